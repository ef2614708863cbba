"""CASE 22: TF32 keeps 10 bits of a product's factors. Nothing of ours takes it unasked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

import trtllm_treewy

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("trtllm_treewy", "runtime", "export")
    for path in (ROOT / folder).rglob("*.py")
)
SWITCHES = {"allow_tf32", "fp32_precision", "set_float32_matmul_precision"}


def test_a_run_leaves_torch_as_it_was(shipped_model):
    before = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    assert before == (False, "highest")
    params = trtllm_treewy.SamplingParams(max_tokens=2)
    with trtllm_treewy.LLM(shipped_model, dtype="float32", device="cpu") as llm:
        llm.generate([5, 6], params)
    after = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    assert after == before


def test_no_module_turns_it_on():
    """Triton's own default for products of float32 is TF32; each of ours says what it takes."""
    products = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            assert name not in SWITCHES, f"{path}:{node.lineno}"
            if not isinstance(node, ast.Call):
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("PRECISION", "'ieee'") == "'ieee'", f"{path}:{node.lineno}"
            if ast.unparse(node.func) == "tl.dot":
                assert given.get("input_precision") == "PRECISION", f"{path}:{node.lineno}"
                products += 1
    assert products > 5


def test_kernels_multiply_no_tf32():
    kernels = sorted((ROOT / "plugins" / "kernels").iterdir())
    found = [path.name for path in kernels if re.search("tf32", path.read_text(encoding="utf-8"))]
    assert len(kernels) > 20
    assert found == []
