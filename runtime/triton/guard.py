"""A process that ends the stub of a model when the server that started it has gone.

A server that crashed, or that was killed, leaves its stubs behind, with the GPU's memory. The
Python backend ends them by a thread of the stub; but while a stub waits for an answer of the
server, of which there will be none, that thread waits for the lock of who asks. Who asks may hold
Python's lock too (metrics do: being made, being set), so that no thread of Python can end it
either. A process of its own waits for neither.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path

# Seconds between two looks.
POLL_SECONDS = 0.1
_SHARED_MEMORY = "/dev/shm/"


def end_with_server() -> None:
    """From now on this process is killed when its parent ends, in whatever way that does.

    To be called first: what is open, mapped and allocated by then, the guard shares.

    Raises:
        OSError: no process can be started.
    """
    stub, server = os.getpid(), os.getppid()
    regions = _shared_regions()
    named = _started_by(regions)
    if named not in (server, None) and _parent(named) is None:
        _end(stub, regions)  # the parent is who takes the children of the dead
    with warnings.catch_warnings():
        # Of threads, which a child may find holding a lock; it takes none that they know.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            _guard(stub, server, regions)
        finally:
            os._exit(0)
    atexit.register(_dismiss, stub, child)


def _dismiss(stub: int, guard: int) -> None:
    """Ends the guard of a process that ends by itself, and takes note of its end.

    Nobody else may: a server that is the first process of a container gets the children of the
    dead, and does not ask for them.
    """
    if os.getpid() != stub:
        return  # a fork of it
    with suppress(OSError):
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


def _guard(stub: int, server: int, regions: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the stub
    _let_go()
    while os.getppid() == stub:
        if _parent(stub) not in (server, None):
            _end(stub, regions)
            return
        time.sleep(POLL_SECONDS)


def _end(stub: int, regions: list[str]) -> None:
    for region in regions:
        Path(region).unlink(missing_ok=True)
    os.kill(stub, signal.SIGKILL)


def _let_go() -> None:
    """Closes all files, which may be pipes whose other ends wait for that."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.close(int(name))
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("treewy-guard")


def _parent(process: int) -> int | None:
    """The parent of a process; None where there is no such process, or it has ended."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _shared_regions() -> list[str]:
    """What this process shares with the server: nobody else removes it when both are killed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split(maxsplit=5)[5] for line in lines if _SHARED_MEMORY in line]
    return sorted({place for place in places if place.startswith(_SHARED_MEMORY)})


def _started_by(regions: list[str]) -> int | None:
    """The process that is named as the server in a stub's arguments: STUB MODEL REGION .. .. PID.

    None where they are others than those of a stub.
    """
    arguments = os.fsdecode(Path("/proc/self/cmdline").read_bytes()).split("\0")
    if len(arguments) < 6 or _SHARED_MEMORY + arguments[2] not in regions:
        return None
    return int(arguments[5]) if arguments[5].isdecimal() else None
