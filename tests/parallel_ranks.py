"""Ranks of a divided model in one process: threads in place of processes, sums in place of NCCL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from checkpoints import hf_config
from gdn_cases import generator
from onnx_cases import random_prompts, random_tree

from trtllm_treewy.binding_names import Bindings
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.sharding import shard_tensor
from trtllm_treewy.model import SINGLE_RANK, Qwen3_5ForCausalLM
from trtllm_treewy.rank_config import shard_config
from trtllm_treewy.runtime.acceptance import greedy_accept

VOCAB = 96
SIZES = {"vocab_size": VOCAB, "attention_bias": True, "linear_num_key_heads": 4,
         "linear_num_value_heads": 8}  # fmt: skip
KINDS = {"dense": {}, "moe": {"moe": True}, "tied": {"tie_word_embeddings": True}}


def random_model(kind):
    changes = {**SIZES, **KINDS[kind]}
    config = ModelConfig.from_dict(hf_config(moe=changes.pop("moe", False), **changes))
    model = Qwen3_5ForCausalLM(config)
    gen = generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=gen) * 0.2)
    return model.eval().requires_grad_(False)


def rank_tensors(model, ranks, rank):
    for name, x in model.state_dict().items():
        yield name, shard_tensor(name, x, model.config, ranks, rank)


def rank_model(model, ranks, rank, collectives=SINGLE_RANK):
    part = Qwen3_5ForCausalLM(shard_config(model.config, ranks), collectives)
    part.load_state_dict(dict(rank_tensors(model, ranks, rank)))
    return part.eval().requires_grad_(False)


class Meeting:
    """Where the threads of all ranks meet: each leaves something, and all see everything."""

    def __init__(self, ranks):
        self.ranks = ranks
        self._left, self._barrier = [None] * ranks, threading.Barrier(ranks, timeout=60)

    def exchange(self, rank, x):
        self._left[rank] = x
        self._barrier.wait()
        left = list(self._left)
        self._barrier.wait()
        return left


class ThreadedCollectives:
    def __init__(self, rank, meeting):
        self.rank, self.ranks, self._meeting = rank, meeting.ranks, meeting

    def all_reduce(self, x):
        return sum(self._meeting.exchange(self.rank, x.clone()))

    def all_gather(self, x):
        return torch.cat(self._meeting.exchange(self.rank, x), -1)


class Parallel:
    """An executor over the executors of all ranks; methods give what rank 0's give."""

    def __init__(self, executors):
        self.ranks = executors
        self._pool = ThreadPoolExecutor(len(executors))

    def __getattr__(self, name):
        @torch.inference_mode()
        def run(executor, *args):
            return getattr(executor, name)(*args)

        def on_all(*args):
            calls = [self._pool.submit(run, rank, *args) for rank in self.ranks]
            first, *_ = [call.result() for call in calls]
            return first

        return on_all


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def same(actual, expected):
    close(actual.logits, expected.logits)
    close(actual.hidden, expected.hidden)


def compare(whole, parallel, config):
    """Prefill, the drafter's entries and nodes, random trees and their commits."""
    gen = generator(2)
    for executor in (whole, parallel):
        assert executor.try_allocate(0, 60)
        assert executor.try_allocate(2, 60)
    batch = random_prompts(gen, VOCAB, [9, 4], [2, 0], [0, 0])
    same(parallel.prefill(batch), whole.prefill(batch))
    entries = random_prompts(gen, VOCAB, [8, 3], [2, 0], [0, 0])
    pairs = torch.randn(11, config.hidden_size, generator=gen)
    drafted = whole.draft_extend(entries, pairs)
    same(parallel.draft_extend(entries, pairs), drafted)
    slot, offsets = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([[8, 9], [3, 4]])
    mask = torch.arange(11) < torch.tensor([[9, 10], [4, 5]])[..., None]
    token_ids = torch.randint(0, VOCAB, (2, 2), generator=gen)
    hidden = drafted.hidden[:, None].expand(-1, 2, -1)
    nodes = (token_ids, hidden, offsets, slot, offsets, mask)
    same(parallel.draft(*nodes), whole.draft(*nodes))
    contexts = [9, 4]
    for _ in range(2):
        tree = random_tree(gen, VOCAB, [2, 0], contexts, 7)
        same(parallel.verify(tree), whole.verify(tree))
        target = torch.full_like(tree.token_ids, -1)
        target[:, 0] = tree.token_ids[:, 1]
        acceptance = greedy_accept(tree, target)
        for executor in (whole, parallel):
            executor.commit(tree, acceptance)
        moved = acceptance.num_accepted.tolist()
        contexts = [c + n for c, n in zip(contexts, moved, strict=True)]
    close(torch.cat([x.state.state for x in parallel.ranks], 2), whole.state.state)
    assert sum(contexts) > 9 + 4 + 4


