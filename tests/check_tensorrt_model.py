"""The whole exported model as engines of TensorRT 8.6 on a GPU, against the torch executor.

    python tests/check_tensorrt_model.py --tensorrt86 FOLDER --json report.json

FOLDER as plugins/tests/tensorrt/build_engine86.sh says, and in LD_LIBRARY_PATH; libtreewy.so is
found as always. Exports the model (onnx_tensorrt86.py says what that TensorRT needs otherwise),
builds prefill, verify and drafter with the plugins, and runs the runtime over them: texts and
acceptance lengths of plain, tree and dynamic decoding, and errors of logits step by step with the
texts forced through random trees (model_check.py). Prints a line for every check; exits with 1 if
one failed. A stage that fails leaves the others running. `--engines ENGINES` takes the engines that
race_tensorrt86.py built for the same model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from model_check import (
    Reference,
    Sizes,
    differences,
    errors_of,
    generate,
    limits_of,
    network_executor,
)

from trtllm_treewy import cuda_library
from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.onnx_export import ExportTypes, export_onnx
from trtllm_treewy.export.profiles import BuildLimits, make_profile
from trtllm_treewy.runtime.executor_torch import TorchExecutor

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("plain", "tree", "dynamic")
DEVICE = torch.device("cuda")
# Errors may be so many times those of torch in the same type, which adds up products in float32
# where TensorRT may choose not to; below the floor no comparison is made.
FACTOR = 4
FLOORS = {"float16": 2e-3, "float32": 1e-4}
# Shares of the acceptance length, and of positions with the reference's best token.
LENGTH, AGREEMENT = 0.05, 0.01
# What is tried in turn for an engine: the builder's level (None: as asked), types kept to.
ATTEMPTS = ((None, True), (3, True), (3, False))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tensorrt86", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/treewy-tiny")
    parser.add_argument("--texts", type=Path, default=ROOT / "examples/training/heldout.jsonl")
    parser.add_argument("--prompts", type=int, default=64, help="how many (64)")
    parser.add_argument("--tokens", type=int, default=64, help="generated of each (64)")
    parser.add_argument("--types", default="float16,float32", help="in this order (both)")
    parser.add_argument("--level", type=int, default=1, help="of the builder's search, 0 to 5 (1)")
    parser.add_argument("--limit", type=float, default=100, help="seconds for an engine (100)")
    parser.add_argument("--engines", type=Path, help="folder of race_tensorrt86.py: builds none")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def say(text):
    print(text, flush=True)


class Stages:
    """Runs stages one by one; what they find is kept, and what they raise."""

    def __init__(self):
        self.rows, self.start = [], time.perf_counter()

    def run(self, name, stage, *args):
        """The stage's result, or None where it failed. A stage gives (result, what it says)."""
        began = time.perf_counter()
        try:
            result, said = stage(*args)
            passed = True
        except Exception as error:
            result, passed = None, False
            said = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        self.note(name, passed, said, time.perf_counter() - began)
        return result

    def note(self, name, passed, said, seconds=0.0):
        row = {"check": name, "passed": passed, "seconds": round(seconds, 1), "said": said}
        self.rows.append(row)
        total = time.perf_counter() - self.start
        say(f"{'ok' if passed else 'FAILED':7}{name:32}{seconds:7.1f} s {total:6.1f} s  {said}")


# ------------------------------------------------------------------------------ engines


