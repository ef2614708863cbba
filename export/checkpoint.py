"""Hugging Face safetensors checkpoints: checked whole against the model, then read piecemeal.

Read from top to bottom: `load_model` builds the model without memory, `find_sources` compares the
files' headers with what the model expects (no tensor data is read until everything fits), and
`read_tensors` copies one tensor at a time into its final type and place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtllm_treewy.config import ModelConfig, read_json
from trtllm_treewy.model import SINGLE_RANK, Collectives, Qwen3_5ForCausalLM
from trtllm_treewy.rank_config import shard_config

from .sharding import shard_tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Progress = Callable[[int, int], None]

_FLOAT_CODES = ("F64", "F32", "BF16", "F16")
_QUANTISED_NAME = re.compile(
    r"\.(qweight|qzeros|scales|biases|g_idx|absmax|SCB|weight_format"
    r"|\w*weight_(scale|scale_inv|scale_2|zero_point|packed|shape)|input_scale)$"
)
# Parameters that the gates of the recurrence need unrounded.
_FLOAT32_NAMES = ("A_log", "dt_bias")
_VISION_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
_NAMES_SHOWN = 8
_QUANTISED = "quantised tensors, which are not supported"


def load_model(
    directory: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    collectives: Collectives = SINGLE_RANK,
) -> Qwen3_5ForCausalLM:
    """The model of a Hugging Face directory with its weights, in eval mode and without gradients.

    Memory beyond the model itself is one tensor (of one rank of several: one whole tensor in the
    machine's memory). The weights are copies: the files may change afterwards.

    Args:
        directory: holds config.json and `model.safetensors` or an index with its shards.
        config: instead of the directory's config.json.
        dtype: "auto" (what the config says), "float32", "bfloat16", "float16" or a floating torch
            type. `A_log` and `dt_bias` are float32 whatever it is.
        device: where the weights go.
        progress: called as `progress(done, total)` after each of the model's tensors.
        collectives: of the rank whose share is wanted, where the model is divided over several.

    Raises:
        FileNotFoundError: the directory or its config.json is absent, or there are no weights.
        ValueError: the config is not supported or does not divide over the ranks, or the weights
            do not fit it; everything that is wrong with them is in one message. Nothing is returned
            half loaded.
    """
    config = ModelConfig.from_pretrained(directory) if config is None else config
    target, ranks = resolve_dtype(dtype, config), collectives.ranks
    with torch.device("meta"):
        whole = Qwen3_5ForCausalLM(config)
        model = Qwen3_5ForCausalLM(shard_config(config, ranks), collectives) if ranks > 1 else whole
    expected = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    sources = find_sources(directory, expected)
    tensors: dict[str, Tensor] = {}
    # A share is cut out where the whole tensor fits; the device need not hold that.
    for name, tensor in read_tensors(sources, target, device if ranks == 1 else "cpu"):
        if ranks > 1:
            share = shard_tensor(name, tensor, config, ranks, collectives.rank)
            tensor = torch.empty(share.shape, dtype=share.dtype, device=device).copy_(share)
        tensors[name] = tensor
        if progress is not None:
            progress(len(tensors), len(sources))
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)


def load_rank(
    directory: str | Path,
    config: ModelConfig,
    dtype: str | torch.dtype,
    device: torch.device,
    collectives: Collectives,
    *,
    progress: Progress | None = None,
) -> Qwen3_5ForCausalLM:
    """`load_model` of one rank's share, in the order in which a rank learns of its arguments."""
    return load_model(
        directory, config, dtype=dtype, device=device, progress=progress, collectives=collectives
    )


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig) -> torch.dtype:
    """The torch type that `dtype` names; "auto" is the config's.

    Raises:
        ValueError: not a floating type that the model runs in.
    """
    if dtype == "auto":
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype.removeprefix("torch."), dtype)
    if isinstance(dtype, torch.dtype) and dtype in (*DTYPES.values(), torch.float64):
        return dtype
    raise ValueError(f"dtype: expected auto, {', '.join(DTYPES)} or a torch type, got {dtype!r}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it; `dtype` is safetensors' code, such as BF16."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where one tensor of the model comes from.

    `parts` is one stored tensor of the same shape or, for experts stored one by one, the pieces
    that lie behind one another in the fused tensor once its first two dimensions are merged.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]


@dataclass
class Problems:
    """Findings by kind, so that one error can tell everything with counts."""

    found: dict[str, list[str]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)

    def add(self, kind: str, finding: str) -> None:
        self.found.setdefault(kind, []).append(finding)

    def raise_if_any(self, directory: str | Path) -> None:
        if not self.found:
            return
        lines = [f"{directory}: the checkpoint does not fit the model"]
        for kind, findings in self.found.items():
            shown = [f"    {finding}" for finding in findings[:_NAMES_SHOWN]]
            rest = len(findings) - len(shown)
            lines += [f"  {kind} ({len(findings)}):", *shown]
            lines += [f"    ... and {rest} more"] if rest else []
        raise ValueError("\n".join([*lines, *(f"  hint: {hint}" for hint in self.hints)]))