# ---- exported graphs


def _prefixed(bindings, rank):
    def rename(x):
        in_place = None if x.in_place is None else f"rank{rank}/{x.in_place}"
        return replace(x, name=f"rank{rank}/{x.name}", in_place=in_place)

    return [rename(x) for x in bindings.inputs], [rename(x) for x in bindings.outputs]


def joint_bindings(bindings, ranks):
    """Those of `join_ranks`'s graph, where every rank has `bindings`."""
    sides = [_prefixed(bindings, rank) for rank in range(ranks)]
    return Bindings(tuple(x for i, _ in sides for x in i), tuple(x for _, o in sides for x in o))


def join_ranks(models):
    """One graph of all ranks' graphs, with sums and concatenations in place of collectives.

    Rank r's values are called rank{r}/..., and its weights lie in the folder rank{r}.
    """
    import onnx

    joint = onnx.ModelProto()
    joint.CopyFrom(models[0])
    for name in ("node", "input", "output", "initializer", "value_info"):
        joint.graph.ClearField(name)
    assert all(list(m.functions) == list(models[0].functions) for m in models)
    segments = []
    for rank, model in enumerate(models):
        _rename(model.graph, f"rank{rank}/")
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = f"rank{rank}/{entry.value}"
        for name in ("input", "output", "initializer"):
            getattr(joint.graph, name).extend(getattr(model.graph, name))
        segments.append(_segments(model.graph.node))
    for parts in zip(*segments, strict=True):
        for nodes, _ in parts:
            joint.graph.node.extend(nodes)
        joint.graph.node.extend(_carried_out([collective for _, collective in parts]))
    return joint


def _rename(graph, prefix):
    for node in graph.node:
        node.name = node.name and prefix + node.name
        for names in (node.input, node.output):
            names[:] = [name and prefix + name for name in names]
    for values in (graph.input, graph.output, graph.initializer):
        for value in values:
            value.name = prefix + value.name


def _segments(nodes):
    """Nodes up to each collective, and the collective; None after the last nodes."""
    segments = [([], None)]
    for node in nodes:
        if node.op_type == "DistCollective":
            segments[-1] = segments[-1][0], node
            segments.append(([], None))
        else:
            segments[-1][0].append(node)
    return segments


def _carried_out(collectives):
    import onnx

    if collectives[0] is None:
        return []
    settings = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in collectives
    ]
    assert all(x == settings[0] for x in settings)
    assert settings[0]["nb_rank"] == len(collectives)
    inputs, (first, *others) = [n.input[0] for n in collectives], [n.output[0] for n in collectives]
    reduction = settings[0]["reduce_op"]
    if settings[0]["collective_operation"] == b"all_reduce":
        assert reduction == b"sum"
        made = onnx.helper.make_node("Sum", inputs, [first])
    else:
        assert (settings[0]["collective_operation"], reduction) == (b"all_gather", b"none")
        made = onnx.helper.make_node("Concat", inputs, [first], axis=0)
    return [made, *(onnx.helper.make_node("Identity", [first], [other]) for other in others)]


class RankNetwork:
    """One rank's part of a joint network: runs it together with the other ranks' threads.

    `pools`: those of all ranks that were bound so far.
    """

    def __init__(self, joint, pools, rank, meeting):
        self._joint, self._pools, self._rank, self._meeting = joint, pools, rank, meeting

    def close(self):
        pass

    def bind(self, pools):
        self._pools.update({f"rank{self._rank}/{name}": x for name, x in pools.items()})
        self._joint.bind(self._pools)

    def run(self, inputs):
        given = self._meeting.exchange(self._rank, inputs)
        results = None
        if self._rank == 0:
            results = self._joint.run(
                {f"rank{r}/{name}": x for r, part in enumerate(given) for name, x in part.items()}
            )
        results, *_ = self._meeting.exchange(self._rank, results)
        prefix = f"rank{self._rank}/"
        return {n.removeprefix(prefix): x for n, x in results.items() if n.startswith(prefix)}
