"""A tiny random hybrid model on the CPU, engines over it, and what each request gives alone."""

from __future__ import annotations

import random

import torch
from checkpoints import hf_config

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.draft_tree import DraftTree
from trtllm_treewy.model import Qwen3_5ForCausalLM
from trtllm_treewy.runtime.buckets import Buckets
from trtllm_treewy.runtime.drafter import MtpDynamicDrafter, NullDrafter
from trtllm_treewy.runtime.engine import Engine
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_torch import TorchExecutor
from trtllm_treewy.runtime.prefix_cache import PrefixCache
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.runtime.tree_sampler import TreeSampler
from trtllm_treewy.sampling_params import SamplingParams

VOCAB = 61


def tiny_config(**changes) -> ModelConfig:
    """One GDN and one attention layer; head_k_dim and head_v_dim differ."""
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    )
    return ModelConfig.from_dict(hf_config(**{**sizes, **changes}))


CONFIG = tiny_config()


def tiny_model(seed: int = 0, config: ModelConfig = CONFIG) -> Qwen3_5ForCausalLM:
    """Random float32 weights, wide enough that every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(values * 0.1)
            elif name.endswith(("A_log", "dt_bias")):
                parameter.copy_(values)
            else:
                parameter.copy_(values * 0.25)
    return model.eval()


def make_executor(model, **changes) -> TorchExecutor:
    """An executor with room for a few short sequences, unless `changes` say otherwise."""
    options = {k: changes.pop(k) for k in ("state_commit", "stash") if k in changes}
    if options.get("state_commit") == "deferred":
        options["deferred_history"] = 12
        options["max_path"] = 5  # some trees of the tests are deeper: the commit folds for these
    limits = {
        "max_batch_size": 4,
        "max_seq_len": 128,
        "max_nodes": 8,
        "scratch_rows": 12,
        "num_blocks": 40,
        "tokens_per_block": 4,
        "num_checkpoints": 0,
    }
    return TorchExecutor(model, ExecutorLimits(**{**limits, **changes}), **options)


def make_engine(executor, drafter=None, *, budget=64, interval=None, buckets=False, **options):
    """An engine; `interval` turns the prefix cache on."""
    limits, prefixes = executor.limits, None
    if interval is not None:
        prefixes = PrefixCache(
            executor.pages, limits.num_checkpoints, limits.tokens_per_block, interval
        )
    shapes = Buckets(limits.max_batch_size, limits.max_nodes) if buckets else None
    drafter = drafter or NullDrafter()
    sampler = options.pop("sampler", None) or TreeSampler(VOCAB, executor.device)
    return Engine(executor, drafter, sampler, budget, prefixes=prefixes, buckets=shapes, **options)


def make_request(number: int, prompt, max_tokens: int, **fields) -> Request:
    return Request(number, tuple(prompt), SamplingParams(max_tokens=max_tokens), **fields)


def run(engine: Engine, requests, most_steps: int = 5000) -> None:
    """Adds requests and steps until all are done."""
    for request in requests:
        engine.add(request)
    for _ in range(most_steps):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"work is left after {most_steps} steps")


def solo_texts(model, jobs) -> dict[int, list[int]]:
    """What each (prompt, max_tokens) gives without drafts, cache or pressure.

    They share a large batch, for speed; `check_is_greedy` is what shows that they are right.
    """
    executor = make_executor(
        model, max_batch_size=64, num_blocks=4096, max_nodes=1, scratch_rows=1, max_seq_len=512
    )
    requests = [make_request(i, prompt, count) for i, (prompt, count) in enumerate(jobs)]
    run(make_engine(executor, budget=4096), requests)
    texts = {r.request_id: list(r.output_token_ids) for r in requests}
    for number, (prompt, _) in enumerate(jobs):
        check_is_greedy(executor, prompt, texts[number])
    return texts


def check_is_greedy(executor: TorchExecutor, prompt, output) -> None:
    """Every token is the best one after all before it, by one pass over the whole text."""
    tokens = [*prompt, *output]
    assert executor.try_allocate(0, len(tokens))
    batch = PrefillBatch.pack(tokens, [len(tokens)], [0], [0], executor.device)
    with torch.inference_mode():
        best = executor.model.logits(executor.prefill(batch).hidden).argmax(-1).tolist()
    executor.free(0)
    assert output == best[len(prompt) - 1 : -1]


class GraftingDrafter(MtpDynamicDrafter):
    """The MTP module's trees with the right continuation grafted on, at random nodes.

    Every accepted length occurs, and the module's own cache is in use all the same.
    """

    def __init__(self, executor, texts: dict[int, list[int]], seed: int) -> None:
        self.largest = executor.limits.max_nodes
        super().__init__(executor, max_nodes=self.largest // 2, max_depth=2, top_k=2)
        self.texts, self.random = texts, random.Random(seed)
        self.engine: Engine | None = None

    def propose(self, roots, max_nodes=None):
        running = {r.slot: r for r in self.engine._scheduler.running}
        trees = super().propose(roots, max_nodes)
        return [self.graft(t, running[r.slot]) for t, r in zip(trees, roots, strict=True)]

    def graft(self, tree: DraftTree, request: Request) -> DraftTree:
        tokens, parents, scores = [*tree.token_ids], [*tree.parent_ids], [*tree.log_probs]
        text = self.texts[request.request_id][len(request.output_token_ids) :]
        at = 0
        for token in text[: self.random.randint(0, self.largest - len(tokens))]:
            tokens.append(token)
            parents.append(at)
            scores.append(self.random.uniform(-6.0, 0.0))
            at = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def check_nothing_leaked(engine: Engine) -> None:
    """No slot, page, checkpoint or drafter entry is held once every request is done."""
    executor, scheduler = engine._executor, engine._scheduler
    limits = executor.limits
    assert not engine.has_work
    assert sorted(scheduler._free_slots) == list(range(limits.max_batch_size))
    assert not executor.state._used
    assert executor.state._pending is None
    prefixes, pages = engine._prefixes, executor.kv_cache
    held = prefixes.blocks_held if prefixes is not None else 0
    assert pages.free_blocks == limits.num_blocks - held
    assert len(pages._held) == held
    if prefixes is not None:
        assert all(node.pins == 0 for node in prefixes._nodes())
        saved = [n.checkpoint for n in prefixes._nodes() if n.checkpoint is not None]
        assert len(set(saved)) == len(saved) == prefixes.checkpoints_used
        engine.drop_prefixes()
        assert prefixes.checkpoints_used == 0
    assert sorted(pages._free) == list(range(limits.num_blocks))
    assert not any(pages._refs)
    assert (pages.block_table == limits.num_blocks).all()
    cache = getattr(engine._drafter, "_cache", None)
    if cache is not None:
        assert not cache._length
        assert not cache._pending
    assert not engine._memory._save_at
