"""The library of CUDA kernels, `libtreewy.so`, as Python sees it: where it is and what it takes.

The structures mirror `plugins/include/treewy.h` field by field (a test compiles the header and
compares). Nothing here needs torch or a GPU; the library itself loads without a driver, too.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

LIBRARY_NAME = "libtreewy.so"
LIBRARY_VARIABLE = "TREEWY_LIBRARY"
VERSION = 5

MAX_NODES = 128
MAX_HEAD_DIM = 256
MAX_CONV_WIDTH = 8
FOLD_ROWS = 64

# treewy_status and treewy_dtype
OK, INVALID_ARGUMENT, UNSUPPORTED, CUDA_ERROR = range(4)
FLOAT32, BFLOAT16, FLOAT16 = range(3)


def _strides(count: int) -> Any:
    return c_int64 * count


class Tree(ctypes.Structure):
    """treewy_tree."""

    _fields_ = [
        ("batch", c_int32),
        ("max_nodes", c_int32),
        ("num_slots", c_int64),
        ("slot", c_void_p),
        ("parents", c_void_p),
        ("num_nodes", c_void_p),
    ]


class Stash(ctypes.Structure):
    """treewy_stash."""

    _fields_ = [
        ("u", c_void_p),
        ("k", c_void_p),
        ("g", c_void_p),
        ("u_stride", _strides(4)),
        ("k_stride", _strides(4)),
        ("g_stride", _strides(3)),
        ("k_dtype", c_int32),
        ("k_normalized", c_int32),
        ("u_dtype", c_int32),
        ("reserved", c_int32),
    ]


class StatePool(ctypes.Structure):
    """treewy_state_pool."""

    _fields_ = [
        ("data", c_void_p),
        ("layer_stride", c_int64),
        ("slot_stride", c_int64),
        ("dtype", c_int32),
        ("layers", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
    ]


class History(ctypes.Structure):
    """treewy_history."""

    _fields_ = [
        ("u", c_void_p),
        ("k", c_void_p),
        ("g", c_void_p),
        ("length", c_void_p),
        ("u_stride", _strides(2)),
        ("k_stride", _strides(2)),
        ("g_stride", _strides(2)),
        ("capacity", c_int32),
        ("u_dtype", c_int32),
        ("k_dtype", c_int32),
        ("reserved", c_int32),
        ("folded", c_void_p),
        ("folding", c_void_p),
        ("folded_stride", _strides(2)),
    ]


class CommitParams(ctypes.Structure):
    """treewy_commit_params."""

    _fields_ = [
        ("tree", Tree),
        ("state", StatePool),
        ("stash", Stash),
        ("accepted", c_void_p),
        ("errors", c_void_p),
        ("tile", c_int32),
        ("items", c_int32),
    ]


class CommitDeferredParams(ctypes.Structure):
    """treewy_commit_deferred_params."""

    _fields_ = [("commit", CommitParams), ("history", History)]


class FlushHistoryParams(ctypes.Structure):
    """treewy_flush_history_params."""

    _fields_ = [
        ("batch", c_int32),
        ("reserved", c_int32),
        ("num_slots", c_int64),
        ("slot", c_void_p),
        ("state", StatePool),
        ("history", History),
        ("errors", c_void_p),
    ]


class ConvWeights(ctypes.Structure):
    """treewy_conv_weights."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("dtype", c_int32),
        ("width", c_int32),
    ]


