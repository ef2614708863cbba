"""Acceptance length of the shipped model on held-out prompts, through the public API.

    python benchmarks/acceptance.py [--max-tokens 128] [--output benchmarks/results/acceptance.json]

Greedy, float32. Acceptance length is tokens per verification step, bonus included, over all steps
of all prompts. Also checks that every tree gives the tokens of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from pathlib import Path

import torch

from trtllm_treewy import LLM, AcceptanceStats, SamplingParams, __version__

ROOT = Path(__file__).resolve().parent.parent


def dynamic(nodes: int, levels: int) -> dict:
    """Trees of so many nodes, grown where the drafter is sure."""
    return {
        "use_dynamic_tree": True,
        "max_total_draft_tokens": nodes - 1,
        "max_draft_len": levels,
        "dynamic_tree_max_topK": 4,
    }


# Of 4, 15 and 40 nodes, the root counted.
TREES: dict[str, dict | None] = {
    "plain": None,
    "chain of 3": {"draft_tree_widths": [1, 1, 1]},
    "dynamic, 4 nodes": dynamic(4, 3),
    "chain of 14": {"draft_tree_widths": [1] * 14},
    "(2,2,2)": {"draft_tree_widths": [2, 2, 2]},
    "dynamic, 15 nodes": dynamic(15, 5),
    "(3,3,3)": {"draft_tree_widths": [3, 3, 3]},
    "dynamic, 40 nodes": dynamic(40, 8),
}


def measure(model: Path, prompts: list[str], config: dict | None, max_tokens: int) -> dict:
    """Tokens and statistics of one tree over all prompts."""
    with LLM(
        model,
        dtype="float32",
        speculative_config=config,
        max_batch_size=8,
        max_seq_len=max_tokens + 256,
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    stats = sum((o.speculation for o in outputs if o.speculation), AcceptanceStats())
    return {
        "token_ids": [output.outputs[0].token_ids for output in outputs],
        **stats.to_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "examples/treewy-tiny")
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples/training/heldout.jsonl")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][: args.limit]

    results = {}
    for name, config in TREES.items():
        results[name] = measure(args.model, prompts, config, args.max_tokens)
        length = results[name]["acceptance_length"]
        print(f"{name:20} {length:6.3f} tokens a step", flush=True)
    plain = results["plain"]["token_ids"]
    for result in results.values():
        result["same_tokens_as_plain"] = result.pop("token_ids") == plain
    record = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} CPU threads",
        "versions": {"trtllm-treewy": __version__, "torch": torch.__version__},
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "results": results,
    }
    print(json.dumps(record, indent=2))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
