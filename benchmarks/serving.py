"""Serving by commit policy, tree, memory and load: the torch executor, with random weights.

    python benchmarks/serving.py qwen3.5-35b-a3b --quick --output serving.json
    python benchmarks/serving.py qwen3.5-35b-a3b --workload chat summary --fraction 0.6 0.75 0.9
    python benchmarks/serving.py qwen3.5-35b-a3b --workload chat --concurrency --rate 4 8 16 \
        --burstiness 1 0.25
    python benchmarks/serving.py qwen3.5-35b-a3b --point chat:0.65:snapshot+reconstruct:3:256 \
        summary:0.9:none+reconstruct:3+auto:8+64 chat:0.65:reconstruct:3:16/s@0.25 \
        --settle 3 --point-seconds 6 --requests-per-sequence 8 --seconds 540
    python benchmarks/serving.py --from first.json second.json --markdown all.md --plot all.png

Weights are made once. For every workload, memory fraction and way to decode an engine is built over
them, as many sequences as the memory holds (at most --most, and no more than its loads have at
once), and every load is run on it. What counts as memory is the whole GPU's, or --memory; a
fraction is of that, the weights included, as vLLM's gpu_memory_utilization is. Points are written
to --output as they come, so that a run that is ended has them; --from puts runs together.

Acceptance is drawn from a law by depth (--law), because random weights agree with nothing: speeds
mean something, texts do not. A chain of 3 has a mean acceptance length of 3.24 unless told else.

A load is so many requests at once, each followed by the next, or requests at a rate: a Poisson
process, or with a burstiness below 1 gamma-distributed distances, as recorded traffic has them.
Where requests are kept out by memory (none waits because of --most), a point is memory-bound; the
tables are split by whether full snapshots are, more than 5% of the time. --quick is the anchor
workload, prompts of 512 and outputs of 192 tokens, at three loads and two fractions.

For a run of limited time, --point names the points, the most wanted first, instead of the product
of all flags; --seconds bounds the whole, weights and all, and what no time is left for is listed.
--point-seconds cuts a point: its throughput is then that of a loop with all prompts at its
beginning, without a tail in which fewer and fewer run, and first tokens that had not come count as
if they had come then. --settle lets the load run before anything is counted, at least so long and
until the first requests, as many as fit, have had a first token (at most five times as long), so
that the figure is of a steady state; give it enough --requests-per-sequence to last. Whole runs, as
vLLM's figures are, have neither. Loads at a rate go on for --rate-seconds. Kernels are compiled on
prompts of all sizes beforehand; a point in which one was compiled or captured nevertheless is
marked.

Differences of a few hundredths need --repeats: engines of one workload and fraction are then kept
beside each other as far as the memory holds them, and take turns, every round with other requests
that are the same for all. A row has the median; ratios are taken round by round, and told with the
least and the greatest of them. What time is left out of are the last rounds.

--policy flashinfer-ucache, or --point with it, is this executor with the kernels of FlashInfer that
commit as ReplaySSM does, for chains of 3 and 7 over --state-dtype bfloat16, if it is installed;
they are checked against the float64 reference first.
The parts are in `serving_bench/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from serving_bench import points, report
from serving_bench.engines import Ground
from serving_bench.measure import Effort
from serving_bench.points import Arrivals
from serving_bench.session import Clock, Session, named, say
from serving_bench.split import kind
from serving_bench.warm import Compiles

from trtllm_treewy.cli.sizes import format_size, parse_size

STARTED = time.perf_counter()
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FRACTIONS = (0.6, 0.75, 0.9)
WORKLOADS = ("chat", "generation", "summary", "anchor")
TREES = ("3", "7", "2,2,2", "3,3,3", points.AUTO)
QUICK: dict[str, Any] = {
    "workload": ["anchor"],
    "concurrency": [8, 64, 256],
    "fraction": [0.65, 0.9],
    "tree": ["3"],
    "point_seconds": 45.0,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    if args.source:
        try:
            run = merge([json.loads(file.read_text(encoding="utf-8")) for file in args.source])
            text = report.text(run)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            files = ", ".join(map(str, args.source))
            parser.error(f"{files}: not a run of this script, or not one run: {error!r}")
    else:
        run = measure_all(parser, args)
        text = report.text(run)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    if args.plot:
        from serving_bench.plot import draw

        draw(run["rows"], args.plot)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="a shipped config's name, or a directory with config.json")
    add("--quick", action="store_true", help="a few points; other flags still hold")
    add("--point", nargs="+", help="WORKLOAD:FRACTION:POLICY:TREE:LOAD, alternatives joined by +")
    add("--workload", nargs="+", choices=list(points.WORKLOADS), help=f"of {WORKLOADS}: all")
    add("--fraction", type=float, nargs="+", help="of the memory (0.6 0.75 0.9)")
    add(
        "--policy",
        nargs="+",
        choices=(*points.POLICIES, *points.PEERS),
        help="none is no speculation (all of ours)",
    )
    add("--tree", nargs="+", help="lengths of chains, widths, auto (3 7 2,2,2 3,3,3 auto)")
    add("--concurrency", type=int, nargs="*", help="requests at once (1 2 4 ... 256)")
    add("--rate", type=float, nargs="+", default=[], help="requests a second (none)")
    add("--burstiness", type=float, nargs="+", default=[1.0], help="of rates (1: Poisson)")
    add("--rate-seconds", type=float, default=60.0, help="how long requests come at a rate")
    add("--most", type=int, default=256, help="sequences at once where memory allows")
    add("--requests-per-sequence", type=int, default=2, help="of those at once")
    add("--least-requests", type=int, default=8)
    add("--point-seconds", type=float, help="after which a point is cut (never)")
    add("--repeats", type=int, default=1, help="of every point, taking turns (1)")
    add("--settle", type=float, default=0.0, help="seconds of load before a point is counted (0)")
    add("--seconds", type=float, help="of the whole: no point is begun that would end later")
    add("--law", nargs="+", default=[], metavar="TREE=P,P", help="acceptance by depth, as 3=.9,.8")
    add("--batch-wait-iters", type=int, default=0, help="as of `serve` (none)")
    add("--cuda-graph-max-prompt-tokens", type=int, help="as of `serve` (as an engine has it)")
    add("--memory", type=parse_size, help="what counts as the whole memory (the GPU's)")
    add("--layers", type=int, help="the first layers of the model alone")
    add("--scale", type=float, default=1.0, help="factor on all lengths, for small models")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--state-dtype", default="float32", choices=("float32", "bfloat16"))
    add("--seed", type=int, default=0)
    add("--device", default="cuda")
    add("--output", type=Path, help="JSON of all points")
    add("--markdown", type=Path, help="the tables that are printed, in a file as well")
    add("--plot", type=Path, help="a picture; needs matplotlib")
    add("--from", dest="source", type=Path, nargs="+", help="tables of saved runs, put together")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in what was not given, and refuses what cannot be, before anything is made."""
    full = {
        "workload": WORKLOADS, "fraction": FRACTIONS, "policy": points.POLICIES, "tree": TREES,
        "concurrency": CONCURRENCY, "point_seconds": None,
    }  # fmt: skip
    given = [name for name in ("quick", *full, "rate") if getattr(args, name)]
    if args.point and set(given) - {"point_seconds"}:
        parser.error(f"--point says all of it: without --{given[0].replace('_', '-')}")
    for name, value in (full | (QUICK if args.quick else {})).items():
        if getattr(args, name) is None and not args.point:
            setattr(args, name, list(value) if isinstance(value, tuple) else value)
    for file in (args.output, args.markdown, args.plot):
        if file is not None and not file.resolve().parent.is_dir():
            parser.error(f"the directory of {file} does not exist")
    if args.source:
        return
    if args.model is None:
        parser.error("no model and no --from given")
    if not (args.point or args.concurrency or args.rate):
        parser.error("neither --concurrency nor --rate names a load")
    tokens = args.cuda_graph_max_prompt_tokens
    if tokens is not None and tokens < 0:
        parser.error(f"--cuda-graph-max-prompt-tokens: expected at least 0, got {tokens}")
    if args.settle < 0:
        parser.error(f"--settle: expected at least 0, got {args.settle:g}")
    positive = (
        "most",
        "repeats",
        "requests_per_sequence",
        "least_requests",
        "scale",
        "rate_seconds",
    )
    limits = ("point_seconds", "seconds")
    for name in (*positive, "concurrency", "rate", "burstiness", "fraction", *limits):
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number <= 0:
                parser.error(f"--{name.replace('_', '-')}: expected above 0, got {number}")
    if any(fraction > 1 for fraction in args.fraction or ()):
        parser.error(f"--fraction: expected at most 1, got {max(args.fraction)}")
    try:
        args.laws = laws(args.law)
        for site in plan_of(args):
            site.setting.speculation(args.laws)
            check_types(args, site.setting)
    except ValueError as error:
        parser.error(str(error))


