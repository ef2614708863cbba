"""The Triton kernels, played by Triton's interpreter, against plain torch.

`tests/test_triton_ops.py` runs this file in a process of its own with TRITON_INTERPRET=1, which
must be set before a kernel is defined.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from engine_world import tiny_config
from paged_attention_cases import make_case, unwritten_is_nan
from paged_prompt_cases import make_prompts

from trtllm_treewy.runtime.kv_cache import KvCache
from trtllm_treewy.topology import ancestor_mask
from trtllm_treewy.triton_ops import attention, prefill_attention

PAGE, SLOTS = 4, 5
NAN = float("nan")
# Multiprocessors, and bytes of shared memory that a block may have.
GPUS = {"H200": (132, 227 * 1024), "L4": (58, 99 * 1024)}


@pytest.fixture(autouse=True)
def poisoned():
    """A kernel that reads what no kernel wrote, or leaves some of its output, gives NaN."""
    with unwritten_is_nan():
        yield


def make_cache(kv_heads, dim, dtype):
    cache = KvCache(1, 60, PAGE, kv_heads, dim, dtype, "cpu", SLOTS, 48)
    # Blocks in another order than rows, and slots that hold different numbers of them.
    for rows in (4, 13, 30, 48):
        for slot in range(SLOTS):
            assert cache.try_reserve(slot, max(1, rows - 3 * slot))
    torch.nn.init.normal_(cache.k)
    torch.nn.init.normal_(cache.v)
    return cache


def random_tree(nodes):
    parents = [-1] + [int(torch.randint(0, t, ())) for t in range(1, nodes)]
    return torch.tensor([parents], dtype=torch.int32)


def random_step(batch, nodes, kv_heads, groups, dim, dtype):
    counts = torch.randint(1, nodes + 1, (batch,), dtype=torch.int32)
    parents = torch.cat([random_tree(nodes) for _ in range(batch)])
    real = torch.arange(nodes) < counts[:, None]
    own = ancestor_mask(parents, counts) & real[:, :, None]
    slot = torch.randperm(SLOTS)[:batch].int()
    slot[-1] = -1
    context = torch.randint(0, 24, (batch,), dtype=torch.int32)
    context[0] = 0
    q = torch.randn(batch, nodes, kv_heads * groups, 2 * dim).to(dtype)[..., :dim]
    k, v = (torch.randn(batch, nodes, kv_heads, dim).to(dtype) for _ in range(2))
    return slot, context, own, q, k, v


def torch_attention(cache, slot, context, own, q, k, v, scale):
    batch, nodes, entries = own.shape
    rows = torch.arange(int(context.max()) + entries)
    behind = rows - context[:, None]
    seen = own.gather(2, behind.clamp(0, entries - 1)[:, None].expand(-1, nodes, -1).long())
    mask = (behind < 0)[:, None] | (seen & ((behind >= 0) & (behind < entries))[:, None])
    real = own.any(-1)
    mask = mask & real[:, :, None]
    offsets = torch.where(real, context[:, None] + torch.arange(nodes), -1)
    return cache.step(slot, offsets, mask).attend(0, q, k, v, scale), offsets


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("kv_heads", "groups", "dim", "nodes"), [(2, 4, 16, 5), (1, 3, 24, 9), (2, 8, 32, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # no bf16 products there
def test_tree_attention_is_that_of_torch(kv_heads, groups, dim, nodes, dtype, splits):
    cache = make_cache(kv_heads, dim, dtype)
    slot, context, own, q, k, v = random_step(4, nodes, kv_heads, groups, dim, dtype)
    want, offsets = torch_attention(cache, slot, context, own, q, k, v, 0.3)
    target = cache.physical(slot, offsets)
    got_cache = make_cache(kv_heads, dim, dtype)
    got_cache.k.copy_(cache.k)
    got_cache.v.copy_(cache.v)
    attention.append_rows(k, v, got_cache.k[0], got_cache.v[0], target)
    sink = cache.num_blocks * PAGE
    assert torch.equal(got_cache.k[:, :, :sink], cache.k[:, :, :sink])
    assert torch.equal(got_cache.v[:, :, :sink], cache.v[:, :, :sink])
    got = attention.tree_attention(
        q, cache.k[0], cache.v[0], cache.block_table, slot, context, own, 0.3,
        page=PAGE, num_blocks=cache.num_blocks,
        tiles=attention.Tiles(16, 16, splits, 4, 2),
    )  # fmt: skip
    # Queries beyond a tree's nodes attend its context here, and nothing there; nobody reads them.
    real = own.any(-1) & (slot >= 0)[:, None]
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[real], want[real], **close)
    assert not got[-1].any()


@pytest.mark.parametrize("splits", [1, 2])
def test_what_is_not_attended_reaches_nobody(splits):
    """CASES 9, 14: NaN in a sibling, behind the tree and in the sink; NaN where it is attended."""
    cache = make_cache(1, 16, torch.float32)
    context = torch.tensor([6, 3], dtype=torch.int32)
    slot = torch.tensor([1, 2], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32)
    own = ancestor_mask(parents, torch.tensor([4, 4]))
    q, k, v = (torch.randn(2, 4, heads, 16) for heads in (2, 1, 1))
    k[0, 2], v[1, 2] = NAN, NAN
    offsets = context[:, None] + torch.arange(4)
    behind = cache.physical(slot, offsets[:, -1:] + 1)
    cache.k[:, :, behind] = NAN
    cache.v[:, :, behind] = NAN
    cache.k[:, :, cache.num_blocks * PAGE :] = NAN
    attention.append_rows(k, v, cache.k[0], cache.v[0], cache.physical(slot, offsets))
    got = attention.tree_attention(
        q, cache.k[0], cache.v[0], cache.block_table, slot, context, own, 1.0,
        page=PAGE, num_blocks=cache.num_blocks, tiles=attention.Tiles(16, 16, splits, 4, 2),
    )  # fmt: skip
    assert got[:, [0, 1, 3]].isfinite().all()
    assert got[:, 2].isnan().all()


@pytest.mark.parametrize(
    ("gpu", "dtype", "batch", "nodes", "short", "longest", "sizes", "splits"),
    [
        ("H200", torch.float32, 1, 1, False, 2200, (1, 4, 64), 16),
        ("H200", torch.float16, 1, 4, True, 2200, (2, 8, 256), 16),
        ("H200", torch.float16, 3, 15, False, 1000, (1, 4, 64), 16),
        ("H200", torch.float32, 8, 40, False, 300, (1, 4, 64), 8),
        ("H200", torch.float16, 8, 40, True, 200, (1, 4, 64), 8),
        ("H200", torch.float32, 2, 128, False, 60, (1, 4, 64), 16),
        ("H200", torch.float32, 8, 40, True, 60, (4, 3, 128), 1),
        ("H200", torch.float32, 8, 40, False, 8, (2, 8, 256), 1),
        ("L4", torch.float32, 3, 15, True, 500, (1, 4, 64), 16),
        ("L4", torch.float16, 1, 4, False, 500, (2, 8, 256), 16),
    ],
)
def test_trees_by_the_plan_of_a_gpu(
    monkeypatch, gpu, dtype, batch, nodes, short, longest, sizes, splits
):
    """The sizes of the GPU's own tests, with a GPU's tiles; `short` leaves rows without blocks."""
    plans, choose = [], attention.choose_tiles
    monkeypatch.setattr(attention, "processors", lambda device: GPUS[gpu])
    monkeypatch.setattr(
        attention, "choose_tiles", lambda *given: plans.append(choose(*given)) or plans[-1]
    )
    case = make_case(batch, nodes, *sizes, dtype, "cpu", longest, short)
    scale = sizes[-1] ** -0.5
    want = case.expected(scale)[case.real]
    got = case.run(scale)[case.real]
    assert [tiles.splits for tiles in plans] == [splits]
    error = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


def test_tiles_fill_the_gpu_and_stay_within_its_memory():
    for batch in (1, 8, 64, 256):
        for rows in (8, 32, 120, 320):
            tiles = attention.choose_tiles(batch, 2, rows, 256, 8192, 132, 227 * 1024, 2)
            programs = batch * 2 * -(-rows // tiles.block_m) * tiles.splits
            assert programs >= 132 or tiles.splits == attention.MAX_SPLITS
            assert tiles.splits == 1 or programs < 4 * 132
    assert attention.choose_tiles(1, 2, 8, 128, 200, 132, 99 * 1024, 2).splits == 1


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kv_heads", "groups", "dim", "page"), [(2, 4, 16, 4), (1, 3, 24, 8), (2, 8, 32, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prompts_are_those_of_plain_torch(monkeypatch, kv_heads, groups, dim, page, dtype, seed):
    """CASES 1, 14: chunks of random lengths behind random contexts, and one that is skipped."""
    torch.manual_seed(seed)
    tiles = prefill_attention.Tiles(*((32, 16), (16, 32), (64, 16))[seed], 4, 2)
    monkeypatch.setattr(prefill_attention, "choose_tiles", lambda *given: tiles)
    lengths = torch.randint(1, 40, (5,)).tolist()
    contexts = torch.randint(0, 50, (5,)).tolist()
    contexts[0] = 0
    case = make_prompts(lengths, contexts, kv_heads, groups, dim, dtype, "cpu", page, skipped=3)
    got = case.run(0.3)
    error = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), case.expected(0.3), rtol=error, atol=error)
    assert not got[sum(lengths[:3]) : sum(lengths[:4])].any()
    sink = case.cache.k[:, :, case.cache._sink :]
    assert sink.isfinite().any(), "rows of the skipped sequence go to the sink"


@pytest.mark.parametrize("context", [0, 3, 37])
@pytest.mark.parametrize("poison", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_row_of_a_prompt_that_is_not_finite_spoils_who_attends_it(context, poison, where):
    """CASE 9: in the diagonal and before it, for all heads of its key head and for no other."""
    case = make_prompts([45, 20], [context, 0], 2, 2, 16, torch.float32, "cpu", 4)
    new = getattr(case, where)
    new[7, 1, 4] = poison
    got = case.run(0.25)
    expected = case.expected(0.25)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got[7:45, 2:].isnan().all()
    assert got[:, :2].isfinite().all()
    assert got[:7].isfinite().all()
    assert got[45:].isfinite().all()


def test_a_row_of_a_context_that_is_not_finite_spoils_the_prompt_behind_it():
    case = make_prompts([9, 9], [70, 70], 1, 2, 16, torch.float32, "cpu", 4)
    case.cache.v[0, 0, case.rows(1)[5], 3] = float("inf")
    got = case.run(0.25)
    assert got[:9].isfinite().all()
    assert got[9:].isnan().all()


def test_prompts_by_the_plan_of_a_gpu(monkeypatch):
    """The tiles of an H200, at D = 256 and beyond one tile of rows and of tokens."""
    monkeypatch.setattr("trtllm_treewy.triton_ops.processors", lambda device: GPUS["H200"])
    case = make_prompts([70, 5, 1], [150, 0, 64], 1, 8, 256, torch.float16, "cpu")
    got = case.run(1 / 16)
    torch.testing.assert_close(got.double(), case.expected(1 / 16), rtol=1e-2, atol=1e-2)


def test_tiles_of_prompts_fill_the_gpu_and_stay_within_its_memory():
    choose = prefill_attention.choose_tiles
    wide = choose([512] * 16, 2, 8, 256, *GPUS["H200"], 2)
    assert wide == prefill_attention.Tiles(128, 64, 8, 2)
    assert choose([512], 2, 8, 256, *GPUS["H200"], 2).block_m == 64
    assert choose([2] * 300, 2, 8, 256, *GPUS["H200"], 2).block_m == 16
    for gpu in GPUS.values():
        for lengths in ([1], [3] * 64, [512] * 16, [8192]):
            for dim, bytes_each in ((64, 2), (128, 2), (256, 2), (256, 4)):
                for groups in (1, 3, 8, 16):
                    tiles = choose(lengths, 2, groups, dim, *gpu, bytes_each)
                    rows = tiles.block_m + 2 * tiles.stages * tiles.block_s
                    assert rows * dim * bytes_each < gpu[1]
                    assert tiles.block_m >= groups


def test_the_list_of_tiles_has_every_token_once_and_the_longest_walks_first():
    lengths, contexts, slots = [5, 0, 9, 4], [100, 7, 0, 50], [2, 3, 0, -1]
    listed = prefill_attention.list_tiles(lengths, contexts, slots, 4).tolist()
    tokens = sorted(first + i for first, count, _, _ in listed for i in range(count))
    assert tokens == list(range(18))
    walks = [position + count if slot >= 0 else 0 for _, count, position, slot in listed]
    assert walks == sorted(walks, reverse=True)
    assert [4, 1, 104, 2] in listed


def test_prompts_refuse_a_scale_that_is_not_above_zero():
    case = make_prompts([3], [0], 1, 1, 16, torch.float32, "cpu", 4)
    with pytest.raises(ValueError, match="scale must be above zero, got 0"):
        case.run(0)


# ------------------------------------------------------------------ the rest of the model


def test_norms_are_those_of_torch():
    from trtllm_treewy.model.norm import RMSNorm, RMSNormGated

    for shape in ((3, 24), (2, 5, 4, 16), (7,), (0, 16)):
        plain, gated = RMSNorm(shape[-1], 1e-6), RMSNormGated(shape[-1], 1e-6)
        torch.nn.init.normal_(plain.weight)
        torch.nn.init.normal_(gated.weight)
        x, gate = torch.randn(shape), torch.randn(shape)
        wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
        for given in (x, wide, x.half()):
            torch.testing.assert_close(
                plain(given), plain.double()(given.double()).to(given.dtype), rtol=1e-3, atol=1e-5
            )
            plain.float()
        want = gated.double()(x.double(), gate.double()).float()
        torch.testing.assert_close(gated.float()(x, gate), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("experts", "top"), [(8, 2), (6, 3), (16, 8)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_are_those_of_torch(tokens, experts, top):
    from trtllm_treewy.model.mlp import Experts, Router
    from trtllm_treewy.triton_ops import moe

    block, router = Experts(experts, 24, 20), Router(24, experts, top)
    for parameter in (*block.parameters(), *router.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.randn(tokens, 24)
    weights, ids = router(x)
    probs = torch.softmax(x @ router.weight.T, -1).topk(top)
    assert torch.equal(ids.long(), probs.indices)
    want_weights = probs.values / probs.values.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, want_weights)
    want = block.double()(x.double(), weights.double(), ids.long()).float()
    block.float()
    for wide_down in (False, True):
        tiles = moe.Tiles(16, 16, 16, 4, 2, wide_down)
        got = moe.run_experts(x, weights, ids, block.gate_up_proj, block.down_proj, tiles).sum(1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_tiles_of_experts_grow_with_their_rows_and_stay_within_memory():
    from trtllm_treewy.triton_ops import moe

    # 8,192 prompt tokens, and 64 decoded ones, of Qwen3.5-35B-A3B on an H200.
    prompts = moe.choose_tiles(8192 * 8, 256, False, GPUS["H200"][1])
    assert prompts == moe.Tiles(128, 128, 64, 8, 4, wide_down=True)
    assert moe.choose_tiles(64 * 8, 256, False, GPUS["H200"][1]).block_m == 16
    for _, shared in GPUS.values():
        heights = []
        for rows in (8, 2048, 8192, 16384, 65536, 1 << 20):
            tiles = moe.choose_tiles(rows, 256, False, shared)
            step = (tiles.block_m + 2 * tiles.block_n) * tiles.block_k * 2
            assert tiles.stages * step <= shared
            assert not tiles.wide_down or tiles.block_m == 128
            heights.append(tiles.block_m)
        assert heights == sorted(heights)
        wide = moe.choose_tiles(1 << 20, 256, True, shared)
        assert wide.stages * (wide.block_m + 2 * wide.block_n) * wide.block_k * 4 <= shared


@pytest.mark.parametrize("tally_from", [0, 1000])
def test_one_expert_for_all_and_experts_that_nobody_wants(monkeypatch, tally_from):
    from trtllm_treewy.model.mlp import Experts
    from trtllm_treewy.triton_ops import moe

    monkeypatch.setattr(moe, "TALLY_FROM", tally_from)
    block = Experts(4, 16, 16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x, ids = torch.randn(37, 16), torch.full((37, 1), 2, dtype=torch.int32)
    weights = torch.rand(37, 1)
    want = block.double()(x.double(), weights.double(), ids.long()).float()
    block.float()
    tiles = moe.Tiles(16, 16, 16, 4, 2)
    got = moe.run_experts(x, weights, ids, block.gate_up_proj, block.down_proj, tiles).sum(1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts", [6, 8])  # with and without padding
def test_a_row_with_nan_keeps_weights_of_nan_and_experts_of_its_own(experts):
    from trtllm_treewy.triton_ops import moe

    logits = torch.randn(4, experts)
    logits[1, 2], logits[2], logits[3, 1] = NAN, NAN, float("-inf")
    weights, ids = moe.route(logits, 3, torch.float32)
    assert weights[[1, 2]].isnan().all()
    assert ids[[1, 2]].tolist() == [[0, 1, 2]] * 2
    want = torch.softmax(logits[[0, 3]], -1).topk(3)
    assert torch.equal(ids[[0, 3]].long(), want.indices)
    torch.testing.assert_close(weights[[0, 3]], want.values / want.values.sum(-1, keepdim=True))


def test_a_token_with_nan_reaches_no_other():
    """Through experts' tiles, norms and mixed outputs, with NaN behind every row too."""
    from trtllm_treewy.model.mlp import Experts
    from trtllm_treewy.model.norm import RMSNorm
    from trtllm_treewy.triton_ops import elementwise, moe

    block, norm = Experts(6, 24, 20), RMSNorm(24, 1e-6)
    for parameter in (*block.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.full((40, 32), NAN)[:, :24]
    x[:] = torch.randn(40, 24)
    x[3] = NAN
    others = torch.arange(40) != 3
    weights, ids = moe.route(torch.randn(40, 6), 2, torch.float32)
    tiles = moe.Tiles(16, 16, 16, 4, 2)
    y = moe.run_experts(x, weights, ids, block.gate_up_proj, block.down_proj, tiles)
    mixed = elementwise.mix(y, x.contiguous(), torch.randn(40, 1))
    silu = elementwise.silu_mul(x, x)
    for got in (y.flatten(1), mixed, silu, norm(x)):
        assert got[others].isfinite().all()
        assert got[3].isnan().all()


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_blocks_are_those_of_torch(monkeypatch, tokens):
    from trtllm_treewy import triton_ops
    from trtllm_treewy.model.mlp import MLP, SparseMoE

    config = tiny_config(moe=True, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    x = torch.randn(tokens, config.hidden_size)
    for block in (SparseMoE(config), MLP(config.hidden_size, 40)):
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter)
        got = block(x)
        with monkeypatch.context() as patch:
            patch.setattr(triton_ops, "serves", lambda x: False)
            torch.testing.assert_close(got, block(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("vocab", "count"), [(61, 1), (61, 5), (9000, 3), (5, 5)])
def test_best_tokens_are_those_of_topk(vocab, count):
    from trtllm_treewy.triton_ops import topk

    logits = torch.randn(4, vocab)
    logits[1, 3] = float("-inf")
    ids, scores = topk.best_tokens(logits, count)
    want = torch.log_softmax(logits, -1).topk(count)
    assert torch.equal(ids, want.indices)
    torch.testing.assert_close(scores, want.values, rtol=1e-5, atol=1e-5)
    logits[2, 1] = NAN
    ids, scores = topk.best_tokens(logits, count)
    assert ((ids >= 0) & (ids < vocab)).all()
    assert scores[2].isnan().any()
    assert scores[[0, 1, 3]].isfinite().any()


def test_a_model_and_its_captured_steps_give_the_tokens_of_torch(monkeypatch):
    """The whole of a step by the kernels: attention, experts, norms, drafts."""
    from engine_world import make_request, run, tiny_model
    from test_cuda_graphs import TOPOLOGIES, agreeable, graph_engine, random_jobs

    from trtllm_treewy import triton_ops
    from trtllm_treewy.runtime.cuda_graphs import GraphSizes

    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    config = tiny_config(moe=True, shared_expert_intermediate_size=8, **sizes)
    model, jobs = agreeable(tiny_model(3, config)), random_jobs(2, 3)
    serves = triton_ops.serves
    texts = []
    for rule in (lambda x: False, serves):
        monkeypatch.setattr(triton_ops, "serves", rule)
        engine = graph_engine(model, TOPOLOGIES["tree"], sizes=GraphSizes((4,), (7,)))
        requests = [make_request(i, prompt[:6], 5) for i, (prompt, _) in enumerate(jobs)]
        run(engine, requests)
        assert engine.stats.graph_steps
        assert engine.stats.accepted_tokens
        texts.append([list(r.output_token_ids) for r in requests])
    assert texts[0] == texts[1]
