"""Times of the CUDA kernels beside the floor of memory and beside peers.

    python benchmarks/kernels.py --quick
    python benchmarks/kernels.py --output results.json --plot results.svg
    python benchmarks/kernels.py --from results.json --plot results.svg --markdown

First the kernels are checked against the float64 reference on the CPU; a wrong kernel is not timed.
Then, for a layer of Qwen3.5-35B-A3B (HK 16, HV 32, K = V = 128), every case is captured as a CUDA
graph of several launches, each over other slots of a pool far larger than the L2 cache; the slots
are drawn anew before every replay, so that states come from memory. A time is the median of the
replays over the launches of a graph. Inputs and outputs are the same from launch to launch and may
stay in the cache, for peers as for us.

The floor of a case is every byte that must move once, at the read bandwidth measured first; a floor
of operations is kept beside it. Peers (FlashInfer, SGLang, flash-linear-attention) are timed in the
same run where they can be imported and are right; the goals are judged from the same rows.
`--from` renders a saved run and needs no GPU. The parts are in `kernel_bench/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from kernel_bench import cases, report
from kernel_bench.results import Results

SECTIONS = ("verify", "stash", "commit", "steps", "other", "peers")


def main() -> None:
    parser = build_parser()
    options = parser.parse_args()
    check_options(parser, options)
    if options.source:
        try:
            results = Results.load(options.source)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("this takes a GPU, and torch sees none; --from renders a saved run")
        results = measure(options)
    if options.output:
        results.save(options.output)
    if options.markdown:
        print(report.markdown(results), end="")
    else:
        report.print_report(results)
    if options.plot:
        from kernel_bench.plot import plot

        plot(results, options.plot)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, about a minute")
    parser.add_argument(
        "--tiles", action="store_true", help="every way to cut blocks of verify and commit as well"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="these sections alone"
    )
    parser.add_argument("--replays", type=int, default=15, help="of a graph, for the median")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--from", dest="source", type=Path, help="render this JSON file, and measure nothing"
    )
    parser.add_argument("--plot", type=Path, help="picture of the times (takes matplotlib)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What would fail after minutes of measuring ends the command at once."""
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot takes matplotlib: pip install 'trtllm-treewy[bench]'")
    for path in (options.output, options.plot):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    if options.replays < 1:
        parser.error(f"--replays is {options.replays}, expected at least 1")


def measure(options: argparse.Namespace) -> Results:
    """A run on the GPU. Parts are saved as they come where there is an output file."""
    from kernel_bench.bench import Bench
    from kernel_bench.check import check_verify
    from kernel_bench.clock import GpuClock, measure_rates
    from kernel_bench.machine import describe_machine
    from kernel_bench.peers import all_peers

    peers = all_peers()
    rates = measure_rates()
    names = dict.fromkeys(name for peer in peers for name in peer.distributions)
    results = describe_machine(rates, names)
    bench = Bench(GpuClock(options.replays), rates, rows=results.rows)
    error = check_verify(bench, options.quick)
    bench.say(f"checked against the reference: u within {error:.1e}")
    for section, run in sections(bench, options, results).items():
        if section not in options.only:
            continue
        try:
            run()
        finally:
            if options.output:
                results.save(options.output)
    return results


def sections(bench, options: argparse.Namespace, results: Results) -> dict[str, Callable]:
    """What is measured, by name, in order."""
    from kernel_bench import acceptance, commit_inputs, commits, convolution, deferred, prompts
    from kernel_bench.peers import all_peers, ucache
    from kernel_bench.peers.measure import measure_peers
    from kernel_bench.verification import Verification

    quick = options.quick
    verification = Verification()
    timers = {
        "commit": commits.time_commit,
        "commit_inputs": commit_inputs.time_commit_inputs,
        "conv_commit": commits.time_conv_commit,
        "tree_conv": convolution.time_tree_conv,
        "prefill_conv": convolution.time_prefill_conv,
        "prefill": prompts.time_prefill,
        "greedy_accept": acceptance.time_greedy_accept,
        "step_reconstruct": deferred.time_step,
        "step_deferred": deferred.time_step,
        "step_deferred_apart": deferred.time_step,
        **dict.fromkeys(
            ("deferred_verify", "deferred_fold", "deferred_append", "deferred_append_folded"),
            deferred.time_phase,
        ),
    }

    def by_operation(bench, case):
        return timers[case.operation](bench, case)

    def peers() -> None:
        results.absent.update(measure_peers(bench, all_peers(), quick))
        results.absent.update(ucache.measure_steps(bench, ucache.step_cases(quick)))

    verify, commit = cases.verify_cases(quick), cases.commit_cases(quick)
    steps = cases.step_cases(quick) + cases.phase_cases(quick)
    if options.tiles:
        verify += cases.tile_cases(verify, list(verification.tiles))
        plain = [c for c in commit if (c.operation, c.stash) == ("commit", "fp32")]
        commit += cases.tile_cases(plain, commits.commit_tiles())
    return {
        "verify": lambda: bench.measure_all("verify", verify, verification.time),
        "stash": lambda: bench.measure_all("stash", cases.stash_cases(quick), verification.time),
        "commit": lambda: bench.measure_all("commit", commit, by_operation),
        "steps": lambda: bench.measure_all("steps", steps, by_operation),
        "other": lambda: bench.measure_all("other", cases.other_cases(quick), by_operation),
        "peers": peers,  # last: a fault of theirs on the GPU must not cost our times
    }


if __name__ == "__main__":
    main()
