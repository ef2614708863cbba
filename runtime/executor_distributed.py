"""The executor of a model that is divided over several ranks, as rank 0 has it.

Every step goes to all ranks, with the same arguments: rank 0 runs its own share in this process,
the others theirs (`rank_worker`). All ranks keep the same books of slots and blocks, each over its
own heads: what changes them is done here at once, and elsewhere before the next step, with which it
travels. Only rank 0 schedules, drafts and samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.config import ModelConfig

from .acceptance import Acceptance
from .device_memory import free_memory
from .errors import EngineDeadError, describe
from .executor import Executor, ExecutorLimits, StepOutput
from .prefix_cache import CachedPrefix, Pages
from .process_group import ProcessGroup, make_store
from .rank_messages import take_tensors
from .rank_worker import Build, Call, Join, Make, Note, meet
from .rank_workers import RankWorkers, interrupt_later, threads_of_each

# Seconds that a collective waits for the other ranks.
DEFAULT_TIMEOUT = 120.0


class RankGroup:
    """All ranks of a model, before it is loaded: the processes, and what they may use.

    Making it starts the processes and waits for them.

    Args:
        config: of one rank's share.
        make: makes a rank's executor (`make_torch_rank`, `engine_files.EngineRank`, each with what
            it opens); it goes to the other processes, so it must be picklable.
        devices: of each rank, as `devices_of` gives them.
        make_first: in place of `make` for rank 0, where that does more (tells of its progress).
        timeout: seconds that a collective waits for the other ranks.

    Raises:
        EngineDeadError: a process could not be started.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: Make,
        devices: Sequence[torch.device],
        *,
        make_first: Make | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.config, self.ranks = config, len(devices)
        self._make, self._make_first = make, make_first or make
        ranks = self.ranks
        store = make_store(ranks, timeout)
        self._workers = RankWorkers(ranks, threads_of_each(ranks, devices[0]))
        try:
            self._workers.send(
                [Join(rank, ranks, store.port, devices[rank], timeout) for rank in range(1, ranks)]
            )
            self._group = self._join(store, devices[0], timeout)
            self._free = [answer.free_memory for answer in self._workers.answers()]
        except BaseException:
            self._workers.close()
            raise

    def _join(self, store: Any, device: torch.device, timeout: float) -> ProcessGroup:
        try:
            group = ProcessGroup(store, 0, self.ranks, device, timeout)
        except RuntimeError as error:
            self._workers.check()
            raise EngineDeadError(f"the ranks do not find one another: {error}") from None
        self._workers.group = group
        return group

    @property
    def free_memory(self) -> int | None:
        """Bytes that each rank can allocate: on GPUs the least of all; on a CPU they share them."""
        device = self._group.device
        free = [free_memory(device), *self._free]
        known = [amount for amount in free if amount is not None]
        if not known:
            return None
        return min(known) // (self.ranks if device.type == "cpu" else 1)

    def start(self, limits: ExecutorLimits, options: dict[str, Any]) -> DistributedExecutor:
        """Loads every rank's share and makes the executors, with `TorchExecutor`'s `options`.

        Raises:
            EngineDeadError: another rank could not; errors of rank 0 as `make` raises them.
        """
        self._workers.send([Build(self._make, limits, options)] * (self.ranks - 1))
        local = self._make_first(self._group, limits, options)
        self._workers.answers()
        meet(self._group)
        return DistributedExecutor(local, self._group, self._workers)

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        self._workers.close()


