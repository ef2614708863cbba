"""A decoding step as captured functions: fill, verify, accept, commit, and then draft.

Each is captured once for a shape (rows, nodes) and replayed over any trees of it; between them
nothing needs the host. `DeviceDecoder` runs the first four as one graph, whose results the host
hears of while the drafts of the next step are made; the executor's own `verify` and `commit` have
graphs of their own for trees that come from the host, whatever accepts them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.model import FusedModel, Qwen3_5ForCausalLM

from . import step_tables
from .acceptance import Acceptance, greedy_accept
from .cuda_graphs import GraphRunner, GraphSizes
from .decode_buffers import Arrival, BufferSizes, DecodeBuffers
from .head import greedy_tokens
from .sequence_pools import SequencePools
from .state_manager import TreeGdnStep
from .static_drafts import StaticDrafts, best_nodes

Accept = Callable[[TreeBatch, Tensor, int], Acceptance]
Shape = tuple[int, int]


def accept_greedily(tree: TreeBatch, target_ids: Tensor, columns: int) -> Acceptance:
    """The model's own choices."""
    return greedy_accept(tree, target_ids, max_path=columns)


@dataclass(frozen=True)
class GraphOptions:
    """What is captured.

    Attributes:
        sizes: batch and tree sizes.
        max_path: nodes of the longest path that a step may accept.
        topology: of the trees that are drafted on the device, None for none.
        accept: how paths are accepted on the device.
        report_trees: tell the host the shape and the scores of verified trees too.
        all_nodes: a step may have any of the sizes' numbers of nodes at any time, so that all are
            captured at the start; otherwise it has the largest, and others are rare.
    """

    sizes: GraphSizes
    max_path: int
    topology: TreeTopology | None = None
    accept: Accept = accept_greedily
    report_trees: bool = False
    all_nodes: bool = False


