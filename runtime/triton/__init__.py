"""Triton Inference Server: the model repository, and the model that its Python backend runs."""
