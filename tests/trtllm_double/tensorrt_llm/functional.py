"""Double of the functional API: each call records a node, with its shape and a torch function.

Shapes: -1 is dynamic. A shape tensor keeps what is known of its values in `known`.
"""

from __future__ import annotations

import math

import numpy as np
import tensorrt as trt
import torch

from ._common import default_net, default_trtnet
from ._utils import str_dtype_to_trt
from .network import ITensor, torch_dtype


class Tensor:
    def __init__(self, name=None, dtype=None, shape=None, dim_range=None, is_network_input=True):
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)
        self.trt_tensor = ITensor(dtype, shape, name)
        self.known = None
        if is_network_input:
            assert dim_range is not None, f"{name}: an input has ranges"
            assert len(dim_range) == len(shape), (name, dim_range, shape)
            self.dim_range = dim_range
            default_net().add_input(self)

    def ndim(self):
        return len(self.shape)

    def mark_output(self, name, dtype=None):
        tensor = self if dtype in (None, self.dtype) else cast(self, dtype)
        outputs = default_net().outputs
        assert name not in outputs, f"two outputs named {name}"
        outputs[name] = tensor

    def __add__(self, other):
        return _arithmetic("add", self, other, lambda a, b: a + b)

    def __sub__(self, other):
        return _arithmetic("sub", self, other, lambda a, b: a - b)

    def __mul__(self, other):
        return _arithmetic("mul", self, other, lambda a, b: a * b)


def _create_tensor(trt_tensor, producer):
    tensor = Tensor(None, trt_tensor.dtype, trt_tensor.shape, is_network_input=False)
    tensor.trt_tensor = trt_tensor
    producer.name = producer.name or f"layer_{id(producer)}"
    return tensor


def _add_plugin_info(layer, plugin_creator, plugin_name, pfc):
    assert layer.name is not None, "the info would stay under the name before this one"
    layer.info = plugin_creator, plugin_name, pfc


def record(op, inputs, shape, function, dtype=None, fields=None):
    layer = default_trtnet().add(
        op,
        [x.trt_tensor for x in inputs],
        [(dtype if dtype is not None else inputs[0].dtype, shape)],
        function,
        fields,
    )
    return _create_tensor(layer.get_output(0), layer)


def constant(array):
    value = torch.as_tensor(np.ascontiguousarray(array))
    dtype = {torch.int32: trt.int32, torch.int64: trt.int64, torch.float32: trt.float32}[
        value.dtype
    ]
    return constant_tensor(value, dtype)


def constant_tensor(value, dtype):
    tensor = record("constant", [], value.shape, lambda: value.to(torch_dtype(dtype)), dtype)
    tensor.known = value.tolist() if value.dim() == 1 and len(value) < 10 else None
    return tensor


def _broadcast(a, b):
    size = max(len(a), len(b))
    a, b = (1,) * (size - len(a)) + tuple(a), (1,) * (size - len(b)) + tuple(b)
    out = []
    for x, y in zip(a, b, strict=True):
        assert x == y or 1 in (x, y) or -1 in (x, y), (a, b)
        out.append(y if x == 1 else x if y in (1, -1) else y)
    return out


def _arithmetic(op, a, b, function):
    if not isinstance(b, Tensor):  # a number takes the tensor's type
        value = torch.tensor([b], dtype=torch_dtype(a.dtype))
        known = [b] if isinstance(b, int) else None
        b = constant_tensor(value, a.dtype)
        b.known = known
    assert a.dtype == b.dtype, f"{op}: strongly typed, got {a.dtype!r} and {b.dtype!r}"
    out = record(op, [a, b], _broadcast(a.shape, b.shape), function)
    if a.known is not None and b.known is not None and len(a.known) == len(b.known):
        pairs = zip(a.known, b.known, strict=True)
        out.known = [-1 if -1 in pair else function(*pair) for pair in pairs]
    return out


def shape(input, dim=None):
    if dim is None:
        out = record("shape", [input], [input.ndim()], lambda x: torch.tensor(x.shape), trt.int64)
        out.known = list(input.shape)
        return out
    out = record("shape", [input], [], lambda x: torch.tensor(x.shape[dim]), trt.int64)
    out.known = [input.shape[dim]]  # of rank 0, as the library's
    return out


def _values(given):
    """A shape argument: what is known, and the tensors that have the rest."""
    if isinstance(given, Tensor):
        return list(given.known), given
    return list(given), None


def concat(inputs, dim=0):
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    first = next(x for x in tensors if x is not None)
    for index, x in enumerate(inputs):
        if tensors[index] is None:
            tensors[index] = constant_tensor(torch.tensor([x]), first.dtype)
        elif x.ndim() == 0:
            tensors[index] = view(x, [1])
            tensors[index].known = x.known
    first = tensors[0]
    assert len({x.dtype for x in tensors}) == 1
    sizes = list(first.shape)
    dim = dim % len(sizes)
    along = [x.shape[dim] for x in tensors]
    sizes[dim] = -1 if -1 in along else sum(along)
    for axis in range(len(sizes)):
        if axis != dim and sizes[axis] == -1:
            sizes[axis] = max(x.shape[axis] for x in tensors)
    out = record("concat", tensors, sizes, lambda *x: torch.cat(x, dim))
    if all(x.known is not None for x in tensors) and dim == 0:
        out.known = [value for x in tensors for value in x.known]
    return out


