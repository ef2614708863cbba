"""Measure the acceptance length of the predictor's drafts on held-out prompts.

    python acceptance.py --model ../treewy-tiny --prompts heldout.jsonl

Decoding is greedy and in float32. One verification step accepts a path of the draft tree that
agrees with the trunk and adds one token of the trunk's own, so its length is the path's plus one.
An accepted path is always a piece of the trunk's greedy continuation: a static tree that holds
the `w` best tokens of each node at depth `d` gets one level deeper exactly when the next
greedy token is among the `w` best of the predictor recursed along that continuation. So the
continuation is written once by transformers' `generate` and the trees are scored against it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from model import DEPTHS, MultiTokenPredictor, Ops, mtp_outputs, trunk_hidden
from torch import Tensor
from train import load_model
from transformers import AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM

TREES = ((1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 2, 1))


def continuation(model: Qwen3_5ForCausalLM, prompt: Tensor, count: int) -> Tensor:
    """The prompt and its greedy continuation by `count` tokens, or up to the end of text."""
    config = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=0,
    )
    ids = prompt[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0]


def draft_ranks(model: Qwen3_5ForCausalLM, mtp: MultiTokenPredictor, ids: Tensor) -> Tensor:
    """`[DEPTHS, T - DEPTHS]`: rank that depth `d` of base `t` gave to token `t + d + 1`."""
    ops = Ops(compiled=False)
    hidden = trunk_hidden(ops, model, ids[None])
    ranks = []
    for depth, out in enumerate(mtp_outputs(ops, model, mtp, ids[None], hidden), start=1):
        logits = F.linear(out[0], model.model.embed_tokens.weight)
        target = ids[depth + 1 :][: len(logits)]
        logits = logits[: len(target)]
        score = logits.gather(-1, target[:, None])
        rank = (logits > score).sum(-1)
        ranks.append(F.pad(rank, (0, out.shape[1] - len(rank)), value=len(logits[0])))
    return torch.stack(ranks)


def step_lengths(ranks: Tensor, widths: tuple[int, ...], base: int, end: int) -> list[int]:
    """Tokens gained by each verification step from `base` until position `end` is written."""
    lengths = []
    while base + 1 < end:
        accepted = 0
        while accepted < len(widths) and ranks[accepted, base] < widths[accepted]:
            accepted += 1
        lengths.append(accepted + 1)
        base += accepted + 1
    return lengths


def distinct(ids: list[int], order: int) -> float:
    """Share of distinct n-grams."""
    grams = [tuple(ids[i : i + order]) for i in range(len(ids) - order + 1)]
    return len(set(grams)) / max(1, len(grams))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=None, help="use the first prompts only")
    parser.add_argument("--samples", type=int, default=3, help="continuations to print")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model, mtp = load_model(args.model, torch.device(args.device))
    prompts = [json.loads(line)["prompt"] for line in args.prompts.open()][: args.limit]
    lengths: dict[tuple[int, ...], list[int]] = {tree: [] for tree in TREES}
    variety: list[float] = []
    looping = 0
    for index, prompt in enumerate(prompts):
        start = torch.tensor(tokenizer(prompt).input_ids, device=args.device)
        ids = continuation(model, start, args.new_tokens + DEPTHS + 1)
        end = min(len(ids), len(start) + args.new_tokens)
        if end < len(start) + args.new_tokens:  # ended early: room for the draft past the end
            ids = F.pad(ids, (0, DEPTHS + 1))
        ranks = draft_ranks(model, mtp, ids).cpu()
        for tree in TREES:
            lengths[tree] += step_lengths(ranks, tree, len(start) - 1, end - 1)
        written = ids[len(start) : end].tolist()
        variety.append(distinct(written, 4))
        looping += distinct(written[len(written) // 2 :], 4) < 0.5
        if index < args.samples:
            print(f"--- {prompt!r}\n+++ {tokenizer.decode(written)!r}")
    for tree in TREES:
        mean = sum(lengths[tree]) / len(lengths[tree])
        print(f"tree {tree}: {mean:.3f} tokens per step over {len(lengths[tree])} steps")
    print(f"distinct 4-grams: {sum(variety) / len(variety):.3f}")
    print(f"second half mostly repetition: {looping} of {len(prompts)} continuations")


if __name__ == "__main__":
    main()
