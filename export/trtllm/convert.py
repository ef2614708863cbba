"""A Hugging Face directory to a TensorRT-LLM checkpoint, and back into our own model.

The checkpoint: `config.json`, `rank{r}.safetensors` for each rank, the files that text needs, and
`draft.safetensors` with the MTP module, the embedding and the head as they were, whole. The library
has no part for that module and does not read the file; our runtime drafts with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from trtllm_treewy.config import ModelConfig, read_json
from trtllm_treewy.engine_config import EngineConfig
from trtllm_treewy.model import Qwen3_5ForCausalLM
from trtllm_treewy.new_directory import new_directory
from trtllm_treewy.trtllm_config import (
    DRAFT_FILE,
    KEY,
    checkpoint_config,
    checkpoint_ranks,
    model_config,
)

from ..build_engine import TEXT_FILES
from ..checkpoint import DTYPES, Source, find_sources, read_tensors, resolve_dtype
from ..onnx_export import parameter_shapes
from .safetensors_writer import SafetensorsWriter
from .tensors import Target, targets, whole_tensors

CONFIG_NAME = "config.json"
Progress = Callable[[int, int], None]


def convert_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    ranks: int = 1,
    dtype: str = "auto",
    max_position_embeddings: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Converts a checkpoint; `output` appears when it is whole.

    Memory is that of a few tensors: each is read once for all ranks, and written as it comes.

    Args:
        checkpoint: a Hugging Face directory.
        output: new, empty, or a checkpoint that this function wrote, which is replaced.
        ranks: tensor parallel size.
        dtype: "auto", "float32", "bfloat16" or "float16"; norms, `A_log`, `dt_bias` and the
            router's weights are float32 whatever it is.
        max_position_embeddings: positions that rotary tables are made for, up to the model's: the
            library puts the tables of all of them into the engine.
        progress: called as `progress(done, total)`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it cannot be converted, a setting is out of range, or `output` holds something
            else, which is never removed.
        OSError: `output` cannot be written.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if EngineConfig.read(checkpoint) is not None:
        raise ValueError(f"{checkpoint} is an engine, expected a checkpoint")
    config = ModelConfig.from_pretrained(checkpoint)
    longest = config.max_position_embeddings
    if max_position_embeddings is not None and not 0 < max_position_embeddings <= longest:
        raise ValueError(
            f"max_position_embeddings must be from 1 to the model's {longest}, got "
            f"{max_position_embeddings}"
        )
    target_dtype = resolve_dtype(dtype, config)
    if target_dtype not in DTYPES.values():
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {target_dtype}")
    wanted = targets(config, ranks)
    sources = {x.name: x for x in find_sources(checkpoint, parameter_shapes(config))}
    _check_output(checkpoint, output)
    name = str(target_dtype).removeprefix("torch.")
    settings = checkpoint_config(config, name, ranks, max_position_embeddings)
    with new_directory(output, keep=checkpoint) as folder:
        _write_ranks(folder, wanted, sources, config, ranks, target_dtype, progress)
        _write_drafter(folder, sources, target_dtype)
        copy_text_files(checkpoint, folder)
        (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(directory: str | Path) -> Qwen3_5ForCausalLM:
    """The model of a converted checkpoint, with the MTP module, in eval mode without gradients.

    Raises:
        FileNotFoundError: there is no such directory, or a file is missing.
        ValueError: it is not a checkpoint of ours, or its tensors are not those of its config.
    """
    directory = Path(directory)
    source = str(directory / CONFIG_NAME)
    raw = read_json(directory / CONFIG_NAME)
    config, ranks = model_config(raw, source), checkpoint_ranks(raw, source)
    parts = [_read(directory / f"rank{rank}.safetensors") for rank in range(ranks)]
    expected = {target.name for target in targets(config, ranks)}
    for rank, part in enumerate(parts):
        if part.keys() != expected:
            odd = ", ".join(sorted(part.keys() ^ expected)[:8])
            raise ValueError(f"{directory}/rank{rank}.safetensors: missing or unknown: {odd}")
    tensors = dict(whole_tensors(parts, config))
    if config.mtp_num_hidden_layers:
        drafter = _read(directory / DRAFT_FILE)
        tensors.update({name: x for name, x in drafter.items() if name.startswith("mtp.")})
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    dtype = DTYPES[raw["dtype"]]
    for name in tensors:
        if not name.endswith(("A_log", "dt_bias")):
            tensors[name] = tensors[name].to(dtype)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{directory}: {' '.join(str(error).split())}") from None
    return model.eval().requires_grad_(False)


def copy_text_files(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and generation config where there are some."""
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return load_file(path)
    except Exception as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def _check_output(checkpoint: Path, output: Path) -> None:
    """Refuses what would be lost: anything but an empty directory or a checkpoint of ours."""
    if not output.exists():
        return
    if not output.is_dir():
        raise ValueError(f"{output} is a file, expected a directory for the checkpoint")
    if output.resolve() == checkpoint.resolve():
        raise ValueError(f"{output} is the checkpoint itself: choose another directory")
    if not any(output.iterdir()):
        return
    try:
        raw = read_json(output / CONFIG_NAME)
    except (OSError, ValueError):
        raw = {}
    if KEY not in raw:
        raise ValueError(
            f"{output} is not empty and holds no converted checkpoint: choose another directory"
        )


def _write_ranks(
    folder: Path,
    wanted: list[Target],
    sources: dict[str, Source],
    config: ModelConfig,
    ranks: int,
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    shapes = {name: torch.empty(x.shape, device="meta") for name, x in sources.items()}
    header = {
        target.name: (
            target.of_rank([shapes[x] for x in target.sources], config, ranks, 0).shape,
            target.dtype(dtype),
        )
        for target in wanted
    }
    with ExitStack() as stack:
        writers = [
            stack.enter_context(SafetensorsWriter(folder / f"rank{rank}.safetensors", header))
            for rank in range(ranks)
        ]
        for done, target in enumerate(wanted, start=1):
            tensors = _read_sources([sources[x] for x in target.sources], target.dtype(dtype))
            for rank, writer in enumerate(writers):
                writer.write(target.name, target.of_rank(tensors, config, ranks, rank))
            if progress is not None:
                progress(done, len(wanted))


def _read_sources(sources: list[Source], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in this type, each read once where it is named twice."""
    unique = list({source.name: source for source in sources}.values())
    tensors = dict(read_tensors(unique, dtype))
    return [tensors[source.name] for source in sources]


def _write_drafter(folder: Path, sources: dict[str, Source], dtype: torch.dtype) -> None:
    shared = ("model.embed_tokens.weight", "lm_head.weight")
    parts = [x for name, x in sources.items() if name.startswith("mtp.") or name in shared]
    if not any(x.name.startswith("mtp.") for x in parts):
        return
    header = {source.name: (source.shape, dtype) for source in parts}
    with SafetensorsWriter(folder / DRAFT_FILE, header) as writer:
        for name, tensor in read_tensors(parts, dtype):
            writer.write(name, tensor)
