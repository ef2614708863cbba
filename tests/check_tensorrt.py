"""Builds engines with the plugins by a complete TensorRT on a GPU, runs them, and says what came.

`./build.sh check-tensorrt` runs it with the `tensorrt` Python package (10 or 11), and
`python tests/check_tensorrt.py --tensorrt86 FOLDER` with TensorRT 8.6, FOLDER as
plugins/tests/tensorrt/build_engine86.sh says. Exits with 1 if a check failed. The checks are those
of engine_suite.py: engines against the kernels called directly, bit for bit, and against the
float64 reference.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
from engine_backends import TensorRT, TensorRT86
from engine_suite import Checks, Step, expect_verify, run_all, sizes
from gdn_cases import generator
from kernel_suite import BF16, F16, F32, Machine

from trtllm_treewy import cuda_library
from trtllm_treewy.plugin_contract import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
TYPES = {"float32": (F32, F32), "float16": (F16, F32), "bfloat16": (BF16, BF16)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tensorrt86", type=Path, help="folder of TensorRT 8.6 and libengine86.so")
    parser.add_argument("--onnx", type=Path, help="file of engine_onnx.py, for TensorRT 8.6")
    parser.add_argument("--plugins", type=Path, default=ROOT / "build" / LIBRARY)
    parser.add_argument("--steps", type=int, default=100, help="verify and commit steps (100)")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def check_onnx(checks, *, model, steps=10):
    """The verify engine from an ONNX file, by TensorRT's parser."""
    from engine_suite import verify_network

    network = verify_network(checks.model)
    profiles = {name: shapes for name, _, *shapes in network.inputs}
    path = checks.folder / "onnx.engine"
    checks.backend.build_onnx(model, profiles, path)
    context = checks.backend.load(path).context()
    gen = generator(8)
    for _ in range(steps):
        step = Step(checks.model, gen, *sizes(gen))
        context.run(step.verify_bindings(checks.model.state, checks.model.windows))
        expect_verify(checks, step, checks.model.state, checks.model.windows)
    return f"{steps} steps"


def say(text):
    print(text, flush=True)


def main():
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("check_tensorrt.py: needs a CUDA device")
    if cuda_library.find_library() is None:
        sys.exit("check_tensorrt.py: no libtreewy.so to compare with: run ./build.sh first")
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        backend = TensorRT86(given.tensorrt86) if given.tensorrt86 else TensorRT(given.plugins)
    except ImportError as error:
        sys.exit(f"check_tensorrt.py: {error}: the package `tensorrt` (10.14 or later) is needed")
    gpu = torch.cuda.get_device_name()
    say(f"TensorRT {backend.version}, {gpu}, torch {torch.__version__}")
    types = [TYPES[n] for n in TYPES if not given.tensorrt86 or n != "bfloat16"]
    machine = Machine("cuda")
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(backend, machine, types, Path(folder), steps=given.steps, say=say)
        if given.onnx:
            checks = Checks(backend, machine, F16, F32, Path(folder))
            checks.run("from ONNX", check_onnx, model=given.onnx.read_bytes())
            row = checks.rows[0]
            verdict = "ok" if row["passed"] else "FAILED"
            say(f"{verdict:7} {row['types']:28} {row['check']:24} {row['seconds']:7.1f} s  "
                f"{row['said']}")  # fmt: skip
            rows += checks.rows
    failed = sum(not row["passed"] for row in rows)
    say(f"{len(rows) - failed} of {len(rows)} checks passed")
    if given.json:
        report = {
            "tensorrt": backend.version, "gpu": gpu, "torch": torch.__version__,
            "python": platform.python_version(), "cuda": torch.version.cuda,
            "date": datetime.date.today().isoformat(), "steps": given.steps, "checks": rows,
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.flush()
    # Engines and contexts go with the process: in which order TensorRT unloads is not tested.
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
