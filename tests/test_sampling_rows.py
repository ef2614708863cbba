"""Logits to tokens: penalties, biases, filters, faults and log probabilities, row by row."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sampling_laws import law

from trtllm_treewy.draft_tree import DraftTree, to_tree_batch
from trtllm_treewy.runtime.sampling import (
    FAULT_REASONS,
    AcceptanceRule,
    Fault,
    SamplingRows,
    SequenceSampling,
    sample,
    sample_tree,
)
from trtllm_treewy.runtime.sampling.processors import adjust, score
from trtllm_treewy.sampling_params import SamplingParams

VOCAB = 40
INF = float("inf")
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(top_k=4, seed=2, logprobs=3),
    SamplingParams(top_p=0.7, temperature=1.5, seed=3),
    SamplingParams(temperature=1.0, min_p=0.2, seed=4),
    SamplingParams(temperature=1.2, repetition_penalty=1.4, presence_penalty=0.5, seed=5),
    SamplingParams(frequency_penalty=1.5, repetition_penalty=0.7, logprobs=0),
    SamplingParams(temperature=1.0, logit_bias={3: 5.0, 4: -INF}, bad_token_ids=[7], seed=6),
    SamplingParams(temperature=0.9, embedding_bias=torch.linspace(-2, 2, VOCAB), seed=7),
    SamplingParams(temperature=2.0, min_tokens=6, stop_token_ids=[1, 2], seed=8),
    SamplingParams(
        temperature=1.0,
        top_k=9,
        top_p=0.9,
        frequency_penalty=0.3,
        prompt_ignore_length=2,
        logprobs=2,
        logprobs_mode="processed",
        seed=9,
    ),
]
PROMPT = [3, 3, 8, 11, 30, 3]


def sequence(params: SamplingParams, **settings) -> SequenceSampling:
    return SequenceSampling(params, PROMPT, VOCAB, end_ids=[0], **settings)


def rows_of(settings, outputs=None) -> SamplingRows:
    made = [sequence(params) for params in settings]
    return SamplingRows.build(made, outputs or [[5, 3]] * len(made), "cpu")


def naive(logits: list[float], params: SamplingParams, output: list[int]) -> torch.Tensor:
    """Changed logits by the definition, one token after the other."""
    ignored = PROMPT[params.prompt_ignore_length or 0 :]
    changed = []
    for token, x in enumerate(logits):
        if token in PROMPT + output:
            r = params.repetition_penalty or 1.0
            x = x / r if x > 0 else x * r
        count = (ignored + output).count(token)
        x -= (params.presence_penalty or 0.0) * (count > 0)
        x -= (params.frequency_penalty or 0.0) * count
        if params.embedding_bias is not None:
            x += float(params.embedding_bias[token])
        x += (params.logit_bias or {}).get(token, 0.0)
        early = len(output) < (params.min_tokens or 0) and token in (0, *params.stop_ids)
        changed.append(-INF if token in (params.bad_token_ids or ()) or early else x)
    return torch.tensor(changed)


@pytest.mark.parametrize("params", SETTINGS, ids=lambda params: f"seed {params.seed}")
@pytest.mark.parametrize("output", [[5], [3, 3, 1, 8, 30, 12, 3]], ids=["short", "long"])
def test_the_distribution_is_the_defined_one(params, output):
    logits = torch.randn(1, VOCAB) * 2
    scores = score(logits, rows_of([params], [output]))
    expected = naive(logits[0].tolist(), params, output)
    torch.testing.assert_close(scores.greedy[0], expected, atol=1e-5, rtol=1e-5)
    if params.greedy:
        assert int(sample(logits, rows_of([params], [output])).token_ids) == expected.argmax()
    else:
        wanted = torch.tensor(law(expected, params))
        torch.testing.assert_close(scores.random.softmax(-1)[0], wanted, atol=1e-5, rtol=1e-4)


def test_penalties_along_a_path_are_those_of_the_text():
    """A tree's tokens equal plain decoding that counts every token when it is there."""
    table = torch.randn(VOCAB, VOCAB)
    chooser = random.Random(3)
    accepted = 0
    for seed, params in enumerate(SETTINGS * 6):
        params = replace(params, seed=seed, temperature=0.5 if params.temperature else None)
        chain = sequence(params)
        output = [5]
        for _ in range(6):
            rows = SamplingRows.build([chain], [output], "cpu")
            output.append(int(sample(table[output[-1]][None], rows).token_ids))
        # The right continuation among wrong siblings, at random places of the tree.
        tokens, parents, tip = [5], [-1], 0
        for token in output[1:]:
            for right in chooser.sample([True, False, False], 3):
                tokens.append(token if right else (token + chooser.randrange(1, VOCAB)) % VOCAB)
                parents.append(tip)
            tip = max(n for n in range(len(tokens)) if tokens[n] == token and parents[n] == tip)
        tree = DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))
        batch = to_tree_batch([tree], [3], [6], "cpu")
        rows = SamplingRows.build([sequence(params)], [[5]], "cpu")
        result = sample_tree(batch, table[batch.token_ids], rows)
        emitted = result.token_ids[0, : int(result.num_tokens[0])].tolist()
        assert emitted[:6] == output[1:]
        accepted += len(emitted) - 1
    assert accepted == 6 * 6 * len(SETTINGS)