def check_types(args: argparse.Namespace, setting: points.Setting) -> None:
    """Raises ValueError for types that a peer's kernels do not have."""
    types = (args.dtype, args.state_dtype)
    if setting.policy in points.PEERS and types != ("bfloat16", "bfloat16"):
        raise ValueError(
            f"{setting.policy}: expected --dtype and --state-dtype bfloat16, got {types[0]} and "
            f"{types[1]}"
        )


def plan_of(args: argparse.Namespace) -> points.Plan:
    """The points that were asked for, by site, in their order.

    Raises:
        ValueError: --point names something else.
    """
    if args.point:
        return points.chosen(args.point, args.scale)
    workloads = [points.WORKLOADS[name].scaled(args.scale) for name in args.workload]
    closed = [Arrivals(concurrency=count) for count in args.concurrency]
    rates = [Arrivals(None, rate, b) for rate in args.rate for b in args.burstiness]
    ways = points.settings(args.policy, args.tree)
    return points.product(workloads, args.fraction, ways, closed + rates)


def laws(given: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """TREE=P,P,... by tree.

    Raises:
        ValueError: something else.
    """
    found = {}
    for text in given:
        tree, _, values = text.partition("=")
        try:
            found[tree] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise ValueError(f"--law: expected TREE=P,P,..., got {text!r}") from None
        points.widths_of(tree)
    return found


def merge(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs of one model on one device as one run; of equal points the last.

    A whole run and a window of a steady state are not equal. Rows get the number of their run, as
    what comes of different ones differs by more than policies may.

    Raises:
        ValueError: they are not of one model, device and law.
    """
    first, found = runs[0]["about"], {}
    defaults = vars(build_parser().parse_args([]))
    for number, run in enumerate(runs, start=1):
        facts, same = run["about"], ("device", "memory", "torch")
        for name in same:
            if facts[name] != first[name]:
                raise ValueError(f"{name} is {facts[name]} beside {first[name]}")
        for name in (
            "model",
            "layers",
            "scale",
            "dtype",
            "state_dtype",
            "most",
            "seed",
            "batch_wait_iters",
            "cuda_graph_max_prompt_tokens",
        ):
            # A run of a time before a setting has what is now its default.
            these, those = (x["settings"].get(name, defaults[name]) for x in (facts, first))
            if these != those:
                raise ValueError(f"{name} is {these} beside {those}")
        for tree in facts["laws"].keys() & first["laws"].keys():
            if facts["laws"][tree] != first["laws"][tree]:
                raise ValueError(f"the law of {tree} differs")
        first["laws"] |= facts["laws"]
        for row in run["rows"]:
            key = [row[k] for k in ("workload", "fraction", "policy", "tree", "load")]
            found[(*key, kind(row))] = row | {"run": number}
    names = {named(row) for row in found.values()}
    left = [point for run in runs for point in run.get("left_out", ()) if point not in names]
    return {"about": first, "rows": list(found.values()), "left_out": list(dict.fromkeys(left))}


def measure_all(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from executor import about, read_config

    from trtllm_treewy.model.dummy import dummy_model

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this takes a GPU, and torch sees none (--device cpu tries the script out)")
    if args.device == "cpu" and args.memory is None:
        parser.error("--device cpu needs --memory, which fractions are of")
    device = torch.device(args.device)
    memory = args.memory or torch.cuda.get_device_properties(device).total_memory
    config = read_config(args.model, args.layers)
    plan = plan_of(args)
    facts = about(args, device) | {
        "memory": memory,
        "laws": {
            site.setting.tree: list(site.setting.speculation(args.laws).simulated_acceptance or ())
            for site in plan
            if site.setting.policy != points.NONE
        },
    }
    files = ("output", "markdown", "plot", "source")  # of this machine, and nothing of the figures
    facts["settings"] = {k: v for k, v in vars(args).items() if k not in files}
    started = time.perf_counter()
    model = dummy_model(config, dtype=getattr(torch, args.dtype), device=device, seed=args.seed)
    say(
        f"{format_size(memory)} of memory, weights made in {time.perf_counter() - started:.1f} s, "
        f"{started - STARTED:.1f} s after the start"
    )
    say("acceptance is simulated (--law): texts mean nothing")
    ground = Ground(
        config, model, memory, args.most, args.state_dtype, args.laws,
        captured=device.type == "cuda", batch_wait_iters=args.batch_wait_iters,
        prompt_tokens=args.cuda_graph_max_prompt_tokens,
    )  # fmt: skip
    run: dict[str, Any] = {"about": facts, "rows": [], "left_out": []}
    clock = Clock(effort_of(args), STARTED + args.seconds if args.seconds else None)
    Session(ground, clock, args.repeats, run, lambda: save(args.output, run), Compiles()).measure(
        plan
    )
    return run


def effort_of(args: argparse.Namespace) -> Effort:
    """How much is run for a point."""
    return Effort(
        args.requests_per_sequence, args.least_requests, args.rate_seconds, args.point_seconds,
        args.seed, args.settle,
    )  # fmt: skip


def save(file: Path | None, run: Mapping[str, Any]) -> None:
    """Writes the run whole or not at all: what was there before stays if this is interrupted."""
    if file is None:
        return
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, file)


if __name__ == "__main__":
    main()
