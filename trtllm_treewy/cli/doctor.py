"""`trtllm-treewy doctor`: what of CUDA, TensorRT and the libraries is found."""

from __future__ import annotations

import argparse
import json

from .program import EXIT_OK


def run(args: argparse.Namespace) -> int:
    """Prints the findings; an exit code."""
    from .. import doctor

    findings = doctor.collect()
    print(json.dumps(findings, indent=2) if args.json else doctor.report(findings))
    return EXIT_OK
