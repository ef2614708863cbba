"""Where the engine of an instance runs: what its instance group says, or the list of GPUs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence


def check_gpus(gpus: Sequence[int] | None, ranks: int) -> None:
    """Refuses GPUs that cannot be divided into sets of `ranks`.

    Raises:
        ValueError: a number is negative or comes twice, or the last set is not whole.
    """
    if gpus is None:
        return
    if min(gpus) < 0:
        raise ValueError(f"gpus has {min(gpus)}, expected numbers of GPUs, from 0 on")
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"gpus has a GPU twice: {','.join(map(str, gpus))}")
    if len(gpus) % ranks:
        raise ValueError(
            f"gpus names {len(gpus)} GPUs, expected a multiple of tensor_parallel_size {ranks}"
        )


def device_of(args: Mapping[str, str], settings: argparse.Namespace) -> str | None:
    """The device of an instance as `LLM` takes it, or those of its ranks.

    Args:
        args: what Triton gives to `initialize`.
        settings: as `read_parameters` gives them.

    Returns:
        "cpu"; "cuda:N", the one of the instance; with several ranks "cuda:N,cuda:M,.."; None where
        nobody says: the first GPUs that torch finds, or else the CPU.

    Raises:
        ValueError: the instance group says otherwise: the CPU where GPUs are listed, or a GPU for
            each instance where there are several ranks.
    """
    kind, ranks = args["model_instance_kind"], settings.tensor_parallel_size
    if kind == "CPU":
        if settings.gpus is not None:
            raise ValueError("parameter gpus names GPUs, and the instance group is of KIND_CPU")
        return "cpu"
    if kind == "GPU":
        if ranks == 1:
            return f"cuda:{args['model_instance_device_id']}"
        raise ValueError(
            f"tensor_parallel_size {ranks} needs instances of KIND_MODEL, which choose their GPUs "
            "(parameter gpus), or of KIND_CPU; the instance group is of KIND_GPU, a GPU each"
        )
    if settings.gpus is None:
        return None
    first = ranks * (_number(args["model_instance_name"]) % (len(settings.gpus) // ranks))
    return ",".join(f"cuda:{gpu}" for gpu in settings.gpus[first : first + ranks])


def _number(instance: str) -> int:
    """The number of an instance in its group, with which Triton ends its name."""
    found = re.search(r"_(\d+)$", instance)
    return int(found[1]) if found else 0
