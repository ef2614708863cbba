"""The prompts of `generate`: from arguments, files and standard input; as chat messages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..llm import LLM


def model_and_prompts(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Model directory and prompts, as they were given; refuses what is empty or no text."""
    words = list(args.words)
    model = args.model
    if model is None:
        if not words:
            args.usage_error("no model given")
        model = words.pop(0)
    prompts = words + args.prompt + [_read_prompt(name) for name in args.prompt_file]
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            args.usage_error(
                "no prompt given: as an argument, with --prompt or --prompt-file, or piped in"
            )
        prompts = [_read_prompt("-")]
    if not all(prompts):
        raise ValueError("the prompt is empty")
    for number, prompt in enumerate(prompts, start=1):
        _expect_text(f"prompt {number}", prompt)
    _expect_text("argument --system", args.system or "")
    for text in args.stop or ():
        _expect_text("argument --stop", text)
    if args.system is not None and not args.chat:
        args.usage_error("argument --system: needs --chat")
    return model, prompts


def _expect_text(what: str, text: str) -> None:
    """Refuses an argument whose bytes are no text: Python passes them on as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not text that can be decoded: {text!r}") from None


def _read_prompt(name: str) -> str:
    """Text of a file, or of standard input for "-", without the newline that ends it."""
    try:
        if name != "-":
            text = Path(name).read_text(encoding="utf-8")
        elif sys.stdin is None:
            raise ValueError("there is no standard input to read the prompt from")
        else:
            text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        source = "standard input" if name == "-" else name
        raise ValueError(f"the prompt in {source} is not UTF-8 text: {error}") from None
    return text.removesuffix("\n")


def chat_prompt(llm: LLM, system: str | None, prompt: str) -> str:
    """The prompt as the checkpoint's chat template writes it."""
    from jinja2 import TemplateError

    if not getattr(llm.tokenizer, "chat_template", None):
        raise ValueError("--chat: the model's tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text: str = llm.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"--chat: the model's chat template refuses this: {error}") from None
    return text
