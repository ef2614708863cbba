"""Builds one engine with TensorRT 8.6: `python tests/build_tensorrt86.py JOB.json`.

A process of its own for each, as check_tensorrt_model.py builds several at once, and a builder that
crashes should take no other with it. The job names `folder` (of TensorRT), `onnx`, `output`,
`types` (a JSON file of float tensors, or null), `profiles`, `half` and `level`; it may name `log`
(a file for all that TensorRT says), `workspace` (bytes) and `cublas` (whether it may be used).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from engine_backends import TensorRT86
from plugin_host import Refused


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    types = None
    if job["types"] is not None:
        names = json.loads(Path(job["types"]).read_text())
        types = {name: getattr(torch, dtype) for name, dtype in names.items()}
    backend = TensorRT86(Path(job["folder"]))
    if job.get("log"):
        backend.log_to(job["log"])
    start = time.perf_counter()
    try:
        asked = backend.build_onnx(
            Path(job["onnx"]).read_bytes(),
            job["profiles"],
            Path(job["output"]),
            half=job["half"],
            level=job["level"],
            types=types,
            workspace=job.get("workspace", 0),
            cublas=job.get("cublas", False),
        )
    except Refused as error:
        print(error, flush=True)
        os._exit(1)
    warnings = backend.log().splitlines()
    print("\n".join(warnings[:40]))
    print(f"{time.perf_counter() - start:.1f} s, {asked} layers with a type", flush=True)
    # In which order TensorRT unloads is not tested.
    os._exit(0)


if __name__ == "__main__":
    main()
