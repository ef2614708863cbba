"""`trtllm-treewy generate`: the text alone goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from ..llmapi import MTPDecodingConfig
from ..outputs import AcceptanceStats, RequestOutput
from ..sampling_params import SamplingParams
from .drafts import speculation_of
from .flags import in_flags
from .loading import expect_directory, loaded_llm
from .program import EXIT_OK, EXIT_REQUEST_FAILED
from .prompts import chat_prompt, model_and_prompts
from .sizes import format_size
from .streams import write_err, write_error

if TYPE_CHECKING:
    from ..llm import LLM


def run(args: argparse.Namespace) -> int:
    """Generates for every prompt; an exit code, 1 where a request ended with an error."""
    model, prompts = model_and_prompts(args)
    expect_directory(model)
    speculation = speculation_of(args, model)
    params = _sampling_params(args)
    with loaded_llm(args, model, speculation, len(prompts)) as llm:
        if args.chat:
            prompts = [chat_prompt(llm, args.system, prompt) for prompt in prompts]
        start = time.perf_counter()
        if len(prompts) == 1 and not args.json:
            outputs = [_stream(llm, prompts[0], params)]
            _tell_error(1, outputs[0])
        else:
            outputs = _generate_all(llm, prompts, params)
            _print_outputs(outputs, llm.memory_report(), as_json=args.json)
        seconds = time.perf_counter() - start
        if not args.quiet:
            write_err(_summary(outputs, seconds, llm.memory_report(), speculation))
    failed = any(output.error is not None for output in outputs)
    return EXIT_REQUEST_FAILED if failed else EXIT_OK


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        stop=args.stop or None,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        # A chat template writes the special tokens itself.
        add_special_tokens=not args.chat,
    )


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
        write_err(f"--- prompt {number} of {len(outputs)}\n")
        text = output.outputs[0].text
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
        _tell_error(number, output)


def _tell_error(number: int, output: RequestOutput) -> None:
    """One line on stderr for a request that ended with an error of its own."""
    if output.error is not None:
        write_error(f"prompt {number}: {in_flags(output.error)}")


def _as_json(output: RequestOutput, memory: dict[str, int]) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": output.error,
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
        f"state of a sequence: {format_size(memory['state_bytes'])}; verification adds "
        f"{format_size(memory['stash_bytes'])} ({speculation.state_commit})"
    )
    if speculation.enabled and speculation.state_commit != "snapshot":
        lines[1] += (
            f"; snapshots of {speculation.max_nodes} nodes would add "
            f"{format_size(memory['snapshot_bytes'])}"
        )
    return "".join(f"[{line}]\n" for line in lines)
