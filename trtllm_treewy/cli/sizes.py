"""Numbers of bytes, as people write them."""

from __future__ import annotations

import argparse


def parse_size(text: str) -> int:
    """Bytes of "141GB" (powers of ten), "80GiB" (powers of two) or a plain count."""
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgt", start=1):
        units[prefix] = units[f"{prefix}b"] = 1000**power
        units[f"{prefix}ib"] = 1024**power
    number = text.rstrip("BbiKkMmGgTt ")
    factor = units.get(text[len(number) :].strip().lower())
    try:
        size = float(number) * (factor or 0)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a size such as 141GB or 80GiB, got {text!r}")
    return int(size)


def format_size(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size /= 1024
    else:
        unit = "TiB"
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