class Builds(threading.Thread):
    """The engines of one type, each in a process, all at once."""

    def __init__(self, given, config, folder, dtype, sizes):
        super().__init__(daemon=True)
        self.given, self.config, self.folder, self.dtype = given, config, folder, dtype
        self.limits = BuildLimits(
            max_batch_size=sizes.batch,
            max_seq_len=sizes.max_seq_len,
            max_nodes=64,
            max_num_tokens=sizes.max_num_tokens,
        )
        self.said, self.built = {}, set()

    def run(self):
        names = networks(self.config)
        threads = [threading.Thread(target=self._build, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _build(self, name):
        said, start = [], time.perf_counter()
        for number, (level, types) in enumerate(ATTEMPTS):
            job = self.folder / f"{name}.{number}.json"
            shapes = make_profile(name, self.config, self.limits).shapes
            level = self.given.level if level is None else level
            description = {
                "folder": str(self.given.tensorrt86), "onnx": str(self.folder / f"{name}.86.onnx"),
                "output": str(self.folder / f"{name}.engine"), "level": level,
                "profiles": shapes, "half": self.dtype == "float16",
                "types": str(self.folder / f"{name}.types.json") if types else None,
            }  # fmt: skip
            job.write_text(json.dumps(description))
            what = f"level {level}, types {'kept' if types else 'free'}"
            left = self.given.limit - (time.perf_counter() - start)
            if left < 1:
                break
            command = [sys.executable, str(ROOT / "tests/build_tensorrt86.py"), str(job)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=left)
                code, text = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                code, text = -1, f"no engine within {error.timeout:.0f} s"
            said.append(f"{what}: rc {code}: {text.strip()[-6000:]}")
            if code == 0:
                self.built.add(name)
                break
        self.said[name] = "\n".join(said)


class Engines:
    """The engines of one type that race_tensorrt86.py left, in place of `Builds`."""

    def __init__(self, folder, config, dtype):
        self.folder, self.config, self.dtype = folder / dtype, config, dtype
        self.built = {n for n in networks(config) if (self.folder / f"{n}.engine").is_file()}
        winners = json.loads((folder / "winners.json").read_text()).get(dtype, {})
        self.said = {name: f"variant {x['name']!r}" for name, x in winners.items()}

    def join(self):
        """Nothing is being built."""


def export(model, folder, dtype):
    """The networks, and what TensorRT 8.6 takes of them."""
    import onnx
    from onnx_tensorrt86 import float_types, lower

    export_onnx(model, folder, dtype=dtype)
    sizes = []
    for path in sorted(folder.glob("*.onnx")):
        lowered = lower(onnx.load(path, load_external_data=False), folder)
        (folder / f"{path.stem}.86.onnx").write_bytes(lowered.SerializeToString())
        types = {n: str(t).removeprefix("torch.") for n, t in float_types(lowered).items()}
        (folder / f"{path.stem}.types.json").write_text(json.dumps(types))
        sizes.append(f"{path.stem} {len(lowered.graph.node)} nodes")
    return True, ", ".join(sizes)


def wait(builds):
    builds.join()
    for name, text in builds.said.items():
        say(f"  -- {builds.dtype} {name}: {text}")
    missing = [name for name in networks(builds.config) if name not in builds.built]
    assert not missing, f"no engine of {', '.join(missing)}"
    sizes = {n: (builds.folder / f"{n}.engine").stat().st_size >> 20 for n in builds.built}
    return True, ", ".join(f"{name} {size} MiB" for name, size in sizes.items())


def load(backend, builds):
    from network_tensorrt86 import TensorRT86Network

    dtype = getattr(torch, builds.dtype)
    types, parts = ExportTypes(dtype), {}
    kinds = {k: types.of(k) for k in ("activation", "state", "stash", "kv", "float32", "int32")}
    for name in networks(builds.config):
        path = builds.folder / f"{name}.engine"
        engine = backend.load(path, half=dtype == torch.float16)
        parts[name] = TensorRT86Network(engine, bindings(name, builds.config), kinds)
    return parts, backend.log().strip()[:2000]


# ------------------------------------------------------------------------------ checks


def check_errors(name, errors, torch_errors):
    """Errors of logits, drafter's included, against torch's in the same type."""
    floor = FLOORS[name]
    bad = []
    for what in ("mean", "worst", "drafter", "prefill"):
        limit = max(FACTOR * getattr(torch_errors, what), floor)
        if not getattr(errors, what) <= limit:
            bad.append(f"{what} {getattr(errors, what):.2e} is above {limit:.2e}")
    if not errors.agree >= torch_errors.agree - AGREEMENT:
        bad.append(f"best tokens agree in {errors.agree:.2%}, torch's in {torch_errors.agree:.2%}")
    said = f"relative error of logits: {line(errors)}; torch {line(torch_errors)}"
    assert not bad, f"{'; '.join(bad)} ({said})"
    return True, said


def line(errors):
    return (
        f"mean {errors.mean:.2e} worst {errors.worst:.2e} prefill {errors.prefill:.2e} "
        f"drafter {errors.drafter:.2e} agree {errors.agree:.2%}"
    )


def check_texts(kind, got, by_torch, plain, prompts, logits_of, largest):
    """Acceptance length, and that texts differ only where the reference nearly does."""
    bad = []
    if kind != "plain":
        length, wanted = got.acceptance_length, by_torch.acceptance_length
        if not abs(length - wanted) <= LENGTH * wanted:
            bad.append(f"acceptance length {length:.3f}, torch {wanted:.3f}")
    found = differences(prompts, plain.tokens, got.tokens, logits_of)
    wide = [x for x in found if not x["gap"] <= 2 * largest]
    if wide:
        bad.append(f"texts differ where the reference is sure (2 x {largest:.3f}): {wide[:4]}")
    same = sum(a == b for a, b in zip(got.tokens, by_torch.tokens, strict=True))
    count = len(prompts)
    said = (
        f"acceptance length {got.acceptance_length:.3f} (torch {by_torch.acceptance_length:.3f}), "
        f"texts as torch's {same}/{count}, as the reference's {count - len(found)}/{count}, "
        f"widest gap {max((x['gap'] for x in found), default=0):.4f}, {got.seconds:.1f} s "
        f"(torch {by_torch.seconds:.1f} s)"
    )
    assert not bad, f"{'; '.join(bad)} ({said})"
    return True, said


class Check:
    """All stages over one set of prompts."""

    def __init__(self, stages, model, prompts, sizes, device):
        self.stages, self.model, self.texts = stages, model, prompts
        self.sizes, self.device = sizes, device
        self.prompts, self.plain, self.wanted, self.drafters = [], None, [], []
        self.results = {}

    def reference(self):
        """Texts of torch in float32 without drafts, and the logits along them."""
        from trtllm_treewy.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.model)
        self.prompts = [list(tokenizer.encode(text)) for text in self.texts]
        self.plain = self._torch_texts("plain", torch.float32)
        reference = Reference(self.model, self.device, self.sizes)
        for prompt, text in zip(self.prompts, self.plain.tokens, strict=True):
            self.wanted.append(reference.logits(prompt + text))
            self.drafters.append(reference.drafter(prompt))
        best = [
            logits[len(prompt) - 1 : -1].argmax(-1).tolist() == text
            for prompt, text, logits in zip(
                self.prompts, self.plain.tokens, self.wanted, strict=True
            )
        ]
        said = f"{sum(best)}/{len(best)} texts are the best tokens of one forward pass"
        assert sum(best) >= 0.9 * len(best), said
        return True, said

    def _torch_texts(self, kind, dtype):
        return generate(
            self.model, self.prompts, self.sizes, drafts=kind, dtype=dtype, device=self.device
        )

    def by_torch(self, name):
        """What torch gives in this type: texts by kind, errors."""
        from trtllm_treewy.export.checkpoint import load_model

        dtype = getattr(torch, name)
        texts = {kind: self._torch_texts(kind, dtype) for kind in KINDS}
        model = load_model(self.model, dtype=dtype, device=self.device)
        errors = self._errors(TorchExecutor(model, limits_of(self.sizes)))
        lengths = ", ".join(f"{k} {t.acceptance_length:.3f}" for k, t in texts.items())
        return (texts, errors), f"acceptance lengths: {lengths}; {line(errors)}"

    def _errors(self, executor):
        reference = self.wanted, self.drafters
        return errors_of(executor, reference, self.prompts, self.plain.tokens, self.sizes)

    def by_networks(self, name, parts, config, texts, torch_errors):
        """The stages over networks of one type."""
        dtype, stages = getattr(torch, name), self.stages
        label = f"{name} engines: "

        def measure():
            executor = network_executor(
                config, limits_of(self.sizes), parts, dtype, self.sizes, self.device
            )
            errors = self._errors(executor)
            return errors, line(errors)

        errors = stages.run(label + "forced trees", measure)
        if errors is not None:
            stages.run(label + "logits", check_errors, name, errors, torch_errors)
        largest = torch_errors.largest if errors is None else errors.largest
        found = {}
        for kind in KINDS:

            def texts_of(kind=kind):
                got = generate(
                    self.model, self.prompts, self.sizes, drafts=kind, dtype=dtype,
                    device=self.device, parts=parts,
                )  # fmt: skip
                runs = ", ".join(f"{k} {p.runs}" for k, p in parts.items())
                return got, f"runs so far: {runs}"

            got = stages.run(label + f"{kind} texts", texts_of)
            if got is not None:
                found[kind] = got
                stages.run(
                    label + f"{kind} compared", check_texts, kind, got, texts[kind], self.plain,
                    self.prompts, self.wanted.__getitem__, largest,
                )  # fmt: skip
        self.results[name] = {
            "errors": errors and asdict(errors),
            "torch_errors": asdict(torch_errors),
            "acceptance_length": {k: t.acceptance_length for k, t in found.items()},
            "torch_acceptance_length": {k: t.acceptance_length for k, t in texts.items()},
            "tokens_per_second": {k: sum(map(len, t.tokens)) / t.seconds for k, t in found.items()},
        }


def main():
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("check_tensorrt_model.py: needs a CUDA device")
    if cuda_library.find_library() is None:
        sys.exit("check_tensorrt_model.py: no libtreewy.so: run ./build.sh first")
    torch.backends.cuda.matmul.allow_tf32 = False
    # Sums of half products in float32, as the model is meant.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    stages, names = Stages(), given.types.split(",")
    lines = given.texts.read_text(encoding="utf-8").splitlines()[: given.prompts]
    config = ModelConfig.from_pretrained(given.model)
    sizes = Sizes(new_tokens=given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(
            stages, given.model, [json.loads(x)["prompt"] for x in lines], sizes,
            DEVICE,
        )  # fmt: skip
        builds = {}
        if given.engines:
            builds = {name: Engines(given.engines, config, name) for name in names}
        for name in [] if given.engines else names:
            (Path(folder) / name).mkdir()
            if stages.run(f"{name}: export", export, given.model, Path(folder) / name, name):
                builds[name] = Builds(given, config, Path(folder) / name, name, sizes)
                builds[name].start()
        by_torch = {}
        if stages.run("reference: torch, float32", check.reference):
            for name in names:
                by_torch[name] = stages.run(f"{name}: torch", check.by_torch, name)
        version = run_engines(stages, check, given, config, builds, by_torch)
    finish(given, stages, check, version)


def run_engines(stages, check, given, config, builds, by_torch):
    """Waits for the engines of each type and checks them; TensorRT's version."""
    from engine_backends import TensorRT86

    def open_backend():
        backend = TensorRT86(given.tensorrt86)
        return backend, f"TensorRT {backend.version}, {torch.cuda.get_device_name()}"

    backend = stages.run("TensorRT", open_backend)
    for name, some in builds.items():
        if not stages.run(f"{name}: engines built", wait, some) or backend is None:
            continue
        parts = stages.run(f"{name}: engines loaded", load, backend, some)
        if parts is not None and by_torch.get(name) is not None:
            check.by_networks(name, parts, config, *by_torch[name])
    return None if backend is None else backend.version


def finish(given, stages, check, version):
    failed = [row["check"] for row in stages.rows if not row["passed"]]
    say(f"{len(stages.rows) - len(failed)} of {len(stages.rows)} stages passed")
    for name in failed:
        say(f"FAILED {name}")
    if given.json:
        report = {
            "tensorrt": version, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "date": datetime.date.today().isoformat(), "model": given.model.name,
            "prompts": len(check.texts), "tokens": given.tokens, "results": check.results,
            "stages": stages.rows,
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.flush()
    # Engines and contexts go with the process: in which order TensorRT unloads is not tested.
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
