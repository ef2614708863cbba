"""The command `trtllm-treewy`: one thin function per subcommand over the Python API.

torch is imported only inside the commands that need it, so that `--help` and the errors of the
command line come at once. Generated text alone goes to stdout; all else goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..runtime.errors import EngineDeadError
from . import bench, build, doctor, generate, plan, serve, triton_repo, trtllm
from .arguments import parse
from .flags import in_flags
from .program import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USER_ERROR
from .streams import discard_stdout, open_streams, write_err, write_error

COMMANDS = {
    "generate": generate.run,
    "build": build.run,
    "convert-checkpoint": trtllm.convert,
    "trtllm-build": trtllm.build,
    "serve": serve.run,
    "bench serve": bench.run,
    "triton-repo": triton_repo.run,
    "plan": plan.run,
    "doctor": doctor.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0; 1 where a request ended with an error of its own; 2 for a user's error; 130 for Ctrl-C; 141
    where the reader of stdout has gone.
    """
    with open_streams():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    try:
        args = parse(argv)
        code = COMMANDS[args.command](args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        write_err("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, MemoryError, NotImplementedError, EngineDeadError) as error:
        if os.environ.get("TREEWY_DEBUG", "0") not in ("", "0"):
            raise
        message = str(error).strip() or type(error).__name__
        write_error(in_flags(message))
        return EXIT_USER_ERROR
