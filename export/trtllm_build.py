"""`trtllm-build` with our flags: `trtllm-treewy trtllm-build`, or this module run by itself.

The library's own command does the build. Before it starts, the flags join its plugin options, our
architecture its models, and the plugin library the process; what cannot work is refused while
nothing is written. The engine's directory appears when it is whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from trtllm_treewy.config import read_json
from trtllm_treewy.new_directory import new_directory
from trtllm_treewy.tensorrt_package import LIBRARY_VARIABLE, find_plugins, load_plugins
from trtllm_treewy.trtllm_config import (
    ARCHITECTURE,
    DRAFT_FILE,
    ENGINE_KEY,
    checkpoint_ranks,
    model_config,
)

from .trtllm import contract
from .trtllm.convert import CONFIG_NAME, copy_text_files
from .trtllm.settings import build_settings

PROGRAM = "trtllm-build"
EXIT_OK, EXIT_USER_ERROR = 0, 2
# What `--help` says where the library is not there to say it.
HELP = """\
usage: trtllm-build --checkpoint_dir CKPT_DIR --output_dir ENGINE_DIR [options]

TensorRT-LLM's own command, with these options beside its own:
  --treewy_plugin {auto,float16,bfloat16,float32,disable}
  --treewy_max_nodes N
  --treewy_library FILE
docs/trtllm.md explains them. Its own are not shown:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; an exit code. Errors are one line on stderr, and 2."""
    try:
        run(list(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError) as error:
        if os.environ.get("TREEWY_DEBUG", "0") not in ("", "0"):
            raise
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_OK


def run(argv: list[str]) -> None:
    """Builds.

    Args:
        argv: the command's words, ours among them.

    Raises:
        ValueError, OSError: it cannot be built, with the reason; nothing was written.
        SystemExit: after `--help`.
    """
    try:
        build = _library()
    except ValueError as error:
        if not {"-h", "--help"} & set(argv):
            raise
        print(HELP, error)
        return
    argv, library = _take_library(argv)
    args = _parse(build, argv)
    ours = _checkpoint_is_ours(args)
    if ours:
        _check(build, args)
    _check_devices()
    loaded = _load(library) if ours or _plugin(args) is not None else None
    output, place = Path(args.output_dir), args.checkpoint_dir or args.model_config
    with _output(output, place, args.dry_run) as folder, _named(loaded):
        _run_command(build, [*argv, "--output_dir", str(folder)])
        if ours:
            _finish(args, folder)


def _library() -> Any:
    """The library's `commands.build`, with our flags and our architecture in it."""
    from importlib import metadata

    try:
        version = metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        version = None
    problem = contract.version_problem(version)
    if problem:
        raise ValueError(problem)
    findings = [finding for finding in contract.check() if finding.problem]
    if findings:
        more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise ValueError(
            f"tensorrt_llm {version} is not as expected: {findings[0]}{more} "
            "(trtllm-treewy doctor --trtllm lists all)"
        )
    from tensorrt_llm.commands import build

    from .trtllm import model, plugin_config

    plugin_config.install()
    model.register()
    return build


def _take_library(argv: list[str]) -> tuple[list[str], str | None]:
    """Our one flag that the library's parser does not have."""
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--treewy_library", metavar="FILE")
    args, rest = parser.parse_known_args(argv)
    return rest, args.treewy_library


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"{message} (see {PROGRAM} --help)")


def _parse(build: Any, argv: list[str]) -> argparse.Namespace:
    parser = build.parse_arguments()
    parser.error = _refuse
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def _plugin(args: argparse.Namespace) -> str | None:
    value = args.treewy_plugin
    return None if value in (None, "disable") else str(value)


def _checkpoint_is_ours(args: argparse.Namespace) -> bool:
    """Whether the checkpoint is one of `convert-checkpoint`; ValueError where nobody builds it."""
    place = args.checkpoint_dir or args.model_config
    if place is None:
        raise ValueError("--checkpoint_dir is needed: a directory made by convert-checkpoint")
    path = Path(place)
    file = path if path.suffix == ".json" else path / CONFIG_NAME
    raw = read_json(file)
    architecture = raw.get("architecture")
    if architecture == ARCHITECTURE:
        return True
    from tensorrt_llm.models import MODEL_MAP

    if "model_type" in raw and architecture is None:
        raise ValueError(
            f"{file} is a Hugging Face config: convert it first (trtllm-treewy convert-checkpoint)"
        )
    if architecture not in MODEL_MAP and args.model_cls_file is None:
        raise ValueError(f"{file}: TensorRT-LLM knows no architecture {architecture!r}")
    return False


