"""Whole models over other networks than torch's: texts, acceptance lengths, errors of logits.

The doctrine for 16 bits: no equality bit for bit, but acceptance lengths, and errors of logits step
by step against one reference, which is torch in float32 without drafts. Where a text differs from
the reference's, the two tokens must have been as close there as those errors allow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from gdn_cases import generator

from trtllm_treewy import LLM, AcceptanceStats, SamplingParams
from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.engine_driver import EngineDriver
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.llmapi import KvCacheConfig, speculation_config_from
from trtllm_treewy.runtime.acceptance import Acceptance
from trtllm_treewy.runtime.build import build_engine
from trtllm_treewy.runtime.engine_settings import EngineSettings
from trtllm_treewy.runtime.executor import ExecutorLimits, ExecutorSource
from trtllm_treewy.runtime.executor_network import DrafterCapacity, NetworkExecutor, PoolTypes
from trtllm_treewy.runtime.executor_torch import TorchExecutor

DRAFTS = {
    "plain": None,
    "tree": {"draft_tree_widths": [3, 3, 3]},
    "chain": {"max_draft_len": 3},
    "dynamic": {"use_dynamic_tree": True, "max_total_draft_tokens": 14, "max_draft_len": 5},
}
MEMORY = 2 << 30
# Of the texts that are forced through trees: nodes of a tree.
FORCED_NODES = 12


@dataclass(frozen=True)
class Sizes:
    """Of a check.

    Attributes:
        batch: sequences at once.
        max_seq_len: prompt and output of the longest.
        max_num_tokens: prompt tokens of a step.
        new_tokens: of each prompt.
    """

    batch: int = 16
    max_seq_len: int = 192
    max_num_tokens: int = 256
    new_tokens: int = 64


@dataclass
class Texts:
    """What a run generated: tokens by prompt, and the statistics of all."""

    tokens: list
    stats: AcceptanceStats
    seconds: float

    @property
    def acceptance_length(self):
        return self.stats.acceptance_length


@dataclass
class Errors:
    """Of logits against the reference, over all positions of all texts.

    Attributes:
        mean: of the relative Frobenius errors of all positions.
        worst: of those.
        largest: absolute, of one logit.
        agree: share of positions with the reference's best token.
        drafter: relative, of the MTP module's logits after each prompt.
        prefill: relative, of the logits after each prompt.
    """

    mean: float
    worst: float
    largest: float
    agree: float
    drafter: float
    prefill: float


def network_executor(config, limits, parts, dtype, sizes, device):
    """The runtime's executor over networks of activation type `dtype`, states in float32."""
    types = PoolTypes(dtype, torch.float32, dtype)
    nodes = max(limits.max_batch_size * limits.max_nodes, 128)
    capacity = DrafterCapacity(entries=sizes.max_num_tokens, nodes=nodes)
    return NetworkExecutor(config, limits, parts, types=types, device=device, capacity=capacity)