def view(input, shape, zero_is_placeholder=True):
    known, tensor = _values(shape)
    inputs = [input] if tensor is None else [input, tensor]

    def run(x, sizes=None):
        target = known if sizes is None else sizes.tolist()
        if zero_is_placeholder:
            target = [x.shape[i] if size == 0 else size for i, size in enumerate(target)]
        return x.reshape(target)

    return record("view", inputs, known, run)


def slice(input, starts, sizes, strides=None):
    assert strides is None
    (_, start), (known, size) = _values(starts), _values(sizes)
    fixed = (None if start is not None else list(starts)), known
    inputs = [input, *(x for x in (start, size) if x is not None)]

    def run(x, *given):
        given = [value.tolist() for value in given]
        begin = fixed[0] if start is None else given.pop(0)
        count = fixed[1] if size is None else given.pop(0)
        for axis, (b, n) in enumerate(zip(begin, count, strict=True)):
            assert 0 <= b and b + n <= x.shape[axis] and n >= 0, (begin, count, x.shape)
            x = x.narrow(axis, b, n)
        return x.clone()

    return record("slice", inputs, known, run)


def split(tensor, split_size_or_sections, dim=0):
    sizes, start, outputs = list(split_size_or_sections), 0, []
    assert sum(sizes) == tensor.shape[dim], "split: the dimension is static"
    for size in sizes:
        sizes_out = list(tensor.shape)
        sizes_out[dim] = size
        outputs.append(
            record("split", [tensor], sizes_out, lambda x, b=start, n=size: x.narrow(dim, b, n))
        )
        start += size
    return outputs


def cast(input, dtype):
    dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
    if input.dtype == dtype:
        return input
    return record("cast", [input], input.shape, lambda x: x.to(torch_dtype(dtype)), dtype)


def sigmoid(input):
    return record("sigmoid", [input], input.shape, torch.sigmoid)


def silu(input):
    return record("silu", [input], input.shape, lambda x: x * torch.sigmoid(x))


