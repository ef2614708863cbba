"""Steps in few launches, played by Triton's interpreter, against the plain modules.

Run by `tests/test_triton_ops.py` in a process of its own, as `triton_suite.py` is.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from engine_world import make_executor, tiny_config, tiny_model
from paged_attention_cases import unwritten_is_nan
from prompt_cases import ROOM, captured_executor, check_equal, committed, play, random_steps

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.model import FusedModel
from trtllm_treewy.model.mlp import MLP, Experts
from trtllm_treewy.model.norm import RMSNorm
from trtllm_treewy.model.rotary import apply_rotary, rotary_frequencies, rotary_tables
from trtllm_treewy.runtime.kv_cache import KvCache
from trtllm_treewy.runtime.prompt_buffers import PromptShape
from trtllm_treewy.runtime.static_drafts import layers_from

NAN = float("nan")
MOE = dict(moe=True, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16)


@pytest.fixture(autouse=True)
def poisoned():
    """A kernel that reads what no kernel wrote, or leaves some of its output, gives NaN."""
    with unwritten_is_nan():
        yield


def filled(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.requires_grad_(False)


# ------------------------------------------------------------------ experts


def few_experts(block, shared, x, weights, ids, tiles=None):
    from trtllm_treewy.triton_ops.moe_few import run_few_experts

    gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
    return run_few_experts(
        x, weights, ids.int(), block.gate_up_proj, block.down_proj, gate_up,
        shared.down_proj.weight, tiles,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "experts", "top", "shared_inner"),
    [(1, 8, 2, 20), (5, 6, 3, 44), (19, 4, 1, 7), (16, 16, 8, 20), (0, 4, 2, 20)],
)
def test_few_experts_are_those_of_torch(tokens, experts, top, shared_inner):
    """Experts that nobody wants or more than a tile does, a shared expert of another size."""
    from trtllm_treewy.triton_ops.moe_few import Tiles

    block, shared = filled(Experts(experts, 24, 20)), filled(MLP(24, shared_inner))
    x, weights = torch.randn(tokens, 40)[:, :24], torch.rand(tokens, top)
    ids = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)] or [torch.zeros(top)])
    ids = ids[:tokens].long()
    for tiles in (None, Tiles(16, 16, 16, 16, 4, 2)):
        got = few_experts(block, shared, x, weights, ids, tiles)
        routed = block.double()(x.double(), weights.double(), ids).float()
        own = shared.double()(x.double()).float()
        block.float(), shared.float()
        torch.testing.assert_close(got[:, :-1].sum(1), routed, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[:, -1], own, rtol=1e-4, atol=1e-4)


def test_all_tokens_with_one_expert_and_nan_in_one_of_them():
    block, shared = filled(Experts(4, 24, 20)), filled(MLP(24, 20))
    x, weights = torch.randn(37, 24), torch.rand(37, 1)
    ids = torch.full((37, 1), 2)
    want = few_experts(block, shared, x, weights, ids)
    x[3], weights[30] = NAN, NAN
    got = few_experts(block, shared, x, weights, ids)
    others = torch.tensor([row not in (3, 30) for row in range(37)])
    assert torch.equal(got[others], want[others])
    assert got[3].isnan().all()
    assert got[30, 0].isnan().all()
    assert torch.equal(got[30, 1], want[30, 1])


def test_more_pairs_than_it_is_for_are_refused():
    block, shared = filled(Experts(4, 24, 20)), filled(MLP(24, 20))
    with pytest.raises(ValueError, match="at most 128 pairs"):
        few_experts(block, shared, torch.randn(86, 24), torch.rand(86, 3), torch.zeros(86, 3))


def test_tiles_give_every_multiprocessor_work_within_its_memory():
    from trtllm_treewy.triton_ops.moe_few import choose_tiles

    for pairs in (8, 32, 64, 128):
        for shared in (227 * 1024, 99 * 1024):
            tiles = choose_tiles(pairs, 512, False, 132, shared)
            assert pairs * (512 // tiles.up_n) >= 128
            columns = max(2 * tiles.up_n, tiles.down_n)
            assert tiles.stages * (columns + 16) * tiles.up_k * 2 <= shared


# ------------------------------------------------------------------ norms and heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_their_norms_are_those_of_torch(monkeypatch, dtype):
    from trtllm_treewy.triton_ops.norm import add_rms_norm, norm_pair

    norm, other = filled(RMSNorm(24, 1e-6)).to(dtype), filled(RMSNorm(24, 1e-6)).to(dtype)
    x, y, shared = (torch.randn(7, n, 24).to(dtype) for n in (1, 3, 2))
    x, gates = x[:, 0], torch.randn(7, 5).to(dtype)
    table, ids = torch.randn(11, 24).to(dtype), torch.randint(0, 11, (7,))
    got = [
        *add_rms_norm(x, y[:, 0].contiguous(), norm.weight, norm.eps),
        *add_rms_norm(x, y, norm.weight, norm.eps, shared[:, 1], gates[:, 2]),
        norm_pair(table, x, norm.weight, other.weight, 1e-6, ids),
        norm_pair(table[ids], x, norm.weight, other.weight, 1e-6),
    ]
    monkeypatch.setattr(triton_ops, "serves", lambda x: False)
    plain = x + y[:, 0]
    mixed = x + (y.float().sum(1).to(dtype) + torch.sigmoid(gates[:, 2:3]) * shared[:, 1])
    pair = torch.cat([norm(table[ids]), other(x)], -1)
    want = [plain, norm(plain), mixed, norm(mixed), pair, pair]
    error = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=error, atol=error)


@pytest.mark.parametrize(("dim", "rotary", "heads", "kv_heads"), [(16, 4, 4, 2), (24, 24, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_are_placed_as_torch_would(monkeypatch, dim, rotary, heads, kv_heads, dtype):
    from trtllm_treewy.triton_ops.heads import place_heads

    q_norm, k_norm = (filled(RMSNorm(dim, 1e-6)).to(dtype) for _ in range(2))
    sizes = [heads * 2 * dim, kv_heads * dim, kv_heads * dim]
    packed = torch.randn(5, sum(sizes) + 8).to(dtype)
    positions = torch.tensor([0, 1, 77, 4000, 262143])
    pools = torch.zeros(2, kv_heads, 9, dim, dtype=dtype)
    target = torch.tensor([3, 1, 8, 8, 0])  # the last row is the sink, and repeats
    q = place_heads(
        packed, (q_norm.weight, 1e-6), (k_norm.weight, 1e-6),
        rotary_frequencies(rotary, 1e7, packed.device), positions, target, *pools, heads,
    )  # fmt: skip
    monkeypatch.setattr(triton_ops, "serves", lambda x: False)
    parts = packed[:, : sum(sizes)].split(sizes, -1)
    tables = rotary_tables(positions, rotary, 1e7, dtype)
    want = apply_rotary(q_norm(parts[0].unflatten(-1, (heads, 2, dim))[:, :, 0]), *tables)
    keys = apply_rotary(k_norm(parts[1].unflatten(-1, (kv_heads, dim))), *tables)
    error = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(q, want, rtol=error, atol=error)
    alone = [0, 1, 4]
    stored = pools[:, :, target[alone]]
    torch.testing.assert_close(stored[0], keys[alone].transpose(0, 1), rtol=error, atol=error)
    assert torch.equal(stored[1], parts[2].unflatten(-1, (kv_heads, dim))[alone].transpose(0, 1))


# ------------------------------------------------------------------ whole steps


def verified(model, trees, prompts):
    """Hidden states of trees behind prompts, and what a commit makes of states and caches."""
    executor = make_executor(model)
    for slot, prompt in enumerate(prompts):
        assert executor.try_allocate(slot, len(prompt))
    lengths = [len(p) for p in prompts]
    tokens = [t for p in prompts for t in p]
    slots = list(range(len(prompts)))
    executor.prefill(PrefillBatch.pack(tokens, lengths, slots, [0] * len(slots), executor.device))
    batch = TreeBatch(*trees, torch.tensor([*slots, -1]).int(),
                      torch.tensor([*lengths, 0]).int(), max(lengths))  # fmt: skip
    return executor, executor.verify(batch)


def random_trees(batch, nodes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (batch, nodes), generator=gen)
    parents = [[-1] + [int(torch.randint(0, t, (), generator=gen)) for t in range(1, nodes)]
               for _ in range(batch)]  # fmt: skip
    counts = torch.randint(1, nodes + 1, (batch,), generator=gen).int()
    counts[-1] = 0
    return tokens, torch.tensor(parents).int(), counts


@pytest.mark.parametrize("kind", ["dense", "moe", "bias"])
def test_a_step_is_that_of_the_plain_model(monkeypatch, kind):
    changes = {"dense": {}, "moe": MOE, "bias": {"attention_bias": True}}[kind]
    model = tiny_model(1, tiny_config(**changes))
    prompts = [[3, 4, 5, 6, 7], [9] * 11, [1, 2]]
    trees = random_trees(4, 6)
    fused, got = verified(model, trees, prompts)
    assert isinstance(fused._steps, FusedModel)
    monkeypatch.setattr(triton_ops, "serves", lambda x: False)
    plain, want = verified(model, trees, prompts)
    assert plain._steps is model
    real = torch.arange(6) < trees[2][:, None]
    torch.testing.assert_close(got.hidden[real], want.hidden[real], rtol=1e-3, atol=1e-3)
    for name in ("k", "v"):
        ours, theirs = getattr(fused.kv_cache, name), getattr(plain.kv_cache, name)
        sink = fused.kv_cache._sink
        torch.testing.assert_close(ours[:, :, :sink], theirs[:, :, :sink], rtol=1e-3, atol=1e-3)


def prompted(model, chunks):
    """Logits of prompts that come in chunks, and what the drafter makes of the last ones."""
    executor = make_executor(model)
    found, contexts = [], [0] * len(chunks[0])
    for slot in range(len(contexts)):
        assert executor.try_allocate(slot, 24)
    for spans in chunks:
        lengths, slots = [len(span) for span in spans], list(range(len(spans)))
        tokens = [token for span in spans for token in span]
        batch = PrefillBatch.pack(tokens, lengths, slots, contexts, executor.device)
        out = executor.prefill(batch)
        drafted = executor.draft_extend(batch, out.hidden)
        found += [out.logits, out.hidden, drafted.logits, drafted.hidden]
        contexts = [a + b for a, b in zip(contexts, lengths, strict=True)]
    return executor, found


@pytest.mark.parametrize("kind", ["dense", "moe", "bias"])
def test_prompts_are_those_of_the_plain_model(monkeypatch, kind):
    changes = {"dense": {}, "moe": MOE, "bias": {"attention_bias": True}}[kind]
    model = tiny_model(1, tiny_config(**changes))
    chunks = [[[3, 4, 5, 6, 7], [9] * 11, [1]], [[8, 2], [5], [30, 31, 32] * 4]]
    fused, got = prompted(model, chunks)
    assert isinstance(fused._steps, FusedModel)
    monkeypatch.setattr(triton_ops, "serves", lambda x: False)
    plain, want = prompted(model, chunks)
    assert plain._steps is model
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_what_enters_the_module_is_what_a_draft_enters():
    """Prompts in pages, and pairs as a chain."""
    model = tiny_model(1)
    executor = make_executor(model)
    for slot in range(2):
        assert executor.try_allocate(slot, 24)
    batch = PrefillBatch.pack([*range(9)], [6, 3], [0, 1], [0, 0], executor.device)
    hidden = torch.randn(9, model.config.hidden_size)
    slot, base = torch.tensor([1, 0]).int(), torch.tensor([3, 6]).int()
    count = torch.tensor([2, 3]).int()
    chain = torch.ones(3, 3).tril().bool().expand(2, -1, -1)
    pairs = torch.tensor([[4, 5, 0], [6, 7, 8]]), torch.randn(2, 3, model.config.hidden_size)
    positions = (base[:, None] + torch.arange(3)).long()
    cache, first, rows = executor.kv_cache, len(model.config.attention_layers), []
    for name in ("draft", "draft_enter"):
        run = getattr(executor._steps, name)
        for pool in (cache.k, cache.v):
            pool[first:].fill_(7.0)
        with torch.inference_mode():
            run(batch.token_ids, hidden, batch.positions, layers_from(cache.prefill(batch), first))
            step = cache.step_behind(slot, base, chain, 6, count=count)
            run(*pairs, positions, layers_from(step, first))
        sink = cache._sink
        rows.append(torch.cat([cache.k[first:, :, :sink], cache.v[first:, :, :sink]]))
    assert isinstance(executor._steps, FusedModel)
    assert torch.equal(*rows)
    written = (rows[0] != 7.0).any(-1).sum()
    assert written == 2 * cache.num_kv_heads * (9 + 5)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_last_of_some_pairs_are_what_a_pass_over_all_gives(monkeypatch, kind):
    """By kernels and by the plain modules; the others' rows are in the cache as well."""
    model = tiny_model(1, tiny_config(**({} if kind == "dense" else MOE)))
    slot, base = torch.tensor([1, -1, 0]).int(), torch.tensor([0, 0, 2]).int()
    count = torch.tensor([2, 0, 3]).int()
    chain = torch.ones(1, 3, 3).tril().bool().expand(3, -1, -1)
    tokens, hidden = torch.arange(9).view(3, 3), torch.randn(3, 3, model.config.hidden_size)
    positions = (base[:, None] + torch.arange(3)).long()
    last = torch.tensor([1, 3, 8])
    for _ in range(2):
        executor = make_executor(model)
        for one in range(2):
            assert executor.try_allocate(one, 24)
        cache, first = executor.kv_cache, len(model.config.attention_layers)
        before = (base + count - 1).clamp(min=0).int()
        rows, outputs = [], []
        for whole in (True, False):
            for pool in (cache.k, cache.v):
                pool[first:].fill_(7.0)
            step = layers_from(cache.step_behind(slot, base, chain, 3, count=count), first)
            itself, nothing = torch.ones(3, 1, 1).bool(), torch.zeros(3).int()
            alone = layers_from(cache.step_behind(slot, before, itself, 4, count=nothing), first)
            with torch.inference_mode():
                if whole:
                    out = executor._steps.draft(tokens, hidden, positions, step)
                    outputs.append(out.flatten(0, 1)[last])
                else:
                    out = executor._steps.draft_last(tokens, hidden, positions, step, last, alone)
                    outputs.append(out[:, 0])
            sink = cache._sink
            rows.append(torch.cat([cache.k[first:, :, :sink], cache.v[first:, :, :sink]]))
        torch.testing.assert_close(outputs[0][[0, 2]], outputs[1][[0, 2]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*rows)
        assert isinstance(executor._steps, FusedModel) == triton_ops.serves(hidden)
        monkeypatch.setattr(triton_ops, "serves", lambda x: False)


class Echo:
    """One rank of two whose partial sums are whole: what it exchanges comes back, doubled."""

    rank, ranks = 0, 2

    def all_reduce(self, x):
        return x * 2

    def all_gather(self, x):
        return x


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_rank_sums_before_it_norms(monkeypatch, kind):
    model = tiny_model(1, tiny_config(**({} if kind == "dense" else MOE)))
    for part in (model, model.model, *model.model.layers, *model.mtp.layers):
        part.collectives = Echo()
    prompts, trees = [[3, 4, 5], [9] * 11, [1, 2]], random_trees(4, 6)
    nodes = torch.tensor([[5, 6], [7, 8]])
    hidden = torch.randn(2, 2, model.config.hidden_size)
    offsets, slot = torch.tensor([[3, 4], [11, 12]]), torch.tensor([0, 1]).int()
    mask = torch.arange(14) < torch.tensor([[4, 5], [12, 13]])[..., None]
    results = []
    for rule in (triton_ops.serves, lambda x: False):
        monkeypatch.setattr(triton_ops, "serves", rule)
        executor, out = verified(model, trees, prompts)
        for one in (0, 1):
            assert executor.try_extend(one, 14)
        drafted = executor.draft(nodes, hidden, offsets, slot, offsets, mask)
        results.append((out.hidden, drafted.hidden))
    real = torch.arange(6) < trees[2][:, None]
    (ours, our_drafts), (theirs, their_drafts) = results
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(our_drafts, their_drafts, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_row_with_nan_fails_alone(kind):
    """CASES 9: a poisoned token in one tree leaves every other tree's bits as they are."""
    model = tiny_model(1, tiny_config(**({} if kind == "dense" else MOE)))
    prompts, trees = [[3, 4, 5], [9] * 11, [1, 2]], random_trees(4, 6)
    trees[2][:] = torch.tensor([6, 6, 6, 0])
    trees[0][:] = trees[0] % 60
    want = verified(model, trees, prompts)[1].hidden
    trees[0][1, 0] = 60  # a root: all of its tree sees it
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = NAN
    got = verified(model, trees, prompts)[1].hidden
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


# ------------------------------------------------------------------ trees and pages


@pytest.mark.parametrize("nodes", [1, 2, 7, 40])
def test_a_plan_of_trees_is_that_of_topology(nodes):
    from trtllm_treewy import topology
    from trtllm_treewy.triton_ops.trees import plan_trees

    _, parents, counts = random_trees(5, nodes, seed=nodes)
    context = torch.tensor([0, 3, 70000, 5, 9]).int()
    mask, depth, positions = plan_trees(parents, counts, context)
    want = topology.ancestor_mask(parents, counts)
    assert torch.equal(mask, want)
    assert torch.equal(depth, topology.node_depth(want))
    assert torch.equal(positions, (context[:, None] + depth).long())


def test_parents_that_go_round_end_a_path():
    from trtllm_treewy.triton_ops.trees import plan_trees

    parents = torch.tensor([[-1, 2, 1, 3]]).int()
    mask, depth, _ = plan_trees(parents, torch.tensor([4]).int(), torch.tensor([0]).int())
    assert depth.tolist() == [[0, 0, 1, 0]]
    assert mask[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def paged_cache():
    cache = KvCache(3, 20, 4, 2, 24, torch.float32, "cpu", 4, 24)
    for slot, rows in ((1, 5), (0, 24), (2, 13), (1, 17)):
        assert cache.try_reserve(slot, rows)
    gen = torch.Generator().manual_seed(1)
    for pool in (cache.k, cache.v):
        pool.copy_(torch.randn(pool.shape, generator=gen))
    return cache


def test_rows_behind_a_context_are_those_of_the_table():
    cache = paged_cache()
    slot, base = torch.tensor([2, -1, 0, 1]).int(), torch.tensor([3, 4, 21, 14]).int()
    count = torch.tensor([5, 5, 5, 2]).int()
    index = torch.arange(5)
    for first, counts in ((0, count), (2, None)):
        got = cache._rows(slot, base, counts, 5, first)
        offsets = base[:, None] + first + index
        if counts is not None:
            offsets = torch.where(index < counts[:, None], offsets, -1)
        want = cache.physical(slot, offsets.long())
        real = want < cache._sink
        assert torch.equal(got[real], want[real])
        assert (got[~real] >= cache._sink).all()
        assert (got < cache.k.shape[2]).all()


def test_compaction_is_that_of_torch(monkeypatch):
    ours, theirs = paged_cache(), paged_cache()
    slot, base = torch.tensor([2, -1, 0, 1]).int(), torch.tensor([3, 4, 10, 14]).int()
    path = torch.tensor([[0, 2, 3, 6], [0, 1, 2, 3], [0, 1, 5, -1], [-1, -1, -1, -1]])
    ours.compact(slot, path, base)
    monkeypatch.setattr(triton_ops, "serves", lambda x: False)
    before = theirs.k.clone()
    theirs.compact(slot, path, base)
    assert not torch.equal(theirs.k[:, :, : theirs._sink], before[:, :, : theirs._sink])
    for name in ("k", "v"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(a[:, :, : ours._sink], b[:, :, : ours._sink])


# ------------------------------------------------------------------ captured prompt steps


def near(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_captured_prompts_leave_what_uncaptured_ones_leave(kind):
    """Padded shapes over the pages; what padding computes is of no use and reaches nothing."""
    model = tiny_model(3, tiny_config(**(MOE if kind == "experts" else {})))
    mine = captured_executor(model, shapes=(PromptShape(8, 3), PromptShape(14, 4)), **ROOM)
    theirs = make_executor(model, **ROOM)
    steps = random_steps(9, 12, 4)[2:]
    ours, want = play(mine, steps, 1), play(theirs, steps, 1)
    assert mine.prompt_graphs.replays == 2 * len(steps)
    check_equal(ours, want, steps, near)
    for got, expected in zip(committed(mine), committed(theirs), strict=True):
        near(got, expected)


def test_no_shape_runs_out_of_tiles():
    """Whatever the sequences are: one of all tokens, as many as there can be, and none."""
    executor = captured_executor(tiny_model(3), **ROOM)
    buffers = executor.prompt_graphs.buffers
    for slot in range(4):
        assert executor.try_allocate(slot, 100)
    for shape, place in buffers._places.items():
        count = shape.sequences
        ones = [1] * (count - 1)
        for lengths in ([shape.tokens], [*ones, shape.tokens - len(ones)], [*ones, 1], []):
            slots = list(range(len(lengths)))
            batch = PrefillBatch.pack(
                [1] * sum(lengths), lengths, slots, [0] * len(lengths), executor.device
            )
            buffers.load(shape, batch)
            first, tokens, position, slot = place.listed.long().T
            assert tokens.sum() == shape.tokens
            covered = torch.cat(
                [torch.arange(a, a + n) for a, n in zip(first, tokens, strict=True)]
            )
            assert torch.equal(covered.sort().values, torch.arange(shape.tokens))
            assert (slot[position + tokens == 0] == -1).all()
