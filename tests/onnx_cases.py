"""Executors over the same model for the tests of the export: torch's and an exported one."""

from __future__ import annotations

import torch

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_network import NetworkExecutor, PoolTypes
from trtllm_treewy.runtime.executor_torch import TorchExecutor
from trtllm_treewy.runtime.network_onnx import OnnxNetwork

LIMITS = ExecutorLimits(
    max_batch_size=5,
    max_seq_len=192,
    max_nodes=24,
    scratch_rows=24,
    num_blocks=90,
    tokens_per_block=8,
)
TYPES = PoolTypes(torch.float32, torch.float32, torch.float32)


def torch_executor(checkpoint, limits=LIMITS):
    return TorchExecutor(load_model(checkpoint, dtype="float32"), limits)


def onnx_executor(checkpoint, folder, limits=LIMITS, types=TYPES):
    config = ModelConfig.from_pretrained(checkpoint)
    parts = {
        name: OnnxNetwork(folder / f"{name}.onnx", bindings(name, config), threads=1)
        for name in networks(config)
    }
    return NetworkExecutor(config, limits, parts, types=types, device=torch.device("cpu"))


def random_prompts(gen, vocab, lengths, slots, contexts):
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=gen).tolist()
    return PrefillBatch.pack(tokens, lengths, slots, contexts, torch.device("cpu"))


def random_tree(gen, vocab, slots, contexts, nodes, *, chain=False):
    """Random topologies and node counts; padded nodes hold tokens and parents that mean nothing."""
    batch = len(slots)
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    for t in range(1, nodes):
        low = t - 1 if chain else 0
        parents[:, t] = torch.randint(low, t, (batch,), generator=gen)
    return TreeBatch(
        token_ids=torch.randint(0, vocab, (batch, nodes), generator=gen),
        parents=parents,
        num_nodes=torch.randint(1, nodes + 1, (batch,), generator=gen, dtype=torch.int32),
        slot=torch.tensor(slots, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        max_context=max(contexts),
    )
