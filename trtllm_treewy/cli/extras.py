"""Packages that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec


def expect_packages(command: str, extra: str, *names: str) -> None:
    """Raises ValueError for the packages that are missing, saying what to install."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        several = "s" if len(missing) > 1 else ""
        raise ValueError(
            f"{command} needs the package{several} {', '.join(missing)}: "
            f"pip install 'trtllm-treewy[{extra}]', in a checkout pip install -e '.[{extra}]'"
        )