class CommitInputsParams(ctypes.Structure):
    """treewy_commit_inputs_params."""

    _fields_ = [
        ("tree", Tree),
        ("state", StatePool),
        ("weights", ConvWeights),
        ("x", c_void_p),
        ("conv_state", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("A_log", c_void_p),
        ("dt_bias", c_void_p),
        ("accepted", c_void_p),
        ("errors", c_void_p),
        ("weight_stride", c_int64),
        ("bias_stride", c_int64),
        ("x_stride", _strides(3)),
        ("conv_state_stride", _strides(3)),
        ("a_stride", _strides(3)),
        ("b_stride", _strides(3)),
        ("A_log_stride", c_int64),
        ("dt_bias_stride", c_int64),
        ("dtype", c_int32),
        ("gate_dtype", c_int32),
        ("tile", c_int32),
        ("items", c_int32),
    ]


class TreeConvParams(ctypes.Structure):
    """treewy_tree_conv_params."""

    _fields_ = [
        ("tree", Tree),
        ("weights", ConvWeights),
        ("x", c_void_p),
        ("y", c_void_p),
        ("conv_state", c_void_p),
        ("x_stride", _strides(2)),
        ("y_stride", _strides(2)),
        ("state_stride", _strides(2)),
        ("dtype", c_int32),
        ("channels", c_int32),
        ("stash", c_void_p),
        ("stash_stride", _strides(2)),
    ]


class ConvCommitParams(ctypes.Structure):
    """treewy_conv_commit_params."""

    _fields_ = [
        ("tree", Tree),
        ("accepted", c_void_p),
        ("errors", c_void_p),
        ("x", c_void_p),
        ("conv_state", c_void_p),
        ("x_stride", _strides(3)),
        ("state_stride", _strides(3)),
        ("dtype", c_int32),
        ("layers", c_int32),
        ("channels", c_int32),
        ("width", c_int32),
    ]


class PathConvParams(ctypes.Structure):
    """treewy_path_conv_params."""

    _fields_ = [
        ("tree", Tree),
        ("weights", ConvWeights),
        ("accepted", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("conv_state", c_void_p),
        ("weight_stride", c_int64),
        ("bias_stride", c_int64),
        ("x_stride", _strides(3)),
        ("y_stride", _strides(3)),
        ("state_stride", _strides(3)),
        ("dtype", c_int32),
        ("layers", c_int32),
        ("channels", c_int32),
        ("reserved", c_int32),
    ]


class Packed(ctypes.Structure):
    """treewy_packed."""

    _fields_ = [
        ("batch", c_int32),
        ("reserved", c_int32),
        ("tokens", c_int64),
        ("num_slots", c_int64),
        ("slot", c_void_p),
        ("cu_seqlens", c_void_p),
    ]


class PrefillConvParams(ctypes.Structure):
    """treewy_prefill_conv_params."""

    _fields_ = [
        ("packed", Packed),
        ("weights", ConvWeights),
        ("x", c_void_p),
        ("y", c_void_p),
        ("conv_state", c_void_p),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("state_stride", _strides(2)),
        ("dtype", c_int32),
        ("channels", c_int32),
    ]


class PrefillParams(ctypes.Structure):
    """treewy_prefill_params."""

    _fields_ = [
        ("packed", Packed),
        ("state", StatePool),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("A_log", c_void_p),
        ("dt_bias", c_void_p),
        ("out", c_void_p),
        ("q_stride", _strides(2)),
        ("k_stride", _strides(2)),
        ("v_stride", _strides(2)),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("out_stride", _strides(2)),
        ("dtype", c_int32),
        ("gate_dtype", c_int32),
    ]


class TreeVerifyParams(ctypes.Structure):
    """treewy_tree_verify_params."""

    _fields_ = [
        ("tree", Tree),
        ("state", StatePool),
        ("history", History),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("A_log", c_void_p),
        ("dt_bias", c_void_p),
        ("out", c_void_p),
        ("u", c_void_p),
        ("g", c_void_p),
        ("q_stride", _strides(3)),
        ("k_stride", _strides(3)),
        ("v_stride", _strides(3)),
        ("a_stride", _strides(2)),
        ("b_stride", _strides(2)),
        ("out_stride", _strides(3)),
        ("u_stride", _strides(3)),
        ("g_stride", _strides(2)),
        ("dtype", c_int32),
        ("gate_dtype", c_int32),
        ("u_dtype", c_int32),
        ("tile", c_int32),
        ("fold_above", c_int32),
        ("reserved", c_int32),
    ]


class GreedyAcceptParams(ctypes.Structure):
    """treewy_greedy_accept_params."""

    _fields_ = [
        ("tree", Tree),
        ("target_ids", c_void_p),
        ("token_ids", c_void_p),
        ("target_stride", c_int64),
        ("token_stride", c_int64),
        ("max_path", c_int32),
        ("reserved", c_int32),
        ("accepted", c_void_p),
        ("num_accepted", c_void_p),
        ("path", c_void_p),
        ("bonus_ids", c_void_p),
    ]


# Launchers and the structure each takes, behind a stream.
LAUNCHERS: dict[str, type[ctypes.Structure]] = {
    "treewy_tree_verify": TreeVerifyParams,
    "treewy_commit": CommitParams,
    "treewy_commit_inputs": CommitInputsParams,
    "treewy_commit_deferred": CommitDeferredParams,
    "treewy_flush_history": FlushHistoryParams,
    "treewy_tree_conv": TreeConvParams,
    "treewy_conv_commit": ConvCommitParams,
    "treewy_path_conv": PathConvParams,
    "treewy_prefill_conv": PrefillConvParams,
    "treewy_prefill": PrefillParams,
    "treewy_greedy_accept": GreedyAcceptParams,
}


class CudaLibrary:
    """A loaded `libtreewy.so`.

    Args:
        path: the file.

    Attributes:
        path: the file.
        launchers: the C functions by name; each takes the address of its structure and a stream,
            and returns a status.

    Raises:
        RuntimeError: the file does not load, is not this library, or is of another version; the
            message says which file and what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            version = int(self._library.treewy_version())
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"{path} is not a usable treewy library: {error}") from error
        if version != VERSION:
            raise RuntimeError(
                f"{path} has interface version {version}, expected {VERSION}: it was built from "
                "other sources. Run ./build.sh to build it again"
            )
        self._library.treewy_last_error.restype = ctypes.c_char_p
        self.launchers = {name: self._launcher(name) for name in LAUNCHERS}

    def _launcher(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise RuntimeError(
                f"{self.path} lacks {name}: it was built from other sources. Run ./build.sh to "
                "build it again"
            ) from error
        function.argtypes = (c_void_p, c_void_p)
        function.restype = c_int32
        return function

    def last_error(self) -> str:
        """Text of this thread's last failure."""
        text: bytes = self._library.treewy_last_error()
        return text.decode(errors="replace")

    def check(self, status: int) -> None:
        """Raise what a status stands for.

        Raises:
            ValueError: for an argument that is wrong or beyond a limit.
            RuntimeError: when CUDA refused the launch.
        """
        if status == OK:
            return
        kind = RuntimeError if status == CUDA_ERROR else ValueError
        raise kind(f"treewy::{self.last_error()}")


def library_candidates() -> list[Path]:
    """Where the library is looked for, in order.

    What the environment variable TREEWY_LIBRARY names (the file or its folder; "none" says to do
    without), else `build/` of the checkout and the folder of this module.
    """
    named = os.environ.get(LIBRARY_VARIABLE, "")
    if named.lower() == "none":
        return []
    if named:
        path = Path(named)
        return [path / LIBRARY_NAME if path.is_dir() else path]
    package = Path(__file__).resolve().parent
    return [package.parent / "build" / LIBRARY_NAME, package / LIBRARY_NAME]


def find_library() -> Path | None:
    """The library's file, or None where there is none; see `library_candidates`.

    Raises:
        FileNotFoundError: TREEWY_LIBRARY names a file that is not there.
    """
    candidates = library_candidates()
    for path in candidates:
        if path.is_file():
            return path
    if os.environ.get(LIBRARY_VARIABLE) and candidates:
        raise FileNotFoundError(f"{LIBRARY_VARIABLE} names {candidates[0]}, which is not a file")
    return None


@lru_cache(maxsize=1)
def load_library() -> CudaLibrary:
    """The library of `find_library`, loaded once.

    Raises:
        RuntimeError: there is none, or it is not usable.
    """
    path = find_library()
    if path is None:
        raise RuntimeError(f"there is no {LIBRARY_NAME}: run ./build.sh where nvcc is installed")
    return CudaLibrary(path)
