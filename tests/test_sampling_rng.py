"""Counter-based random numbers: published answers, laws, and names that all count."""

from __future__ import annotations

import pytest
import torch

from trtllm_treewy.runtime.sampling.counter_rng import (
    Purpose,
    gumbel,
    philox,
    random_word,
    seed_words,
    uniform,
)

MASK64 = 2**64 - 1


# Random123's kat_vectors for philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
        ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe0994fdcceb5001e42024126ea1",
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, answer):
    words = [
        [torch.tensor(int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
        for text in (counter, key, answer)
    ]
    assert philox(tuple(words[0]), tuple(words[1])) == tuple(words[2])


def splitmix(state: int, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        numbers.append(z ^ (z >> 31))
    return numbers


def test_tokens_get_the_numbers_of_splitmix():
    """The noise is the double-precision value of Python's own integers."""
    for state in (0, 5, 2**63, MASK64 - 3, 0x123456789ABCDEF0):
        signed = state - 2**64 if state >= 2**63 else state
        unit = torch.tensor([(n % 2**63) / 2**63 for n in splitmix(state, 50)], dtype=torch.float64)
        expected = -torch.log(-torch.log1p(-unit))
        noise = gumbel(torch.tensor(signed), torch.arange(50))
        torch.testing.assert_close(noise.double(), expected, rtol=1e-5, atol=1e-5)


def test_noise_of_a_token_does_not_depend_on_the_others():
    word = torch.tensor([3, -8])
    noise = gumbel(word, torch.arange(1000))
    some = torch.tensor([[7, 999, 0], [5, 6, 7]])
    assert torch.equal(gumbel(word, some), noise.gather(1, some))
    assert bool(noise.isfinite().all())


def names(count: int, purpose: Purpose = Purpose.TARGET, index: int = 0, sequence: int = 0):
    seed = torch.tensor([seed_words(s, sequence) for s in range(count)])
    return random_word(seed, torch.arange(count) % 7, purpose, index)


def test_uniform_numbers():
    numbers = uniform(names(20000))
    counts = torch.bincount((numbers * 50).long(), minlength=50).double()
    statistic = ((counts - 400) ** 2 / 400).sum()
    assert float(torch.special.gammaincc(torch.tensor(24.5).double(), statistic / 2)) > 1e-4
    assert 0 <= float(numbers.min()) < float(numbers.max()) < 1


def test_gumbel_draws_follow_the_probabilities():
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    draws = (p.log() + gumbel(names(40000), torch.arange(5))).argmax(-1)
    expected = p.double() * 40000
    statistic = ((torch.bincount(draws, minlength=5) - expected) ** 2 / expected).sum()
    assert float(torch.special.gammaincc(torch.tensor(2.0).double(), statistic / 2)) > 1e-4


def test_every_part_of_the_name_counts():
    """Seed halves, sequence, position, purpose and index: all words are distinct, none related."""
    words = [
        names(500),
        names(500, Purpose.ACCEPT),
        names(500, Purpose.DRAFT),
        names(500, Purpose.ACCEPT, 1),
        names(500, sequence=1),
        random_word(torch.tensor([seed_words(7 << 32)] * 500), torch.arange(500), Purpose.TARGET),
    ]
    together = torch.cat(words)
    assert len(set(together.tolist())) == len(together)
    for a in range(len(words)):
        for b in range(a):
            pair = torch.stack([uniform(words[a]), uniform(words[b])])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.2


def test_torch_generators_are_neither_read_nor_moved():
    state = torch.get_rng_state()
    first = names(10)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(names(10), first)
