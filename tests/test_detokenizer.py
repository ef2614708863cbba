"""Incremental text: characters of several tokens, special tokens, stop strings anywhere."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from trtllm_treewy.runtime.detokenizer import Detokenizer


class ByteTokenizer:
    """One token a byte; ids from 256 are special. Counts the tokens that it was asked for."""

    decoded = 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.decoded += len(token_ids)
        data = bytearray()
        for token in token_ids:
            if token < 256:
                data.append(token)
            elif not skip_special_tokens:
                data += b"<special>"
        return data.decode("utf-8", errors="replace")


def run(token_ids, step, **settings):
    """Text after every `step` tokens."""
    detokenizer = Detokenizer(ByteTokenizer(), **settings)
    texts = []
    for start in range(0, len(token_ids), step):
        chunk = token_ids[start : start + step]
        detokenizer.add(chunk, last=start + step >= len(token_ids))
        texts.append(detokenizer.text)
    return detokenizer, texts


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_characters_are_never_cut(step):
    text = "naïve café — 日本語 🎄 end"
    _, texts = run(list(text.encode()), step)
    assert texts[-1] == text
    for earlier, later in pairwise(texts):
        assert later.startswith(earlier)
        assert "�" not in earlier


def test_unfinished_character_at_the_end():
    _, texts = run(list("é".encode())[:1], 1)
    assert texts[-1] == "�"


def test_invalid_bytes_do_not_hold_the_text_for_ever():
    detokenizer, _ = run([0x80, 0x80, *b"abc"], 1)
    assert detokenizer.text.endswith("abc")


@pytest.mark.parametrize("step", [1, 2, 5])
def test_special_tokens(step):
    ids = [*b"a", 300, *b"b"]
    assert run(ids, step)[1][-1] == "ab"
    assert run(ids, step, skip_special_tokens=False)[1][-1] == "a<special>b"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 50])
def test_stop_string(step, include):
    """The text never shows a part of a stop string, and ends at its first character."""
    ids = list(b"one STO two STOP three")
    detokenizer, texts = run(ids, step, stop=["STOP", "never"], include_stop=include)
    expected = "one STO two STOP" if include else "one STO two "
    assert texts[-1] == expected
    assert detokenizer.stopped_by == "STOP"
    assert detokenizer.num_tokens == len(b"one STO two STOP")
    for text in texts:
        assert expected.startswith(text)


def test_the_earliest_stop_string_wins():
    detokenizer, _ = run(list(b"abcdef"), 6, stop=["def", "bcd"])
    assert (detokenizer.text, detokenizer.stopped_by) == ("a", "bcd")


def test_held_back_text_comes_at_the_end():
    _, texts = run(list(b"ends in ST"), 1, stop=["STOP"])
    assert texts[-2] == "ends in "
    assert texts[-1] == "ends in ST"


def random_bytes(generator, count):
    """Text, bytes of parts of characters, bytes that are none, and special tokens, in runs."""
    ids = []
    while len(ids) < count:
        kind, length = generator.randrange(6), generator.choice([1, 2, 3, 40])
        characters = [generator.choice("aé日🎄\ufffd") for _ in range(length)]
        whole = list("".join(characters).encode())
        runs = [
            whole,
            whole[generator.randrange(len(whole)) :],
            [generator.randrange(0x80, 0x100) for _ in range(length)],
            [generator.choice([0x80, 0xE6, 0xF0, 0x9F]) for _ in range(length)],
            [300] * length,
            [token for byte in whole for token in (byte, 300)],
        ]
        ids += runs[kind]
    return ids[:count]


def in_pieces(generator, detokenizer, ids):
    """Takes `ids` in random pieces; the text only grows, and is looked at after each."""
    seen, start = "", 0
    while start < len(ids):
        step = generator.choice([1, 1, 2, 3, 30])
        detokenizer.add(ids[start : start + step])
        assert detokenizer.text.startswith(seen)
        seen, start = detokenizer.text, start + step
    detokenizer.add([], last=True)
    assert detokenizer.text.startswith(seen)
    assert detokenizer.num_tokens == len(ids)
    return detokenizer.text


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("skip", [True, False])
def test_any_bytes_in_any_pieces_are_the_text_of_the_whole(seed, skip):
    generator = random.Random(seed)
    tokenizer = ByteTokenizer()
    ids = random_bytes(generator, generator.choice([5, 60, 400]))
    expected = tokenizer.decode(ids, skip)
    for stop in ([], ["never"]):
        found = Detokenizer(tokenizer, skip_special_tokens=skip, stop=stop)
        assert in_pieces(generator, found, ids) == expected


@pytest.mark.parametrize("seed", range(10))
def test_any_tokens_in_any_pieces_are_the_text_of_the_whole(seed, shipped_model):
    tokenizer = AutoTokenizer.from_pretrained(shipped_model)
    generator = random.Random(seed)
    bytes_alone = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    assert bytes_alone
    ids = [
        token
        for _ in range(60)
        for token in generator.choices(
            generator.choice([bytes_alone, range(len(tokenizer)), tokenizer.all_special_ids]),
            k=generator.choice([1, 2, 3, 30]),
        )
    ]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert in_pieces(generator, Detokenizer(tokenizer), ids) == expected


@pytest.mark.parametrize("piece", [1, 3, 10_000])
@pytest.mark.parametrize(
    "ids", [[0x80], [0xF0], [0xF0, 0x9F], [0xE6, 300], [300], [0xEF, 0xBF, 0xBD], [0x61]]
)
def test_the_work_is_linear_in_the_tokens(ids, piece):
    """Of each kind alone, and behind the beginning of a character."""
    for first in ([], [0xF0]):
        run = (first + ids * 3000)[:3000]
        tokenizer = ByteTokenizer()
        detokenizer = Detokenizer(tokenizer)
        for start in range(0, len(run), piece):
            detokenizer.add(run[start : start + piece], last=start + piece >= len(run))
        assert tokenizer.decoded < 60 * len(run)
        assert detokenizer.text == ByteTokenizer().decode(run)


def test_a_stop_string_in_bytes_that_are_no_text():
    """It is met where it stands, though what follows is never a whole character."""
    ids = [*b"one", *[0x80] * 50, *b"STOP", *[0x80] * 50]
    expected = "one" + "\ufffd" * 50
    for piece in (1, 7, 200):
        detokenizer, texts = run(ids, piece, stop=["STOP", "\ufffd" * 60])
        assert texts[-1] == expected
        assert detokenizer.stopped_by == "STOP"


def test_shipped_tokenizer_token_by_token(shipped_model):
    tokenizer = AutoTokenizer.from_pretrained(shipped_model)
    text = "The naïve function returns a list, e.g. [1, 2] — 日本語."
    ids = tokenizer.encode(text)
    generator = random.Random(1)
    detokenizer, start = Detokenizer(tokenizer), 0
    while start < len(ids):
        step = generator.randint(1, 4)
        detokenizer.add(ids[start : start + step])
        start += step
    detokenizer.add([], last=True)
    assert detokenizer.text == tokenizer.decode(ids)
