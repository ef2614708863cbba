"""The checkpoint's tokenizer and end tokens, through transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import ModelConfig


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a Hugging Face directory.

    Raises:
        ValueError: the directory has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    if not any((directory / name).is_file() for name in files):
        raise ValueError(
            f"{directory}: expected a tokenizer (tokenizer.json), found none; pass tokenizer=, or "
            "skip_tokenizer_init=True to work with token ids"
        )
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise ValueError(f"{directory}: the tokenizer does not load: {error}") from error


def end_token_ids(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, else the model config's.

    Raises:
        ValueError: generation_config.json cannot be read, or its ids are no ids of this model.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return config.eos_token_id
    try:
        raw = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a JSON object, got {error}") from error
    if raw is None:
        return config.eos_token_id
    ids = tuple(raw) if isinstance(raw, list) else (raw,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token >= config.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id {token!r} is not an id below vocab_size={config.vocab_size}"
            )
    return ids
