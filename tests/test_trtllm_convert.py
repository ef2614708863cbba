"""Converted checkpoints: whole, exact, and refused with one line where they cannot be made."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from safetensors.torch import load_file

from trtllm_treewy.cli import main
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.export.trtllm.convert import convert_checkpoint, load_checkpoint
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.trtllm_config import ARCHITECTURE, model_config
