"""Many ways to build the whole model with TensorRT 8.6 at once, and what fails where none does.

    python tests/race_tensorrt86.py --tensorrt86 FOLDER --output ENGINES --seconds 130

TensorRT 8.6 fuses what lies between plugins into regions and may have no implementation of one; it
then names the region and no reason. One run on a GPU, with a process for each core, therefore tries
every network as it is, with types kept and free, with cuBLAS (--cublas, where it is in
LD_LIBRARY_PATH as version 12), and with fences that end regions (fences_tensorrt86.py). Of the
networks that fail as they are it builds heads, shorter and shorter, down to the node that fails.
What TensorRT said of failed builds is in ENGINES/logs; lines that give a reason are printed.

The first of `VARIANTS` that was built for a network is its engine: ENGINES/TYPE/NETWORK.engine, for
`check_tensorrt_model.py --engines ENGINES`. Exits with 1 if a type has not all its engines.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN_LINES, SHOWN_CHARACTERS = 8, 400
# Of a verbose log: why a kernel, or all of them, would not do.
REASON = re.compile(
    r"skipping tactic|no tactics|insufficient memory|not sufficient|exception|[Cc]heck failed|"
    r"could not find|no valid|error code|unsupported|^[01] ",
    re.IGNORECASE,
)
# How many heads of a network are built at once.
CUTS = 6


@dataclass(frozen=True)
class Variant:
    """A way to build a network.

    Attributes:
        name: of the variant.
        fences: one of `fences_tensorrt86.LEVELS`.
        types: whether the builder is asked to keep to those of the file.
        level: of the builder's search.
        cublas: whether it may use cuBLAS.
        turn: when it is tried; the smaller the earlier.
    """

    name: str
    fences: str = "none"
    types: bool = True
    level: int = 1
    cublas: bool = False
    turn: int = 0


# The most wanted first: regions as TensorRT makes them, in the types of the file.
VARIANTS = (
    Variant("kept", turn=1),
    Variant("kept, cuBLAS", cublas=True, turn=4),
    Variant("fences at steps", fences="steps", turn=2),
    Variant("fences at products", fences="products", turn=6),
    Variant("fences everywhere", fences="all", types=False, level=0, turn=0),
    Variant("free", types=False, level=2, turn=3),
    Variant("free, cuBLAS", types=False, level=2, cublas=True, turn=5),
)


@dataclass
class Outcome:
    """Of one build. `built` is None where the time ran out."""

    built: bool | None
    seconds: float
    said: str


class Pool:
    """Runs jobs in threads, the one of the lowest priority number first.

    Args:
        workers: how many at once.
        deadline: `time.monotonic()` after which none is started.
    """

    def __init__(self, workers, deadline):
        self._heap, self._numbers = [], itertools.count()
        self._ready, self._running, self._deadline = threading.Condition(), 0, deadline
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]

    def add(self, priority, job):
        with self._ready:
            heapq.heappush(self._heap, (priority, next(self._numbers), job))
            self._ready.notify()

    def run(self):
        """Returns when no job is left and none runs, or the deadline has passed for all."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _work(self):
        while True:
            with self._ready:
                while not self._heap and self._running:
                    self._ready.wait(0.2)
                if not self._heap or time.monotonic() >= self._deadline:
                    self._heap.clear()
                    self._ready.notify_all()
                    return
                job = heapq.heappop(self._heap)[2]
                self._running += 1
            try:
                job()
            finally:
                with self._ready:
                    self._running -= 1
                    self._ready.notify_all()


