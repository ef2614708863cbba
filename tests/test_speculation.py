"""Speculative decoding gives the tokens of plain decoding: every tree, policy and batch."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import hf_config, write_checkpoint

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.draft_tree import DraftTree
from trtllm_treewy.runtime import build
from trtllm_treewy.runtime.drafter import DraftRoot

LENGTHS = [1, 2, 5, 11, 30, 70]
TREES = {
    "chain": {"max_draft_len": 3},
    "long chain": {"max_draft_len": 20},
    "static": {"draft_tree_widths": [3, 3, 3]},
    "uneven": {"draft_tree_widths": [4, 1, 2, 1]},
    "parents": {"draft_tree_parents": [-1, 0, 0, 0, 1, 1, 4, 2, 6, 0]},
    "dynamic": {
        "use_dynamic_tree": True,
        "max_total_draft_tokens": 12,
        "dynamic_tree_max_topK": 4,
        "max_draft_len": 5,
    },
    "dynamic wide": {
        "use_dynamic_tree": True,
        "max_total_draft_tokens": 30,
        "dynamic_tree_max_topK": 10,
        "max_draft_len": 4,
    },
}
# Commit policies; "inputs" is reconstruct from its other stash.
POLICIES = {
    "reconstruct": {"state_commit": "reconstruct", "stash": "pseudo_values"},
    "inputs": {"state_commit": "reconstruct", "stash": "inputs"},
    "deferred": {"state_commit": "deferred"},
    "snapshot": {"state_commit": "snapshot"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    write_checkpoint(directory, hf_config(), seed=3)
    return directory


@pytest.fixture(scope="module")
def prompts():
    generator = random.Random(7)
    return [[generator.randrange(97) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(checkpoint, prompts):
    return generate(checkpoint, prompts, None)


def params(count: int) -> list[SamplingParams]:
    """Requests of different output lengths, so that slots are freed and reused in between."""
    return [SamplingParams(max_tokens=[40, 7, 64, 23, 1, 50][i % 6]) for i in range(count)]


def make_llm(directory, config, drafter=None, **settings) -> LLM:
    settings = {"max_batch_size": 3, "max_seq_len": 256, **settings}
    with pytest.MonkeyPatch.context() as patch:
        if drafter is not None:
            patch.setattr(build, "make_drafter", lambda *_: drafter)
        return LLM(
            directory,
            skip_tokenizer_init=True,
            dtype="float32",
            device="cpu",
            speculative_config=config,
            **settings,
        )


def generate(directory, prompts, config, **settings):
    with make_llm(directory, config, **settings) as llm:
        outputs = llm.generate(prompts, params(len(prompts)))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tree", TREES)
def test_same_tokens_as_plain_decoding(tree, policy, checkpoint, prompts, plain):
    """Batches of requests of different lengths over fewer slots than requests (CASES 1, 8)."""
    config = {**TREES[tree], **POLICIES[policy], "deferred_history": 6}
    assert generate(checkpoint, prompts, config) == plain


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_without_drafts(policy, checkpoint, prompts, plain):
    """The commit policy does not depend on there being drafts."""
    config = {"draft_tree_widths": [], **POLICIES[policy]}
    assert generate(checkpoint, prompts, config) == plain


class OracleDrafter:
    """Random trees that hold the right continuation up to a random depth, at random nodes.

    Every accepted length occurs, and accepted nodes lie anywhere in the tree, which a trained
    drafter's best-first order would hide.
    """

    def __init__(self, texts: dict[int, list[int]], seed: int) -> None:
        self.texts, self.random = texts, random.Random(seed)
        self.slots: dict[int, tuple[int, int]] = {}
        self.max_nodes = 14

    def observe(self, slot, token_ids, hidden):
        assert hidden.shape[0] == len(token_ids)

    def settle(self, *slots):
        pass

    def forget(self, slot):
        pass

    def propose(self, roots: list[DraftRoot], max_nodes=None) -> list[DraftTree]:
        return [self.tree(root) for root in roots]

    def tree(self, root: DraftRoot) -> DraftTree:
        count = self.random.randint(1, self.max_nodes)
        parents, tokens = [-1], [root.token_id]
        truth = self.continuation(root)
        on_path, depth, right = 0, 0, self.random.randint(0, 6)
        for node in range(1, count):
            if depth < min(right, len(truth)) and self.random.random() < 0.5:
                parents.append(on_path)
                tokens.append(truth[depth])
                on_path, depth = node, depth + 1
            else:
                parents.append(self.random.randrange(node))
                tokens.append(self.random.randrange(97))
        return DraftTree(tuple(tokens), tuple(parents), tuple(-float(d) for d in range(count)))

    def continuation(self, root: DraftRoot) -> list[int]:
        for text in self.texts.values():
            if len(text) > root.context_len and text[root.context_len] == root.token_id:
                return text[root.context_len + 1 :]
        return []


class SpyDrafter(OracleDrafter):
    """Keeps what the engine tells of each sequence's verified tokens, by slot and then by text."""

    def __init__(self, texts, seed):
        super().__init__(texts, seed)
        self.open: dict[int, list] = {}
        self.closed: list[list] = []

    def observe(self, slot, token_ids, hidden):
        super().observe(slot, token_ids, hidden)
        self.open.setdefault(slot, []).append((list(token_ids), hidden))

    def forget(self, slot):
        if slot in self.open:
            self.closed.append(self.open.pop(slot))


