"""What an engine directory says of itself: the object `treewy_engine` of its config.json.

The rest of that config.json is the checkpoint's own, so the directory also describes the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .config import read_json

KEY = "treewy_engine"
CONFIG_NAME = "config.json"
FORMAT = 1
ONNX, TENSORRT = "onnx", "tensorrt"
KINDS = (ONNX, TENSORRT)


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
        builder: program and version that made the engines.
        gpu: the GPU that they were made on or for; None for any.
        inputs: digest of all that the build depends on.
        files: of the directory, by name.
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
    builder: str
    gpu: str | None
    inputs: str
    files: Mapping[str, EngineFile] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT

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
        raw = read_json(path).get(KEY)
        if raw is None:
            return None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: Any, source: str) -> EngineConfig:
        """Raises ValueError for another format, and for keys that are missing or unknown."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else raw
            raise ValueError(
                f"{source}: {KEY} has format {found!r}, this version reads {FORMAT}: build it again"
            )
        known = {x.name for x in fields(cls)}
        if raw.keys() != known:
            odd = sorted(raw.keys() ^ known)
            raise ValueError(f"{source}: {KEY}: missing or unknown: {', '.join(odd)}")
        if raw["kind"] not in KINDS:
            raise ValueError(f"{source}: kind must be one of {', '.join(KINDS)}, got {raw['kind']}")
        files = {name: EngineFile(**file) for name, file in raw["files"].items()}
        return cls(**{**raw, "files": files})

    def check_files(self, directory: Path, *, contents: bool) -> None:
        """Raises ValueError for files that are not there or not those that were built.

        Args:
            directory: the engine's.
            contents: compare checksums too, and not lengths alone.
        """
        for name, file in self.files.items():
            path = directory / name
            if not path.is_file():
                raise ValueError(f"{directory}: {name} is missing: build the engine again")
            if path.stat().st_size != file.bytes:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes, expected {file.bytes}: build the "
                    "engine again"
                )
            if contents and digest(path) != file.sha256:
                raise ValueError(f"{path} is not the file that was built: its checksum differs")


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
