"""A directory that appears when it is whole, in place of an earlier one if there is one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path


@contextmanager
def new_directory(output: str | Path, *, keep: str | Path | None = None) -> Iterator[Path]:
    """A hidden directory beside `output` that takes its place at the end, or goes on an error.

    What is there stays until then; whether it may be replaced is for the caller to know. Where
    `output` is a link, what it points to is replaced. What killed processes left is removed.

    Args:
        output: the place; folders above it are made.
        keep: what must outlast this, because it is read: it may not lie in `output`.

    Yields:
        The directory to fill.

    Raises:
        ValueError: `keep` lies in `output`, or `output` cannot be replaced.
        OSError: it cannot be written.
    """
    output = Path(os.path.realpath(output))
    _check_replaceable(output, keep)
    made = [folder for folder in output.parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{output.name}.building-"
        _remove_abandoned(output, prefix)
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=output.parent))
        old = folder.with_name(f"{folder.name}-old")
        try:
            yield folder
            folder.chmod(0o755)
            if output.exists():
                output.rename(old)
            folder.rename(output)
        finally:
            if old.exists() and not output.exists():
                old.rename(output)  # an error or an interrupt between the two moves
            for path in (folder, old):
                _remove(path)
    except BaseException:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _check_replaceable(output: Path, keep: str | Path | None) -> None:
    if keep is not None and output in Path(os.path.realpath(keep)).parents and output.is_dir():
        raise ValueError(f"{keep} lies in {output}, which would be replaced: choose another place")
    if os.path.ismount(output):
        raise ValueError(
            f"{output} is where a file system is mounted, which cannot be replaced in one step: "
            "choose a folder in it"
        )


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(output: Path, prefix: str) -> None:
    """What was left of this directory by processes that were killed: their ids run no more."""
    for path in sorted(output.parent.glob(f"{escape(prefix)}*")):
        pid = path.name.removeprefix(prefix).split("-")[0]
        if not pid.isdigit() or _runs(int(pid)):
            continue
        if path.name.endswith("-old") and not output.exists():
            path.rename(output)  # killed between the two moves: the one before it is whole
        else:
            _remove(path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
