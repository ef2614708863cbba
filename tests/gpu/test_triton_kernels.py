"""The Triton kernels on a GPU against plain torch, in the types and sizes that models have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from paged_attention_cases import make_case, unwritten_is_nan
from paged_prompt_cases import make_prompts

from trtllm_treewy import triton_ops
from trtllm_treewy.model.mlp import MLP, Experts
from trtllm_treewy.model.norm import RMSNorm, RMSNormGated
from trtllm_treewy.model.rotary import apply_rotary, rotary_frequencies, rotary_tables
from trtllm_treewy.runtime.attention_steps import PagedAttention
from trtllm_treewy.runtime.kv_cache import KvCache

pytestmark = pytest.mark.gpu

TYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
    torch.float16: dict(rtol=4e-3, atol=4e-3),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "short"),
    [(1, 1, False), (1, 4, False), (3, 15, False), (8, 40, False), (8, 40, True), (2, 128, False)],
)
@pytest.mark.parametrize(("kv_heads", "groups", "dim"), [(2, 8, 256), (4, 3, 128), (1, 4, 64)])
def test_tree_attention(batch, nodes, short, kv_heads, groups, dim, dtype):
    assert triton_ops.installed(), "Triton comes with torch's CUDA build"
    case = make_case(batch, nodes, kv_heads, groups, dim, dtype, "cuda", 2200, short)
    want = case.expected(dim**-0.5)[case.real]
    got = case.run(dim**-0.5)[case.real]
    torch.testing.assert_close(got.double(), want, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "contexts"),
    [
        ([1], [0]),
        ([2, 3, 1], [900, 0, 64]),
        ([512] * 6, [0] * 6),
        ([700, 1, 64, 333], [0, 4000, 63, 1000]),
        ([2500], [31]),
    ],
)
@pytest.mark.parametrize(("kv_heads", "groups", "dim"), [(2, 8, 256), (4, 3, 128), (1, 1, 64)])
def test_prompts(lengths, contexts, kv_heads, groups, dim, dtype):
    skipped = 1 if len(lengths) > 2 else None
    case = make_prompts(lengths, contexts, kv_heads, groups, dim, dtype, "cuda", skipped=skipped)
    got = case.run(dim**-0.5)
    torch.testing.assert_close(got.double(), case.expected(dim**-0.5), **CLOSE[dtype])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_row_of_a_prompt_that_is_not_finite_spoils_who_attends_it(where, poison):
    case = make_prompts([600, 300], [70, 0], 2, 8, 256, torch.bfloat16, "cuda")
    getattr(case, where)[210, 1, 77] = poison
    got = case.run(1 / 16)
    torch.testing.assert_close(
        got.double(), case.expected(1 / 16), equal_nan=True, **CLOSE[torch.bfloat16]
    )
    assert got[210:600, 8:].isnan().all()


def test_a_prompt_step_does_not_wait_for_the_device():
    case = make_prompts([600, 300], [70, 0], 2, 8, 256, torch.bfloat16, "cuda")
    want = case.run(1 / 16)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = case.run(1 / 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


def test_a_context_beyond_32_bit_offsets():
    """Pools of more than 2^31 elements."""
    rows = (1 << 31) // (4 * 256) // 32 + 64
    cache = KvCache(1, rows, 32, 4, 256, torch.bfloat16, "cuda", 2, 4096)
    cache._free = list(range(rows))  # the last blocks come first
    assert cache.try_reserve(0, 700)
    table = cache.block_table
    assert int(table[0, 0]) == rows - 1
    k, v = (torch.randn(1, 600, 4, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(1, 600, 8, 256, device="cuda", dtype=torch.bfloat16)
    slot = torch.zeros(1, dtype=torch.int32, device="cuda")
    own = torch.ones(1, 600, 600, dtype=torch.bool, device="cuda").tril()
    step = PagedAttention(cache, slot, slot, own, torch.arange(600, device="cuda")[None])
    got = step.attend(0, q, k, v, 1 / 16)
    want = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.repeat_interleave(2, 2).transpose(1, 2),
        v.repeat_interleave(2, 2).transpose(1, 2), is_causal=True, scale=1 / 16,
    ).transpose(1, 2)  # fmt: skip
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 60, 700, 2300])
def test_experts(tokens, dtype):
    num_experts, hidden, inner, top = 64, 512, 192, 8
    block = Experts(num_experts, hidden, inner).to("cuda", dtype).requires_grad_(False)
    block.gate_up_proj.normal_(0, hidden**-0.5)
    block.down_proj.normal_(0, inner**-0.5)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    logits = torch.randn(tokens, num_experts, device="cuda", dtype=dtype)
    from trtllm_treewy.triton_ops.moe import route

    weights, experts = route(logits, top, dtype)
    probs = logits.float().softmax(-1)
    best = probs.topk(top, -1).values
    torch.testing.assert_close(
        weights.float(), best / best.sum(-1, keepdim=True), rtol=1e-2, atol=1e-3
    )
    with unwritten_is_nan():
        got = block(x, weights, experts)
    want = Experts.forward(block.double(), x.double(), weights.double(), experts.long())
    torch.testing.assert_close(got.double(), want, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 13, 16])
def test_few_experts(tokens, dtype):
    """The shared expert among the others, and one expert that all tokens have."""
    from trtllm_treewy.triton_ops.moe_few import run_few_experts

    num_experts, hidden, inner, top = 64, 2048, 512, 8
    block, shared = Experts(num_experts, hidden, inner), MLP(hidden, inner)
    for parameter in (*block.parameters(), *shared.parameters()):
        parameter.requires_grad_(False).normal_(0, parameter.shape[-1] ** -0.5)
    block, shared = block.to("cuda", dtype), shared.to("cuda", dtype)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    ids = torch.stack([torch.randperm(num_experts - 1)[:top] for _ in range(tokens)]).cuda() + 1
    ids[:, 3] = 0
    weights = torch.rand(tokens, top, device="cuda")
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)  # as `route` gives them
    gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
    with unwritten_is_nan():
        got = run_few_experts(
            x, weights, ids.int(), block.gate_up_proj, block.down_proj, gate_up,
            shared.down_proj.weight,
        )  # fmt: skip
    wide = x.double()
    want = Experts.forward(block.double(), wide, weights.double(), ids)
    torch.testing.assert_close(got[:, :-1].double().sum(1), want, **CLOSE[dtype])
    torch.testing.assert_close(got[:, -1].double(), shared.double()(wide), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_heads_are_placed(dtype):
    """Far positions too, where the angle of a rotation is taken from a large float32."""
    from trtllm_treewy.triton_ops.heads import place_heads

    heads, kv_heads, dim, rotary = 16, 2, 256, 64
    sizes = [heads * 2 * dim, kv_heads * dim, kv_heads * dim]
    packed = torch.randn(5, sum(sizes), device="cuda", dtype=dtype)
    positions = torch.tensor([0, 1, 4097, 150000, 262143], device="cuda")
    weights = [torch.randn(dim, device="cuda", dtype=dtype) for _ in range(2)]
    pools = torch.zeros(2, kv_heads, 9, dim, device="cuda", dtype=dtype)
    target = torch.tensor([3, 1, 5, 7, 0], device="cuda")
    frequencies = rotary_frequencies(rotary, 1e7, packed.device)
    with unwritten_is_nan():
        q = place_heads(
            packed, (weights[0], 1e-6), (weights[1], 1e-6), frequencies, positions, target,
            *pools, heads,
        )  # fmt: skip
    norms = [RMSNorm(dim, 1e-6).to("cuda", dtype).requires_grad_(False) for _ in range(2)]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.copy_(weight)
    parts = packed.split(sizes, -1)
    tables = rotary_tables(positions, rotary, 1e7, dtype)
    want = apply_rotary(norms[0](parts[0].unflatten(-1, (heads, 2, dim))[:, :, 0]), *tables)
    keys = apply_rotary(norms[1](parts[1].unflatten(-1, (kv_heads, dim))), *tables)
    torch.testing.assert_close(q, want, **CLOSE[dtype])
    torch.testing.assert_close(pools[0][:, target], keys.transpose(0, 1), **CLOSE[dtype])
    values = parts[2].unflatten(-1, (kv_heads, dim)).transpose(0, 1)
    assert torch.equal(pools[1][:, target], values)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms(dtype):
    for shape in ((5, 2048), (2, 7, 16, 256), (3, 32, 128), (4, 5120)):
        x, gate = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        for module, inputs in (
            (RMSNorm(shape[-1], 1e-6), (x,)),
            (RMSNormGated(shape[-1], 1e-6), (x, gate)),
        ):
            module = module.to("cuda", dtype).requires_grad_(False)
            module.weight.normal_()
            with unwritten_is_nan():
                got = module(*inputs)
            want = module.double()(*(y.double() for y in inputs))
            torch.testing.assert_close(got.double(), want, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_best_tokens(count, dtype):
    from trtllm_treewy.triton_ops.topk import best_tokens

    logits = torch.randn(300, 248320, device="cuda", dtype=dtype)
    with unwritten_is_nan():
        ids, scores = best_tokens(logits, count)
    # By the logits: their log-softmax rounds some that differ to the same number.
    best = logits.topk(count)
    assert torch.equal(logits.gather(1, ids), best.values)
    want = best.values.double() - logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(scores.double(), want, rtol=1e-4, atol=1e-4)
    assert all(len(set(row)) == count for row in ids.tolist())
