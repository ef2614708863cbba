"""A whole model, its MTP module drafting: sampled on trees, the text is that of plain sampling."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from checkpoints import hf_config, write_checkpoint

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.draft_tree import DraftTree, TreeTopology, fit_to_budget, to_tree_batch
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.runtime.drafter import DraftRoot
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_torch import TorchExecutor
from trtllm_treewy.runtime.sampling import (
    AcceptanceRule,
    Proposal,
    SamplingDynamicDrafter,
    SamplingRows,
    SamplingStaticDrafter,
    SequenceSampling,
    sample,
    sample_tree,
)
from trtllm_treewy.sampling_params import SamplingParams

VOCAB, LENGTH = 97, 24
LIMITS = ExecutorLimits(
    max_batch_size=8,
    max_seq_len=128,
    max_nodes=16,
    scratch_rows=40,
    num_blocks=96,
    tokens_per_block=16,
)
SETTINGS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=3),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, seed=4),
    SamplingParams(temperature=1.3, min_p=0.05, logit_bias={5: 2.0}, seed=5),
    SamplingParams(frequency_penalty=0.8, min_tokens=4, stop_token_ids=[9]),
]


@dataclass
class Text:
    """A sequence in the loop below."""

    slot: int
    prompt: list[int]
    sampling: SequenceSampling
    output: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def context(self) -> int:
        return len(self.prompt) + len(self.output) - 1


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, hf_config(), seed=4)
    executor = TorchExecutor(load_model(directory, dtype="float32"), LIMITS)
    # Sure enough of its tokens that drafts are accepted and filters matter.
    executor.model.lm_head.weight.data.mul_(3.0)
    return executor


def make_drafter(executor, kind):
    if kind == "plain":
        return None
    if kind == "dynamic":
        return SamplingDynamicDrafter(executor, max_nodes=10, max_depth=4, top_k=4)
    topology = {
        "chain": TreeTopology.chain(3),
        "static": TreeTopology.from_widths([3, 2, 1]),
        "uneven": TreeTopology.from_parents([-1, 0, 0, 0, 1, 1, 4, 2, 6]),
    }[kind]
    return SamplingStaticDrafter(executor, topology)


def rows_for(texts, device):
    return SamplingRows.build([t.sampling for t in texts], [t.output for t in texts], device)


def prefill(executor, drafter, texts):
    lengths = [len(text.prompt) for text in texts]
    tokens = [token for text in texts for token in text.prompt]
    slots = [text.slot for text in texts]
    for text in texts:
        assert executor.try_allocate(text.slot, len(text.prompt) + LENGTH + 8)
    batch = PrefillBatch.pack(tokens, lengths, slots, [0] * len(texts), executor.device)
    result = executor.prefill(batch)
    first = sample(result.logits, rows_for(texts, executor.device)).token_ids.tolist()
    for text, token, hidden in zip(texts, first, result.hidden.split(lengths), strict=True):
        text.output.append(token)
        if drafter is not None:
            drafter.observe(text.slot, [*text.prompt[1:], token], hidden)


def step(executor, drafter, texts, budget):
    rows = rows_for(texts, executor.device)
    roots = [DraftRoot(text.slot, text.output[-1], text.context) for text in texts]
    proposal = Proposal([DraftTree.root_only(root.token_id) for root in roots], None)
    if drafter is not None:
        proposal = drafter.propose_sampled(roots, rows)
    trees = fit_to_budget(proposal.trees, budget)
    contexts = [text.context for text in texts]
    batch = to_tree_batch(trees, [text.slot for text in texts], contexts, executor.device)
    output = executor.verify(batch)
    drafts = proposal.record and proposal.record.align(trees, batch.parents.shape[1])
    longest = 1 + max(tree.depth for tree in trees)
    result = sample_tree(batch, output.logits, rows, drafts=drafts, max_path=longest)
    executor.commit(batch, result.acceptance)
    assert not bool(result.fault.any())
    for row, text in enumerate(texts):
        count = int(result.num_tokens[row])
        tokens = result.token_ids[row, :count].tolist()
        path = result.acceptance.path[row, :count].tolist()
        text.output += tokens
        text.steps += 1
        if drafter is not None:
            drafter.observe(text.slot, tokens, output.hidden[row, path])


def run(executor, kind, settings, rule=AcceptanceRule.MATCH, budget=200):
    """Tokens and steps of each request, all in one batch until each is long enough."""
    chooser = random.Random(5)
    drafter = make_drafter(executor, kind)
    texts = []
    for number, params in enumerate(SETTINGS):
        prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randrange(1, 12))]
        if number in settings:
            sampling = SequenceSampling(params, prompt, VOCAB, acceptance=rule)
            texts.append(Text(len(texts), prompt, sampling))
    chooser.shuffle(texts)
    prefill(executor, drafter, texts)
    running = texts
    while running := [text for text in running if len(text.output) < LENGTH]:
        step(executor, drafter, running, max(budget, len(running)))
    for text in texts:
        executor.free(text.slot)
        if drafter is not None:
            drafter.forget(text.slot)
    texts.sort(key=lambda text: text.slot)
    return [text.output[:LENGTH] for text in texts], [text.steps for text in texts]


@pytest.fixture(scope="module")
def plain(executor):
    return [run(executor, "plain", [number])[0][0] for number in range(len(SETTINGS))]


@pytest.mark.parametrize("budget", [200, 20], ids=["whole", "pruned"])
@pytest.mark.parametrize("kind", ["chain", "static", "uneven", "dynamic"])
def test_match_on_trees_gives_the_text_of_plain_sampling(kind, budget, executor, plain):
    """DESIGN 4.2, with random tokens: token for token, each request as if it were alone."""
    everyone = range(len(SETTINGS))
    texts, steps = run(executor, kind, everyone, budget=budget)
    assert texts == plain
    assert sum(steps) < len(SETTINGS) * (LENGTH - 1), "some drafts were accepted"
    some = [4, 0, 3]
    assert run(executor, kind, some, budget=budget)[0] == [plain[i] for i in sorted(some)]


def test_the_seed_is_what_makes_the_text(executor, plain):
    different = {tuple(text) for text in plain}
    assert len(different) == len(plain)
    assert run(executor, "plain", range(len(SETTINGS)))[0] == plain


@pytest.mark.parametrize("kind", ["chain", "static", "uneven", "dynamic"])
def test_rejection_does_not_depend_on_the_batch_where_trees_do_not(kind, executor, plain):
    rule = AcceptanceRule.REJECTION
    together, steps = run(executor, kind, range(len(SETTINGS)), rule)
    alone = [run(executor, kind, [number], rule)[0][0] for number in range(len(SETTINGS))]
    assert together == alone
    assert sum(steps) < len(SETTINGS) * (LENGTH - 1)
    # Greedy requests beside it have their own text.
    assert [together[1], together[5]] == [plain[1], plain[5]]


def test_greedy_batches_propose_as_the_greedy_drafters_do(executor):
    drafter = make_drafter(executor, "static")
    prompt = [3, 1, 4, 1, 5]
    text = Text(2, prompt, SequenceSampling(SamplingParams(), prompt, VOCAB))
    prefill(executor, drafter, [text])
    rows = rows_for([text], executor.device)
    assert rows.plain_greedy
    proposal = drafter.propose_sampled([DraftRoot(2, text.output[-1], 5)], rows)
    assert proposal.record is None
    assert proposal.trees[0].num_nodes == 16
    executor.free(2)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_greedy_row_among_random_ones_gets_the_same_tree(kind, executor):
    """Its children are the module's best tokens, with the module's own log probabilities."""
    prompt = [3, 1, 4, 1, 5]
    settings = [SamplingParams(), SamplingParams(temperature=1.0, seed=1)]
    trees = []
    for chosen in (settings[:1], settings):
        drafter = make_drafter(executor, kind)
        texts = [
            Text(slot, prompt, SequenceSampling(params, prompt, VOCAB))
            for slot, params in enumerate(chosen)
        ]
        prefill(executor, drafter, texts)
        roots = [DraftRoot(text.slot, text.output[-1], text.context) for text in texts]
        trees.append(drafter.propose_sampled(roots, rows_for(texts, executor.device)).trees[0])
        for text in texts:
            executor.free(text.slot)
            drafter.forget(text.slot)
    assert trees[0].token_ids == trees[1].token_ids
    assert trees[0].parent_ids == trees[1].parent_ids
    assert trees[0].log_probs == pytest.approx(trees[1].log_probs, abs=1e-4)
