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

import torch
from torch import Tensor

from trtllm_treewy.draft_tree import DraftTree, TreeTopology

from .decode_buffers import Arrival
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
        tree: the verified tree with its scores, where the policy wants it; tokens are not told,
            nor the scores of a chain, which fall from node to node whatever they are.
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
        slots, drafted, nodes: of its rows; whether drafts are made for them, and how many nodes.
        shape: that it is captured for.
        max_context: at least the committed tokens of every row, when it began.
        columns: numbers that the host is told of a row.
        table: int32 [rows, columns] on the host, complete after `event`.
        appends: whether its pairs stand behind those that the MTP module has not seen.
        held: pairs that a row has at most when it ends.
        following: captured nodes of the next step, for which it drafts.
        next_nodes: of its rows.
        entered: whether the module sees all pairs before the next step.
    """

    slots: list[int]
    drafted: list[bool]
    nodes: list[int]
    shape: tuple[int, int]
    max_context: int
    columns: int
    table: Tensor
    event: torch.cuda.Event | None
    appends: bool
    held: int
    following: int
    next_nodes: list[int]
    entered: bool


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
        # Pairs on the device, by slot: how many; and the slots where the module has yet to see
        # some of them. A step without drafts leaves its pair to a later pass over several.
        self._pairs: dict[int, int] = {}
        self._unseen: set[int] = set()
        # Captured nodes that the trees are drafted for, by slot.
        self._drafted: dict[int, int] = {}
        # Slots whose root is on the device.
        self._rooted: set[int] = set()
        self._launched: deque[_Launched] = deque()
        drafts = graphs.drafts
        # What a policy is told of chains, by nodes: one object each, of which it may keep notes.
        self._chains: dict[int, DraftTree] = {}
        if drafts is not None and graphs.options.all_nodes and is_chain(drafts.topology):
            self._chains = {n: chain_of(n) for n in range(1, drafts.topology.num_nodes + 1)}

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

    def launch(
        self, requests: Sequence[Request], limit: int | None, following: int | None = None
    ) -> None:
        """Starts a step of all of `requests`, each with its slot; it `fits`.

        Args:
            requests: of its rows.
            limit: the policy's, of nodes a tree.
            following: the limit of the next step, whose trees are drafted behind this one.
        """
        nodes = [self.nodes(request, limit) for request in requests]
        shape = self._graphs.fit(len(requests), max(nodes))
        assert shape is not None
        self._bring(requests, shape[1])
        appends = self._appends(requests, shape[1])
        rows = [
            (request.held_slot, request.context_len, count)
            for request, count in zip(requests, nodes, strict=True)
        ]
        longest = max(context for _, context, _ in rows)
        self._graphs.run_step(shape, rows, appends)
        drafted = [self._graphs.drafts is not None and r.speculation for r in requests]
        slots = [slot for slot, _, _ in rows]
        held = max((self._pairs.get(slot, 1) for slot in slots), default=0) + 1 if appends else None
        self._follow(slots, drafted, nodes, shape, longest, held, following)

    def _appends(self, requests: Sequence[Request], width: int) -> bool:
        """Whether a step is to keep pairs that the MTP module has not seen; or it sees them now."""
        unseen = [r for r in requests if r.held_slot in self._unseen]
        if not unseen:
            return False
        most = max(self._pairs.get(r.held_slot, 1) for r in requests)
        if width == 1 and most < self._graphs.buffers.sizes.path:
            return True
        self._run_late(1, unseen)
        return False

    def may_launch_again(self, limit: int | None) -> bool:
        """Whether the drafted step can go on, and be followed by one of so many nodes."""
        last = self._launched[-1]
        width = self._next(last.drafted, last.shape[0], limit)[1]
        shapes = {(last.shape[0], last.following), (last.shape[0], width)}
        return all(self._graphs.ready(shape) for shape in shapes)

    def launch_again(self, following: int | None = None) -> None:
        """Starts a step of the same sequences behind the one that is under way.

        The device knows how far each has come; those that have ended go on to no effect. Its trees
        are those that were drafted for it; `following` is the limit of the step behind it.
        """
        last = self._launched[-1]
        longest = last.max_context + self._graphs.buffers.sizes.path
        shape = (last.shape[0], last.following)
        changed = last.next_nodes if last.next_nodes != last.nodes else None
        appends = not last.entered
        self._graphs.run_step_again(shape, longest, changed, appends)
        held = last.held + 1 if appends else None
        self._follow(last.slots, last.drafted, last.next_nodes, shape, longest, held, following)

    def _next(
        self, drafted: Sequence[bool], batch: int, limit: int | None
    ) -> tuple[list[int], int]:
        """Nodes of the rows of a next step of the same sequences, and the captured number."""
        drafts = self._graphs.drafts
        most = 1 if drafts is None else drafts.topology.num_nodes
        nodes = [min(most, limit or most) if one else 1 for one in drafted]
        shape = self._graphs.fit(batch, max(nodes))
        return (nodes, shape[1]) if shape is not None else ([1] * len(nodes), 1)

    def _follow(
        self,
        slots: list[int],
        drafted: list[bool],
        nodes: list[int],
        shape: tuple[int, int],
        longest: int,
        appended: int | None,
        limit: int | None,
    ) -> None:
        """Starts the copy of a step's results, and the drafts behind it.

        `appended` says how many pairs a row has at most, where the step appends its own.
        """
        path = self._graphs.buffers.sizes.path
        held = min(shape[1], path) if appended is None else appended
        next_nodes, following = self._next(drafted, shape[0], limit)
        # Where the next step has no drafts, and room to append its pairs, they wait.
        entered = any(drafted) and (following > 1 or held == path)
        columns = self._graphs.result_columns(shape[1])
        table, event = self._start_copy(shape[0], columns, len(nodes))
        self._launched.append(
            _Launched(
                slots, drafted, nodes, shape, longest, columns, table, event,
                appends=appended is not None, held=held, following=following,
                next_nodes=next_nodes, entered=entered or not any(drafted),
            )
        )  # fmt: skip
        if entered:
            self._graphs.run_drafts(following, shape[0], longest + path)
        for slot, mine in zip(slots, drafted, strict=True):
            self._drafted.pop(slot, None)
            if mine and entered and following > 1:
                self._drafted[slot] = following
            if mine:
                (self._unseen.discard if entered else self._unseen.add)(slot)

    def _start_copy(
        self, batch: int, columns: int, rows: int
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """The results on the host, int32 [rows, columns], and when they are there."""
        source = self._graphs.buffers.result(batch, columns)[:rows]
        # The other one's results, if it is in use, have not been read yet.
        busy = self._launched[-1].table.data_ptr() if self._launched else 0
        host = next(buffer for buffer in self._host if buffer.data_ptr() != busy)
        table = host[: source.numel()].view(source.shape)
        table.copy_(source, non_blocking=True)
        if not source.is_cuda:
            return table, None
        event = torch.cuda.Event()
        event.record()
        return table, event

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
            tree = self._chains.get(launched.nodes[row]) if trees is None else trees[row]
            decoded.append(DecodedRow(path, tokens, bool(numbers[-1]), launched.nodes[row], tree))
            request, slot = requests[row], launched.slots[row]
            if request.slot == slot and request.speculation and self._cache is not None:
                before = self._pairs.get(slot, 0) if launched.appends else 0
                self._pairs[slot] = before + len(path)
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

    def _bring(self, requests: Sequence[Request], width: int) -> None:
        """Sees to it that roots, pairs and drafts for `width` nodes of all are on the device."""
        self._adopt(requests)
        drafts = self._graphs.drafts
        if drafts is None or width == 1:
            return
        made = {slot: drafts.depth_for(nodes) for slot, nodes in self._drafted.items()}
        levels = drafts.depth_for(width)
        late = [r for r in requests if r.speculation and made.get(r.held_slot, 0) < levels]
        if late:
            self._run_late(width, late)
            self._drafted |= {r.held_slot: width for r in late}

    def _adopt(self, requests: Sequence[Request]) -> None:
        """Takes over those that are new here, however many, by two copies and one launch.

        Of each the root, and the newest pair where it drafts; the drafter enters its others.
        """
        arrivals: list[Arrival] = []
        cache = self._cache
        if cache is not None:
            paired = [r for r in requests if r.speculation and r.held_slot not in self._pairs]
            cache.settle(*[request.held_slot for request in paired])
            for request in paired:
                (token,), hidden = cache.take(request.held_slot)
                arrivals.append(Arrival(request.held_slot, token, hidden))
        with_pair = {one.slot for one in arrivals}
        known = self._rooted | with_pair
        rooted = [r for r in requests if r.held_slot not in known]
        arrivals += [Arrival(r.held_slot, r.output_token_ids[-1]) for r in rooted]
        if not arrivals:
            return
        self._graphs.adopt(arrivals)
        self._pairs.update(dict.fromkeys(with_pair, 1))
        self._unseen |= with_pair
        self._rooted.update(one.slot for one in arrivals)

    def _run_late(self, nodes: int, requests: Sequence[Request]) -> None:
        """Enters all pairs of these sequences, and drafts for so many nodes where there are any."""
        rows = [(r.held_slot, r.context_len) for r in requests]
        longest = max(context for _, context in rows)
        self._graphs.run_drafts(nodes, self._graphs.batch_for(len(rows)), longest, rows)
        self._unseen.difference_update(slot for slot, _ in rows)

    def release(self, request: Request) -> None:
        """Gives a sequence's verified pairs back to the drafter, if they are here."""
        slot = request.held_slot
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
        self._drafted.pop(slot, None)
        self._unseen.discard(slot)
        self._rooted.discard(slot)


def is_chain(topology: TreeTopology) -> bool:
    """Whether every node has the one before it as its parent."""
    return topology.parent_ids == tuple(range(-1, topology.num_nodes - 1))


def chain_of(nodes: int) -> DraftTree:
    """A chain of so many nodes, with scores that fall from node to node."""
    return DraftTree(
        (0,) * nodes, tuple(range(-1, nodes - 1)), tuple(-1.0 * n for n in range(nodes))
    )
