"""The checkpoint's tokenizer and end tokens, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import ModelConfig, read_json

NO_LIMIT = 1 << 60


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
        # Lengths are checked here, by the engine's limit; transformers would warn of its own.
        return AutoTokenizer.from_pretrained(
            str(directory),
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=NO_LIMIT,
        )
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
    raw = read_json(path).get("eos_token_id")
    if raw is None:
        return config.eos_token_id
    ids = tuple(raw) if isinstance(raw, list) else (raw,)
    for token in ids:
        is_int = isinstance(token, int) and not isinstance(token, bool)
        if not is_int or not 0 <= token < config.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id {token!r} is not an id below vocab_size="
                f"{config.vocab_size}; ids start at 0"
            )
    return ids