def find_sources(
    directory: str | Path, expected: Mapping[str, Sequence[int]]
) -> tuple[Source, ...]:
    """Finds every expected tensor in the directory's weight files; reads headers only.

    Args:
        directory: holds `model.safetensors` or an index with its shards.
        expected: the model's parameter names and their shapes.

    Raises:
        FileNotFoundError: the directory is absent or holds no weights.
        ValueError: absent or unreadable shards, an index that disagrees with them, missing,
            unexpected, misshapen, duplicate or quantised tensors: all of them in one message.
    """
    problems = Problems()
    inventory = _read_inventory(Path(directory), problems)
    stored = _by_model_name(inventory.tensors, problems)
    if _QUANTISED in problems.found:  # the rest would only be echoes of it
        problems.raise_if_any(directory)
    known = stored.keys() | {_model_name(name) for name in inventory.lost}
    sources: list[Source] = []
    used: set[str] = set()
    for name, size in expected.items():
        pieces = _pieces(name, tuple(size), known)
        for piece, shape in pieces.items():
            if piece in stored:
                _check_shape(stored[piece], shape, problems)
            elif piece not in known:
                problems.add(inventory.missing_kind, f"{piece} {list(shape)}")
        parts = tuple(stored[piece] for piece in pieces if piece in stored)
        sources.append(Source(name, tuple(size), parts))
        used.update(pieces)
    _check_unexpected(stored, used, expected, problems)
    _add_hints(problems, inventory.missing_kind, stored)
    problems.raise_if_any(directory)
    return tuple(sources)


def read_tensors(
    sources: Sequence[Source], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of each source in turn, copied into `dtype` on `device`.

    Raises:
        ValueError: a file that changed or cannot be read any more, or a finite weight that is
            infinite in `dtype`.
    """
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for source in sources:
            is_gate = source.name.rpartition(".")[2] in _FLOAT32_NAMES
            kind = torch.float32 if is_gate else dtype
            out = torch.empty(source.shape, dtype=kind, device=device)
            rows = out.flatten(0, 1) if len(source.parts) > 1 else out[None]
            start = 0
            for part in source.parts:
                if part.file not in handles:
                    handles[part.file] = stack.enter_context(_open(part.file))
                value = _read(handles[part.file], part)
                count = part.shape[0] if len(source.parts) > 1 else 1
                block = rows[start : start + count]
                block.copy_(value.view(block.shape))
                _check_range(block, value, part)
                start += count
            yield source.name, out


@dataclass
class _Inventory:
    """Stored tensors by stored name, and the names that unreadable files would have held."""

    origin: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    @property
    def missing_kind(self) -> str:
        return f"tensors missing from {self.origin}"


def _read_inventory(root: Path, problems: Problems) -> _Inventory:
    if not root.is_dir():
        raise FileNotFoundError(f"model directory {str(root)!r} does not exist")
    index, single = root / INDEX_NAME, root / SINGLE_NAME
    if index.is_file():
        files = _index_files(index, problems)
        if single.is_file() and SINGLE_NAME not in files:
            problems.add(
                "weight files",
                f"both {SINGLE_NAME} and an index that does not name it; expected one of them",
            )
        return _read_shards(root, files, problems)
    if single.is_file():
        tensors = _read_header(single, problems)
        problems.raise_if_any(root)  # without its header nothing more can be said
        return _Inventory(SINGLE_NAME, tensors or {})
    present = sorted(
        path.name for path in root.glob("*") if path.suffix in (".safetensors", ".bin")
    )
    raise FileNotFoundError(
        f"{root}: expected {SINGLE_NAME} or {INDEX_NAME}, got "
        f"{', '.join(present[:_NAMES_SHOWN]) or 'no weight files'}"
    )


def _index_files(index: Path, problems: Problems) -> dict[str, set[str]]:
    """Shard file name to the tensors that the index puts there."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected a non-empty object weight_map")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or re.search(r"[/\\\0]", file):
            raise ValueError(
                f"{index}: {name}: expected the name of a file beside the index, got {file!r}"
            )
        files.setdefault(file, set()).add(name)
    return files


def _read_shards(root: Path, files: Mapping[str, set[str]], problems: Problems) -> _Inventory:
    inventory = _Inventory(INDEX_NAME)
    home = {name: file for file, names in files.items() for name in names}
    for file, names in files.items():
        path = root / file
        tensors = _read_header(path, problems)
        if tensors is None:
            inventory.lost |= names
            continue
        for name in sorted(names - tensors.keys()):
            problems.add("index disagrees", f"{name}: the index says {file}, which lacks it")
            inventory.lost.add(name)
        for name, tensor in tensors.items():
            if name in names:
                inventory.tensors[name] = tensor
            elif name in home:
                problems.add("duplicate tensors", f"{name}: in {home[name]} and in {file}")
            else:
                problems.add("index disagrees", f"{name}: in {file}, which the index leaves out")
    return inventory