class DecodeGraphs:
    """The captured functions of an executor, and the buffers they work on.

    Args:
        model: of the executor.
        pools: the executor's states and caches.
        first_mtp_layer: the MTP module's first layer in the KV cache.
        runner: captures and replays.
        options: what is captured.

    Attributes:
        buffers: static memory.
    """

    def __init__(
        self,
        model: Qwen3_5ForCausalLM | FusedModel,
        pools: SequencePools,
        first_mtp_layer: int,
        runner: GraphRunner,
        options: GraphOptions,
    ) -> None:
        self._model, self._pools, self._runner = model, pools, runner
        self.options, self.sizes = options, options.sizes
        topology = options.topology
        dtype = pools.state.shape.activation_dtype
        self.buffers = DecodeBuffers(
            buffer_sizes(pools.limits.max_batch_size, model.config.hidden_size, options),
            dtype,
            pools.device,
        )
        self.drafts: StaticDrafts | None = None
        if topology is not None and topology.num_nodes > 1:
            self.drafts = StaticDrafts(
                model, pools.kv_cache, first_mtp_layer, self.buffers, topology
            )
        # Which drafted nodes there are to choose from in a step of so many, and their parents.
        root = torch.zeros(1, dtype=torch.int64, device=pools.device)
        self._within = {nodes: (root, root.int() - 1) for nodes in self.sizes.nodes}
        if self.drafts is not None:
            for nodes in self.sizes.nodes:
                self._within[nodes] = self.drafts.nodes_within(self.drafts.depth_for(nodes))
        self._steps: dict[Shape, TreeGdnStep] = {}
        self._functions: dict[tuple[object, ...], Callable[[], None]] = {}
        # Where attention masks the rows up to a bound, each bound is another function.
        self._bounded = not triton_ops.serves(pools.kv_cache.k)

    @property
    def memory_bytes(self) -> int:
        """Memory of the graphs, static buffers not among it."""
        return self._runner.memory_bytes

    @property
    def num_shapes(self) -> int:
        """Shapes that `capture_all` captures."""
        return len(self._first_shapes)

    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures steps now, the largest first; others as they are met.

        Those of whole trees, or of all numbers of nodes (`GraphOptions.all_nodes`). Later captures
        find their memory in the pool of the largest. `progress` is told how many are done.
        """
        shapes = self._first_shapes
        for done, (batch, nodes) in enumerate(shapes, start=1):
            self._record_step(batch, nodes, self._bound(0))
            if progress is not None:
                progress(done, len(shapes))

    @property
    def _first_shapes(self) -> list[Shape]:
        """What is captured at the start, in that order."""
        widths = self.sizes.nodes if self.options.all_nodes else self.sizes.nodes[-1:]
        return [(b, n) for b in reversed(self.sizes.batch) for n in reversed(widths)]

    def _bound(self, max_context: int) -> int:
        """The bound of contexts that a step of at most `max_context` tokens is captured for."""
        if not self._bounded:
            return 0
        most = self._pools.limits.max_seq_len + self._pools.limits.scratch_rows
        return min(most, max(64, 1 << max(0, max_context - 1).bit_length()))

    def _record_step(self, batch: int, nodes: int, bound: int) -> None:
        """Captures all that a step of this shape needs, and is not there yet.

        Rows of the buffers are afterwards what they were.
        """
        self._pools.kv_cache.flush()
        with self.buffers.inert(batch):
            for name in ("verify", "commit"):
                self._record_part(name, batch, nodes, bound)
            self._record_whole(batch, nodes, bound)
            if self.drafts is not None:
                self._record_drafts(batch, bound, self.drafts.depth_for(nodes))
        self._record_adoption(batch)

    def _record_whole(self, batch: int, nodes: int, bound: int) -> None:
        """Captures all of a step but the drafts behind it; of roots alone in both ways."""
        for append in (False, True) if self.drafts is not None and nodes == 1 else (False,):
            step = partial(self._step, batch, nodes, bound, append)
            self._record(("step", batch, nodes, bound, append), step)

    def _record_part(self, name: str, batch: int, nodes: int, bound: int) -> None:
        if name == "verify":
            self._record((name, batch, nodes, bound), partial(self._verify, batch, nodes, bound))
        else:
            function = {"fill": self._fill, "accept": self._accept, "commit": self._commit}[name]
            self._record((name, batch, nodes), partial(function, batch, nodes))

    def _record_adoption(self, batch: int) -> None:
        if ("adopt", batch) not in self._runner:
            self.buffers.load_arrivals(batch, [])
            self._record(("adopt", batch), partial(self._adopt, batch))

    def _record_drafts(self, batch: int, bound: int, levels: int) -> None:
        """Captures drafting, whose functions may run twice over whatever the buffers hold."""
        assert self.drafts is not None
        if levels:
            draft = partial(self.drafts.draft, batch, bound, levels)
            self._record(("draft", batch, bound, levels), draft)
        else:
            self._record(("extend", batch, bound), partial(self._extend, batch, bound))

    def _record(self, key: tuple[object, ...], function: Callable[[], None]) -> None:
        if key not in self._runner:
            self._functions[key] = function
            self._runner.record(key, torch.inference_mode()(function))
            self._pools.state.discard()

    # ---- what is captured

    def _step(self, batch: int, nodes: int, bound: int, append: bool) -> None:
        """From the trees drafted on the device to states behind what was accepted of them."""
        buffers = self.buffers
        # Where the last step of these rows has brought them, or the host says that they are.
        buffers.context(batch).copy_(buffers.draft_context(batch))
        self._fill(batch, nodes)
        tree = buffers.tree(batch, nodes, bound)  # its plan is made once
        self._verify(batch, nodes, bound, tree)
        self._accept(batch, nodes, tree)
        self._commit(batch, nodes, append=append)

    def _adopt(self, batch: int) -> None:
        """Takes sequences over: their roots, and the pairs that the MTP module has not seen."""
        buffers = self.buffers
        slot, paired, tokens = buffers.arrivals(batch)
        buffers.tree_tokens[buffers.by_slot(slot), 0] = tokens
        index = buffers.by_slot(paired)
        buffers.pending_tokens[index, 0] = tokens
        buffers.pending_hidden[index, 0] = buffers.hidden(batch, 1)[:, 0]
        buffers.pending_len.index_fill_(0, index, 1)

    def _fill(self, batch: int, nodes: int) -> None:
        """Takes the trees drafted on the device, cut to their best nodes where there are more."""
        buffers = self.buffers
        kept, own = self._within[nodes]
        size = kept.shape[0]
        if size <= nodes:
            step_tables.fill(buffers, batch, nodes, kept, own)
            return
        index = buffers.by_slot(buffers.slot(batch))
        tokens = buffers.tree_tokens[index].index_select(1, kept)
        scores = buffers.tree_scores[index].index_select(1, kept)
        tokens, parents, scores = best_nodes(tokens, own, scores, nodes)
        buffers.tokens(batch, nodes).copy_(tokens)
        buffers.parents(batch, nodes).copy_(parents)
        buffers.scores(batch, nodes).copy_(scores)

    def _verify(self, batch: int, nodes: int, bound: int, tree: TreeBatch | None = None) -> None:
        """The model over the trees: hidden states, and what a commit needs."""
        tree = self.buffers.tree(batch, nodes, bound) if tree is None else tree
        pools = self._pools
        pools.state.discard()
        step = self._steps[batch, nodes] = pools.state.verify(tree)
        attention = pools.kv_cache.verify(tree, ahead=True)
        hidden = self._model(tree.token_ids, tree.positions, step, attention)
        self.buffers.hidden(batch, nodes).copy_(hidden)

    def _accept(self, batch: int, nodes: int, tree: TreeBatch | None = None) -> None:
        """The accepted paths, and what the host is told of them."""
        buffers = self.buffers
        tree = buffers.tree(batch, nodes, 0) if tree is None else tree
        columns = buffers.path(batch, nodes).shape[1]
        ids, values = greedy_tokens(self._model, buffers.hidden(batch, nodes).flatten(0, 1))
        ids, values = ids.view(batch, nodes), values.view(batch, nodes)
        accepted = self.options.accept(tree, ids, columns)
        step_tables.report(buffers, batch, nodes, accepted, values, self.result_columns(nodes))

    def result_columns(self, nodes: int) -> int:
        """Numbers that the host is told of a row: path, tokens, fault, and the tree if wanted."""
        columns = 2 * min(nodes, self.buffers.sizes.path) + 1
        return columns + 2 * nodes * self.options.report_trees

    def _commit(self, batch: int, nodes: int, append: bool = False) -> None:
        """Moves states and cache rows; what was accepted is pending for the MTP module.

        In place of what was pending, or with `append`, in a step of roots alone, behind it.
        """
        buffers, pools = self.buffers, self._pools
        tree = buffers.tree(batch, nodes, 0)
        pools.state.resume(self._steps[batch, nodes])
        pools.state.commit(buffers.accepted(batch))
        pools.kv_cache.compact(tree.slot, buffers.path(batch, nodes), tree.context_lens)
        step_tables.note(buffers, batch, nodes, append)

    def _extend(self, batch: int, bound: int) -> None:
        assert self.drafts is not None
        self.drafts.enter(batch, bound)

    # ---- replays

    def fit(self, rows: int, nodes: int) -> Shape | None:
        """The captured shape for such a step, or None."""
        return self.sizes.fit(rows, nodes)

    def batch_for(self, rows: int) -> int:
        """The smallest captured batch that holds `rows`, which are not more than the largest."""
        return next(size for size in self.sizes.batch if size >= rows)

    @torch.inference_mode()
    def run_step(
        self, shape: Shape, rows: Sequence[tuple[int, int, int]], append: bool = False
    ) -> None:
        """Verifies, accepts and commits the trees that were drafted on the device.

        Args:
            shape: of the step.
            rows: slot, committed tokens and nodes of each.
            append: in a step of roots alone, keep the pairs that the MTP module has not seen.
        """
        bound = self._prepare(shape, max(context for _, context, _ in rows))
        self.buffers.load_rows(shape[0], list(rows))
        self._runner.replay(("step", *shape, bound, append))

    def ready(self, shape: Shape) -> bool:
        """Whether `run_step_again` may have this shape."""
        return ("commit", *shape) in self._runner

    @torch.inference_mode()
    def adopt(self, arrivals: Sequence[Arrival]) -> None:
        """Takes over any number of sequences, at most as many as a step has rows.

        Args:
            arrivals: those with a pair first.
        """
        batch = self.batch_for(len(arrivals))
        self._record_adoption(batch)
        self.buffers.load_arrivals(batch, arrivals)
        self._runner.replay(("adopt", batch))

    @torch.inference_mode()
    def run_step_again(
        self,
        shape: Shape,
        max_context: int,
        nodes: Sequence[int] | None = None,
        append: bool = False,
    ) -> None:
        """A step of the rows of the last one, each as far on as that has brought it.

        Args:
            shape: as many rows as the last step's, and a number of nodes that is `ready`.
            max_context: at least the most tokens that a row may have by now.
            nodes: of each row, where they are others than those of the last step.
            append: as in `run_step`.
        """
        bound = self._bound(max_context + self.buffers.sizes.path)
        self._pools.kv_cache.flush()
        key = ("step", *shape, bound, append)
        if key not in self._runner:  # another bound
            with self.buffers.inert(shape[0]):
                self._record_whole(*shape, bound)
        if nodes is not None:
            self.buffers.load_nodes(shape[0], nodes)
        self._runner.replay(key)

    @torch.inference_mode()
    def run_drafts(
        self,
        nodes: int,
        batch: int,
        max_context: int,
        rows: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Drafts the next trees, or enters the pending pairs alone.

        Args:
            nodes: of the captured step that the trees are for; 1 for no trees.
            batch: a captured batch size.
            max_context: at least the largest number of committed tokens.
            rows: slot and committed tokens of each; those of the last step where not given.
        """
        assert self.drafts is not None
        bound = self._bound(max_context + self.buffers.sizes.path)
        levels = self.drafts.depth_for(nodes)
        self._pools.kv_cache.flush()
        if rows is not None:
            self.buffers.load_draft_rows(batch, list(rows))
        self._record_drafts(batch, bound, levels)
        self._runner.replay(("draft", batch, bound, levels) if levels else ("extend", batch, bound))

    def replay_part(self, name: str, shape: Shape, max_context: int) -> None:
        """Replays one function over what the buffers hold; for measurements."""
        key = self._key(name, shape, max_context)
        self._capture_part(name, shape, max_context)
        self._runner.replay(key)

    @torch.inference_mode()
    def run_part(self, name: str, shape: Shape, max_context: int) -> None:
        """Calls what `replay_part` replays."""
        self._capture_part(name, shape, max_context)
        self._functions[self._key(name, shape, max_context)]()

    def _capture_part(self, name: str, shape: Shape, max_context: int) -> None:
        """Those that no step has need of; both, before anything is in the buffers."""
        if self._key(name, shape, max_context) not in self._runner:
            with self.buffers.inert(shape[0]):
                for part in ("fill", "accept"):
                    self._record_part(part, *shape, 0)

    def _key(self, name: str, shape: Shape, max_context: int) -> tuple[object, ...]:
        bound = self._bound(max_context + self.buffers.sizes.path)
        if name == "draft" and self.drafts is not None:
            return name, shape[0], bound, self.drafts.depth_for(shape[1])
        if name == "extend":
            return name, shape[0], bound
        return (name, *shape, bound) if name == "verify" else (name, *shape)

    @torch.inference_mode()
    def verify(self, tree: TreeBatch) -> Tensor | None:
        """Verifies trees from the host; hidden states [B, N, hidden], None where nothing fits."""
        rows, width = tree.parents.shape
        shape = self.fit(rows, width)
        if shape is None or self._pools.state.pending:
            return None  # a pending tree is refused where the uncaptured step begins
        bound = self._prepare(shape, tree.max_context)
        self.buffers.load_tree(tree, *shape)
        self._runner.replay(("verify", *shape, bound))
        self._pools.state.resume(self._steps[shape])
        return self.buffers.hidden(*shape)[:rows, :width]

    @torch.inference_mode()
    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        """Commits the trees that `verify` took last."""
        shape = self.fit(*tree.parents.shape)
        assert shape is not None
        self.load_acceptance(acceptance, *shape)
        self._runner.replay(("commit", *shape))
        self._pools.state.discard()

    def load_acceptance(self, acceptance: Acceptance, batch: int, nodes: int) -> None:
        """Puts accepted paths where a commit reads them."""
        buffers = self.buffers
        rows, columns = acceptance.path.shape
        path = buffers.path(batch, nodes)
        kept = min(columns, path.shape[1])
        for target, source, blank in (
            (buffers.accepted(batch), acceptance.accepted, -1),
            (buffers.num_accepted(batch), acceptance.num_accepted, 0),
            (buffers.bonus(batch), acceptance.bonus_ids, -1),
        ):
            if rows < batch:
                target.fill_(blank)
            target[:rows] = source
        if (rows, kept) != path.shape:
            path.fill_(-1)
        path[:rows, :kept] = acceptance.path[:, :kept]

    def _prepare(self, shape: Shape, max_context: int) -> int:
        """Sees to it that a step can be replayed; the bound it is captured for."""
        bound = self._bound(max_context + self.buffers.sizes.path)
        if ("verify", *shape, bound) not in self._runner:
            self._record_step(*shape, bound)
        self._pools.kv_cache.flush()
        return bound


def buffer_sizes(slots: int, hidden: int, options: GraphOptions) -> BufferSizes:
    """Sizes of the buffers for what is captured."""
    nodes = options.sizes.nodes[-1]
    return BufferSizes(
        slots=slots,
        batch=options.sizes.batch[-1],
        nodes=nodes,
        path=min(nodes, options.max_path),
        drafts=options.topology.num_nodes if options.topology is not None else 1,
        hidden=hidden,
    )
