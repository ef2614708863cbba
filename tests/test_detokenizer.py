"""Incremental text: characters of several tokens, special tokens, stop strings anywhere."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from trtllm_treewy.runtime.detokenizer import Detokenizer


class ByteTokenizer:
    """One token a byte; ids from 256 are special."""

    def decode(self, token_ids, skip_special_tokens=True):
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
