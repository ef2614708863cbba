"""How much memory a device has free."""

from __future__ import annotations

from pathlib import Path

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device`; None where there is no telling."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_free_of_machine(), _free_of_container()) if limit is not None]
    return min(limits, default=None)


def _free_of_machine() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_container() -> int | None:
    """What the control group (v2) of a container leaves, if it limits memory at all."""
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
