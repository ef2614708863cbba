"""The command `trtllm-treewy`: one thin function per subcommand over the Python API.

torch is imported only inside the commands that need it, so that `--help` and the errors of the
command line come at once. Generated text alone goes to stdout; all else goes to stderr.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .llmapi import (
    DEFAULT_DYNAMIC_DEPTH,
    DEFAULT_DYNAMIC_TOP_K,
    STATE_COMMITS,
    KvCacheConfig,
    MTPDecodingConfig,
)
from .outputs import AcceptanceStats, RequestOutput
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .config import ModelConfig
    from .llm import LLM

PROGRAM = "trtllm-treewy"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
DEFAULT_MAX_TOKENS = 128
DEFAULT_DRAFT_TREE_WIDTHS = (3, 3, 3)
DEFAULT_CONTEXT_LENGTH = 32768
DTYPES = ("auto", "float32", "bfloat16", "float16")

EPILOG = "TREEWY_DEBUG=1 in the environment shows an error with its traceback."

# The flags behind which settings of the Python API stand, for its errors.
FLAG_OF_SETTING = {
    "draft_tree_widths": "--draft-tree-widths",
    "draft_tree_parents": "--draft-tree-parents",
    "use_dynamic_tree=True": "--dynamic-tree",
    "max_total_draft_tokens": "--dynamic-tree",
    "dynamic_tree_max_topK": "--dynamic-tree-top-k",
    "max_draft_len": "--max-draft-len",
    "max_batch_size": "--max-batch-size",
    "max_seq_len": "--max-seq-len",
    "max_tokens": "--max-tokens",
    "num_nodes": "--num-nodes",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 2 for a user's error, 130 for Ctrl-C."""
    with _open_streams():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    try:
        args = _parse(argv)
        args.command(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        _err("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Whatever Python still wants to flush at exit must not fail again.
        if not isinstance(sys.stdout, _NoReader):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, MemoryError, NotImplementedError) as error:
        if os.environ.get("TREEWY_DEBUG", "0") not in ("", "0"):
            raise
        message = str(error).strip() or type(error).__name__
        _err(f"{PROGRAM}: error: {_in_flags(message)}\n")
        return EXIT_USER_ERROR


class _NoReader(io.StringIO):
    """Stands for a stdout that was closed before the start: a pipe without a reader."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextmanager
def _open_streams() -> Iterator[None]:
    """stdout and stderr that can be used, also by libraries, where the caller closed them."""
    before = sys.stdout, sys.stderr
    with ExitStack() as stack:
        if before[0] is None or before[0].closed:
            sys.stdout = _NoReader()
        if before[1] is None or before[1].closed:
            sys.stderr = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _in_flags(message: str) -> str:
    """A message of the Python API with the flags of this command in place of its settings."""
    for setting, flag in FLAG_OF_SETTING.items():
        # Not within a longer name, such as kv_cache_config.max_tokens, nor within a path.
        message = re.sub(rf"(?<![\w./'\"-]){re.escape(setting)}(?![\w/'\"])", flag, message)
    message = re.sub(
        r"=\((-?\d[-\d, ]*)\)", lambda found: "=" + found[1].replace(" ", "").strip(","), message
    )
    return re.sub(r"^(MTPDecodingConfig|SamplingParams): ", "", message)


# --- generate ------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> None:
    model, prompts = _model_and_prompts(args)
    if not Path(model).is_dir():
        raise ValueError(f"model directory {model!r} does not exist (nothing is downloaded)")
    speculation = _speculation(args, model)
    params = _sampling_params(args)
    with _load(args, model, speculation, len(prompts)) as llm:
        if args.chat:
            prompts = [_chat_prompt(llm, args.system, prompt) for prompt in prompts]
        start = time.perf_counter()
        if len(prompts) == 1 and not args.json:
            outputs = [_stream(llm, prompts[0], params)]
        else:
            outputs = _generate_all(llm, prompts, params)
            _print_outputs(outputs, llm.memory_report(), as_json=args.json)
        seconds = time.perf_counter() - start
        if not args.quiet:
            _err(_summary(outputs, seconds, llm.memory_report(), speculation))


@contextmanager
def _load(
    args: argparse.Namespace, model: str, speculation: MTPDecodingConfig, num_prompts: int
) -> Iterator[LLM]:
    cache = KvCacheConfig(mamba_ssm_cache_dtype=args.state_dtype)
    show = not args.quiet and sys.stderr.isatty()
    if show:
        _err("loading torch ...\r")
    _let_threads_sleep(args.device)
    with _interrupt_exits():
        from .llm import LLM

        llm = LLM(
            model,
            dtype=args.dtype,
            speculative_config=speculation,
            kv_cache_config=cache,
            max_batch_size=min(num_prompts, args.max_batch_size),
            max_seq_len=args.max_seq_len,
            device=args.device,
            progress=_show_progress if show else None,
        )
    if show:
        _err("\033[K")
    with llm:
        yield llm


def _let_threads_sleep(device: str | None) -> None:
    """Makes OpenMP's threads sleep while they wait; to be called before torch is imported.

    A step on the CPU is many small parallel regions. Threads that spin between them take the cores
    from those that work: on a busy machine that made a run of 1.4 s one of 46.4 s. Whoever has set
    either variable has decided; a GPU does not use these threads.
    """
    if device is not None and not device.startswith("cpu"):
        return
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


@contextmanager
def _interrupt_exits() -> Iterator[None]:
    """Ctrl-C ends the process at once while there is nothing to clean up.

    Modules that catch everything while they are imported would swallow a KeyboardInterrupt.
    """

    def leave(*_: object) -> None:
        with suppress(OSError):
            os.write(2, b"\ninterrupted\n")
        os._exit(EXIT_INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever embeds us, or ignores the signal, has decided otherwise
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _show_progress(done: int, total: int) -> None:
    _err(f"\rloading weights {100 * done // max(total, 1):3d}%\033[K\r")


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """Writes the text as it comes; Ctrl-C and a closed pipe abort the request."""
    stream = llm.generate_async(prompt, params, streaming=True)
    output = None
    try:
        for output in stream:
            sys.stdout.write(output.outputs[0].text_diff)
            sys.stdout.flush()
    finally:
        stream.close()
    assert output is not None, "a request yields at least its last output"
    if not output.outputs[0].text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return output


def _generate_all(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params)
    return outputs if isinstance(outputs, list) else [outputs]


def _print_outputs(outputs: list[RequestOutput], memory: dict[str, int], *, as_json: bool) -> None:
    for number, output in enumerate(outputs, start=1):
        if as_json:
            print(json.dumps(_as_json(output, memory), ensure_ascii=False), flush=True)
            continue
        _err(f"--- prompt {number} of {len(outputs)}\n")
        text = output.outputs[0].text
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()


def _as_json(output: RequestOutput, memory: dict[str, int]) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "speculation": output.speculation.to_dict() if output.speculation else None,
        "memory": memory,
    }


def _summary(
    outputs: list[RequestOutput],
    seconds: float,
    memory: dict[str, int],
    speculation: MTPDecodingConfig,
) -> str:
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    lines = [f"{tokens} tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)"]
    stats = sum((o.speculation for o in outputs if o.speculation), AcceptanceStats())
    if speculation.enabled:
        lines[0] += (
            f"; {stats.num_steps} verification steps, acceptance length "
            f"{stats.acceptance_length:.2f} tokens a step (bonus included)"
        )
    else:
        lines[0] += ", without drafts"
    lines.append(
        f"state of a sequence: {_bytes(memory['state_bytes'])}; verification adds "
        f"{_bytes(memory['stash_bytes'])} ({speculation.state_commit})"
    )
    if speculation.enabled and speculation.state_commit != "snapshot":
        lines[1] += (
            f"; snapshots of {speculation.max_nodes} nodes would add "
            f"{_bytes(memory['snapshot_bytes'])}"
        )
    return "".join(f"[{line}]\n" for line in lines)


def _bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size /= 1024
    else:
        unit = "TiB"
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _model_and_prompts(args: argparse.Namespace) -> tuple[str, list[str]]:
    words = list(args.words)
    model = args.model
    if model is None:
        if not words:
            args.usage_error("no model given")
        model = words.pop(0)
    prompts = words + args.prompt + [_read_prompt(name) for name in args.prompt_file]
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            args.usage_error(
                "no prompt given: as an argument, with --prompt or --prompt-file, or piped in"
            )
        prompts = [_read_prompt("-")]
    if not all(prompts):
        raise ValueError("the prompt is empty")
    for number, prompt in enumerate(prompts, start=1):
        _expect_text(f"prompt {number}", prompt)
    _expect_text("argument --system", args.system or "")
    for text in args.stop or ():
        _expect_text("argument --stop", text)
    if args.system is not None and not args.chat:
        args.usage_error("argument --system: needs --chat")
    return model, prompts


def _expect_text(what: str, text: str) -> None:
    """Refuses an argument whose bytes are no text: Python passes them on as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not text that can be decoded: {text!r}") from None


def _read_prompt(name: str) -> str:
    """Text of a file, or of standard input for "-", without the newline that ends it."""
    try:
        if name != "-":
            text = Path(name).read_text(encoding="utf-8")
        elif sys.stdin is None:
            raise ValueError("there is no standard input to read the prompt from")
        else:
            text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        source = "standard input" if name == "-" else name
        raise ValueError(f"the prompt in {source} is not UTF-8 text: {error}") from None
    return text.removesuffix("\n")


def _chat_prompt(llm: LLM, system: str | None, prompt: str) -> str:
    from jinja2 import TemplateError

    if not getattr(llm.tokenizer, "chat_template", None):
        raise ValueError("--chat: the model's tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text: str = llm.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"--chat: the model's chat template refuses this: {error}") from None
    return text


def _speculation(args: argparse.Namespace, model: str) -> MTPDecodingConfig:
    shape: dict[str, Any] = {}
    if args.no_speculation:
        shape["draft_tree_widths"] = ()
    elif args.draft_tree_widths is not None:
        shape["draft_tree_widths"] = args.draft_tree_widths
    elif args.draft_tree_parents is not None:
        shape["draft_tree_parents"] = args.draft_tree_parents
    elif args.dynamic_tree is not None:
        shape["use_dynamic_tree"] = True
        shape["max_total_draft_tokens"] = args.dynamic_tree
    elif args.max_draft_len is None:
        drafts = _drafts_by_default(model, args.quiet)
        shape["draft_tree_widths"] = DEFAULT_DRAFT_TREE_WIDTHS if drafts else ()
    if args.max_draft_len is not None:
        shape["max_draft_len"] = args.max_draft_len
    if args.dynamic_tree_top_k is not None:
        shape["dynamic_tree_max_topK"] = args.dynamic_tree_top_k
    return MTPDecodingConfig(state_commit=args.state_commit, **shape)


def _drafts_by_default(model: str, quiet: bool) -> bool:
    from .config import ModelConfig

    if ModelConfig.from_pretrained(model).mtp_num_hidden_layers:
        return True
    if not quiet:
        _err(f"[{model} has no MTP module, decoding without drafts]\n")
    return False


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        stop=args.stop or None,
        ignore_eos=args.ignore_eos,
        # A chat template writes the special tokens itself.
        add_special_tokens=not args.chat,
    )


# --- plan, doctor --------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> None:
    from . import memory_plan

    config = _model_config(args.config)
    plan = memory_plan.plan(
        config,
        draft_tree_widths=args.draft_tree_widths,
        num_nodes=args.num_nodes,
        state_dtype=args.state_dtype,
        activation_dtype=args.activation_dtype,
        stash_dtype=args.stash_dtype,
        context_length=args.context_length
        or min(DEFAULT_CONTEXT_LENGTH, config.max_position_embeddings),
        batch_size=args.batch_size,
        history=args.history,
    )
    fits = None if args.memory is None else plan.max_sequences(args.memory)
    if args.json:
        extra = {} if fits is None else {"memory_bytes": args.memory, "max_sequences": fits}
        print(json.dumps(plan.to_dict() | extra, indent=2))
        return
    print(plan.table())
    if fits is not None:
        counts = ", ".join(f"{policy} {count}" for policy, count in fits.items())
        print(f"Sequences that fit into {_bytes(args.memory)} beside the weights: {counts}")


def _model_config(name: str) -> ModelConfig:
    """Config of a directory, of a config.json, or of a model that this package ships by name."""
    from .config import ModelConfig, read_json, shipped_configs

    path = Path(name)
    if path.is_dir():
        return ModelConfig.from_pretrained(path)
    if path.is_file():
        return ModelConfig.from_dict(read_json(path), source=name)
    shipped = shipped_configs()
    file = shipped.get(name.lower().removesuffix(".json"))
    if file is None:
        raise ValueError(
            f"config {name!r} is neither a model directory, nor a config.json, nor one of the "
            f"shipped configs: {', '.join(sorted(shipped))}"
        )
    return ModelConfig.from_dict(read_json(file), source=file.name)


def _doctor(args: argparse.Namespace) -> None:
    from . import doctor

    findings = doctor.collect()
    print(json.dumps(findings, indent=2) if args.json else doctor.report(findings))


# --- the command line ----------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Errors in one line, as all of this command's errors are."""

    def error(self, message: str) -> NoReturn:
        _err(f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(EXIT_USER_ERROR)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    prompts: list[str] = []
    if argv[:1] == ["generate"] and "--" in argv:
        # By hand, as the second run of positionals that argparse does not take has no "--" left.
        end = argv.index("--")
        argv, prompts = argv[:end], argv[end + 1 :]
    args, rest = parser.parse_known_args(_join_parents(argv))
    # argparse takes one run of positionals only; MODEL --option X PROMPT has two.
    options = [word for word in rest if word.startswith("-") and word != "-"]
    if options or (rest and not hasattr(args, "words")):
        args.usage_error(f"unrecognized arguments: {' '.join(options or rest)}")
    if rest or prompts:
        args.words += rest + prompts
    if args.command is _generate:
        _check_drafts(args)
    return args


def _check_drafts(args: argparse.Namespace) -> None:
    """Refuses what argparse cannot: a flag may be in one exclusive group only."""
    depth, top_k = args.max_draft_len is not None, args.dynamic_tree_top_k is not None
    for given, flag in ((depth, "--max-draft-len"), (top_k, "--dynamic-tree-top-k")):
        if given and args.no_speculation:
            args.usage_error(f"argument --no-speculation: not allowed with argument {flag}")
    if top_k and args.dynamic_tree is None:
        args.usage_error("argument --dynamic-tree-top-k: needs --dynamic-tree")


def _join_parents(argv: list[str]) -> list[str]:
    """`--draft-tree-parents -1,0,0` as one word, which argparse would take for two options."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--draft-tree-parents":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Tree speculative decoding for Gated DeltaNet hybrid models.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show the version and exit",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser)
    _add_plan(commands.add_parser)
    _add_doctor(commands.add_parser)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: package metadata takes longer than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(PROGRAM, version(PROGRAM))
        parser.exit()


def _add_generate(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "generate",
        allow_abbrev=False,
        help="generate text",
        usage=f"{PROGRAM} generate MODEL [PROMPT ...] [options]",
        description="Generate text. The text goes to stdout, all else to stderr. "
        "Several prompts are decoded as one batch.",
        epilog=EPILOG,
    )
    parser.set_defaults(command=_generate, usage_error=parser.error)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL [PROMPT ...]",
        help='model directory, and prompts, after "--" if they begin with "-" '
        "(default: one prompt from standard input, if piped)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="model directory; all positionals are prompts then (default: the first positional)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt, after the positional ones; may be repeated (default: none)",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help='one prompt in a file, "-" for standard input; may be repeated (default: none)',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="apply the chat template of the checkpoint, which must have one "
        "(default: the prompt as it stands)",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message, with --chat (default: none)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="most tokens to generate for a prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end at this text; may be repeated (default: none)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after the end token (default: stop there)",
    )
    _add_drafts(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and activations (default: %(default)s, the checkpoint's; with float32 on "
        "the CPU, drafts never change the tokens)",
    )
    engine.add_argument(
        "--state-dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the recurrent state (default: %(default)s, which is float32)",
    )
    engine.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, ... (default: a GPU if torch finds one)",
    )
    engine.add_argument(
        "--max-batch-size",
        type=_positive,
        default=8,
        metavar="N",
        help="most prompts decoded together (default: %(default)s)",
    )
    engine.add_argument(
        "--max-seq-len",
        type=_positive,
        metavar="N",
        help="most tokens of prompt and output together (default: 8192, or the model's longest "
        "if that is shorter)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a prompt, at the end (default: text as it comes)",
    )
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="text and errors only (default: a summary on stderr too)",
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "drafts",
        "Without a flag that says how: a tree of widths 3,3,3 where the model has an MTP module, "
        "else none.",
    )
    shape = group.add_mutually_exclusive_group()
    shape.add_argument(
        "--draft-tree-widths",
        type=_integers,
        metavar="W,W,...",
        help="children per node, level by level (default: 3,3,3)",
    )
    shape.add_argument(
        "--draft-tree-parents",
        type=_integers,
        metavar="-1,P,...",
        help="parent of each node, root first (default: a tree by widths)",
    )
    shape.add_argument(
        "--dynamic-tree",
        type=_positive,
        metavar="N",
        help="the best N draft tokens, anew at each step (default: the same tree at each step)",
    )
    shape.add_argument(
        "--no-speculation",
        action="store_true",
        help="decode without drafts (default: with drafts, where the model has an MTP module)",
    )
    group.add_argument(
        "--max-draft-len",
        type=_positive,
        metavar="N",
        help=f"a chain of N drafts, or with --dynamic-tree its depth "
        f"(default: no chain; {DEFAULT_DYNAMIC_DEPTH} with --dynamic-tree)",
    )
    group.add_argument(
        "--dynamic-tree-top-k",
        type=_positive,
        metavar="K",
        help=f"candidates below each node of a dynamic tree (default: {DEFAULT_DYNAMIC_TOP_K})",
    )
    group.add_argument(
        "--state-commit",
        choices=STATE_COMMITS,
        default="reconstruct",
        help="how accepted tokens reach the state (default: %(default)s)",
    )


def _add_plan(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "plan",
        allow_abbrev=False,
        help="memory a sequence takes, by commit policy",
        description="Memory a sequence takes under each commit policy. Nothing is loaded.",
        epilog=EPILOG,
    )
    parser.set_defaults(command=_plan, usage_error=parser.error)
    parser.add_argument(
        "config", metavar="CONFIG", help="model directory, config.json, or a shipped name"
    )
    tree = parser.add_mutually_exclusive_group()
    tree.add_argument(
        "--draft-tree-widths",
        type=_integers,
        default=DEFAULT_DRAFT_TREE_WIDTHS,
        metavar="W,W,...",
        help="children per node, level by level (default: 3,3,3)",
    )
    tree.add_argument(
        "--num-nodes",
        type=_positive,
        metavar="N",
        help="nodes of any other tree, root included (default: a tree by widths)",
    )
    parser.add_argument(
        "--state-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the recurrent state (default: %(default)s)",
    )
    parser.add_argument(
        "--activation-dtype",
        choices=DTYPES[1:],
        default="bfloat16",
        help="of activations and KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--stash-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of what verification keeps for the commit (default: %(default)s)",
    )
    parser.add_argument(
        "--context-length",
        type=_positive,
        metavar="TOKENS",
        help=f"tokens that the KV cache is counted at (default: {DEFAULT_CONTEXT_LENGTH}, or the "
        "model's longest if that is shorter)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=1,
        metavar="N",
        help="sequences that run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--history",
        type=_positive,
        default=16,
        metavar="TOKENS",
        help='accepted tokens that "deferred" keeps for a sequence (default: %(default)s)',
    )
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="memory beside the weights, such as 141GB: says how many sequences fit "
        "(default: does not say)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="bytes, as one JSON object (default: a table in MiB)",
    )


def _add_doctor(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "doctor",
        allow_abbrev=False,
        help="what of CUDA, TensorRT and the libraries is found here",
        description="Says what of CUDA, TensorRT and the libraries is found on this machine.",
        epilog=EPILOG,
    )
    parser.set_defaults(command=_doctor, usage_error=parser.error)
    parser.add_argument(
        "--json", action="store_true", help="as one JSON object (default: a line a finding)"
    )


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas, got {text!r}"
        ) from None


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return value


def _size(text: str) -> int:
    """Bytes of "141GB" (powers of ten), "80GiB" (powers of two) or a plain count."""
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgt", start=1):
        units[prefix] = units[f"{prefix}b"] = 1000**power
        units[f"{prefix}ib"] = 1024**power
    number = text.rstrip("BbiKkMmGgTt ")
    factor = units.get(text[len(number) :].strip().lower())
    try:
        size = float(number) * (factor or 0)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a size such as 141GB or 80GiB, got {text!r}")
    return int(size)


def _err(text: str) -> None:
    """Writes to stderr, which may be closed."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


if __name__ == "__main__":
    sys.exit(main())
