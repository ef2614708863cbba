"""Counters on the device of what commits could not move."""

from __future__ import annotations

import torch
from torch import Tensor

_error_counters: dict[torch.device, Tensor] = {}


def error_address(device: torch.device) -> int | None:
    """Address of the device's error counter.

    None while a graph is captured before anything else ran: a counter that is made then would be
    set to zero by every replay.
    """
    counter = _error_counters.get(device)
    if counter is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        counter = _error_counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter.data_ptr()


def error_count(device: torch.device | str, *, reset: bool = False) -> int:
    """Rows that commits on the device could not move since it was last reset; waits for it.

    Such a row has its slot or accepted node out of range, parents that are not in topological
    order, or a path longer than its history; its state is as it was. Counted once by each commit
    operator.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    counter = _error_counters.get(device)
    if counter is None:
        return 0
    count = int(counter)
    if reset:
        counter.zero_()
    return count
