"""`trtllm-treewy doctor`: what of CUDA, TensorRT and the libraries is found."""

from __future__ import annotations

import argparse
import json

from .program import EXIT_CHECK_FAILED, EXIT_OK


def run(args: argparse.Namespace) -> int:
    """Prints the findings; an exit code."""
    from .. import doctor

    if args.trtllm:
        return _run_trtllm(args.json)
    findings = doctor.collect()
    print(json.dumps(findings, indent=2) if args.json else doctor.report(findings))
    return EXIT_OK


def _run_trtllm(as_json: bool) -> int:
    from .. import doctor

    report = doctor.check_trtllm()
    print(json.dumps(report, indent=2) if as_json else doctor.trtllm_report(report))
    return EXIT_CHECK_FAILED if report["problem"] or report["failed"] else EXIT_OK