def test_what_the_drafter_is_told(checkpoint, prompts, plain):
    """Verified tokens and the hidden states before them, scattered paths and prompt chunks (10)."""
    texts = {i: [*p, *t] for i, (p, t) in enumerate(zip(prompts, plain, strict=True))}
    config = {"draft_tree_parents": [-1, *[0] * 13]}
    spy = SpyDrafter(texts, seed=5)
    with make_llm(checkpoint, config, spy, max_num_tokens=42) as llm:
        outputs = llm.generate(prompts, params(len(prompts)))
        assert [output.outputs[0].token_ids for output in outputs] == plain
        executor = llm._engine._executor
        told = {tuple(t for ids, _ in text for t in ids): text for text in spy.closed}
        assert sum(o.speculation.num_accepted for o in outputs) > 20
        for text in texts.values():
            # The first token is nobody's successor; the engine may stop telling before the end.
            match = [key for key in told if key == tuple(text[1 : 1 + len(key)])]
            assert match, "the drafter was told other tokens than those of the text"
            key = max(match, key=len)
            assert executor.try_allocate(0, len(text))
            batch = PrefillBatch.pack(text, [len(text)], [0], [0], executor.device)
            expected = executor.prefill(batch).hidden[: len(key)]
            executor.free(0)
            hidden = torch.cat([states for _, states in told[key]])
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("minimum", range(2, 20, 3))
def test_min_tokens_inside_a_tree(minimum, checkpoint, prompts, plain):
    """An end token that may come at one depth of a tree, and not yet at another."""
    end = plain[2][12]
    settings = {"max_tokens": 40, "end_id": end, "min_tokens": minimum}
    with make_llm(checkpoint, None) as llm:
        expected = llm.generate(prompts[2], SamplingParams(**settings)).outputs[0].token_ids
    text = [*prompts[2], *expected]
    drafter = OracleDrafter({0: text}, seed=minimum)
    with make_llm(checkpoint, {"draft_tree_parents": [-1, *[0] * 13]}, drafter) as llm:
        output = llm.generate(prompts[2], SamplingParams(**settings))
    assert output.outputs[0].token_ids == expected
    assert output.speculation.num_accepted > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(seed, policy, checkpoint, prompts, plain):
    """Random topologies, accepted nodes scattered over the tree (CASES 9, 10, 14)."""
    config = {
        "draft_tree_parents": [-1, *[0] * 13],
        **POLICIES[policy],
        "deferred_history": 14,  # the trees below are deeper than these widths say
    }
    texts = {i: [*p, *t] for i, (p, t) in enumerate(zip(prompts, plain, strict=True))}
    with make_llm(checkpoint, config, OracleDrafter(texts, seed)) as llm:
        outputs = llm.generate(prompts, params(len(prompts)))
    assert [output.outputs[0].token_ids for output in outputs] == plain
    accepted = sum((o.speculation.num_accepted for o in outputs), 0)
    assert accepted > 20, "a drafter that is never right tests little"


