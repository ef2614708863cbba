"""stdout and stderr, either of which the caller may have closed."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .program import PROGRAM


class NoReader(io.StringIO):
    """Stands for a stdout that was closed before the start: a pipe without a reader."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextmanager
def open_streams() -> Iterator[None]:
    """stdout and stderr that can be used, also by libraries, where the caller closed them."""
    before = sys.stdout, sys.stderr
    with ExitStack() as stack:
        if before[0] is None or before[0].closed:
            sys.stdout = NoReader()
        if before[1] is None or before[1].closed:
            sys.stderr = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def discard_stdout() -> None:
    """Once the reader has gone: what Python still wants to flush at exit must not fail again."""
    if not isinstance(sys.stdout, NoReader):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_err(text: str) -> None:
    """Writes to stderr, which may be closed."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def write_error(message: str) -> None:
    """Writes an error to stderr, as all errors of this command are written."""
    write_err(f"{PROGRAM}: error: {message}\n")
