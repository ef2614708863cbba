"""Double: re-exports, as the library's package does."""

from .plugin import PluginConfig, current_all_reduce_helper  # noqa: F401