def test_tree_pruned_to_the_step_budget(checkpoint, prompts, plain):
    """A tree over the step's token budget is pruned, and speculation stays on (CASE 25)."""
    config = {"draft_tree_widths": [3, 3, 3]}
    sizes = []
    with make_llm(checkpoint, config, max_num_tokens=30) as llm:
        executor = llm._engine._executor
        verify = executor.verify
        executor.verify = lambda tree: sizes.append(int(tree.num_nodes.sum())) or verify(tree)
        outputs = llm.generate(prompts, params(len(prompts)))
    assert max(sizes) == 30
    assert [output.outputs[0].token_ids for output in outputs] == plain
    drafted = [output.speculation for output in outputs if output.speculation.num_steps]
    assert all(stats.num_drafted > stats.num_steps for stats in drafted)


def test_moe(tmp_path, prompts):
    """A mixture of experts, tied embeddings, one slot."""
    write_checkpoint(tmp_path, hf_config(moe=True, tie_word_embeddings=True), seed=11)
    plain = generate(tmp_path, prompts[:4], None)
    config = {"draft_tree_widths": [2, 2, 2]}
    assert generate(tmp_path, prompts[:4], config, max_batch_size=1) == plain


def test_batch_of_one_equals_batch_of_many(checkpoint, prompts, plain):
    """What shares the batch does not change a request's tokens."""
    config = {"draft_tree_widths": [2, 2]}
    singles = []
    for prompt, param in zip(prompts, params(len(prompts)), strict=True):
        with make_llm(checkpoint, config, max_batch_size=1) as llm:
            singles.append(llm.generate(prompt, param).outputs[0].token_ids)
    assert singles == plain


def test_prompt_prefill_ends_with_prefill_semantics(checkpoint, prompts, plain):
    """Prompts cut into chunks anywhere, one last token included (CASE 17)."""
    for budget in (3, 10, 29, 69):
        config = {"max_draft_len": 2}
        assert generate(checkpoint, prompts, config, max_num_tokens=budget) == plain


@pytest.mark.parametrize("budget", [8192, 300, 256])
def test_long_prompts(budget, checkpoint, plain):
    """Prompts longer than what waits for the MTP module, beside a request that runs already."""
    generator = random.Random(9)
    prompts = [[generator.randrange(97) for _ in range(n)] for n in (5, 255, 257, 600)]
    settings = {"max_seq_len": 700, "max_num_tokens": budget}
    expected = generate(checkpoint, prompts, None, **settings)
    for config in ({"draft_tree_widths": [3, 2]}, TREES["dynamic"]):
        assert generate(checkpoint, prompts, config, **settings) == expected


def test_state_after_speculation_is_the_state_of_the_text(checkpoint, prompts, plain):
    """The pools hold what a plain prefill of the same tokens leaves (CASES 3, 19, 21)."""
    prompt, text = prompts[3], plain[3]
    with make_llm(checkpoint, {"draft_tree_widths": [3, 3]}) as llm:
        stream = llm.generate_async(prompt, SamplingParams(max_tokens=60), streaming=True)
        while len(next(stream).outputs[0].token_ids) < 20:
            pass
        (request,) = (handle.request for handle in llm._driver._handles.values())
        executor = llm._engine._executor
        state = executor.state.state[:, request.slot].clone()
        conv = executor.state.conv_state[:, request.slot].clone()
        tokens = [*prompt, *request.output_token_ids][: request.context_len]
        assert tokens[len(prompt) :] == text[: len(tokens) - len(prompt)]
        other = next(s for s in range(3) if s != request.slot)
        stream.abort()
        assert executor.try_allocate(other, len(tokens))
        executor.prefill(PrefillBatch.pack(tokens, [len(tokens)], [other], [0], executor.device))
        torch.testing.assert_close(state, executor.state.state[:, other], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(conv, executor.state.conv_state[:, other], atol=1e-4, rtol=1e-4)