def test_counts_follow_the_output_and_start_again_when_it_shrinks():
    """CASES 16 in kind: a resumed request counts its own text, and nothing twice."""
    one = sequence(SamplingParams(frequency_penalty=1.0, prompt_ignore_length=4))
    for output in ([5], [5, 3], [5, 3, 3, 3], [5, 3], [], [9]):
        counts = one.counts(output, torch.device("cpu"))
        for row, text in enumerate((PROMPT + output, PROMPT[4:] + output)):
            assert counts[row].tolist() == [text.count(token) for token in range(VOCAB)]


def test_a_row_does_not_depend_on_its_batch():
    """The same tokens, log probabilities and faults in any company, order and padding."""
    logits = torch.randn(len(SETTINGS), VOCAB) * 2
    alone = [sample(logits[i : i + 1], rows_of([s])) for i, s in enumerate(SETTINGS)]
    for _ in range(5):
        order = random.sample(range(len(SETTINGS)), random.randrange(1, len(SETTINGS)))
        made = [sequence(SETTINGS[i]) for i in order]
        rows = SamplingRows.build(made, [[5, 3]] * len(order), "cpu", pad_to=len(order) + 2)
        padded = torch.cat([logits[order], torch.full((2, VOCAB), torch.nan)])
        result = sample(padded, rows)
        for place, i in enumerate(order):
            assert result.token_ids[place] == alone[i].token_ids[0]
            if alone[i].logprobs is not None and SETTINGS[i].logprobs is not None:
                assert result.logprobs.chosen[place] == alone[i].logprobs.chosen[0]


def test_fresh_seeds_differ_and_given_ones_are_kept():
    params = SamplingParams(temperature=1.0)
    assert sequence(params).seed != sequence(params).seed
    assert sequence(replace(params, seed=2**64 - 1)).seed == 2**64 - 1
    assert rows_of([replace(params, seed=2**64 - 1)]).seed.tolist() == [[2**32 - 1, 2**32 - 1, 0]]


@pytest.mark.parametrize(
    ("value", "fault"),
    [(torch.nan, Fault.NOT_FINITE), (INF, Fault.NOT_FINITE)],
)
@pytest.mark.parametrize("settings", [[SamplingParams()] * 5, SETTINGS], ids=["greedy", "mixed"])
def test_a_poisoned_row_fails_alone(value, fault, settings):
    logits = torch.randn(len(settings), 3, VOCAB)
    tree = DraftTree((5, 6, 7), (-1, 0, 0), (0.0,) * 3)
    batch = to_tree_batch([tree] * len(settings), range(len(settings)), [2] * len(settings), "cpu")
    rule = {"acceptance": AcceptanceRule.MATCH}
    made = [sequence(params, **rule) for params in settings]
    for params, one in zip(settings, made, strict=True):
        one.seed = params.seed or 0
    rows = SamplingRows.build(made, [[3, 5]] * len(settings), "cpu")
    right = sample_tree(batch, logits, rows)
    poisoned = logits.clone()
    poisoned[2, 0, 17] = value
    result = sample_tree(batch, poisoned, rows)
    assert result.fault.tolist() == [fault if i == 2 else 0 for i in range(len(settings))]
    assert result.token_ids[2].tolist() == [-1] * 3
    assert int(result.num_tokens[2]) == 0
    assert int(result.acceptance.accepted[2]) >= 0
    others = [i for i in range(len(settings)) if i != 2]
    assert torch.equal(result.token_ids[others], right.token_ids[others])
    assert fault in FAULT_REASONS