def swiglu(input):
    sizes = [*input.shape[:-1], input.shape[-1] // 2]

    def run(x):
        up, gate = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return record("swiglu", [input], sizes, run)


def matmul(input, mat2, transa=False, transb=False):
    assert not transa and transb and input.dtype == mat2.dtype, "strongly typed"
    assert input.shape[-1] == mat2.shape[-1], (input.shape, mat2.shape)
    sizes = [*input.shape[:-1], mat2.shape[0]]
    return record("matmul", [input, mat2], sizes, lambda x, w: x @ w.T)


def rms_norm(input, normalized_shape, num_groups, weight, eps):
    assert num_groups == 1 and input.dtype == weight.dtype, "strongly typed"
    assert tuple(input.shape[-len(normalized_shape) :]) == tuple(normalized_shape)

    def run(x, w):
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * w

    return record("rms_norm", [input, weight], input.shape, run, fields={"eps": eps})


def embedding(input, weight):
    sizes = [*input.shape, weight.shape[1]]
    return record("embedding", [input, weight], sizes, lambda i, w: w[i.long()], weight.dtype)


def gather_last_token_logits(hidden_states, last_token_ids, remove_input_padding):
    assert remove_input_padding
    sizes = [last_token_ids.shape[0], hidden_states.shape[1]]
    return record(
        "gather_last_token_logits",
        [hidden_states, last_token_ids],
        sizes,
        lambda x, ids: x[ids.long() - 1],
    )


def allreduce(tensor, group, all_reduce_params=None):
    assert all_reduce_params is None
    return record("allreduce", [tensor], tensor.shape, lambda ranks: [sum(ranks)] * len(ranks))


def allgather(tensor, group, gather_dim=0):
    sizes = list(tensor.shape)
    sizes[gather_dim] *= len(group)
    return record(
        "allgather",
        [tensor],
        sizes,
        lambda ranks: [torch.cat(ranks, gather_dim)] * len(ranks),
    )


# The plugin reads a pool by its address; here the addresses of tensors that tests made.
POOLS = {}


def gpt_attention(
    *,
    qkv,
    past_key_value,
    sequence_length,
    host_past_key_value_lengths,
    host_max_attention_window_sizes,
    host_sink_token_length,
    context_lengths,
    cache_indirection,
    host_request_types,
    layer_idx,
    num_heads,
    num_kv_heads,
    hidden_size_per_head,
    q_scaling,
    rotary_embedding_dim,
    rotary_cos_sin,
    max_context_length,
    tp_size,
    tp_rank,
    kv_cache_block_offsets,
    host_kv_cache_block_offsets,
    host_kv_cache_pool_pointers,
    host_kv_cache_pool_mapping,
    host_context_lengths,
    host_runtime_perf_knobs,
    host_context_progress,
    spec_decoding_max_generation_length=1,
    spec_decoding_generation_lengths=None,
    spec_decoding_position_offsets=None,
    spec_decoding_packed_mask=None,
    spec_decoding_use=None,
):
    assert past_key_value is None, "paged"
    tree = [
        spec_decoding_generation_lengths,
        spec_decoding_position_offsets,
        spec_decoding_packed_mask,
        spec_decoding_use,
    ]
    inputs = [
        qkv,
        sequence_length,
        host_request_types,
        context_lengths,
        host_past_key_value_lengths,
        kv_cache_block_offsets,
        host_kv_cache_pool_pointers,
        host_kv_cache_pool_mapping,
        rotary_cos_sin,
        *(x for x in tree if x is not None),
    ]
    unread = [
        host_max_attention_window_sizes,
        host_sink_token_length,
        cache_indirection,
        host_kv_cache_block_offsets,
        host_context_lengths,
        host_runtime_perf_knobs,
        host_context_progress,
    ]
    assert all(x is not None for x in [*inputs, *unread])
    sizes = num_heads, num_kv_heads, hidden_size_per_head

    def run(*values):
        return _attend(values, layer_idx, sizes, q_scaling, rotary_embedding_dim)

    fields = {
        "layer_idx": layer_idx,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": hidden_size_per_head,
        "q_scaling": q_scaling,
        "rotary_embedding_dim": rotary_embedding_dim,
        "max_context_length": max_context_length,
        "spec_decoding_max_generation_length": spec_decoding_max_generation_length,
        "has_tree_mask": tree[2] is not None,
    }
    out = [-1, num_heads * hidden_size_per_head]
    return record("GPTAttention", inputs, out, run, fields=fields), None


def _attend(values, layer, sizes, q_scaling, rotary_dim):
    qkv, seq_len, types, context_len, past_len, offsets, pointers, mapping, table = values[:9]
    tree = values[9:]
    heads, kv_heads, dim = sizes
    pool = POOLS[int(pointers[0, 0])]
    assert mapping[layer].tolist() == [0, layer]
    table = table.reshape(-1, rotary_dim // 2, 2)
    out = torch.zeros(qkv.shape[0], heads * dim, dtype=qkv.dtype)
    row, tree_row, seen_tree = 0, 0, False
    for request, kind in enumerate(types.tolist()):
        total = int(seq_len[request])
        if kind == 0:
            assert not seen_tree, "prompts come first"
            count = int(context_len[request])
            depth, sees = torch.arange(count), torch.ones(count, count).tril().bool()
            assert int(past_len[request]) == total
        elif tree:
            lengths, position_offsets, mask, use = tree
            assert int(use[0]) == 1
            seen_tree, count = True, int(lengths[tree_row])
            assert position_offsets.shape[1] == count and count == int(lengths[0])
            depth = position_offsets[tree_row].long()
            words = mask[tree_row * count : (tree_row + 1) * count].long() & 0xFFFFFFFF
            bits = torch.arange(count)
            sees = (words[:, bits // 32] >> (bits % 32)) & 1 == 1
            tree_row += 1
            assert int(past_len[request]) == total - count
        else:
            seen_tree, count = True, 1
            depth, sees = torch.zeros(1).long(), torch.ones(1, 1).bool()
            assert int(past_len[request]) == total - 1
        past = total - count
        q, k, v = qkv[row : row + count].split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        turn = table[past + depth]
        q = _rotate(q.unflatten(-1, (heads, dim)), turn, rotary_dim)
        k = _rotate(k.unflatten(-1, (kv_heads, dim)), turn, rotary_dim)
        v = v.unflatten(-1, (kv_heads, dim))
        place = torch.arange(total)
        tokens = pool.shape[4]
        found = offsets[0, request, :, place // tokens].long()
        block, inner = found[0] // (2 * pool.shape[1]), place % tokens
        assert (found[1] == found[0] + 1).all() and (found[0] % (2 * pool.shape[1]) == 0).all()
        pool[block[past:], layer, 0, :, inner[past:]] = k.to(pool.dtype)
        pool[block[past:], layer, 1, :, inner[past:]] = v.to(pool.dtype)
        keys, values_ = (pool[block, layer, i, :, inner].to(q.dtype) for i in (0, 1))
        keys, values_ = (x.repeat_interleave(heads // kv_heads, 1) for x in (keys, values_))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) / (
            q_scaling * math.sqrt(dim)
        )
        allowed = torch.cat([torch.ones(count, past).bool(), sees], 1)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, values_.float())
        out[row : row + count] = attended.flatten(1).to(out.dtype)
        row += count
    assert row == qkv.shape[0], "rows are those of the requests"
    return out


def _rotate(x, turn, rotary_dim):
    cos, sin = turn[..., 0][:, None].to(x.dtype), turn[..., 1][:, None].to(x.dtype)
    first, second, rest = x.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
