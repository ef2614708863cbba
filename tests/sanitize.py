"""Small cases of every kernel on a GPU, to be run under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python tests/sanitize.py trees histories

Each group calls kernels over shapes that take different ways through them, and compares with the
float64 reference as the tests do. Exits with 1 where a result differs; the tool says what it finds.
"""

from __future__ import annotations

import argparse

import folding_suite as folds
import kernel_suite as suite
import prefill_suite as prefills
from gdn_cases import Dims
from kernel_suite import BF16, F16, F32, Machine, TreeCase

from trtllm_treewy import cuda_library

WIDE, NARROW = Dims(1, 2, 128, 128), Dims(2, 2, 64, 64)


def trees(machine):
    """Small, general and whole-matrix verification, both tiles, aligned and not."""
    for nodes in (1, 5, 8, 11, 16, 23, 40, 61, 70):
        for dtype, state in ((BF16, BF16), (BF16, F32), (F16, F32)):
            case = TreeCase(nodes, WIDE, nodes, dtype=dtype, state_dtype=state, batch=2, pads=1)
            suite.check_verify(machine, case, pad=(8, 8))
            with suite.verify_tile(cuda_library.load_library(), 2):
                suite.check_verify(machine, case, pad=(8, 8))
    for nodes in (5, 20):
        suite.check_verify(machine, TreeCase(nodes, NARROW, nodes, dtype=F32), pad=(1, 1))
        suite.check_verify(machine, TreeCase(nodes, NARROW, nodes, dtype=BF16), pad=(1, 1))


def histories(machine):
    """Short and long histories of verification, appended to and flushed."""
    for nodes, capacity in ((3, 16), (16, 16), (12, 32), (16, 40), (20, 16)):
        for dtype, state, stash in ((BF16, BF16, BF16), (BF16, F32, F32), (F16, F32, None)):
            case = TreeCase(nodes, WIDE, nodes, dtype=dtype, state_dtype=state, batch=2)
            history = suite.random_history(case, capacity, stash=stash)
            suite.check_verify(machine, case, history=history)
            case = TreeCase(nodes, WIDE, nodes, dtype=dtype, state_dtype=state, layers=2)
            suite.check_deferred(machine, case, capacity=capacity, steps=3, stash=stash)
            kept = stash or F32
            folds.check_deferred_folding(machine, case, capacity=capacity, steps=3, stash=kept)


def commits(machine):
    """Both stashes, conv windows, acceptance."""
    for nodes in (4, 19):
        for dtype, state in ((BF16, BF16), (BF16, F32), (F32, F32)):
            case = TreeCase(nodes, WIDE, nodes, dtype=dtype, state_dtype=state, layers=2)
            suite.check_commit(machine, case)
        inputs = suite.InputsCase(nodes, WIDE, nodes, dtype=BF16, state_dtype=F32, layers=2)
        suite.check_commit_inputs(machine, inputs)
        suite.check_greedy(machine, nodes, nodes)


def convs(machine):
    """Of trees and of prompts, whole vectors and single channels."""
    for channels, nodes in ((64, 5), (256, 16), (37, 9), (512, 41)):
        for dtype in (BF16, F32):
            case = suite.conv_case(nodes, nodes=nodes, dtype=dtype, channels=channels, width=4)
            suite.check_conv(machine, case, bias=True, pad=0)
            suite.check_conv(machine, case, bias=False, pad=1)
            suite.check_conv_commit(machine, case, pad=1)
            suite.check_prefill_conv(
                machine, nodes, dtype=dtype, channels=channels, width=4, lengths=(1, 9, 0, 70)
            )


def prompts(machine):
    """Prompts on tensor cores and in float32."""
    for dtype, state in ((BF16, BF16), (BF16, F32), (F16, F32), (F32, F32)):
        for pad in (8, 1):
            prefills.check_prefill(
                machine, 1, WIDE, lengths=(70, 1, 0, 17), dtype=dtype, state_dtype=state, pad=pad
            )


GROUPS = {x.__name__: x for x in (trees, histories, commits, convs, prompts)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}: all")
    machine = Machine("cuda")
    for name in parser.parse_args().groups or GROUPS:
        if name not in GROUPS:
            parser.error(f"group must be one of {', '.join(GROUPS)}, got {name}")
        GROUPS[name](machine)
        print(f"{name}: equal to the reference", flush=True)


if __name__ == "__main__":
    main()