def test_poison_in_a_node_off_the_path_does_not_matter():
    """DESIGN 1: what is in a sibling or behind the tree reaches no other node."""
    tree = DraftTree((5, 6, 7), (-1, 0, 0), (0.0,) * 3)
    batch = to_tree_batch([tree], [0], [2], "cpu", pad_nodes_to=5)
    logits = torch.randn(1, 5, VOCAB)
    logits[0, 0, 7] = 50.0
    logits[0, 1] = torch.nan
    logits[0, 3:] = torch.nan
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=1, top_p=0.9)):
        result = sample_tree(batch, logits, rows_of([params]))
        assert result.fault.tolist() == [0]
        assert result.acceptance.path[0, :2].tolist() == [0, 2]
        logits[0, 2] = torch.nan
        assert sample_tree(batch, logits, rows_of([params])).fault.tolist() == [Fault.NOT_FINITE]
        logits[0, 2] = 0.0


def test_nothing_left_to_choose_is_said():
    everything = SamplingParams(temperature=1.0, bad_token_ids=list(range(VOCAB)))
    greedy = SamplingParams(logit_bias={token: -INF for token in range(VOCAB)})
    result = sample(torch.randn(3, VOCAB), rows_of([everything, SamplingParams(), greedy]))
    assert result.fault.tolist() == [Fault.NOTHING_ALLOWED, Fault.NONE, Fault.NOTHING_ALLOWED]
    assert result.token_ids[0] == result.token_ids[2] == -1
    assert "logit_bias" in FAULT_REASONS[Fault.NOTHING_ALLOWED]


def test_settings_that_overflow_are_not_the_models_fault():
    """Metrics count logits that are not finite as an alarm; a client must not ring it."""
    settings = [{"repetition_penalty": 1e-45}, {"logit_bias": {3: 3e38, 4: 3e38}}, {}]
    rows = rows_of([SamplingParams(**each) for each in settings])
    logits = torch.randn(3, VOCAB)
    logits[0, 5], logits[1, 3] = 1.0, 3e38
    assert sample(logits, rows).fault.tolist() == [Fault.SETTINGS, Fault.SETTINGS, Fault.NONE]
    logits[0, 0] = torch.nan
    assert sample(logits, rows).fault.tolist()[0] == Fault.NOT_FINITE
    assert "penalties" in FAULT_REASONS[Fault.SETTINGS]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1e30, "top_p": 1e-12},
        {"top_k": 1},
        {"temperature": 1e-30, "top_k": 2**70},
        {"temperature": 0, "top_p": 0.5, "top_k": 7},
        {"top_p": 0.0},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_settings_at_their_limits_are_greedy(settings):
    logits = torch.randn(64, VOCAB) * 100
    rows = rows_of([SamplingParams(seed=s, **settings) for s in range(64)])
    assert torch.equal(sample(logits, rows).token_ids, logits.argmax(-1))


def test_large_temperature_is_uniform_and_large_logits_are_finite():
    logits = torch.randn(400, VOCAB) * 1e30
    rows = rows_of([SamplingParams(temperature=1e38, seed=s) for s in range(400)])
    result = sample(logits, rows)
    assert not bool(result.fault.any())
    assert len(set(result.token_ids.tolist())) > VOCAB // 2


def test_equal_tokens_stay_together():
    """What a filter keeps does not hang on how a sort orders equals."""
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = 1.0
    kept = score(logits, rows_of([SamplingParams(top_k=2, seed=0)])).random[0] > -INF
    assert kept.tolist() == [True] * 3 + [False] * (VOCAB - 3)
    # The model's logits, in any float type, stay as they were.
    half = torch.randn(2, VOCAB).bfloat16()
    before = half.clone()
    rows = rows_of([SETTINGS[5], SETTINGS[7]])
    assert adjust(half, rows).dtype == torch.float32
    sample(half, rows)
    assert torch.equal(half, before)


