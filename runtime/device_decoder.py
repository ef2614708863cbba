"""Decoding without the host: sequences whose trees, acceptance and drafts stay on the device.

A step is launched as a whole; the host hears of it by one small copy, and while it works on what
it heard, the device drafts the next trees already. Whatever needs more than that (random sampling,
penalties, a tree cut short) is decoded by the engine's other way, and a sequence may change between
both at any step: it takes its verified tokens that the MTP module has not seen along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trtllm_treewy.batch import upload
from trtllm_treewy.draft_tree import DraftTree

from .decode_graphs import DecodeGraphs
from .drafter import MtpCache
from .request import Request


@dataclass(frozen=True)
class DecodedRow:
    """What a step brought one sequence.

    Attributes:
        path: accepted nodes, the root first.
        token_ids: the tokens after each of them, the bonus last.
        faulty: a node on the path has logits that are not finite.
        num_nodes: of its tree.
        tree: the verified tree with its scores, where the policy wants it; tokens are not told.
    """

    path: list[int]
    token_ids: list[int]
    faulty: bool
    num_nodes: int
    tree: DraftTree | None


@dataclass(frozen=True)
class _Launched:
    """A step that the device is at.

    Attributes:
        slots, nodes: of its rows.
        shape: that it is captured for.
        max_context: at least the committed tokens of every row, when it began.
        columns: numbers that the host is told of a row.
        table: int32 [rows, columns] on the host, complete after `event`.
        drafting: what follows it, "draft" or "extend", or None.
    """

    slots: list[int]
    nodes: list[int]
    shape: tuple[int, int]
    max_context: int
    columns: int
    table: Tensor
    event: torch.cuda.Event | None
    drafting: Literal["draft", "extend"] | None


class DeviceDecoder:
    """Runs steps of sequences that need nothing but the model's own choices.

    Args:
        graphs: the captured steps.
        cache: the drafter's, which a sequence comes from and goes back to; None without a drafter.
    """

    def __init__(self, graphs: DecodeGraphs, cache: MtpCache | None) -> None:
        self._graphs, self._cache = graphs, cache
        sizes = graphs.buffers.sizes
        # Two, since a step may be started before the last one's results are read.
        self._host = [
            torch.empty(
                sizes.batch * (2 * sizes.path + 1 + 2 * sizes.nodes),
                dtype=torch.int32,
                pin_memory=graphs.buffers.device.type == "cuda",
            )
            for _ in range(2)
        ]
        # Pairs on the device, by slot: how many; and the slots whose drafts are ready.
        self._pairs: dict[int, int] = {}
        self._drafted: set[int] = set()
        # Slots whose root is on the device.
        self._rooted: set[int] = set()
        self._launched: deque[_Launched] = deque()

    @property
    def drafts(self) -> bool:
        """Whether trees are drafted on the device at all."""
        return self._graphs.drafts is not None

    @property
    def depth(self) -> int:
        """Of the deepest tree."""
        return self._graphs.drafts.topology.depth if self._graphs.drafts is not None else 0

    def nodes(self, request: Request, limit: int | None) -> int:
        """Nodes of the request's next tree under the policy's limit."""
        drafts = self._graphs.drafts
        if drafts is None or not request.speculation:
            return 1
        return min(drafts.topology.num_nodes, limit or drafts.topology.num_nodes)

    def fits(self, rows: int, nodes: int) -> bool:
        """Whether such a step is captured."""
        return rows > 0 and self._graphs.fit(rows, nodes) is not None

    def launch(self, requests: Sequence[Request], limit: int | None) -> None:
        """Starts a step of all of `requests`, each with its slot; it `fits`."""
        nodes = [self.nodes(request, limit) for request in requests]
        shape = self._graphs.fit(len(requests), max(nodes))
        assert shape is not None
        self._bring(requests, drafting=max(nodes) > 1)
        rows = [
            (_slot(request), request.context_len, count)
            for request, count in zip(requests, nodes, strict=True)
        ]
        drafting: Literal["draft", "extend"] | None = None
        if self._graphs.drafts is not None and any(r.speculation for r in requests):
            drafting = "draft" if max(nodes) > 1 else "extend"
        longest = max(context for _, context, _ in rows)
        self._graphs.run_step(shape, rows)
        self._follow([slot for slot, _, _ in rows], nodes, shape, longest, drafting)
        for request in requests:
            self._drafted.discard(_slot(request))
            if drafting == "draft" and request.speculation:
                self._drafted.add(_slot(request))

    def launch_again(self) -> None:
        """Starts a step of the same sequences behind the one that is under way.

        The device knows how far each has come; those that have ended go on to no effect.
        """
        last = self._launched[-1]
        longest = last.max_context + self._graphs.buffers.sizes.path
        self._graphs.run_step_again(last.shape, longest)
        self._follow(last.slots, last.nodes, last.shape, longest, last.drafting)

    def _follow(
        self,
        slots: list[int],
        nodes: list[int],
        shape: tuple[int, int],
        longest: int,
        drafting: Literal["draft", "extend"] | None,
    ) -> None:
        """Starts the copy of a step's results, and the drafts behind it."""
        columns = self._graphs.result_columns(shape[1])
        source = self._graphs.buffers.result(shape[0], columns)[: len(nodes)]
        # The other one's results, if it is in use, have not been read yet.
        busy = self._launched[-1].table.data_ptr() if self._launched else 0
        host = next(buffer for buffer in self._host if buffer.data_ptr() != busy)
        table = host[: source.numel()].view(source.shape)
        table.copy_(source, non_blocking=True)
        event = None
        if source.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._launched.append(
            _Launched(slots, nodes, shape, longest, columns, table, event, drafting)
        )
        if drafting is not None:
            longest += self._graphs.buffers.sizes.path
            self._graphs.run_drafts(drafting, shape[0], longest)

    def results(self, requests: Sequence[Request]) -> list[DecodedRow]:
        """What the oldest step under way brought, in the order of its `launch`.

        Waits for the device, but not for the drafts of the next step. Of requests that have
        finished meanwhile the rows mean nothing.
        """
        launched = self._launched.popleft()
        if launched.event is not None:
            launched.event.synchronize()
        columns = min(launched.shape[1], self._graphs.buffers.sizes.path)
        trees = self._trees(launched, 2 * columns + 1) if self._reports else None
        decoded = []
        for row, numbers in enumerate(launched.table[:, : 2 * columns + 1].tolist()):
            path = [node for node in numbers[:columns] if node >= 0]
            tokens = numbers[columns : columns + len(path)]
            tree = None if trees is None else trees[row]
            decoded.append(DecodedRow(path, tokens, bool(numbers[-1]), launched.nodes[row], tree))
            request, slot = requests[row], launched.slots[row]
            if request.slot == slot and request.speculation and self._cache is not None:
                self._pairs[slot] = len(path)
        return decoded

    @property
    def _reports(self) -> bool:
        return self._graphs.options.report_trees

    def _trees(self, launched: _Launched, first: int) -> list[DraftTree]:
        width = launched.shape[1]
        parents = launched.table[:, first : first + width].tolist()
        scores = launched.table[:, first + width :].contiguous().view(torch.float32).tolist()
        return [
            DraftTree((0,) * count, tuple(parents[row][:count]), tuple(scores[row][:count]))
            for row, count in enumerate(launched.nodes)
        ]

    def discard(self) -> None:
        """Forgets the steps under way; their sequences must be forgotten as well."""
        self._launched.clear()

    # ---- coming and going

    def _bring(self, requests: Sequence[Request], drafting: bool) -> None:
        """Sees to it that roots, pairs and drafts of all sequences are on the device."""
        self._adopt([r for r in requests if r.speculation and _slot(r) not in self._pairs])
        missing = [r for r in requests if _slot(r) not in self._rooted]
        if missing:
            slots = _integers([_slot(r) for r in missing], self._graphs.buffers.device)
            roots = [r.output_token_ids[-1] for r in missing]
            tokens = _integers(roots, self._graphs.buffers.device)
            self._graphs.buffers.tree_tokens[slots, 0] = tokens
            self._rooted |= {_slot(r) for r in missing}
        if self._graphs.drafts is None or not drafting:
            return
        late = [r for r in requests if r.speculation and _slot(r) not in self._drafted]
        if late:
            self._run_late("draft", late)
            self._drafted |= {_slot(r) for r in late}

    def _adopt(self, requests: Sequence[Request]) -> None:
        """Takes the newest pair of sequences over from the drafter; it enters the others."""
        if self._cache is None or not requests:
            return
        tokens, hidden = [], []
        self._cache.settle(*[_slot(r) for r in requests])
        for request in requests:
            (token,), state = self._cache.take(_slot(request))
            tokens.append(token)
            hidden.append(state[0])
        buffers = self._graphs.buffers
        slots = _integers([_slot(r) for r in requests], buffers.device)
        buffers.pending_tokens[slots, 0] = _integers(tokens, buffers.device)
        buffers.pending_hidden[slots, 0] = torch.stack(hidden)
        buffers.pending_len.index_fill_(0, slots, 1)
        for request in requests:
            self._pairs[_slot(request)] = 1
        # A step without drafts would write over pairs that were not entered.
        self._run_late("extend", requests)

    def _run_late(self, mode: Literal["draft", "extend"], requests: Sequence[Request]) -> None:
        rows = [(_slot(r), r.context_len) for r in requests]
        longest = max(context for _, context in rows)
        self._graphs.run_drafts(mode, self._graphs.batch_for(len(rows)), longest, rows)

    def release(self, request: Request) -> None:
        """Gives a sequence's verified pairs back to the drafter, if they are here."""
        slot = _slot(request)
        count = self._pairs.get(slot)
        self.forget(slot)
        if count is None or self._cache is None:
            return
        hidden = self._graphs.buffers.pending_hidden[slot, :count].clone()
        self._cache.resume(slot, request.context_len - count)
        self._cache.add(slot, request.output_token_ids[-count:], hidden)

    def forget(self, slot: int) -> None:
        """The sequence in `slot` has ended, or goes elsewhere."""
        self._pairs.pop(slot, None)
        self._drafted.discard(slot)
        self._rooted.discard(slot)


def _integers(values: Sequence[int], device: torch.device) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.int64), device)


def _slot(request: Request) -> int:
    if request.slot is None:
        raise RuntimeError(f"request {request.request_id} holds no slot")
    return request.slot
