"""A call of a launcher: its structure, kept by signature, and what it is launched on.

A call's checks, and all of its C structure but the addresses, depend on the tensors' shapes,
strides, types and devices alone. They are worked out once for each such signature and kept, so
that a call in a running model fills in addresses and launches.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import cuda_library as lib
from .errors import error_address

# Operators whose launcher has another name than they.
LAUNCHERS = {
    "commit_deferred_folding": "treewy_commit_deferred",
    "flush_history_folding": "treewy_flush_history",
    "tree_conv_into": "treewy_tree_conv",
    "tree_outputs": "treewy_tree_verify",
    "tree_verify_folding": "treewy_tree_verify",
    "tree_verify_into": "treewy_tree_verify",
}

# Calls that went to the reference, by operator and reason.
reference_calls: Counter[tuple[str, str]] = Counter()

MAX_KEPT_CALLS = 512


class Call:
    """One launcher's structure for tensors of one signature.

    Attributes:
        reason: why the torch reference serves such tensors, or None.
        copies: positions of the tensors that have to be made contiguous first.
        params: the structure, without addresses.
    """

    def __init__(self, op: str, device: torch.device) -> None:
        self.launcher = LAUNCHERS.get(op, f"treewy_{op}")
        self.device = device
        self.reason: str | None = None
        self.copies: tuple[int, ...] = ()
        self.params: Any = lib.LAUNCHERS[self.launcher]()
        self._address = ctypes.addressof(self.params)
        self._places: list[tuple[Any, str]] = []
        self._errors: Any = None

    def address(self, view: Any, *names: str) -> None:
        """The next tensors' addresses go into these fields of `view`."""
        self._places += [(view, name) for name in names]

    def count_errors(self, view: Any) -> None:
        """The device's error counter goes into the field `errors` of `view`."""
        self._errors = view

    def launch(self, tensors: Sequence[Tensor | None]) -> None:
        """Launches on the current stream, the tensors in the order that `address` was given."""
        for (view, name), x in zip(self._places, tensors, strict=True):
            setattr(view, name, None if x is None else x.data_ptr())
        if self._errors is not None:
            self._errors.errors = error_address(self.device)
        library = lib.load_library()
        function, device = library.launchers[self.launcher], self.device
        if device.type != "cuda":  # the kernels played on the host, in tests
            status = function(self._address, None)
        elif device.index == torch.cuda.current_device():
            status = function(self._address, torch.cuda.current_stream(device).cuda_stream)
        else:
            with torch.cuda.device(device):
                status = function(self._address, torch.cuda.current_stream(device).cuda_stream)
        if status:
            library.check(status)


class _Kept(threading.local):
    """The calls made so far, by signature; a structure is filled by one thread alone."""

    def __init__(self) -> None:
        self.calls: dict[Any, Call] = {}


_kept = _Kept()


def prepare(
    op: str,
    tensors: tuple[Tensor | None, ...],
    setup: Callable[..., None],
    *options: Any,
) -> tuple[Call, tuple[Tensor | None, ...]]:
    """The call for these tensors, set up now if there was none like it, and what to launch it on.

    `setup(call, *tensors, *options)` checks the tensors and fills the structure; it raises
    ValueError for wrong ones.
    """
    key = (
        op,
        options,
        *[
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
            for x in tensors
        ],
    )
    call = _kept.calls.get(key)
    if call is None:
        first = tensors[0]
        assert first is not None
        call = Call(op, first.device)
        setup(call, *tensors, *options)
        if len(_kept.calls) >= MAX_KEPT_CALLS:
            _kept.calls.clear()
        _kept.calls[key] = call
    if call.reason is None and call.copies:
        copied = list(tensors)
        for position in call.copies:
            x = copied[position]
            copied[position] = None if x is None else x.contiguous()
        return prepare(op, tuple(copied), setup, *options)
    return call, tensors


def call_reference(op: str, call: Call, arguments: tuple[Any, ...]) -> Any:
    """The torch reference of an operator."""
    from .. import ops

    reference_calls[op, str(call.reason)] += 1
    return getattr(ops, op)._init_fn(*arguments)


def find_copies(
    tensors: Sequence[Tensor | None], *, whole: Sequence[int], rows: Sequence[int]
) -> tuple[int, ...]:
    """Positions of tensors that are not contiguous: wholly, or in their last dimension."""
    found = []
    for position in (*whole, *rows):
        x = tensors[position]
        if x is None:
            continue
        inner = x.stride(-1) == 1 or x.shape[-1] == 1
        if not (x.is_contiguous() if position in whole else inner):
            found.append(position)
    return tuple(found)