def test_log_probabilities():
    table = torch.randn(VOCAB, VOCAB)
    wanted = [
        SamplingParams(temperature=0.3, seed=1, logprobs=2),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0.3, seed=3, logprobs=5, logprobs_mode="processed", top_k=3),
        SamplingParams(temperature=0.3, seed=4),
        SamplingParams(logprobs=1, logprobs_mode="processed"),
    ]
    best = table.argmax(-1)
    tokens = (5, int(best[5]), int(best[best[5]]))
    tree = DraftTree(tokens, (-1, 0, 1), (0.0,) * 3)
    batch = to_tree_batch([tree] * 5, [4, 2, 0, 1, 3], [2] * 5, "cpu")
    result = sample_tree(batch, table[batch.token_ids], rows_of(wanted))
    emitted = [
        row[:count].tolist()
        for row, count in zip(result.token_ids, result.num_tokens.tolist(), strict=True)
    ]
    host = result.logprobs.to_host(emitted, wanted)
    assert [len(row) for row in host] == [len(e) if i != 3 else 0 for i, e in enumerate(emitted)]
    assert len(emitted[1]) == 3
    for row in (0, 1, 2, 4):
        before = 5
        for token, entry in zip(emitted[row], host[row], strict=True):
            values = table[before].log_softmax(-1)
            if row == 2:
                values = torch.tensor(law(table[before], wanted[2])).log()
            if row == 4:
                values = torch.full((VOCAB,), -INF)
                values[token] = 0.0
            assert next(iter(entry)) == token
            assert entry[token].logprob == pytest.approx(float(values[token]), abs=1e-4)
            assert entry[token].rank == 1 + int((values > values[token]).sum())
            asked = wanted[row].logprobs
            for place, other in enumerate(values.topk(min(asked, 3)).indices.tolist(), start=1):
                if values[other] > -INF:
                    assert entry[other].rank == place
            assert len(entry) in (max(asked, 1), asked + 1)
            before = token


def test_padding_is_never_sampled():
    """CASES 6, 7."""
    tree = DraftTree((5,), (-1,), (0.0,))
    batch = to_tree_batch([tree, tree], [2, -1], [0, 0], "cpu", pad_nodes_to=4, pad_batch_to=3)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3)):
        made = [sequence(params), sequence(params)]
        rows = SamplingRows.build(made, [[5]] * 2, "cpu", pad_to=3)
        result = sample_tree(batch, torch.zeros(3, 4, VOCAB), rows, max_path=2)
        assert result.acceptance.accepted.tolist() == [0, -1, -1]
        assert result.acceptance.num_accepted.tolist() == [1, 0, 0]
        assert result.acceptance.path.tolist() == [[0, -1], [-1, -1], [-1, -1]]
        assert result.num_tokens.tolist() == [1, 0, 0]
        assert result.acceptance.bonus_ids.tolist() == [int(result.token_ids[0, 0]), -1, -1]
        assert result.fault.tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(10))
def test_the_walk_equals_greedy_acceptance(seed):
    """A greedy row beside a random one takes the path of the greedy operator."""
    chooser = random.Random(seed)
    trees = []
    for _ in range(6):
        parents, tokens = [-1], [0]
        for node in range(1, chooser.randrange(2, 16)):
            parent = chooser.randrange(node)
            used = {tokens[n] for n in range(node) if parents[n] == parent}
            if len(used) < 3:
                parents.append(parent if parent < len(tokens) else 0)
                tokens.append(chooser.choice([t for t in range(3) if t not in used]))
            else:
                break
        trees.append(DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens)))
    batch = to_tree_batch(trees, [7, 0, 3, 5, 1, -1], [4] * 6, "cpu", pad_nodes_to=18)
    logits = torch.randn(6, 18, VOCAB)
    logits[..., :3] += 5.0
    greedy = [SamplingParams()] * 6
    mixed = [*greedy[:5], SamplingParams(temperature=1.0, seed=1)]
    limit = chooser.choice([18, 3])
    expected = sample_tree(batch, logits, rows_of(greedy), max_path=limit)
    result = sample_tree(batch, logits, rows_of(mixed), max_path=limit)
    for name in ("accepted", "num_accepted", "path", "bonus_ids"):
        assert torch.equal(getattr(result.acceptance, name), getattr(expected.acceptance, name))
    assert torch.equal(result.token_ids, expected.token_ids)
    assert torch.equal(result.num_tokens, expected.num_tokens)