class Bisection:
    """The shortest head of a network that cannot be built, some lengths at a time.

    Args:
        length: of the network, which cannot be built.
        cuts: how many lengths are tried at once.
    """

    def __init__(self, length, cuts=CUTS):
        self.good, self.bad, self._cuts = 0, length, cuts

    @property
    def done(self):
        return self.bad - self.good <= 1

    def lengths(self):
        """What to try next, between the longest that was built and the shortest that was not."""
        gap = self.bad - self.good
        steps = min(self._cuts, gap - 1)
        return sorted({self.good + gap * (i + 1) // (steps + 1) for i in range(steps)})

    def learn(self, outcomes):
        """Takes {length: built}; None where it is not known. False if nothing was learnt."""
        before = self.good, self.bad
        failed = [length for length, built in outcomes.items() if built is False]
        self.bad = min([self.bad, *failed])
        passed = [n for n, built in outcomes.items() if built and n < self.bad]
        self.good = max([self.good, *passed])
        return before != (self.good, self.bad)


def reasons(text):
    """The lines of a verbose log that say why there is no engine, shortened, without repeats."""
    lines = [x for x in text.splitlines() if REASON.search(x)]
    unique = list(dict.fromkeys(re.sub(r"0x[0-9a-f]{6,}|\d{3,}", "#", x) for x in lines))
    return [x[:SHOWN_CHARACTERS] for x in unique[-SHOWN_LINES:]]


class Race:
    """All builds of all types.

    Args:
        networks: {(type, network): lowered ModelProto}.
        build: `build(key, variant, model, label, seconds) -> Outcome`; writes the engine of a
            whole network to `engine(key, variant)`.
        variants: the ways to try, the most wanted first.
        seconds: for all of it.
        workers: builds at once.
    """

    def __init__(self, networks, build, variants, seconds, workers):
        self.networks, self.variants, self._build = networks, variants, build
        self.start = time.monotonic()
        self.deadline = self.start + seconds
        self.outcomes, self.bisections, self._lock = {}, {}, threading.Lock()
        self._pool = Pool(workers, self.deadline)

    def run(self):
        kinds = list(dict.fromkeys(kind for kind, _ in self.networks))
        for key in self.networks:
            for variant in self.variants:
                # All of the first type, then what else was asked for.
                priority = variant.turn + 100 * kinds.index(key[0])
                self._pool.add(priority, lambda k=key, v=variant: self._whole(k, v))
        self._pool.run()

    def winner(self, key):
        """The most wanted variant that was built, or None."""
        for variant in self.variants:
            outcome = self.outcomes.get((key, variant.name))
            if outcome is not None and outcome.built:
                return variant
        return None

    def _left(self):
        return self.deadline - time.monotonic()

    def _whole(self, key, variant):
        from fences_tensorrt86 import fence

        model = self.networks[key]
        outcome = self._build(key, variant, fence(model, variant.fences), "whole", self._left())
        with self._lock:
            self.outcomes[key, variant.name] = outcome
        self._say(f"{key[0]} {key[1]} {variant.name}", outcome)
        if outcome.built is False and variant == self.variants[0]:
            self.bisections[key] = Bisection(len(model.graph.node))
            self._round(key)

    def _round(self, key):
        bisection, found = self.bisections[key], {}
        lengths = bisection.lengths()
        for length in lengths:
            self._pool.add(50, lambda n=length: self._head(key, n, len(lengths), found))

    def _head(self, key, length, count, found):
        from fences_tensorrt86 import head

        part, variant = head(self.networks[key], length), self.variants[0]
        if part.graph.output:
            outcome = self._build(key, variant, part, f"head {length}", self._left())
        else:
            outcome = Outcome(True, 0.0, "nothing that the rest takes")
        self._say(f"{key[0]} {key[1]} first {length} nodes", outcome)
        with self._lock:
            found[length] = outcome.built
            complete = len(found) == count
        if complete and self.bisections[key].learn(found) and not self.bisections[key].done:
            self._round(key)

    def _say(self, what, outcome):
        word = {True: "built", False: "FAILED", None: "no time"}[outcome.built]
        total = time.monotonic() - self.start
        lines = [f"{word:8}{what:48}{outcome.seconds:6.1f} s {total:6.1f} s"]
        if outcome.built is False:
            lines += [f"          {x}" for x in reasons(outcome.said)]
        print("\n".join(lines), flush=True)

    def report(self):
        """Lines: what each network is built from, and where a region fails."""
        lines = []
        for key in self.networks:
            best = self.winner(key)
            lines.append(f"{key[0]} {key[1]}: {'no engine' if best is None else best.name}")
            if key in self.bisections:
                found, nodes = self.bisections[key], self.networks[key].graph.node
                lines.append(f"  the first {found.good} nodes are built, {found.bad} are not:")
                for node in nodes[found.good : min(found.bad, found.good + 12)]:
                    names = ", ".join(node.input), ", ".join(node.output)
                    lines.append(f"    {node.op_type} ({names[0]}) -> {names[1]}")
        return lines


class Builder:
    """Builds in processes of build_tensorrt86.py; see `Race`."""

    def __init__(self, tensorrt, output, profiles, types):
        self.tensorrt, self.output = tensorrt, output
        self.profiles, self.types = profiles, types
        self.logs = output / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def engine(self, key, variant):
        return self.output / key[0] / f"{key[1]}.{_plain(variant.name)}.engine"

    def __call__(self, key, variant, model, label, seconds):
        start = time.monotonic()
        stem = self.logs / _plain(f"{key[0]} {key[1]} {variant.name} {label}")
        files = {x: stem.with_name(f"{stem.name}.{x}") for x in ("onnx", "json", "log", "engine")}
        files["onnx"].write_bytes(model.SerializeToString())
        whole = label == "whole"
        target = self.engine(key, variant) if whole else files["engine"]
        target.parent.mkdir(exist_ok=True)
        inputs = {x.name for x in model.graph.input}
        shapes = self.profiles[key[1]]
        job = {
            "folder": str(self.tensorrt), "onnx": str(files["onnx"]), "output": str(target),
            "types": str(self.types[key]) if variant.types else None, "level": variant.level,
            "profiles": {name: x for name, x in shapes.items() if name in inputs},
            "half": key[0] == "float16", "log": str(files["log"]), "cublas": variant.cublas,
            "workspace": 8 << 30,
        }  # fmt: skip
        files["json"].write_text(json.dumps(job))
        built = self._run(files["json"], seconds)
        files["onnx"].unlink()
        if not whole:
            target.unlink(missing_ok=True)
        said = files["log"].read_text(errors="replace") if files["log"].exists() else ""
        if built[0]:
            files["log"].unlink(missing_ok=True)
        return Outcome(built[0], time.monotonic() - start, f"{said}\n{built[1]}")

    @staticmethod
    def _run(job, seconds):
        """Whether it was built, None if it had no time; what it said."""
        command = [sys.executable, str(ROOT / "tests/build_tensorrt86.py"), str(job)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return None, ""
        text = (done.stdout + done.stderr).strip()
        return done.returncode == 0, f"0 exit status {done.returncode}: {text[-1500:]}"


def _plain(text):
    return re.sub(r"[^A-Za-z0-9]+", "-", text)


def exported(model, folder, types):
    """Lowered networks by (type, name), the files of their types, and profiles by name."""
    import onnx
    from check_tensorrt_model import export
    from model_check import Sizes

    from trtllm_treewy.binding_names import networks
    from trtllm_treewy.config import ModelConfig
    from trtllm_treewy.export.profiles import BuildLimits, make_profile

    config, sizes = ModelConfig.from_pretrained(model), Sizes()
    limits = BuildLimits(
        max_batch_size=sizes.batch,
        max_seq_len=sizes.max_seq_len,
        max_nodes=64,
        max_num_tokens=sizes.max_num_tokens,
    )
    profiles = {n: make_profile(n, config, limits).shapes for n in networks(config)}
    found, files = {}, {}
    for kind in types:
        (folder / kind).mkdir()
        export(model, folder / kind, kind)
        for name in networks(config):
            found[kind, name] = onnx.load(folder / kind / f"{name}.86.onnx")
            files[kind, name] = folder / kind / f"{name}.types.json"
    return found, files, profiles


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tensorrt86", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--output", type=Path, required=True, metavar="ENGINES")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/treewy-tiny")
    parser.add_argument("--types", default="float16,float32", help="in this order (both)")
    parser.add_argument("--seconds", type=float, default=130, help="for all builds (130)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="builds at once")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="those to try (all)")
    parser.add_argument("--cublas", action="store_true", help="cuBLAS 12 is in LD_LIBRARY_PATH")
    return parser.parse_args()


def finish(race, builder):
    """Gives the winners their names; True if every type has all its engines."""
    print("\n".join(race.report()), flush=True)
    winners = {}
    for key in race.networks:
        best = race.winner(key)
        if best is not None:
            target = builder.output / key[0] / f"{key[1]}.engine"
            builder.engine(key, best).replace(target)
            winners.setdefault(key[0], {})[key[1]] = asdict(best)
    (builder.output / "winners.json").write_text(json.dumps(winners, indent=1) + "\n")
    return sum(len(x) for x in winners.values()) == len(race.networks)


def main():
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    wanted = given.variants or [x.name for x in VARIANTS]
    variants = [x for x in VARIANTS if x.name in wanted and (given.cublas or not x.cublas)]
    if not variants:
        sys.exit(f"--variants: one of {', '.join(x.name for x in VARIANTS)} must be left")
    with tempfile.TemporaryDirectory() as folder:
        networks, files, profiles = exported(given.model, Path(folder), given.types.split(","))
        builder = Builder(given.tensorrt86, given.output, profiles, files)
        race = Race(networks, builder, variants, given.seconds, given.workers)
        race.run()
    sys.exit(0 if finish(race, builder) else 1)


if __name__ == "__main__":
    main()
