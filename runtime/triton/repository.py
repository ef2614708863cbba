"""Writes a model into a model repository: whole or not at all, without paths of this machine."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import EngineConfig, devices_text
from trtllm_treewy.new_directory import new_directory
from trtllm_treewy.rank_config import shard_config

from .config_pbtxt import Instances, config_text
from .settings import parameters_of, read_parameters

VERSION = "1"
CHECKPOINT = "checkpoint"
# In a checkpoint's directory: weights in formats that are not read here, and code, which never is.
_UNREAD = frozenset((".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".py"))
_WEIGHTS = ".safetensors"
_MODEL_PY = '''"""What Triton runs; the settings are in ../config.pbtxt."""

import sys

# The folder that tritonserver was started in comes first, and may be a checkout of the sources.
sys.path[:] = [place for place in sys.path if place]
try:
    from trtllm_treewy.runtime.triton.model import TritonPythonModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: install trtllm-treewy[triton] for the Python of Triton's backend "
        f"({sys.version.split()[0]} in {sys.prefix}), or start tritonserver with the bin folder of "
        "an environment that has it first in PATH"
    ) from None

__all__ = ["TritonPythonModel"]
'''


def write_model(
    repository: Path,
    name: str,
    model: Path,
    settings: argparse.Namespace,
    instances: Instances,
    *,
    model_path: str | None = None,
    force: bool = False,
) -> Path:
    """Writes the model `name` into `repository`, which is made if it is not there.

    Args:
        repository: Triton's model repository.
        name: what clients call the model.
        model: directory of a checkpoint, or of an engine of `trtllm-treewy build`.
        settings: by the parser of `settings.add_settings`.
        instances: where it runs.
        model_path: where the server finds the model; it is copied into the repository otherwise.
        force: replace a model of that name.

    Returns:
        Directory of the model in the repository.

    Raises:
        FileExistsError: there is a model of that name already.
        ValueError, OSError: the model or a setting is not usable, or the disk is full; nothing is
            left behind then.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"{name!r} cannot be the name of a Triton model: use letters, digits, _.-")
    where = CHECKPOINT if model_path is None else model_path
    parameters = parameters_of(argparse.Namespace(**{**vars(settings), "model": where}))
    _check_model(model, read_parameters(parameters))
    target = repository / name
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists; --force replaces it")
    files: list[Path] = []
    if model_path is None:
        files = list(model_files(model, weights=settings.load_format != "dummy"))
    with new_directory(target, keep=model if model_path is not None else None) as part:
        _expect_room(part, sum(file.stat().st_size for file in files))
        _fill(part, config_text(name, parameters, instances), model, files)
    return target


def _check_model(model: Path, settings: argparse.Namespace) -> None:
    """Raises ValueError where `LLM` would refuse the model, or what is asked of it."""
    config = ModelConfig.from_pretrained(model)
    ranks, built = settings.tensor_parallel_size, EngineConfig.read(model)
    if ranks == 1 and settings.load_format == "auto" and built is None:
        return
    engine = built is not None
    if not engine:
        # This imports torch.
        from trtllm_treewy.runtime.trtllm_engine import TrtllmEngine

        engine = TrtllmEngine.read(model) is not None
    expected = 1 if built is None else built.tensor_parallel_size
    if engine and (ranks, settings.load_format) != (expected, "auto"):
        raise ValueError(
            f"{model} is an engine for {devices_text(expected)}, with its weights in it: expected "
            f"tensor_parallel_size {expected} and load_format auto, got {ranks} and "
            f"{settings.load_format}"
        )
    if not engine:
        shard_config(config, ranks)


def model_files(model: Path, *, weights: bool = True) -> Iterator[Path]:
    """The files of a checkpoint or an engine that a server needs; a checkpoint's `weights` or not.

    Raises:
        ValueError: the engine is not whole.
    """
    built = EngineConfig.read(model)
    if built is not None:
        built.check_files(model, contents=False)
    unread = frozenset[str]() if built is not None else _UNREAD
    if built is None and not weights:
        unread |= {_WEIGHTS}
    for file in sorted(model.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(model).parts)
        if file.is_file() and not hidden and file.suffix not in unread:
            yield file


def _fill(part: Path, config: str, model: Path, files: list[Path]) -> None:
    version = part / VERSION
    version.mkdir()
    (part / "config.pbtxt").write_text(config, encoding="utf-8")
    (version / "model.py").write_text(_MODEL_PY, encoding="utf-8")
    for file in files:
        copy = version / CHECKPOINT / file.relative_to(model)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)  # what a link points to, not the link


def _expect_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder.parent} has {free} bytes left and the model takes {needed}; make room, or "
            "leave the model where it is: --model-path"
        )
