"""The devices that a model runs on: what `LLM(device=)` says, checked against what is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Devices = str | torch.device | Sequence[str | torch.device]


def devices_of(device: Devices | None, ranks: int) -> list[torch.device]:
    """The device of each rank.

    Args:
        device: the first one, the others being those that follow; or one for each rank, in a list
            or in a text, separated by commas. None: GPUs where there are any.
        ranks: how many there are.

    Raises:
        ValueError: one is not there, or is named twice, or there are not `ranks` of them.
    """
    if isinstance(device, str) and "," in device:
        device = [name.strip() for name in device.split(",")]
    if isinstance(device, str) or not isinstance(device, Sequence):
        first = _device(device)
        return [first] if ranks == 1 else _following(first, ranks)
    found = [_device(one) for one in device]
    if len(found) != ranks:
        raise ValueError(
            f"device names {len(found)} devices, expected one for each rank of "
            f"tensor_parallel_size={ranks}, or the first alone"
        )
    kinds, places = {one.type for one in found}, {(one.type, one.index or 0) for one in found}
    if len(kinds) > 1 or (kinds == {"cuda"} and len(places) < ranks):
        named = ", ".join(map(str, found))
        raise ValueError(f"device must be different GPUs, or the CPU for all ranks, got {named}")
    return found


def _following(device: torch.device, ranks: int) -> list[torch.device]:
    """Where each rank runs: GPUs from `device` on, or the CPU for all.

    Raises:
        ValueError: there are not as many GPUs.
    """
    if device.type != "cuda":
        return [device] * ranks
    first, count = device.index or 0, torch.cuda.device_count()
    if first + ranks > count:
        raise ValueError(
            f"tensor_parallel_size {ranks} needs {ranks} CUDA devices from cuda:{first} on, torch "
            f"sees {count}"
        )
    return [torch.device("cuda", first + rank) for rank in range(ranks)]


def _device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or a GPU where there is one; ValueError if it is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not a torch device: {error}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ValueError(
                f"device {str(device)!r} is not there: torch sees {count} CUDA devices"
            )
    elif found.type != "cpu":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
    return found