def test_sampling_does_not_wait_for_the_device():
    """CASES 28: on the meta device nothing can be read back."""
    rows = rows_of(SETTINGS)
    meta = replace(
        rows,
        **{
            name: value.to("meta")
            for name, value in vars(rows).items()
            if isinstance(value, torch.Tensor)
        },
    )
    tree = DraftTree((5, 6, 7), (-1, 0, 1), (0.0,) * 3)
    batch = to_tree_batch([tree] * len(SETTINGS), range(len(SETTINGS)), [2] * len(SETTINGS), "cpu")
    names = ("token_ids", "parents", "num_nodes", "slot", "context_lens")
    batch = replace(batch, **{name: getattr(batch, name).to("meta") for name in names})
    result = sample_tree(batch, torch.randn(len(SETTINGS), 3, VOCAB, device="meta"), meta)
    assert result.token_ids.shape == (len(SETTINGS), 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias has token id 40, expected ids below"),
        ({"bad_token_ids": [3, 99]}, "bad_token_ids has token id 99"),
        ({"embedding_bias": torch.zeros(3)}, r"embedding_bias must be a tensor \[40\], got \[3\]"),
        ({"embedding_bias": torch.full((VOCAB,), torch.nan)}, "no NaN"),
    ],
)
def test_settings_that_the_model_does_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        sequence(SamplingParams(**settings))


def test_stop_ids_beyond_the_vocabulary_are_no_harm():
    params = SamplingParams(min_tokens=4, stop_token_ids=[VOCAB + 5])
    assert sample(torch.randn(1, VOCAB), rows_of([params])).fault.tolist() == [0]


def test_tensors_that_do_not_fit_are_refused():
    rows = rows_of(SETTINGS[:2])
    with pytest.raises(ValueError, match=r"logits must be a float tensor \[2, 40\]"):
        sample(torch.zeros(2, VOCAB + 1), rows)
    with pytest.raises(ValueError, match="logits are on meta, the sampling rows on cpu"):
        sample(torch.zeros(2, VOCAB, device="meta"), rows)
    with pytest.raises(ValueError, match="expected an output for each sequence"):
        SamplingRows.build([sequence(SETTINGS[0])], [], "cpu")
    tree = DraftTree((5,), (-1,), (0.0,))
    batch = to_tree_batch([tree], [0], [0], "cpu")
    with pytest.raises(ValueError, match="the tree has 1 rows, the sampling rows 2"):
        sample_tree(batch, torch.zeros(1, 1, VOCAB), rows)
    with pytest.raises(ValueError, match="max_path must be >= 1"):
        sample_tree(batch, torch.zeros(1, 1, VOCAB), rows_of(SETTINGS[:1]), max_path=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": INF}, "temperature must be a number >= 0, got inf"),
        ({"top_p": 1.1}, r"top_p must be a number in \[0, 1\], got 1.1"),
        ({"min_p": -0.1}, r"min_p must be a number in \[0, 1\]"),
        ({"temperature": 1e39}, "temperature must be a number that float32 can hold"),
        ({"presence_penalty": 10**400}, "presence_penalty must be a number that float32 can hold"),
        ({"logit_bias": {1: 1e39}}, "logit_bias of token 1 must be a number that float32 can hold"),
        ({"top_k": -1}, "top_k must be an integer >= 0"),
        ({"seed": 2**64}, "seed must be below"),
        ({"seed": -1}, "seed must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be a number >= 0"),
        ({"presence_penalty": torch.nan}, "presence_penalty must be a number that is finite"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be"),
        ({"prompt_ignore_length": -1}, "prompt_ignore_length must be"),
        ({"logit_bias": [1.0]}, "logit_bias must be a dict"),
        ({"logit_bias": {1: torch.nan}}, "logit_bias of token 1 must be"),
        ({"logit_bias": {1: INF}}, "logit_bias of token 1 must be"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias must be an integer >= 0"),
        ({"bad_token_ids": 4}, "bad_token_ids must be a list"),
        ({"bad_token_ids": [-4]}, "bad_token_ids must be an integer"),
        ({"embedding_bias": [0.0]}, "embedding_bias must be a tensor"),
        ({"logprobs": -1}, "logprobs must be"),
        ({"logprobs": True}, "logprobs must be"),
        ({"logprobs_mode": "log"}, "logprobs_mode must be 'raw' or 'processed'"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.gpu
def test_a_gpu_draws_the_tokens_of_the_cpu():
    """The same numbers on every device; rounding may turn a draw only where two are as good."""
    made = [replace(SETTINGS[i % len(SETTINGS)], seed=i) for i in range(220)]
    logits = torch.randn(len(made), VOCAB) * 2
    expected = sample(logits, rows_of(made))
    rows = SamplingRows.build([sequence(p) for p in made], [[5, 3]] * len(made), "cuda")
    result = sample(logits.cuda(), rows)
    assert torch.equal(result.fault.cpu(), expected.fault)
    assert int((result.token_ids.cpu() != expected.token_ids).sum()) <= 1
