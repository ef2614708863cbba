"""Double."""