class DistributedExecutor:
    """The `Executor` over all ranks; see `TorchExecutor` for what each call does.

    Every step raises `EngineDeadError` once a rank is lost; what only changes the books does not.
    """

    def __init__(self, local: Executor, group: ProcessGroup, workers: RankWorkers) -> None:
        self.limits, self.device = local.limits, local.device
        self._local, self._group, self._workers = local, group, workers
        self._pages = _AllPages(local.pages, self._note)
        self._number = 0
        self._noted: list[Note] = []

    @property
    def process_ids(self) -> list[int]:
        """Processes of ranks 1, 2, .."""
        return self._workers.process_ids

    @property
    def lost(self) -> str | None:
        """Why no step can run any more, since a rank is lost; None while it can."""
        return self._workers.error

    @property
    def pages(self) -> Pages:
        return self._pages

    def try_allocate(self, slot: int, num_tokens: int, prefix: CachedPrefix | None = None) -> bool:
        done: bool = self._note("try_allocate", slot, num_tokens, prefix)
        return done

    def try_extend(self, slot: int, num_tokens: int) -> bool:
        done: bool = self._note("try_extend", slot, num_tokens)
        return done

    def save_checkpoint(self, slot: int, checkpoint: int, hidden: Tensor) -> None:
        self._on_all("save_checkpoint", slot, checkpoint, hidden)

    def checkpoint_hidden(self, checkpoint: int) -> Tensor:
        return self._local.checkpoint_hidden(checkpoint)

    def free(self, slot: int) -> None:
        self._note("free", slot)

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        output: StepOutput = self._on_all("prefill", batch)
        return output

    def verify(self, tree: TreeBatch) -> StepOutput:
        output: StepOutput = self._on_all("verify", tree)
        return output

    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        self._on_all("commit", tree, acceptance)

    def discard(self) -> None:
        self._note("discard")

    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        output: StepOutput = self._on_all("draft_extend", batch, hidden)
        return output

    def draft_enter(self, batch: PrefillBatch, hidden: Tensor) -> None:
        self._on_all("draft_enter", batch, hidden)

    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot: Tensor,
        write_offsets: Tensor,
        mask: Tensor,
    ) -> StepOutput:
        output: StepOutput = self._on_all(
            "draft", token_ids, hidden, positions, slot, write_offsets, mask
        )
        return output

    def close(self) -> None:
        """Ends the other ranks' processes; safe to call twice."""
        try:
            # First: what it runs with may hold on to the group's communicator.
            self._local.close()
        finally:
            self._workers.close()

    def _on_all(self, method: str, *arguments: Any) -> Any:
        """Calls `method` on every rank; what rank 0's gives.

        An interrupt comes after it, so that it never stops one rank and not the others.
        """
        with interrupt_later():
            self._number += 1
            rest, tensors = take_tensors(arguments)
            noted, self._noted = tuple(self._noted), []
            self._workers.post(Call(self._number, noted, Note(method, rest)))
            try:
                with torch.inference_mode():
                    self._group.broadcast(tensors)
                result = Note(method, arguments).call(self._local)
            except Exception as error:
                if not self._workers.settled(self._number, error):
                    self._workers.lose(f"rank 0 failed alone: {describe(error)}")
                    self._workers.check()
                raise
            except BaseException:
                self._workers.lose("interrupted within a step")
                raise
            self._workers.check()
            return result

    def _note(self, method: str, *arguments: Any) -> Any:
        """Changes the books: rank 0's now, the others' before their next step.

        What fails here, or changes nothing, never gets to them. It works after the loss of a rank.
        """
        with interrupt_later():
            note, free = Note(method, arguments), self._local.pages.free_blocks
            result = note.call(self._local)
            # Most steps ask for rows that a sequence has already.
            changes = result is not False and (
                method != "try_extend" or free != self._local.pages.free_blocks
            )
            if changes and self._workers.error is None:
                self._noted.append(note)
            return result


class _AllPages:
    """Rank 0's pages, whose changes all ranks make."""

    def __init__(self, local: Pages, note: Callable[..., Any]) -> None:
        self._local, self._note = local, note

    @property
    def free_blocks(self) -> int:
        return self._local.free_blocks

    def blocks(self, slot: int) -> tuple[int, ...]:
        return self._local.blocks(slot)

    def refs(self, block: int) -> int:
        return self._local.refs(block)

    def hold(self, block: int) -> None:
        self._note("pages.hold", block)

    def drop(self, block: int) -> None:
        self._note("pages.drop", block)

    def drop_all(self) -> None:
        self._note("pages.drop_all")

    def recount(self) -> None:
        self._note("pages.recount")
