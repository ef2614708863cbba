"""The bookkeeping of captured steps, played by Triton's interpreter, against its twin in torch.

Run by `tests/test_triton_ops.py` in a process of its own, as `triton_suite.py` is.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from engine_world import tiny_model
from paged_attention_cases import unwritten_is_nan
from test_cuda_graphs import TOPOLOGIES, graph_engine

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.runtime import static_drafts, step_tables
from trtllm_treewy.runtime.acceptance import Acceptance
from trtllm_treewy.runtime.acceptance_law import accept_by_depth
from trtllm_treewy.runtime.decode_buffers import BufferSizes, DecodeBuffers

SLOTS, BATCH, NODES, PATH = 6, 5, 7, 4
TABLES = ("tree_tokens", "tree_scores", "pending_tokens", "pending_hidden", "pending_len")


@pytest.fixture(autouse=True)
def poisoned():
    """A kernel that reads what no kernel wrote, or leaves some of its output, gives NaN."""
    with unwritten_is_nan():
        yield


def random_buffers(seed, hidden=20, dtype=torch.float32):
    """Buffers in the middle of things: rows 1 and 4 are padding."""
    gen = torch.Generator().manual_seed(seed)
    sizes = BufferSizes(SLOTS, BATCH, NODES, PATH, NODES, hidden)
    buffers = DecodeBuffers(sizes, dtype, torch.device("cpu"))

    def ints(table, high):
        table.copy_(torch.randint(high, table.shape, generator=gen))

    for table in (buffers.tree_tokens, buffers.pending_tokens, buffers._tokens, buffers._bonus):
        ints(table, 500)
    for table in (buffers.tree_scores, buffers.pending_hidden, buffers._hidden, buffers._scores):
        table.copy_(torch.randn(table.shape, generator=gen))
    ints(buffers.pending_len, PATH)
    buffers.pending_len += 1
    slots = torch.randperm(SLOTS, generator=gen)[:BATCH].tolist()
    rows = [(slot, 10 + row, NODES) for row, slot in enumerate(slots)]
    rows[1] = rows[4] = (-1, 0, 0)
    buffers.load_rows(BATCH, rows)
    parents = [[-1] + [int(torch.randint(n, (), generator=gen)) for n in range(1, NODES)]
               for _ in range(BATCH)]  # fmt: skip
    buffers._parents.copy_(torch.tensor(parents).flatten())
    return buffers, gen


def random_paths(buffers, nodes, gen):
    """Accepted paths of all lengths, as an acceptance that is not in the buffers yet."""
    columns = min(nodes, PATH)
    path = torch.full((BATCH, columns), -1)
    for row, slot in enumerate(buffers.slot(BATCH).tolist()):
        if slot >= 0:
            length = int(torch.randint(1, columns + 1, (), generator=gen))
            later = torch.randperm(nodes - 1, generator=gen)[: length - 1] + 1
            path[row, :length] = torch.cat([torch.zeros(1).long(), later.sort().values])
    count = (path >= 0).sum(1).int()
    last = torch.where(
        count > 0, path.gather(1, (count - 1).clamp(min=0)[:, None].long())[:, 0], -1
    )
    bonus = torch.where(count > 0, torch.randint(500, (BATCH,), generator=gen), -1)
    return Acceptance(last.int(), count, path, bonus)


def both(monkeypatch, run, seed, **changes):
    """`run(buffers, gen)` by the kernels and by torch: both buffers, and what it gave."""
    found = []
    for kernels in (True, False):
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(triton_ops, "runs_on", lambda x: False)
            buffers, gen = random_buffers(seed, **changes)
            found.append((buffers, run(buffers, gen)))
    return found


def same(one, other, skip=()):
    """All that the buffers hold but the sink, and the tables named."""
    for name, table in vars(one).items():
        if isinstance(table, torch.Tensor) and name not in skip:
            rows = slice(0, SLOTS) if name in TABLES else slice(None)
            assert torch.equal(table[rows], getattr(other, name)[rows]), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("nodes", "size"), [(7, 7), (7, 3), (1, 1), (5, 4)])
def test_fill(monkeypatch, nodes, size, seed):
    kept = torch.randperm(NODES)[:size].sort().values
    own = torch.tensor([-1, *(n // 2 for n in range(size - 1))], dtype=torch.int32)

    def run(buffers, gen):
        step_tables.fill(buffers, BATCH, nodes, kept, own)

    (ours, _), (theirs, _) = both(monkeypatch, run, seed)
    real = ours.slot(BATCH) >= 0
    for view in ("tokens", "parents", "scores"):
        one, other = (getattr(b, view)(BATCH, nodes) for b in (ours, theirs))
        assert torch.equal(one[real], other[real])
    assert (ours.parents(BATCH, nodes)[:, size:] == -1).all()
    same(ours, theirs, ("_tokens", "_scores"))  # of padding they are the sink's


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("nodes", [7, 3, 1])
@pytest.mark.parametrize("seed", range(3))
def test_report(monkeypatch, nodes, trees, seed):
    columns = 2 * min(nodes, PATH) + 1 + 2 * nodes * trees

    def run(buffers, gen):
        accepted = random_paths(buffers, nodes, gen)
        values = torch.randn(BATCH, nodes, generator=gen)
        values[0, accepted.path[0, accepted.num_accepted[0] - 1]] = (
            float("nan") if seed else float("-inf")
        )
        values[2, nodes - 1] = float("inf")
        step_tables.report(buffers, BATCH, nodes, accepted, values, columns)
        return accepted

    (ours, accepted), (theirs, _) = both(monkeypatch, run, seed)
    same(ours, theirs)
    told = ours.result(BATCH, columns)
    assert told[0, 2 * min(nodes, PATH)] == 1
    assert told[2, 2 * min(nodes, PATH)] == (nodes - 1 in accepted.path[2].tolist())
    assert told[3, 2 * min(nodes, PATH)] == 0


@pytest.mark.parametrize("hidden", [20, 2100])
@pytest.mark.parametrize(("nodes", "append"), [(7, False), (3, False), (1, False), (1, True)])
@pytest.mark.parametrize("seed", range(2))
def test_note(monkeypatch, nodes, append, hidden, seed):
    before, _ = random_buffers(seed, hidden)

    def run(buffers, gen):
        buffers.pending_len.clamp_(max=PATH - 1)
        accepted = random_paths(buffers, nodes, gen)
        step_tables.report(
            buffers, BATCH, nodes, accepted, torch.zeros(BATCH, nodes), 2 * min(nodes, PATH) + 1
        )
        step_tables.note(buffers, BATCH, nodes, append)

    (ours, _), (theirs, _) = both(monkeypatch, run, seed, hidden=hidden)
    same(ours, theirs, ("pending_tokens", "pending_hidden"))
    live = [slot for slot in ours.slot(BATCH).tolist() if slot >= 0]
    for slot in range(SLOTS):
        count = int(ours.pending_len[slot]) if slot in live else 0
        for name in ("pending_tokens", "pending_hidden"):
            mine, their, old = (getattr(b, name)[slot] for b in (ours, theirs, before))
            assert torch.equal(mine[:count], their[:count])
            assert torch.equal(mine[count:], old[count:]), "what nobody asks for stays"
    assert torch.equal(ours.draft_slot(BATCH), ours.slot(BATCH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hidden", [20, 2100])
def test_pairs(monkeypatch, hidden, dtype):
    (ours, got), (theirs, want) = both(
        monkeypatch, lambda buffers, gen: step_tables.pairs(buffers, BATCH), 3,
        hidden=hidden, dtype=dtype,
    )  # fmt: skip
    same(ours, theirs)
    real = ours.draft_slot(BATCH) >= 0
    for name in ("tokens", "hidden", "positions", "count", "base", "before", "last"):
        one, other = getattr(got, name), getattr(want, name)
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        kept = real if name in ("tokens", "hidden") else slice(None)  # of padding: the sink's
        assert torch.equal(one[kept], other[kept]), name
    assert (got.positions.flatten()[got.last] == got.before)[real].all()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_children(monkeypatch, name):
    """Every level of a topology, from candidates that are as many as the level above has."""
    topology = TOPOLOGIES[name]
    levels = static_drafts._levels(topology, torch.device("cpu"))
    above = 1
    for depth, level in enumerate(levels, start=1):

        def run(buffers, gen, level=level, depth=depth, above=above):
            # As many columns as the table of this topology has.
            buffers.tree_tokens = buffers.tree_tokens.repeat(1, 2)[:, : topology.num_nodes].clone()
            buffers.tree_scores = buffers.tree_scores.repeat(1, 2)[:, : topology.num_nodes].clone()
            ids = torch.randint(500, (BATCH * above, level.widest), generator=gen)
            gains = -torch.rand(BATCH * above, level.widest, generator=gen)
            return step_tables.children(buffers, BATCH, level.nodes, ids, gains, depth)

        (ours, got), (theirs, want) = both(monkeypatch, run, depth)
        same(ours, theirs)
        for one, other in zip(got, want, strict=True):
            assert one.is_contiguous()
            assert torch.equal(one, other)
        above = level.sees.shape[0]


@pytest.mark.parametrize(("nodes", "calls"), [(1, 3), (4, 25), (7, 25)])
def test_a_drawn_path_is_one_of_the_tree_and_as_deep_as_the_law_says(nodes, calls):
    """Rows of trees of other sizes and of none; frequencies by depth, and no two calls alike."""
    law, columns, rows = (0.8, 0.5, 0.9), min(nodes, 4), 14
    torch.manual_seed(nodes)
    gen = torch.Generator().manual_seed(nodes)
    parents = torch.tensor([[-1] + [n // 2 for n in range(nodes - 1)]] * rows).int()
    counts = torch.full((rows,), nodes).int()
    counts[1], slot = 0, torch.arange(rows).int()
    slot[2], counts[3] = -1, max(1, nodes - 1)
    tree = TreeBatch(torch.zeros(rows, nodes).long(), parents, counts, slot, slot.clone(), 0)
    target = torch.randint(500, (rows, nodes), generator=gen)
    accept, depths, seen = accept_by_depth(law), [], set()
    for _ in range(calls):
        found = accept(tree, target, columns)
        assert found.path.shape == (rows, columns)
        assert found.accepted[1:3].tolist() == found.bonus_ids[1:3].tolist() == [-1, -1]
        assert found.num_accepted[1:3].tolist() == [0, 0]
        for row in (0, *range(3, rows)):
            path = [node for node in found.path[row].tolist() if node >= 0]
            assert len(path) == found.num_accepted[row]
            assert path[-1] == found.accepted[row] < counts[row]
            assert [parents[row, node].item() for node in path] == [-1, *path[:-1]]
            assert found.bonus_ids[row] == target[row, path[-1]]
            same_depth = [n for n in range(counts[row]) if tree.depth[row, n] == len(path) - 1]
            assert path[-1] == same_depth[0], "the first that is as deep"
            if row > 3:
                depths.append(len(path) - 1)
        seen.add(tuple(found.num_accepted.tolist()))
    deepest, reached = int(tree.depth[0].max()), 1.0
    for depth in range(1, deepest + 1):
        reached *= law[depth - 1]
        share = sum(one >= depth for one in depths) / len(depths)
        assert abs(share - reached) < 0.1
    assert len(seen) == (calls if nodes > 1 else 1)


def test_a_step_takes_few_launches_beside_the_model(monkeypatch):
    """Torch's operators in the functions of a step, products and those of this project aside."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            returns = func._schema.returns
            views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            if not views and func.namespace != "treewy":
                names.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    engine = graph_engine(tiny_model(0), TOPOLOGIES["chain"])
    graphs = engine._executor.graphs
    counts = {}
    for part in ("fill", "commit"):
        graphs.run_part(part, (4, 4), 30)
        names.clear()
        with Notes():
            graphs.run_part(part, (4, 4), 30)
        # Beside what the interpreter makes of a kernel's tensors: copies, and where they lie.
        counts[part] = [n for n in names if n not in ("set_", "copy_") and "empty" not in n]
    assert counts == {"fill": [], "commit": []}
