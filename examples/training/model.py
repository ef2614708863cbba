"""The `treewy-tiny` model as training needs it: a trunk and its multi-token predictor.

The trunk's parameters live in transformers' `Qwen3_5ForCausalLM`, and transformers' own forward
pass defines the model. `trunk_hidden` computes the same function faster: its gated delta rule
works on whole chunks with batched matrix products, and its pointwise parts are plain functions
that `torch.compile` can fuse. `train.py check` compares the two.

The multi-token predictor (MTP) follows the layout of Qwen3.5 checkpoints: at position `t` it
takes the embedding of token `t + 1` and the trunk's final hidden state at `t`, and predicts
token `t + 2`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    torch_chunk_gated_delta_rule,
)

CHUNK = 64
DEPTHS = 3


def make_config(**overrides: object) -> Qwen3_5TextConfig:
    """The configuration of `treewy-tiny`; `overrides` serve dry runs."""
    settings: dict = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return Qwen3_5TextConfig(**(settings | overrides))


# --------------------------------------------------------------------------- pointwise parts


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm with the zero-centred weight of Qwen3.5."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the leading channels; positions on the next-to-last axis."""
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos + swapped * sin, kept), dim=-1)


def norm_and_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Per-head norm and rotary embedding of `[B, T, H, D]`, returned as `[B, H, T, D]`."""
    y = rms_norm(x, weight, eps).transpose(1, 2)
    return rotate(y.float(), cos, sin).to(x.dtype)


# --------------------------------------------------------------------------- gated delta rule


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of `I + A` for a strictly lower triangular `A` of power-of-two size.

    Diagonal blocks of size 1, 2, 4, ... are inverted in turn: a block row `[[X, 0], [C, Y]]`
    of inverted halves becomes whole by putting `-Y C X` at `C`. As stable as substitution,
    but made of matrix products only.
    """

    @staticmethod
    def forward(ctx: object, a: Tensor) -> Tensor:
        size = a.shape[-1]
        index = torch.arange(size, device=a.device)
        inverse = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
        half = 1
        while half < size:
            row, col = index[:, None] // half, index[None, :] // half
            corner = (row // 2 == col // 2) & (row > col)
            inverse = inverse - inverse @ (a * corner) @ inverse
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def decay_products(beta: Tensor, decay: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """`(A, E)`: pairwise decays `E` of a chunk (lower triangle) and `A` of its system."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
    gap = decay[..., :, None] - decay[..., None, :]
    pairwise = gap.masked_fill(~lower, float("-inf")).exp()
    system = (products * pairwise * beta[..., None]).tril(-1)
    return system, pairwise


def chunk_scan(
    query: Tensor, key: Tensor, new: Tensor, read: Tensor, attn: Tensor, decay: Tensor
) -> Tensor:
    """Carry the state over the chunks (axis -3) and return each chunk's output."""
    last = decay[..., -1:, None]
    query = query * decay[..., None].exp()
    key = key * (last - decay[..., None]).exp()
    state = new.new_zeros(*new.shape[:-3], key.shape[-1], new.shape[-1])
    outputs = []
    for i in range(new.shape[-3]):
        value = new[..., i, :, :] - read[..., i, :, :] @ state
        outputs.append(query[..., i, :, :] @ state + attn[..., i, :, :] @ value)
        state = state * last[..., i, :, :].exp() + key[..., i, :, :].mT @ value
    return torch.stack(outputs, dim=-3)


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over `[B, T, heads, dim]` inputs, `g` the log decay; float32.

    Queries and keys are normalised here. Each key head serves the same number of value heads.
    """
    batch, length, key_heads, _ = k.shape
    groups = v.shape[2] // key_heads
    pad = -length % CHUNK

    def chunked(x: Tensor, per_key_head: bool) -> Tensor:
        """`[B, T, heads, ...]` as `[B, key heads, group, chunks, CHUNK, ...]`."""
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, pad))
        split = (key_heads, 1 if per_key_head else groups)
        x = x.reshape(batch, -1, CHUNK, *split, *x.shape[3:])
        return x.movedim((3, 4), (1, 2))

    q, k = (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q.float(), k.float())
    )
    q, k = chunked(q * q.shape[-1] ** -0.5, True), chunked(k, True)
    v, g, beta = chunked(v, False), chunked(g, False), chunked(beta, False)
    decay = g.cumsum(-1)
    system, pairwise = decay_products(beta, decay, k @ k.mT)
    inverse = UnitLowerInverse.apply(system)
    new = inverse @ (v * beta[..., None])
    read = inverse @ (k * (beta * decay.exp())[..., None])
    out = chunk_scan(q, k, new, read, (q @ k.mT) * pairwise, decay)
    out = out.movedim((1, 2), (3, 4)).reshape(batch, length + pad, -1, v.shape[-1])
    return out[:, :length]


# --------------------------------------------------------------------------- layers


def gdn_inputs(
    qkv: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal convolution with SiLU, the log decay and the write strength."""
    length, taps = qkv.shape[1], conv.shape[-1]
    padded = F.pad(qkv.float(), (0, 0, taps - 1, 0))
    mixed = sum(padded[:, i : i + length] * conv[:, 0, i].float() for i in range(taps))
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return F.silu(mixed), g, b.float().sigmoid()


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (y * F.silu(z.float())).to(z.dtype)


class Ops:
    """The fusable functions, compiled or not."""

    def __init__(self, compiled: bool) -> None:
        wrap: Callable = torch.compile if compiled else lambda f: f
        self.rms_norm = wrap(rms_norm)
        self.swiglu = wrap(swiglu)
        self.norm_and_rotate = wrap(norm_and_rotate)
        self.gdn_inputs = wrap(gdn_inputs)
        self.gated_norm = wrap(gated_norm)
        self.delta_rule = wrap(chunk_gated_delta_rule)


def gdn_mixer(ops: Ops, mixer: nn.Module, x: Tensor) -> Tensor:
    """The Gated DeltaNet token mixer."""
    batch, length, _ = x.shape
    qkv, g, beta = ops.gdn_inputs(
        mixer.in_proj_qkv(x),
        mixer.in_proj_a(x),
        mixer.in_proj_b(x),
        mixer.conv1d.weight,
        mixer.A_log,
        mixer.dt_bias,
    )
    q, k, v = qkv.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1)
    q, k = (y.reshape(batch, length, -1, mixer.head_k_dim) for y in (q, k))
    v = v.reshape(batch, length, -1, mixer.head_v_dim)
    with torch.autocast(x.device.type, enabled=False):
        out = ops.delta_rule(q, k, v, g, beta)
    z = mixer.in_proj_z(x).reshape(batch, length, -1, mixer.head_v_dim)
    out = ops.gated_norm(out, z, mixer.norm.weight, mixer.layer_norm_epsilon)
    return mixer.out_proj(out.reshape(batch, length, -1))


def attention_inputs(
    ops: Ops, attn: nn.Module, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value as `[B, heads, T, D]` (grouped heads repeated) and the output gate."""
    shape = (*x.shape[:-1], -1, attn.head_dim)
    q, gate = attn.q_proj(x).view(*x.shape[:-1], -1, 2 * attn.head_dim).chunk(2, dim=-1)
    q = ops.norm_and_rotate(q, attn.q_norm.weight, attn.q_norm.eps, cos, sin)
    k = attn.k_proj(x).view(shape)
    k = ops.norm_and_rotate(k, attn.k_norm.weight, attn.k_norm.eps, cos, sin)
    v = attn.v_proj(x).view(shape).transpose(1, 2)
    k, v = (y.repeat_interleave(attn.num_key_value_groups, dim=1) for y in (k, v))
    return q, k, v, gate.reshape(*x.shape[:-1], -1)


def attention_output(attn: nn.Module, out: Tensor, gate: Tensor) -> Tensor:
    out = out.transpose(1, 2).reshape(gate.shape)
    return attn.o_proj(out * gate.sigmoid())


def mlp_block(ops: Ops, layer: nn.Module, x: Tensor) -> Tensor:
    """The second half of a decoder layer, residual included."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    y = ops.rms_norm(x, norm.weight, norm.eps)
    return x + mlp.down_proj(ops.swiglu(mlp.gate_proj(y), mlp.up_proj(y)))


def rope_table(model: Qwen3_5ForCausalLM, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `0 .. length - 1` as `[length, rotary width]`, float32."""
    weight = model.model.embed_tokens.weight
    positions = torch.arange(length, device=weight.device).view(1, 1, -1)
    reference = torch.zeros(1, device=weight.device)
    cos, sin = model.model.rotary_emb(reference, positions.expand(3, 1, -1))
    return cos[0], sin[0]


def embed(model: Qwen3_5ForCausalLM, ids: Tensor) -> Tensor:
    """Token embeddings, by `index_select`: its gradient needs no host synchronisation."""
    weight = model.model.embed_tokens.weight
    return weight.index_select(0, ids.flatten()).view(*ids.shape, -1)


def trunk_hidden(ops: Ops, model: Qwen3_5ForCausalLM, ids: Tensor) -> Tensor:
    """The trunk's hidden states after its final norm, `[B, T, H]`."""
    cos, sin = rope_table(model, ids.shape[1])
    x = embed(model, ids)
    for kind, layer in zip(model.config.layer_types, model.model.layers, strict=True):
        y = ops.rms_norm(x, layer.input_layernorm.weight, layer.input_layernorm.eps)
        if kind == "linear_attention":
            x = x + gdn_mixer(ops, layer.linear_attn, y)
        else:
            q, k, v, gate = attention_inputs(ops, layer.self_attn, y, cos, sin)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attention_output(layer.self_attn, out, gate)
        x = mlp_block(ops, layer, x)
    return ops.rms_norm(x, model.model.norm.weight, model.model.norm.eps)


# --------------------------------------------------------------------------- multi-token predictor


class MultiTokenPredictor(nn.Module):
    """Parameters of the MTP block under their checkpoint names (prefix `mtp.`)."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        index = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, index)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)


def path_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of draft entries of one depth, indexed by the position `t` of their base.

    `keys[0]` and `values[0]` belong to the depth-1 entries, whose hidden states are the
    trunk's own: query `t` sees those of positions up to `t`. The further ones belong to the
    deeper entries of the query's own draft path: query `t` sees entry `t` alone of each.
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    scale, length = q.shape[-1] ** -0.5, q.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys[0].mT * scale).masked_fill(future, float("-inf"))
    own = torch.stack([(q * key).sum(-1) * scale for key in keys[1:]], dim=-1)
    weights = torch.cat((scores, own), dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., length + i, None] * value
    return out


def mtp_outputs(
    ops: Ops,
    model: Qwen3_5ForCausalLM,
    mtp: MultiTokenPredictor,
    ids: Tensor,
    hidden: Tensor,
    depths: int = DEPTHS,
) -> list[Tensor]:
    """Outputs of the predictor at every base position and depth along the given tokens.

    Element `d - 1` is `[B, T - depths, H]`: row `t` is the entry of depth `d` whose draft
    starts at base `t`. It has rotary position `t + d - 1`, took tokens up to `t + d` and
    predicts token `t + d + 1`. Depth 1 takes the trunk's hidden state at `t`, depth `d`
    the output of depth `d - 1`.
    """
    layer = mtp.layers[0]
    attn = layer.self_attn
    cos, sin = rope_table(model, ids.shape[1])
    embedded = embed(model, ids)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    rows = ids.shape[1] - depths
    state = hidden[:, :rows]
    for depth in range(1, depths + 1):
        place = slice(depth - 1, depth - 1 + rows)
        e = embedded[:, depth : depth + rows]
        e = ops.rms_norm(e, mtp.pre_fc_norm_embedding.weight, mtp.pre_fc_norm_embedding.eps)
        h = ops.rms_norm(state, mtp.pre_fc_norm_hidden.weight, mtp.pre_fc_norm_hidden.eps)
        x = mtp.fc(torch.cat((e, h), dim=-1))
        y = ops.rms_norm(x, layer.input_layernorm.weight, layer.input_layernorm.eps)
        q, k, v, gate = attention_inputs(ops, attn, y, cos[place], sin[place])
        keys.append(k)
        values.append(v)
        x = x + attention_output(attn, path_attention(q, keys, values), gate)
        x = mlp_block(ops, layer, x)
        state = ops.rms_norm(x, mtp.norm.weight, mtp.norm.eps)
        outputs.append(state)
    return outputs


# --------------------------------------------------------------------------- self-check


@torch.no_grad()
def check_trunk(model: Qwen3_5ForCausalLM, ids: Tensor) -> float:
    """Largest difference between `trunk_hidden` and transformers' forward pass (float32)."""
    ours = trunk_hidden(Ops(compiled=False), model, ids)
    theirs = model.model(input_ids=ids).last_hidden_state
    return (ours - theirs).abs().max().item()


def check_delta_rule() -> float:
    """Largest difference between `chunk_gated_delta_rule` and transformers' (float32)."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 200, 2, 128, generator=generator)
    v = torch.randn(2, 200, 4, 128, generator=generator)
    g, beta = torch.rand(2, 2, 200, 4, generator=generator)
    q2, k2 = (x.repeat_interleave(2, dim=2) for x in (q, k))
    theirs, _ = torch_chunk_gated_delta_rule(
        q2, k2, v, g=-0.3 * g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    return (chunk_gated_delta_rule(q, k, v, -0.3 * g, beta) - theirs).abs().max().item()


def draft_by_recursion(
    model: Qwen3_5ForCausalLM, mtp: MultiTokenPredictor, ids: Tensor, hidden: Tensor, base: int
) -> list[Tensor]:
    """Outputs of one draft from `base`, entry after entry, with transformers' decoder layer."""
    states, outputs = hidden[:, : base + 1], []
    for _ in range(DEPTHS):
        length = states.shape[1]
        e = mtp.pre_fc_norm_embedding(model.model.embed_tokens(ids[:, 1 : length + 1]))
        x = mtp.fc(torch.cat((e, mtp.pre_fc_norm_hidden(states)), dim=-1))
        rope = tuple(y[None] for y in rope_table(model, length))
        x = mtp.layers[0](x, position_embeddings=rope, attention_mask=None)
        outputs.append(mtp.norm(x[:, -1:]))
        states = torch.cat((states, outputs[-1]), dim=1)
    return outputs


@torch.no_grad()
def check_mtp(model: Qwen3_5ForCausalLM, mtp: MultiTokenPredictor, ids: Tensor) -> float:
    """Largest difference between `mtp_outputs` and entry-by-entry drafting (float32)."""
    ops = Ops(compiled=False)
    hidden = trunk_hidden(ops, model, ids)
    parallel = mtp_outputs(ops, model, mtp, ids, hidden)
    worst = 0.0
    for base in (0, ids.shape[1] // 2, ids.shape[1] - DEPTHS - 1):
        drafted = draft_by_recursion(model, mtp, ids, hidden, base)
        for ours, theirs in zip(parallel, drafted, strict=True):
            worst = max(worst, (ours[:, base : base + 1] - theirs).abs().max().item())
    return worst
