"""Where the module for `--custom_module_dirs` lies; apart, as its folder joins the import path."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parent / "treewy_torch"