def _check(build: Any, args: argparse.Namespace) -> None:
    """Everything that a build of ours would find out after it has begun to write."""
    place = Path(args.checkpoint_dir or args.model_config)
    file = place if place.suffix == ".json" else place / CONFIG_NAME
    raw = read_json(file)
    config = model_config(raw, str(file))
    ranks = checkpoint_ranks(raw, str(file))
    if place.suffix != ".json":
        for rank in range(ranks):
            if not (place / f"rank{rank}.safetensors").is_file():
                raise FileNotFoundError(f"{place}/rank{rank}.safetensors does not exist")
    if args.speculative_decoding_mode is not None:
        raise ValueError("--speculative_decoding_mode must not be given: trees are inputs")
    positions = raw.get("max_position_embeddings", config.max_position_embeddings)
    if args.max_seq_len is not None and args.max_seq_len > positions:
        raise ValueError(
            f"--max_seq_len is {args.max_seq_len}, and the checkpoint has rotary tables for "
            f"{positions} positions"
        )
    settings = build.PluginConfig.from_arguments(args)
    if str(getattr(args, "kv_cache_type", "paged")).lower() not in ("paged", "kvcachetype.paged"):
        raise ValueError(f"--kv_cache_type is {args.kv_cache_type}, expected paged")
    build_settings(
        settings,
        str(raw["dtype"]),
        max_draft_len=args.max_draft_len,
        max_beam_width=args.max_beam_width,
        max_num_tokens=args.max_num_tokens,
        gather_context_logits=args.gather_context_logits,
        prompt_embedding_table_size=args.max_prompt_embedding_table_size,
    )


def _check_devices() -> None:
    """The library starts as many workers as there are GPUs, which must not be none."""
    import torch

    if torch.cuda.device_count() == 0:
        raise ValueError("torch finds no CUDA device: an engine is built on the GPU that it is for")


def _load(library: str | None) -> Path:
    """Loads the plugin library, or that of the usual places; its file."""
    import tensorrt as trt

    found = find_plugins() if library is None else Path(library)
    if not found.is_file():
        raise FileNotFoundError(f"--treewy_library: there is no file {found}")
    load_plugins(trt, found)
    return found


@contextmanager
def _named(library: Path | None) -> Iterator[None]:
    """Names the plugin library in the environment, where the build's workers look for it."""
    before = os.environ.get(LIBRARY_VARIABLE)
    if library is not None:
        os.environ[LIBRARY_VARIABLE] = str(library.absolute())
    try:
        yield
    finally:
        os.environ.pop(LIBRARY_VARIABLE, None)
        if before is not None:
            os.environ[LIBRARY_VARIABLE] = before


def _is_engine(folder: Path) -> bool:
    try:
        raw = read_json(folder / CONFIG_NAME)
    except (OSError, ValueError):
        return False
    return ENGINE_KEY in raw


@contextmanager
def _output(output: Path, checkpoint: str, dry_run: bool) -> Iterator[Path]:
    """Where to build: a new directory that takes the place of `output` once it is whole.

    With several processes (MPI) each writes its own ranks, so they write in place, as without us.
    """
    if output.is_file():
        raise ValueError(f"{output} is a file, expected a directory for the engine")
    if output.is_dir() and any(output.iterdir()) and not _is_engine(output):
        raise ValueError(f"{output} is not empty and holds no engine: choose another directory")
    from tensorrt_llm._utils import mpi_world_size

    if dry_run and output.is_dir() and any(output.iterdir()):
        raise ValueError(f"{output} holds an engine, whose config.json --dry_run would replace")
    if mpi_world_size() > 1:
        yield output
        return
    with new_directory(output, keep=checkpoint) as folder:
        yield folder


def _run_command(build: Any, argv: list[str]) -> None:
    """The library's `main`, which reads sys.argv; what it raises becomes one line."""
    before = sys.argv
    sys.argv = [PROGRAM, *argv]
    try:
        build.main()
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        if os.environ.get("TREEWY_DEBUG", "0") not in ("", "0"):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the build failed: {reason} (TREEWY_DEBUG=1 shows where)") from error
    finally:
        sys.argv = before


def _finish(args: argparse.Namespace, folder: Path) -> None:
    """The flags in the engine's config.json, and beside it what our runtime reads too."""
    import json

    path = folder / CONFIG_NAME
    if not path.is_file():  # another process writes it
        return
    raw = read_json(path)
    flags = raw.setdefault("build_config", {}).setdefault("plugin_config", {})
    flags["treewy_plugin"] = _plugin(args)
    flags["treewy_max_nodes"] = args.treewy_max_nodes
    text = json.dumps(raw, indent=4)
    _replace(path, lambda file: file.write_text(text + "\n", encoding="utf-8"))
    if args.checkpoint_dir is None:
        return
    source = Path(args.checkpoint_dir)
    if source.suffix != ".json":
        copy_text_files(source, folder)
        if (source / DRAFT_FILE).is_file():
            shutil.copyfile(source / DRAFT_FILE, folder / DRAFT_FILE)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    new = path.with_name(f"{path.name}.new")
    write(new)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