def generate(model, prompts, sizes, *, drafts, dtype, device, parts=None):
    """Texts of all prompts, greedy; by torch, or over the networks `parts`."""
    cache, speculation = KvCacheConfig(memory_bytes=MEMORY), DRAFTS[drafts]
    name = str(dtype).removeprefix("torch.")
    with LLM(
        model,
        dtype=name,
        device=device,
        speculative_config=speculation,
        kv_cache_config=cache,
        max_batch_size=sizes.batch,
        max_seq_len=sizes.max_seq_len,
        max_num_tokens=sizes.max_num_tokens,
    ) as llm:
        if parts is not None:
            source = ExecutorSource(
                make=lambda limits: network_executor(
                    llm.config, limits, parts, dtype, sizes, llm.device
                ),
                weights=lambda limits: 0,
                steps=lambda limits: 0,
                max_batch_size=sizes.batch,
            )
            settings = EngineSettings(
                config=llm.config,
                speculation=speculation_config_from(speculation),
                cache=cache,
                dtype=dtype,
                device=llm.device,
                max_batch_size=sizes.batch,
                max_seq_len=sizes.max_seq_len,
                max_num_tokens=sizes.max_num_tokens,
            )
            llm._engine, _ = build_engine(settings, lambda: None, source=source)
            llm._driver = EngineDriver(llm._engine, llm.device)
        start = time.perf_counter()
        params = SamplingParams(max_tokens=sizes.new_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        stats = sum((o.speculation for o in outputs if o.speculation), AcceptanceStats())
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        return Texts(tokens, stats, time.perf_counter() - start)


class Reference:
    """Torch in float32 without drafts: logits of every position of a text, in one go."""

    def __init__(self, model, device, sizes):
        self._model = load_model(model, dtype="float32", device=device)
        self._executor = TorchExecutor(self._model, limits_of(sizes))

    @torch.inference_mode()
    def logits(self, text):
        """[len(text), vocab] float32: entry t is after token t."""
        if not self._executor.try_allocate(0, len(text)):
            raise RuntimeError("no room for a text")
        _, (hidden,) = _prefill(self._executor, [text], [0])
        self._executor.free(0)
        return self._model.logits(hidden)

    def drafter(self, text):
        """[vocab]: the MTP module's logits after the pairs of a text."""
        return drafter_logits(self._executor, [text])[1][0]


def limits_of(sizes):
    """For forced texts."""
    rows = sizes.max_seq_len + 32
    return ExecutorLimits(
        max_batch_size=sizes.batch,
        max_seq_len=sizes.max_seq_len,
        max_nodes=32,
        scratch_rows=32,
        num_blocks=-(-rows // 32) * sizes.batch,
        tokens_per_block=32,
    )


@torch.inference_mode()
def drafter_logits(executor, texts):
    """Prefills texts and enters their pairs into the MTP module.

    Returns:
        Logits [rows, vocab] of both, the model's first.
    """
    slots = list(range(len(texts)))
    for slot, text in enumerate(texts):
        if not executor.try_allocate(slot, len(text)):
            raise RuntimeError("no room for a text")
    first, hidden = _prefill(executor, texts, slots)
    pairs = [text[1:] for text in texts]
    hidden = torch.cat([x[:-1] for x in hidden])
    lengths = [len(x) for x in pairs]
    zeros = [0] * len(pairs)
    tokens = [token for pair in pairs for token in pair]
    packed = PrefillBatch.pack(tokens, lengths, slots, zeros, executor.device)
    logits = executor.draft_extend(packed, hidden).logits.clone()
    for slot in slots:
        executor.free(slot)
    return first, logits


def _prefill(executor, texts, slots):
    """Last logits [rows, vocab], and hidden states of each text; one text a step."""
    logits, hidden = [], []
    for text, slot in zip(texts, slots, strict=True):
        batch = PrefillBatch.pack(text, [len(text)], [slot], [0], executor.device)
        output = executor.prefill(batch)
        logits.append(output.logits[0].clone())
        hidden.append(output.hidden.clone())
    return torch.stack(logits), hidden


@torch.inference_mode()
def errors_of(executor, reference, prompts, texts, sizes, seed=0):
    """Forces texts through trees: random topologies, the text's tokens on one path of each.

    Args:
        executor: to be checked; `limits_of(sizes)` or larger.
        reference: logits by text, [len, vocab] each, of prompt and text; drafters' by prompt.
        prompts, texts: token ids.
        sizes: of the check.
        seed: of the trees.
    """
    gen, found, drafters, prefills = generator(seed), [], [], []
    wanted, wanted_drafters = reference
    for first in range(0, len(prompts), sizes.batch):
        rows = slice(first, first + sizes.batch)
        some = [list(p) for p in prompts[rows]]
        after, drafted = drafter_logits(executor, some)
        expected = [x[len(p) - 1] for x, p in zip(wanted[rows], some, strict=True)]
        prefills.append(_relative(after, torch.stack(expected)))
        drafters.append(_relative(drafted, torch.stack(wanted_drafters[rows])))
        full = [p + list(t) for p, t in zip(some, texts[rows], strict=True)]
        found += _forced(executor, some, full, wanted[rows], gen)
    relative = torch.cat([x[0] for x in found])
    return Errors(
        mean=relative.mean().item(),
        worst=relative.max().item(),
        largest=max(x[1].max().item() for x in found),
        agree=torch.cat([x[2] for x in found]).float().mean().item(),
        drafter=torch.cat(drafters).mean().item(),
        prefill=torch.cat(prefills).mean().item(),
    )


def _relative(actual, wanted):
    actual, wanted = actual.float(), wanted.float()
    return (actual - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def _forced(executor, prompts, full, wanted, gen):
    slots, contexts = list(range(len(full))), [len(p) for p in prompts]
    vocab = wanted[0].shape[-1]
    for slot, text in enumerate(full):
        if not executor.try_allocate(slot, len(text)):
            raise RuntimeError("no room for a text")
    _prefill(executor, prompts, slots)
    found = []
    while all(c < len(text) for c, text in zip(contexts, full, strict=True)):
        tree, paths = _tree_over(full, slots, contexts, gen, vocab, executor.device)
        logits = executor.verify(tree).logits
        for row, path in enumerate(paths):
            actual = logits[row, path].float()
            expected = wanted[row][contexts[row] : contexts[row] + len(path)]
            same = actual.argmax(-1) == expected.argmax(-1)
            found.append((_relative(actual, expected), (actual - expected).abs(), same))
        executor.commit(tree, _acceptance(tree, paths))
        contexts = [c + len(path) for c, path in zip(contexts, paths, strict=True)]
    for slot in slots:
        executor.free(slot)
    return found


def _tree_over(full, slots, contexts, gen, vocab, device):
    """A random tree for each row, one path of which holds the text's next tokens."""
    rows, nodes = len(full), FORCED_NODES
    tokens = torch.randint(0, vocab, (rows, nodes), generator=gen)
    parents = torch.full((rows, nodes), -1, dtype=torch.int32)
    counts = torch.randint(1, nodes + 1, (rows,), generator=gen, dtype=torch.int32)
    paths = []
    for row, text in enumerate(full):
        for t in range(1, nodes):
            parents[row, t] = int(torch.randint(max(0, t - 3), t, (1,), generator=gen))
        node = int(torch.randint(0, int(counts[row]), (1,), generator=gen))
        path = [node]
        while parents[row, path[-1]] >= 0:
            path.append(int(parents[row, path[-1]]))
        path = path[::-1][: len(text) - contexts[row]]
        for depth, at in enumerate(path):
            tokens[row, at] = text[contexts[row] + depth]
        paths.append(path)
    tree = TreeBatch(
        token_ids=tokens.to(device),
        parents=parents.to(device),
        num_nodes=counts.to(device),
        slot=torch.tensor(slots, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        max_context=max(contexts),
    )
    return tree, paths


def _acceptance(tree, paths):
    device = tree.parents.device
    longest = max(len(path) for path in paths)
    padded = [path + [-1] * (longest - len(path)) for path in paths]
    return Acceptance(
        accepted=torch.tensor([p[-1] for p in paths], dtype=torch.int32, device=device),
        num_accepted=torch.tensor([len(p) for p in paths], dtype=torch.int32, device=device),
        path=torch.tensor(padded, device=device),
        bonus_ids=torch.zeros(len(paths), dtype=torch.int64, device=device),
    )


def differences(prompts, expected, actual, logits_of):
    """Where texts first differ: how much better the reference found its own token there.

    Args:
        prompts: token ids.
        expected, actual: texts, token ids.
        logits_of: the reference's, of a prompt's index: [len, vocab] over prompt and `expected`.

    Returns:
        A dict for each text that differs: prompt, token, gap of the two logits.
    """
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, expected, actual, strict=True)):
        at = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            row = logits_of(index)[len(prompt) + at - 1]
            gap = (row[a[at]] - row[b[at]]).item()
            found.append({"prompt": index, "token": at, "gap": gap})
    return found
