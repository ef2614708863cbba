"""What an engine directory says of itself: the object `treewy_engine` of its config.json.

The rest of that config.json is the checkpoint's own, so the directory also describes the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import read_json

if TYPE_CHECKING:
    import torch

KEY = "treewy_engine"
CONFIG_NAME = "config.json"
FORMAT = 3
ONNX, TENSORRT = "onnx", "tensorrt"
KINDS = (ONNX, TENSORRT)
# How attention is exported.
STANDARD, ATTENTION_OP = "standard", "onnx"
ATTENTIONS = (STANDARD, ATTENTION_OP)


class EngineMismatchError(ValueError):
    """An engine cannot run here, or not as asked; the message says what does not fit."""


def _is_size(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"bytes", "sha256"}
        and _is_size(value["bytes"])
        and isinstance(value["sha256"], str)
    )


def _is_mapping(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def _one_of(names: tuple[str, ...]) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


# What a field of `EngineConfig` may hold, by its annotation or its entry in `_CHOICES`.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda x: isinstance(x, str)),
    "str | None": ("a text or null", lambda x: x is None or isinstance(x, str)),
    "int": ("an integer >= 1", lambda x: _is_size(x, 1)),
    "bool": ("true or false", lambda x: isinstance(x, bool)),
    "Mapping[str, EngineFile]": (
        "files, each with bytes and sha256",
        lambda x: _is_mapping(x, _is_file),
    ),
    "Mapping[str, int]": ("integers >= 0 by name", lambda x: _is_mapping(x, _is_size)),
    "Mapping[str, float]": (
        "numbers by name",
        lambda x: _is_mapping(x, lambda y: isinstance(y, (int, float))),
    ),
    "kind": _one_of(KINDS),
    "dtype": _one_of(("float32", "float16", "bfloat16")),
    "attention": _one_of(ATTENTIONS),
}
_CHOICES = {
    "kind": "kind",
    "attention": "attention",
    **dict.fromkeys(("activation_dtype", "state_dtype", "stash_dtype", "kv_dtype"), "dtype"),
}


@dataclass(frozen=True)
class EngineFile:
    """A file of the directory: its length and the SHA-256 of its contents."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class EngineConfig:
    """What was built, from what and for what.

    Attributes:
        kind: `onnx` or `tensorrt`.
        activation_dtype, state_dtype, stash_dtype, kv_dtype: torch's names.
        max_batch_size, max_seq_len, max_nodes, max_num_tokens: the largest that the networks take.
        plugin_version: of the plugins that the nodes ask for.
        plugins: whether the plugins are in the engines, which then need their library.
        attention: `standard` operators, or the `onnx` Attention operator.
        tensor_parallel_size: ranks that the model is divided over; with more than one, each has
            its networks in a folder of its own (`rank_folder`).
        builder: program and version that made the engines.
        gpu: the GPU that they were made on or for, by `gpu_identity`; None for any.
        model: digest of the checkpoint's own part of config.json.
        inputs: digest of all that the build depends on.
        files: of the directory, by path in it.
        scratch: bytes that each network takes when it runs, on the rank that takes the most; 0
            where not measured.
        seconds: what the stages of the build took.
        format: of this object.
    """

    kind: str
    activation_dtype: str
    state_dtype: str
    stash_dtype: str
    kv_dtype: str
    max_batch_size: int
    max_seq_len: int
    max_nodes: int
    max_num_tokens: int
    plugin_version: str
    plugins: bool
    attention: str
    tensor_parallel_size: int
    builder: str
    gpu: str | None
    model: str
    inputs: str
    files: Mapping[str, EngineFile] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT

    def rank_files(self, rank: int) -> dict[str, EngineFile]:
        """A rank's own files by name; for one rank, all of the directory."""
        prefix = rank_folder(rank, self.tensor_parallel_size)
        if not prefix:
            return dict(self.files)
        some = self.files.items()
        return {
            name.removeprefix(f"{prefix}/"): file
            for name, file in some
            if name.startswith(f"{prefix}/")
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def read(cls, directory: str | Path) -> EngineConfig | None:
        """That of a directory; None where there is none, as in a checkpoint's directory.

        Raises:
            ValueError: it is not understood.
        """
        path = Path(directory) / CONFIG_NAME
        if not path.is_file():
            return None
        whole = read_json(path)
        raw = whole.pop(KEY, None)
        if raw is None:
            return None
        engine = cls.from_dict(raw, str(path))
        if engine.model != digest_of(whole):
            raise EngineMismatchError(
                f"{path} describes another model than the one that was built: it was changed after "
                "the build; build the engine again"
            )
        return engine

    @classmethod
    def from_dict(cls, raw: Any, source: str) -> EngineConfig:
        """That of a dict; EngineMismatchError for another format, other keys or wrong values."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else raw
            raise EngineMismatchError(
                f"{source}: {KEY} has format {found!r}, this version reads {FORMAT}: build it again"
            )
        known = {x.name for x in fields(cls)}
        if raw.keys() != known:
            odd = sorted(raw.keys() ^ known)
            raise EngineMismatchError(f"{source}: {KEY}: missing or unknown: {', '.join(odd)}")
        for x in fields(cls):
            expected, fits = _EXPECTED[_CHOICES.get(x.name, str(x.type))]
            if not fits(raw[x.name]):
                raise EngineMismatchError(
                    f"{source}: {x.name} must be {expected}, got {raw[x.name]!r}: it was changed "
                    "after the build; build the engine again"
                )
        files = {name: EngineFile(**file) for name, file in raw["files"].items()}
        return cls(**{**raw, "files": files})

    def check_files(self, directory: Path, *, contents: bool) -> None:
        """Raises EngineMismatchError for files that are not there or not those that were built.

        Args:
            directory: the engine's.
            contents: compare checksums too, and not lengths alone.
        """
        for name, file in self.files.items():
            path = directory / name
            if not path.is_file():
                raise EngineMismatchError(f"{directory}: {name} is missing: build the engine again")
            if path.stat().st_size != file.bytes:
                raise EngineMismatchError(
                    f"{path} has {path.stat().st_size} bytes, expected {file.bytes}: build the "
                    "engine again"
                )
            if contents and digest(path) != file.sha256:
                raise EngineMismatchError(
                    f"{path} is not the file that was built: its checksum differs"
                )


def rank_folder(rank: int, ranks: int) -> str:
    """Where in an engine's directory a rank's networks are: its own folder if there are more."""
    return f"rank{rank}" if ranks > 1 else ""


def devices_text(ranks: int) -> str:
    """What an engine of so many ranks is for, in words."""
    return "one device" if ranks == 1 else f"{ranks} ranks, a device each"


def gpu_identity(device: torch.device) -> str | None:
    """Name and compute capability of a GPU, such as "NVIDIA H200 sm_90"; None for no GPU."""
    if device.type != "cuda":
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} sm_{major}{minor}"


def digest(path: Path) -> str:
    """SHA-256 of a file's contents."""
    value = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value.update(block)
    return value.hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
