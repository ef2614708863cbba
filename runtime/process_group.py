"""One rank's end of a group of processes: `Collectives` over gloo on a CPU, NCCL on GPUs.

The group stands by itself: torch's default process group is neither needed nor touched, so a
program that has one of its own, or several `LLM`s, can use this.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

# Typed in part only.
dist: Any = distributed
c10d: Any = distributed_c10d
HOST = "127.0.0.1"  # all ranks are on one machine
# Where a tensor may start in a packed broadcast: on a multiple of every element's size.
ALIGNMENT = 16
# Where `ProcessGroupNCCL._comm_ptr` came.
COMMUNICATOR_SINCE = "2.8 or later"


def make_store(ranks: int, timeout: float) -> Any:
    """Where ranks find one another: rank 0's, at a free port (`store.port`) of the loopback."""
    # Given no socket of ours, it would listen to every network that the machine is in.
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    return _store(ranks, port, timeout, is_master=True, master_listen_fd=listening.detach())


def join_store(ranks: int, port: int, timeout: float) -> Any:
    """The same store, from another rank's process."""
    return _store(ranks, port, timeout, is_master=False)


def _store(ranks: int, port: int, timeout: float, **role: Any) -> Any:
    return dist.TCPStore(
        HOST, port, ranks, timeout=timedelta(seconds=timeout), wait_for_workers=False, **role
    )


class ProcessGroup:
    """The collectives of one rank. Making it waits for all ranks.

    On a GPU everything is queued on the current stream, and nothing waits on the host.

    Args:
        store: of `make_store` or `join_store`.
        rank, ranks: this one, and how many there are.
        device: where this rank's tensors are.
        timeout: seconds that a collective waits for the other ranks.

    Raises:
        RuntimeError: from every method, when another rank is gone or does not come in time.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, device: torch.device, timeout: float
    ) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self._aborted = False
        self._backend: Any = _make_backend(store, rank, ranks, device, timedelta(seconds=timeout))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`; see `Collectives`. In float32 on a CPU, whatever x is."""
        x = x.contiguous()
        wide = x.float() if x.device.type == "cpu" and x.dtype.itemsize < 4 else x
        _wait(self._backend.allreduce([wide], _options(dist.AllreduceOptions())))
        return wide.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` [..., n] of all ranks along the last axis; see `Collectives`."""
        x = x.contiguous()
        parts = x.new_empty(self.ranks * x.numel())
        options = _options(c10d.AllgatherOptions())
        _wait(self._backend._allgather_base(parts, x.view(-1), options))
        return parts.view(self.ranks, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Rank 0's tensors on every rank, in one message; they must be as large on all ranks.

        Args:
            tensors: on `device`. Of rank 0: what is sent. Of the others: overwritten.

        Returns:
            The tensors of rank 0, in order.
        """
        if not tensors:
            return []
        sizes = [_padded(tensor) for tensor in tensors]
        packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        spans = packed.split(sizes)
        if self.rank == 0:
            for span, tensor in zip(spans, tensors, strict=True):
                span[: tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        options = _options(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = 0, 0
        _wait(self._backend.broadcast([packed], options))
        if self.rank == 0:
            return list(tensors)
        return [
            span[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for span, tensor in zip(spans, tensors, strict=True)
        ]

    def communicator(self) -> int:
        """Address of the NCCL communicator, which lives as long as the group is not aborted.

        It is there once all ranks have run a collective.

        Raises:
            RuntimeError: there is none, on a CPU or before that, or torch does not give it.
        """
        address = getattr(self._backend, "_comm_ptr", None)
        if address is None:
            raise RuntimeError(
                f"torch {torch.__version__} gives no NCCL communicator on {self.device}: engines "
                f"of several ranks need GPUs and torch {COMMUNICATOR_SINCE}"
            )
        with torch.cuda.device(self.device):
            found = int(address())
        if not found:
            raise RuntimeError("the ranks have not met: NCCL has no communicator yet")
        return found

    def abort(self) -> None:
        """Ends the group, and what waits for a rank that is gone; from any thread, also twice."""
        if self.device.type == "cuda" and not self._aborted:
            self._aborted = True
            self._backend.abort()


def _make_backend(
    store: Any, rank: int, ranks: int, device: torch.device, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        # 2: a failure ends the communicator and not the process, which has more to say.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        nccl: Any = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        nccl.global_ranks_in_group, nccl.group_name = list(range(ranks)), "treewy"
        return dist.ProcessGroupNCCL(store, rank, ranks, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    # By address: the machine's name need not resolve.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    return dist.ProcessGroupGloo(store, rank, ranks, gloo)


def _options(options: Any) -> Any:
    """Asks for the current stream, where torch can (from 2.8 on)."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    """Waits: the host for gloo, the current stream alone for NCCL."""
    if work is not None:
        work.wait()


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
