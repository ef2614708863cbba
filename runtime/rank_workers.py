"""The processes of ranks 1, 2, ..: started, watched and ended by rank 0's.

Commands go to the workers over a socket each; they answer only what went wrong. A thread watches
them, so that a worker that dies or fails alone ends the group within seconds, whatever rank 0 is
waiting for. The other way round, a worker ends with rank 0's process (`rank_worker`).
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .errors import EngineDeadError, describe
from .process_group import ProcessGroup
from .rank_worker import Call, Failed, Ready, command

# Seconds in which a fault of one rank must show on all, if it is one of all.
GRACE = 5.0
# Seconds that a worker has to end once it is told to.
END_SECONDS = 5.0


class RankWorkers:
    """The processes, and what has become of them.

    Args:
        ranks: of the group, rank 0 (this process) among them.
        threads: that each may compute with on a CPU.

    Attributes:
        group: rank 0's end of the group, once it is there; aborted when a worker is lost.
    """

    def __init__(self, ranks: int, threads: int | None = None) -> None:
        self.group: ProcessGroup | None = None
        self._lines: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._processes, self._lines)
        try:
            for _ in range(1, ranks):
                process, line = _start(threads)
                self._processes.append(process)
                self._lines.append(line)
        except BaseException:
            self._end()
            raise
        self._watch = _Watch(self._processes, self._lines)
        threading.Thread(target=self._watch.run, args=(), name="treewy-ranks", daemon=True).start()

    @property
    def error(self) -> str | None:
        """Why the group is lost; None while it is not."""
        return self._watch.error

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1, 2, .."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raises EngineDeadError once the group is lost."""
        self._watch.check_lone_failures()
        if self.error is not None:
            raise EngineDeadError(self.error)

    def send(self, messages: Sequence[Any]) -> None:
        """One message for each worker, in the order of ranks.

        Raises:
            EngineDeadError: a worker is gone.
        """
        self._send_bytes([pickle.dumps(message) for message in messages])

    def _send_bytes(self, data: Sequence[bytes]) -> None:
        self.check()
        self._watch.group = self.group
        for rank, (line, message) in enumerate(zip(self._lines, data, strict=True), start=1):
            try:
                line.send_bytes(message)
            except OSError:
                self.lose(self._watch.obituary(rank))
                self.check()

    def post(self, call: Call) -> None:
        """One call for all workers; raises as `send`."""
        self._watch.current = call.number
        data = pickle.dumps(call)
        self._send_bytes([data] * len(self._lines))

    def answers(self) -> list[Ready]:
        """Waits for every worker's `Ready`, in the order of ranks.

        Raises:
            EngineDeadError: a worker could not do what it was told, or is gone.
        """
        ready = self._watch.wait_ready()
        self.check()
        return ready

    def settled(self, number: int, error: Exception) -> bool:
        """Whether every worker failed in this call with the same error, so that all are in step.

        Waits for them, `GRACE` seconds at most.
        """
        return self._watch.all_failed(number, describe(error))

    def lose(self, reason: str) -> None:
        """Ends the group for `reason`, unless it has ended already; `check` raises from then on."""
        self._watch.lose(reason)

    def close(self) -> None:
        """Ends the workers; safe to call twice."""
        self._watch.closing = True
        self._end()
        if self.group is not None:
            self.group.abort()  # NCCL complains of a group that is just dropped


class _Watch:
    """What the watching thread sees. It does not hold the `RankWorkers`, which may be collected."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], lines: list[Connection]) -> None:
        self._processes, self._lines = processes, lines
        self._changed = threading.Condition()
        self._ready: dict[int, Ready] = {}
        self._failed: dict[int, tuple[Failed, float]] = {}
        self.group: ProcessGroup | None = None
        self.current: int | None = None
        self.error: str | None = None
        self.closing = False

    def run(self) -> None:
        """Until all workers are gone."""
        open_lines = {id(line): rank for rank, line in enumerate(self._lines, start=1)}
        while open_lines:
            lines = [line for line in self._lines if id(line) in open_lines]
            try:
                arrived = wait(lines, timeout=0.5)
            except OSError:  # closed by `close`
                return
            for line in arrived:
                rank = open_lines[id(line)]
                try:
                    self._note(rank, pickle.loads(line.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del open_lines[id(line)]
                    if not self.closing:
                        self.lose(self.obituary(rank))
            self.check_lone_failures()

    def lose(self, reason: str) -> None:
        """Kills the workers and ends what waits for them; the first reason stays."""
        with self._changed:
            first = self.error is None
            if first:
                self.error = f"tensor parallel group lost: {reason}"
            self._changed.notify_all()
        if first:
            for process in self._processes:
                process.kill()
            if self.group is not None:
                self.group.abort()

    def wait_ready(self) -> list[Ready]:
        with self._changed:
            count = len(self._lines)
            self._changed.wait_for(lambda: self.error is not None or len(self._ready) == count)
            answers = [self._ready[rank] for rank in sorted(self._ready)]
            self._ready.clear()
        return answers

    def all_failed(self, number: int, reason: str) -> bool:
        def all_here() -> bool:
            return self.error is not None or len(self._failed) == len(self._lines)

        with self._changed:
            self._changed.wait_for(all_here, GRACE)
            same = len(self._failed) == len(self._lines) and all(
                failed == Failed(number, reason) for failed, _ in self._failed.values()
            )
            if same:
                self._failed.clear()
        return same and self.error is None

    def _note(self, rank: int, message: Any) -> None:
        with self._changed:
            if isinstance(message, Failed):
                self._failed[rank] = message, time.monotonic()
            else:
                self._ready[rank] = message
            self._changed.notify_all()
        if isinstance(message, Failed) and message.number is None:
            self.lose(f"rank {rank}: {message.reason}")

    def check_lone_failures(self) -> None:
        """A worker that failed where rank 0 did not, or not in time, is out of step."""
        for rank, (failed, since) in list(self._failed.items()):
            passed = self.current is not None and (failed.number or 0) < self.current
            if passed or time.monotonic() - since > GRACE:
                self.lose(f"rank {rank} failed alone: {failed.reason}")

    def obituary(self, rank: int) -> str:
        """How a worker ended whose line broke; waits for it to end."""
        process = self._processes[rank - 1]
        who = f"rank {rank} (process {process.pid})"
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(END_SECONDS)
            if code < 0:
                return f"{who} was killed by {signal.Signals(-code).name}"
            return f"{who} ended with exit code {code}"
        return f"{who} does not answer"


def _start(threads: int | None) -> tuple[subprocess.Popen[bytes], Connection]:
    here, there = socket.socketpair()
    with there:
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(
            command(there.fileno()),
            stdin=subprocess.PIPE,  # the worker ends when it is closed
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=[there.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is rank 0's to answer
        )
    return process, Connection(here.detach())


def _end(processes: list[subprocess.Popen[bytes]], lines: list[Connection]) -> None:
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for line in lines:
        line.close()


@contextmanager
def interrupt_later() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, where ranks must stay in step; a second one does not.

    In threads other than the main one nothing has to be done: no interrupt is raised there.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[Any] = []

    def note(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])


def threads_of_each(ranks: int, device: torch.device) -> int | None:
    """Threads that each rank may compute with on a CPU, which they share; None on a GPU."""
    if device.type != "cpu":
        return None
    return max(1, torch.get_num_threads() // ranks)
