"""Double of the command: its parser, and the order in which it does things."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

import torch

from ..builder import BuildConfig, build
from ..models import MODEL_MAP
from ..models.modeling_utils import PretrainedConfig
from ..plugin import PluginConfig
from ..plugin.plugin import add_plugin_argument


def parse_arguments():
    parser = argparse.ArgumentParser(prog="trtllm-build")
    for name, default in (
        ("checkpoint_dir", None),
        ("model_config", None),
        ("model_cls_file", None),
        ("model_cls_name", None),
        ("output_dir", "engine_outputs"),
        ("logits_dtype", None),
        ("output_timing_cache", "model.cache"),
        ("log_level", "info"),
    ):
        parser.add_argument(f"--{name}", type=str, default=default)
    for name, default in (
        ("max_batch_size", 2048),
        ("max_input_len", 1024),
        ("max_seq_len", None),
        ("max_beam_width", 1),
        ("max_num_tokens", 8192),
        ("opt_num_tokens", None),
        ("max_prompt_embedding_table_size", 0),
        ("max_draft_len", 0),
        ("workers", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv_cache_type", default=argparse.SUPPRESS)
    modes = ["draft_tokens_external", "lookahead_decoding", "medusa", "eagle"]
    parser.add_argument("--speculative_decoding_mode", default=None, choices=modes)
    for name in ("gather_context_logits", "dry_run", "visualize_network", "strip_plan"):
        parser.add_argument(f"--{name}", action="store_true")
    add_plugin_argument(parser)
    return parser


def main():
    args = parse_arguments().parse_args()
    if args.gather_context_logits and args.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not support with draft len > 0. ")
    os.makedirs(args.output_dir, exist_ok=True)
    model_cls = None
    if args.model_cls_file is not None:
        spec = spec_from_file_location("models", args.model_cls_file)
        module = sys.modules["models"] = module_from_spec(spec)
        spec.loader.exec_module(module)
        model_cls = getattr(module, args.model_cls_name)
    workers = min(torch.cuda.device_count(), args.workers)
    assert workers == 1, "a pool of no workers, or of spawned ones"
    plugin_config = PluginConfig.from_arguments(args)
    plugin_config.validate()
    place = args.checkpoint_dir if args.checkpoint_dir is not None else args.model_config
    ckpt_dir = None if place.lower().endswith(".json") else place
    model_config = PretrainedConfig.from_json_file(
        place if ckpt_dir is None else os.path.join(place, "config.json")
    )
    build_config = BuildConfig(
        max_input_len=args.max_input_len,
        max_seq_len=args.max_seq_len,
        max_batch_size=args.max_batch_size,
        max_beam_width=args.max_beam_width,
        max_num_tokens=args.max_num_tokens,
        opt_num_tokens=args.opt_num_tokens,
        max_prompt_embedding_table_size=args.max_prompt_embedding_table_size,
        kv_cache_type=getattr(args, "kv_cache_type", None),
        gather_context_logits=args.gather_context_logits,
        max_draft_len=args.max_draft_len,
        dry_run=args.dry_run,
        plugin_config=plugin_config,
    )
    if args.logits_dtype is not None:
        model_config.logits_dtype = args.logits_dtype
    for rank in range(model_config.mapping.world_size):
        config = copy.deepcopy(model_config)
        config.set_rank(rank)
        cls = model_cls or MODEL_MAP[config.architecture]
        model = cls(config) if ckpt_dir is None else cls.from_checkpoint(ckpt_dir, config=config)
        build(model, build_config).save(args.output_dir)
