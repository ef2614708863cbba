"""From the flags of the drafts to the speculation settings of an `LLM`."""

from __future__ import annotations

import argparse
from typing import Any

from ..llmapi import MTPDecodingConfig
from .engine_arguments import DEFAULT_DRAFT_TREE_WIDTHS
from .streams import write_err


def speculation_of(args: argparse.Namespace, model: str) -> MTPDecodingConfig:
    """What the flags ask for; without any, a tree where the model has an MTP module."""
    shape: dict[str, Any] = {}
    if args.no_speculation:
        shape["draft_tree_widths"] = ()
    elif args.draft_tree_widths is not None:
        shape["draft_tree_widths"] = args.draft_tree_widths
    elif args.draft_tree_parents is not None:
        shape["draft_tree_parents"] = args.draft_tree_parents
    elif args.dynamic_tree is not None:
        shape["use_dynamic_tree"] = True
        shape["max_total_draft_tokens"] = args.dynamic_tree
    elif args.max_draft_len is None and args.tree_policy not in ("dynamic", "auto"):
        drafts = _drafts_by_default(model, args.quiet)
        shape["draft_tree_widths"] = DEFAULT_DRAFT_TREE_WIDTHS if drafts else ()
    if args.max_draft_len is not None:
        shape["max_draft_len"] = args.max_draft_len
    if args.dynamic_tree_top_k is not None:
        shape["dynamic_tree_max_topK"] = args.dynamic_tree_top_k
    return MTPDecodingConfig(
        tree_policy=args.tree_policy,
        acceptance_rule=args.acceptance_rule,
        state_commit=args.state_commit,
        stash=args.stash,
        **shape,
    )


def _drafts_by_default(model: str, quiet: bool) -> bool:
    from ..config import ModelConfig

    if ModelConfig.from_pretrained(model).mtp_num_hidden_layers:
        return True
    if not quiet:
        write_err(f"[{model} has no MTP module, decoding without drafts]\n")
    return False
