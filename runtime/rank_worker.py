"""A process that holds one rank's executor and does what rank 0 tells it.

Started by `rank_workers`. It ends when rank 0 ends, whatever it is doing: its standard input is
the line to rank 0's process.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from trtllm_treewy.model import Collectives, Qwen3_5ForCausalLM

from .device_memory import free_memory
from .errors import EngineDeadError, describe
from .executor import Executor, ExecutorLimits
from .executor_torch import TorchExecutor
from .process_group import ProcessGroup, join_store
from .rank_messages import places, put_tensors

Load = Callable[[torch.device, Collectives], Qwen3_5ForCausalLM]
"""Gives a rank's model on a device; a function that can be pickled."""
Make = Callable[["ProcessGroup", ExecutorLimits, "dict[str, Any]"], Executor]
"""Makes a rank's executor, given a `TorchExecutor`'s options; a function that can be pickled."""


@dataclass(frozen=True)
class Join:
    """First message: who the worker is."""

    rank: int
    ranks: int
    port: int
    device: torch.device
    timeout: float


@dataclass(frozen=True)
class Build:
    """Second message: the executor to make."""

    make: Make
    limits: ExecutorLimits
    options: dict[str, Any]


@dataclass(frozen=True)
class Note:
    """A method of the executor ("pages.hold" is one of its pages), and its arguments."""

    method: str
    arguments: tuple[Any, ...]

    def call(self, executor: Any) -> Any:
        """Does it."""
        for name in self.method.split("."):
            executor = getattr(executor, name)
        return executor(*self.arguments)


@dataclass(frozen=True)
class Call:
    """Every further message: a step, after what has changed the books since the last.

    The arguments of `step` are without their tensors (`rank_messages`), which are broadcast.
    """

    number: int
    before: tuple[Note, ...]
    step: Note


@dataclass(frozen=True)
class Ready:
    """Answer to `Join`, with the device's free bytes, and to `Build`."""

    free_memory: int | None = None


@dataclass(frozen=True)
class Failed:
    """What went wrong with a call (None: before the first)."""

    number: int | None
    reason: str


def main(file_descriptor: int) -> None:
    """Serves rank 0 over a socket until it is gone; never returns."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    line = Connection(file_descriptor)
    try:
        _serve(line)
    except (EOFError, OSError):
        pass  # rank 0 is gone, or has given this process up
    finally:
        # Not by way of destructors: NCCL's wait for ranks that may be gone.
        os._exit(0)


def _end_with_parent() -> None:
    # By the descriptor: a thread in a read of sys.stdin would hold its lock at the end.
    while os.read(0, 1):
        pass
    os._exit(0)


def _serve(line: Connection) -> None:
    try:
        join = _receive(line)
        group = _join(join)
        line.send(Ready(free_memory(join.device)))
        build = _receive(line)
        executor = build.make(group, build.limits, build.options)
        line.send(Ready())
        meet(group)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        line.send(_failure(None, error))
        return
    while True:
        call = _receive(line)
        try:
            for note in call.before:
                note.call(executor)
            arguments = call.step.arguments
            with torch.inference_mode():
                tensors = group.broadcast([place.empty() for place in places(arguments)])
                Note(call.step.method, put_tensors(arguments, tensors)).call(executor)
        except Exception as error:
            line.send(_failure(call.number, error))


def _failure(number: int | None, error: Exception) -> Failed:
    if os.environ.get("TREEWY_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    return Failed(number, describe(error))


def _receive(line: Connection) -> Any:
    return pickle.loads(line.recv_bytes())


def _join(join: Join) -> ProcessGroup:
    if join.device.type == "cuda":
        torch.cuda.set_device(join.device)
    store = join_store(join.ranks, join.port, join.timeout)
    return ProcessGroup(store, join.rank, join.ranks, join.device, join.timeout)


def make_torch_rank(
    load: Load, group: ProcessGroup, limits: ExecutorLimits, options: dict[str, Any]
) -> TorchExecutor:
    """One rank's torch executor over its share of the model."""
    return TorchExecutor(load(group.device, group), limits, **options)


def meet(group: ProcessGroup) -> None:
    """Opens the connections, which the first step would have to wait for.

    To be called once all ranks are known to come: NCCL waits for them without end.
    """
    group.all_reduce(torch.zeros(1, device=group.device))


def command(file_descriptor: int) -> list[str]:
    """The command line of a worker: this interpreter, with this process's import path.

    In a program that Python is embedded in, `multiprocessing.set_executable` says which
    interpreter to take. Unlike `multiprocessing`, it does not import the main program again, so
    that a script needs no `if __name__ == "__main__"`.

    Raises:
        EngineDeadError: there is no interpreter.
    """
    interpreter = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if not interpreter:
        raise EngineDeadError(
            "no Python interpreter to start ranks with: sys.executable is empty; name one with "
            "multiprocessing.set_executable"
        )
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {__name__} import main; main({file_descriptor})"
    )
    return [interpreter, "-c", program]