def _read_header(path: Path, problems: Problems) -> dict[str, StoredTensor] | None:
    """Tensors of one file by stored name; None, and a problem, where it cannot be read.

    Opening compares the header with the file's length, so a truncated file is found here.
    """
    try:
        with _open(path) as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(name, path, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except ValueError as error:
        problems.add("unreadable files", str(error))
        return None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(path):
            reason = "a Git LFS pointer, not the file itself (fetch it with git lfs pull)"
        else:
            reason = f"truncated or corrupt ({error})"
        raise ValueError(f"{path} is not a readable safetensors file: {reason}") from None


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).startswith(b"version https://git-lfs")
    except OSError:
        return False


def _read(handle: Any, part: StoredTensor) -> Tensor:
    try:
        value: Tensor = handle.get_tensor(part.name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{part.file}: {part.name} cannot be read: {error}") from None
    if tuple(value.shape) != part.shape:
        raise ValueError(
            f"{part.file} changed while it was read: {part.name}: expected {list(part.shape)}, "
            f"got {list(value.shape)}"
        )
    return value


def _model_name(stored: str) -> str | None:
    """The model's name for a stored tensor; None for what belongs to the vision tower."""
    name = re.sub(r"^model\.language_model\.", "model.", stored)
    name = re.sub(r"^language_model\.", "", name)
    return None if name.startswith(_VISION_PREFIXES) else name


def _by_model_name(
    tensors: Mapping[str, StoredTensor], problems: Problems
) -> dict[str, StoredTensor]:
    """Text tensors by the model's names; quantised ones are reported."""
    result: dict[str, StoredTensor] = {}
    for stored, tensor in tensors.items():
        name = _model_name(stored)
        if name is None:
            continue
        if name in result:
            problems.add("duplicate tensors", f"{stored} and {result[name].name} are both {name}")
        if _is_quantised(tensor):
            problems.add(_QUANTISED, f"{stored} ({tensor.dtype}, {tensor.file.name})")
        result[name] = tensor
    return result


def _is_quantised(tensor: StoredTensor) -> bool:
    return tensor.dtype not in _FLOAT_CODES or bool(_QUANTISED_NAME.search(tensor.name))


def _pieces(
    name: str, shape: tuple[int, ...], known: AbstractSet[str | None]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what makes up `name`: itself, or experts that are stored one by one.

    Experts are in the order in which they lie in the fused tensor: `gate_up_proj` [E, 2I, H] is
    gate 0, up 0, gate 1, up 1, ... of [I, H] each; `down_proj` [E, H, I] is one [H, I] an expert.
    """
    block, _, kind = name.rpartition(".experts.")
    halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    if not block or not halves or name in known:
        return {name: shape}
    pieces: dict[str, tuple[int, ...]] = {
        f"{block}.experts.{expert}.{half}.weight": (shape[1] // len(halves), shape[2])
        for expert in range(shape[0])
        for half in halves
    }
    return pieces if pieces.keys() & known else {name: shape}


def _check_range(block: Tensor, value: Tensor, part: StoredTensor) -> None:
    """Refuses weights that are finite in the file and infinite in float16."""
    if block.dtype != torch.float16 or block.isfinite().all() or not value.isfinite().all():
        return
    raise ValueError(
        f"{part.file}: {part.name} does not fit float16 (expected magnitudes up to 65504, got "
        f"{value.abs().max().item():g}): use bfloat16 or float32"
    )


def _check_shape(tensor: StoredTensor, shape: tuple[int, ...], problems: Problems) -> None:
    if tensor.shape != shape:
        problems.add(
            "misshapen tensors",
            f"{tensor.name} ({tensor.file.name}): expected {list(shape)}, got {list(tensor.shape)}",
        )


def _check_unexpected(
    stored: Mapping[str, StoredTensor],
    used: set[str],
    expected: Mapping[str, Sequence[int]],
    problems: Problems,
) -> None:
    """Stored text tensors that the model has no place for, but for those it shares or lacks."""
    has_mtp = any(name.startswith("mtp.") for name in expected)
    for name, tensor in stored.items():
        ignored = name == "lm_head.weight" or (name.startswith("mtp.") and not has_mtp)
        if name not in used and not ignored:
            problems.add("unexpected tensors", f"{tensor.name} ({tensor.file.name})")


def _add_hints(problems: Problems, missing_kind: str, stored: Mapping[str, StoredTensor]) -> None:
    missing = problems.found.get(missing_kind, [])
    if any(finding.startswith("lm_head.weight ") for finding in missing):
        problems.hints.append("tie_word_embeddings is false in config.json, so a head is needed")
    lacks_mtp = any(finding.startswith("mtp.") for finding in missing)
    if lacks_mtp and not any(name.startswith("mtp.") for name in stored):
        problems.hints.append(
            "the files hold no mtp.* tensors: with mtp_num_hidden_layers 0 in config.json "
            "the model runs without drafting"
        )
