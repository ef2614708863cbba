"""`LLM`: prompts in, texts out. The names and shapes are those of TensorRT-LLM's LLM API."""

from __future__ import annotations

import difflib
import inspect
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .config import ModelConfig
from .export.checkpoint import load_model, load_rank, resolve_dtype
from .llmapi import (
    CudaGraphConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    cuda_graph_config_from,
    kv_cache_config_from,
    speculation_config_from,
)
from .model import Qwen3_5ForCausalLM
from .model.dummy import dummy_model, dummy_rank
from .model_directory import ModelDirectory
from .outputs import CompletionOutput, RequestOutput
from .prompt_input import PromptInput, check_text, is_single, params_for, split_prompt
from .rank_config import shard_config
from .runtime import async_engine, request_stream
from .runtime.build import build_engine, check_limit
from .runtime.detokenizer import Detokenizer
from .runtime.devices import Devices, devices_of
from .runtime.engine_files import EngineRank
from .runtime.errors import describe
from .runtime.executor_distributed import RankGroup
from .runtime.rank_worker import make_torch_rank
from .runtime.request import Request
from .runtime.scheduler import BatchWait
from .runtime.stats import EngineStats
from .sampling_params import SamplingParams
from .text_group import MergedStream, TextGroup
from .tokenizer import end_token_ids, load_tokenizer

DEFAULT_MAX_SEQ_LEN = 8192
DEFAULT_GRAPHS = CudaGraphConfig()


class LLM:
    """A model, loaded and ready to generate.

    Args:
        model: directory of a Hugging Face checkpoint (`qwen3_5`, `qwen3_5_text`, `qwen3_5_moe`),
            or of an engine that `trtllm-treewy build` made of one.
        tokenizer: directory of the tokenizer; the model's own by default.
        skip_tokenizer_init: do without a tokenizer; prompts are token ids then, and no text comes
            back.
        tensor_parallel_size: devices that the model is divided over; it must divide the heads, the
            feed-forward sizes and the vocabulary. Each runs its share in a process of its own, this
            one the first. GPUs are taken from `device` on, or those that it names; on the CPU,
            ranks share the machine. An engine has its number in it, which 1 stands for; another is
            refused.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        speculative_config: `MTPDecodingConfig` or a dict of its fields; None decodes without
            drafts.
        kv_cache_config: `KvCacheConfig` or a dict of its fields.
        cuda_graph_config: `CudaGraphConfig` or a dict of its fields: which steps are captured
            as CUDA graphs, on a GPU; None for none. The steps of a TensorRT engine have sizes of
            their own, and those of several ranks are not captured: a warning says so.
        load_format: "auto" reads the checkpoint; "dummy" makes random weights on the device, so
            that config.json is all that must be there. For measurements.
        max_batch_size: sequences decoded together; each holds a state slot. None takes as many of
            the longest length as memory allows.
        max_seq_len: tokens of a sequence, prompt and output; by default the smaller of the
            model's limit and 8192.
        max_num_tokens: tokens of one engine step, prompt tokens and tree nodes together. Where both
            want more than there is, each gets half, and trees keep their best nodes.
        batch_wait_timeout_iters: engine steps that a request which could start waits, while others
            decode, for more to start with it. A prompt step reads all weights, so that several
            prompts together cost little more than one: more throughput under load, a later first
            token. A request of a priority above 0 does not wait, nor do others once it is there.
        batch_wait_max_tokens_ratio: part of `max_num_tokens`; prompts that are as long together
            wait no longer.
        device: a torch device; by default a GPU where torch finds one. With `tensor_parallel_size`
            also a list with the device of each rank, or these in one text, separated by commas.
        progress: called with (tensors done, tensors in all) while the checkpoint loads.
        others: further settings of TensorRT-LLM's `LLM`; those that ask for what this version
            does anyway are taken, all others are refused.

    Raises:
        FileNotFoundError: the checkpoint, or a part of it, is not there.
        ValueError: the checkpoint or a setting is not usable; the message says which, what was
            expected and what came.
        EngineMismatchError: an engine cannot run here, or not as asked: another GPU, TensorRT or
            plugin version, types or limits beyond what was built. It is a ValueError.
        MemoryError: the caches do not fit; the message says what to lower, and by how much.
        EngineDeadError: (`runtime.errors`) with `tensor_parallel_size` above 1, a rank was lost.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str | torch.dtype = "auto",
        speculative_config: MTPDecodingConfig | Mapping[str, Any] | None = None,
        kv_cache_config: KvCacheConfig | Mapping[str, Any] | None = None,
        cuda_graph_config: CudaGraphConfig | Mapping[str, Any] | None = DEFAULT_GRAPHS,
        load_format: str = "auto",
        max_batch_size: int | None = 8,
        max_seq_len: int | None = None,
        max_num_tokens: int = 8192,
        batch_wait_timeout_iters: int = 0,
        batch_wait_max_tokens_ratio: float = 0.5,
        device: Devices | None = None,
        progress: Callable[[int, int], None] | None = None,
        **others: Any,
    ) -> None:
        _refuse_others(others)
        _check_ranks(tensor_parallel_size)
        check_limit("max_num_tokens", max_num_tokens)
        _check_batch_wait(batch_wait_timeout_iters, batch_wait_max_tokens_ratio)
        _check_load_format(load_format)
        self.speculation = speculation_config_from(speculative_config)
        cache_config = kv_cache_config_from(kv_cache_config)
        graphs = cuda_graph_config_from(cuda_graph_config)
        _warn_of_law(self.speculation)
        directory = Path(model)
        self.config = ModelConfig.from_pretrained(directory)
        self._end_ids = end_token_ids(directory, self.config)
        self.tokenizer: Any = None
        if not skip_tokenizer_init:
            self.tokenizer = load_tokenizer(Path(tokenizer or directory))
        found = ModelDirectory.read(directory)
        ranks = found.ranks(tensor_parallel_size, load_format)
        if found.for_cpu and device is None:
            device = "cpu"
        devices = devices_of(device, ranks)
        self.device = devices[0]
        if found.is_engine or ranks > 1:
            _warn_of_graphs(graphs, self.device)
        make_ranks: Callable[[], RankGroup] | None = None
        if ranks > 1 and found.built is not None:
            make = EngineRank(directory.absolute(), graphs is not None)
            make_ranks = partial(RankGroup, shard_config(self.config, ranks), make, devices)
        elif ranks > 1:
            make_ranks = _ranks_maker(directory, self.config, devices, dtype, load_format, progress)
        if max_seq_len is None:
            max_seq_len = min(found.max_seq_len(self.config), DEFAULT_MAX_SEQ_LEN)
        source = found.source(
            self.speculation, cache_config, dtype, self.device, graphs=graphs is not None
        )
        dtype, max_num_tokens = found.dtype(dtype), found.max_num_tokens(max_num_tokens)
        self._engine, self._memory = build_engine(
            self.config,
            partial(_load, directory, self.config, dtype, self.device, progress, load_format),
            self.speculation,
            cache_config,
            dtype=resolve_dtype(dtype, self.config),
            device=self.device,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            source=source,
            make_ranks=make_ranks,
            graphs=graphs if self.device.type == "cuda" else None,
            batch_wait=BatchWait(
                batch_wait_timeout_iters, int(batch_wait_max_tokens_ratio * max_num_tokens)
            ),
        )
        self._lock = threading.RLock()
        self._handles: dict[int, _Handle] = {}
        self._async_engine: async_engine.AsyncEngine | None = None
        # Not the engine's lock, for which an event loop would wait a step.
        self._starting = threading.Lock()
        self._next_id = 0
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Cancels what still runs. Safe to call twice; nothing can be generated afterwards."""
        if self._async_engine is not None:
            self._async_engine.close()  # not under the lock, which its last step may need
        with self._lock:
            self._engine.cancel([handle.request for handle in self._handles.values()])
            self._handles.clear()
            self._closed = True
            self._engine.close()

    def memory_report(self) -> dict[str, int]:
        """What was planned, and allocated by it.

        Bytes of one sequence: `state_bytes` (recurrent and conv state), `stash_bytes` (what
        verification leaves for the commit), `snapshot_bytes` (what a full state for every node of
        the tree would have taken instead), `kv_bytes_per_token`, `checkpoint_bytes` (a state that
        the prefix cache keeps). Bytes in all: `weights_bytes`, `total_bytes`. Numbers:
        `max_batch_size`, `kv_blocks`, `checkpoints`. With `tensor_parallel_size` above 1, bytes are
        those of each rank.
        """
        return dict(self._memory)

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since it was made; a live object."""
        return self._engine.stats

    def generate(
        self,
        inputs: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Generates for one prompt or for several, and waits for all of them.

        Args:
            inputs: a text, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a
                list of any of these.
            sampling_params: one for all prompts, or a list with one for each.
            use_tqdm: show a progress bar over the prompts on stderr.

        Returns:
            One output for a single prompt, else a list in the order of `inputs`.

        Raises:
            ValueError: a prompt or a setting is not usable; then nothing was started.
        """
        single = is_single(inputs)
        prompts: Sequence[Any] = [inputs] if single else list(inputs)
        params = params_for(prompts, sampling_params)
        with self._lock:
            groups = self._submit(prompts, params)
            try:
                self._run(groups, use_tqdm)
            finally:
                for group in groups:
                    self._release(group.texts)
        outputs = [group.output() for group in groups]
        return outputs[0] if single else outputs

    def generate_async(
        self,
        inputs: PromptInput,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
    ) -> RequestStream:
        """Starts one request; iterate over what comes back, with `for` or with `async for`.

        With `for`, whoever iterates moves the engine forward. With `async for` or `await` a thread
        does, which is started then.

        Args:
            inputs: one prompt, as for `generate`.
            sampling_params: how to decode it.
            streaming: yield an output after every engine step that brought something new, with
                the news in `text_diff` and `token_ids_diff`; otherwise yield the whole at the end.

        Raises:
            ValueError: the prompt or a setting is not usable.
        """
        params = sampling_params or SamplingParams()
        with self._lock:
            (group,) = self._submit([inputs], [params])
        return RequestStream(self, group, streaming)

    def _submit(
        self, prompts: Sequence[PromptInput], params: Sequence[SamplingParams]
    ) -> list[TextGroup]:
        """Checks every prompt first, then queues them all, each with its texts."""
        if self._closed:
            raise RuntimeError("this LLM was shut down")
        groups = []
        for prompt, one in zip(prompts, params, strict=True):
            if not isinstance(one, SamplingParams):
                raise ValueError(
                    f"sampling_params must be a SamplingParams, got {type(one).__name__}"
                )
            one.validate()
            groups.append(TextGroup([self._make_handle(prompt, each) for each in one.copies()]))
        handles: list[_Handle] = [handle for group in groups for handle in group.texts]
        for handle in handles:
            self._engine.check(handle.request)
        for handle in handles:
            self._engine.add(handle.request)
            self._handles[handle.request.request_id] = handle
        return groups

    def _make_handle(self, prompt: PromptInput, params: SamplingParams) -> _Handle:
        """A request for one text of a prompt."""
        params.validate()
        for token in {*params.stop_ids, *params.end_ids(self._end_ids)}:
            if token >= self.config.vocab_size:
                raise ValueError(
                    f"stop or end token {token} is not an id below "
                    f"vocab_size={self.config.vocab_size}"
                )
        text, token_ids = self._read_prompt(prompt, params)
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
            )
        elif params.stop_strings:
            raise ValueError("stop strings need a tokenizer, but skip_tokenizer_init is set")
        request = Request(
            request_id=self._next_id,
            prompt_token_ids=token_ids,
            params=params,
            end_ids=frozenset(params.end_ids(self._end_ids)),
        )
        self._next_id += 1
        return _Handle(request, text, detokenizer, self.speculation.enabled)

    def _read_prompt(
        self, prompt: PromptInput, params: SamplingParams
    ) -> tuple[str | None, tuple[int, ...]]:
        text, ids = split_prompt(prompt)
        if ids is None:
            check_text(text)
            if self.tokenizer is None:
                raise ValueError(
                    "a text prompt needs a tokenizer, but skip_tokenizer_init is set; pass token "
                    "ids"
                )
            ids = self.tokenizer.encode(text, add_special_tokens=params.add_special_tokens)
        if not len(ids):
            raise ValueError(f"prompt {text!r} has no tokens, expected at least one")
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise ValueError(f"prompt token {index} is {token!r}, expected an integer id")
            if not 0 <= int(token) < self.config.vocab_size:
                raise ValueError(
                    f"prompt token {index} is {token}, expected an id in "
                    f"[0, vocab_size={self.config.vocab_size})"
                )
        return text, tuple(int(token) for token in ids)

    def _run(self, groups: Sequence[TextGroup], use_tqdm: bool) -> None:
        from tqdm import tqdm

        with tqdm(total=len(groups), disable=not use_tqdm, unit="prompt") as bar:
            while running := [group for group in groups if not group.finished]:
                bar.update(len(groups) - len(running) - bar.n)
                self._step()
            bar.update(len(groups) - bar.n)

    def _step(self) -> None:
        """One engine step, for every request there is, whoever waits for it."""
        try:
            self._engine.step()
        finally:
            self._update_handles()
            if self._async_engine is not None:
                self._async_engine.poll()

    def _update_handles(self) -> None:
        for handle in list(self._handles.values()):
            try:
                handle.update(self._engine.stop)
            except Exception as error:  # such as a tokenizer's
                self._engine.fail(handle.request, describe(error))
            if handle.finished:
                self._handles.pop(handle.request.request_id, None)

    def _adopt(self, handle: _Handle, streaming: bool) -> request_stream.RequestStream:
        """Hands a request over to the engine thread, which is started if need be."""
        with self._starting:
            if self._async_engine is None:
                self._async_engine = async_engine.AsyncEngine(
                    self._engine,
                    lock=self._lock,
                    after_step=self._update_handles,
                    device=self.device,
                )
        self._handles.pop(handle.request.request_id, None)
        return self._async_engine.adopt(handle, streaming=streaming)

    def _release(self, handles: Sequence[_Handle]) -> None:
        self._engine.cancel([handle.request for handle in handles])
        for handle in handles:
            self._handles.pop(handle.request.request_id, None)


class _Handle:
    """A request with its text; what the caller has been told of it so far."""

    def __init__(
        self, request: Request, prompt: str | None, detokenizer: Detokenizer | None, drafts: bool
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._detokenizer = detokenizer
        self._drafts = drafts
        self._told_tokens = 0
        self._told_text = 0

    @property
    def finished(self) -> bool:
        return self.request.finished

    @property
    def has_news(self) -> bool:
        return self.finished or len(self.request.output_token_ids) > self._told_tokens

    def update(self, stop: Callable[[Request, int, str], None]) -> None:
        """Turns new tokens into text; calls `stop` where a stop string is complete."""
        text, request = self._detokenizer, self.request
        if text is None or text.stopped_by is not None:
            return
        text.add(request.output_token_ids[text.num_tokens :], last=request.finished)
        if text.stopped_by is not None:
            stop(request, text.num_tokens, text.stopped_by)

    def output(self) -> RequestOutput:
        """Everything so far; the differences are against the last call."""
        request = self.request
        text = self._detokenizer.text if self._detokenizer is not None else ""
        # The engine notes those of a whole step, of which a stop may have cut tokens off.
        noted = request.logprobs[: len(request.output_token_ids)]
        completion = CompletionOutput(
            text=text,
            token_ids=list(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            text_diff=text[self._told_text :],
            token_ids_diff=request.output_token_ids[self._told_tokens :],
            logprobs=None if request.params.num_logprobs is None else noted,
        )
        self._told_text, self._told_tokens = len(text), len(request.output_token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            finished=request.finished,
            speculation=request.stats if self._drafts and request.speculation else None,
            error=request.error,
        )


class RequestStream:
    """The outputs of one `generate_async` request, as they come.

    Whoever iterates with `for` moves the engine forward, for all requests in it; so several streams
    may be read in turn, from one thread or from several. `async for` waits for the engine thread;
    it raises `runtime.errors.RequestError` where the request could not be brought to its end. A
    stream is read in one of these ways. Leave early with `abort`, or by closing the stream, which
    gives the request's slot back.
    """

    def __init__(self, llm: LLM, group: TextGroup, streaming: bool) -> None:
        self._llm, self._group, self._streaming = llm, group, streaming
        self._done = False
        self._adopted: list[request_stream.RequestStream] = []
        self._merged: AsyncIterator[RequestOutput] | None = None

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        if self._adopted:
            raise RuntimeError("this stream is read with `async for`; go on with it")
        llm, group = self._llm, self._group
        with llm._lock:
            while not (group.finished or (self._streaming and group.has_news)):
                llm._step()
            self._done = group.finished
            return group.output()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        if self._merged is None:
            self._merged = self._adopt()
        output = await anext(self._merged)
        self._done = output.finished
        return output

    def _adopt(self) -> AsyncIterator[RequestOutput]:
        """Hands all texts over to the engine thread; they are ended where it takes no more."""
        llm, texts, streaming = self._llm, self._group.texts, self._streaming
        try:
            adopted = [llm._adopt(handle, streaming) for handle in texts]
        except BaseException:
            self._done = True
            with llm._lock:
                llm._release(texts)
            raise
        self._adopted = adopted
        return adopted[0] if len(adopted) == 1 else MergedStream(adopted, streaming)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    async def aresult(self) -> RequestOutput:
        """Waits for the end and returns the whole output, without blocking the event loop.

        Cancelling the wait ends the request.
        """
        output = None
        try:
            async for output in self:
                pass
        finally:
            if not self._done:
                self.abort()
        return output if output is not None else self._group.output()

    def result(self) -> RequestOutput:
        """Waits for the end and returns the whole output."""
        output = None
        for output in self:
            pass
        return output if output is not None else self._group.output()

    def abort(self) -> None:
        """Ends the request where it stands; the next output says "cancelled"."""
        for stream in self._adopted:
            stream.abort()
        if not self._adopted:
            with self._llm._lock:
                self._llm._release(self._group.texts)

    close = abort


# Settings of TensorRT-LLM's LLM, with the values that mean what this version does anyway.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "backend": (None, "pytorch"),
    "trust_remote_code": (False,),
    "tokenizer_mode": ("auto", "fast"),
    "revision": (None,),
    "tokenizer_revision": (None,),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "moe_expert_parallel_size": (None, 1),
    "moe_tensor_parallel_size": (None, 1),
    "enable_attention_dp": (False,),
    "disable_overlap_scheduler": (True,),
    "enable_chunked_prefill": (True,),
    "max_beam_width": (None, 1),
    "max_input_len": (None,),
    "quant_config": (None,),
    "lora_config": (None,),
    "enable_lora": (False,),
}


def _refuse_others(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for the first setting that asks for something this version has not."""
    for name, value in settings.items():
        if name not in _OTHERS:
            known = [name for name in inspect.signature(LLM).parameters if name != "others"]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"LLM has no setting {name!r}; {hint}")
        if not any(value is other or value == other for other in _OTHERS[name]):
            accepted = " or ".join(repr(other) for other in _OTHERS[name])
            raise ValueError(f"{name}={value!r} is not supported in this version, only {accepted}")


def _check_ranks(size: Any) -> None:
    """Raises ValueError unless `size` is a number of ranks."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size must be an integer >= 1, got {size!r}")


def _check_load_format(load_format: Any) -> None:
    """Raises ValueError unless weights can be had in that way."""
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")


def _warn_of_law(speculation: MTPDecodingConfig) -> None:
    """Warns whoever measures with drafts that are accepted at random."""
    if speculation.simulated_acceptance is not None:
        warnings.warn(
            f"acceptance is drawn from the law {speculation.simulated_acceptance} and not from "
            "the model (simulated_acceptance): the texts mean nothing",
            stacklevel=3,
        )


def _check_batch_wait(iters: Any, ratio: Any) -> None:
    """Raises ValueError unless requests can wait for so long."""
    if isinstance(iters, bool) or not isinstance(iters, int) or iters < 0:
        raise ValueError(f"batch_wait_timeout_iters must be an integer >= 0, got {iters!r}")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"batch_wait_max_tokens_ratio must be from 0 to 1, got {ratio!r}")


def _warn_of_graphs(graphs: CudaGraphConfig | None, device: torch.device) -> None:
    """Warns whoever asked for graphs where the settings of them have no effect."""
    if graphs is not None and graphs is not DEFAULT_GRAPHS and device.type == "cuda":
        warnings.warn(
            "cuda_graph_config has no effect here: TensorRT engines choose the steps that are "
            "captured, and those of a model over several GPUs are not",
            stacklevel=3,
        )


def _ranks_maker(
    directory: Path,
    config: ModelConfig,
    devices: Sequence[torch.device],
    dtype: str | torch.dtype,
    load_format: str,
    progress: Callable[[int, int], None] | None,
) -> Callable[[], RankGroup]:
    """What starts the ranks; ValueError where the model cannot be divided over so many."""
    part = shard_config(config, len(devices))
    if load_format == "dummy":
        dummy = partial(dummy_rank, config, part, resolve_dtype(dtype, config))
        return lambda: RankGroup(part, partial(make_torch_rank, dummy), devices)
    load = partial(load_rank, directory, config, dtype)
    return lambda: RankGroup(
        part, partial(make_torch_rank, load), devices,
        make_first=partial(make_torch_rank, partial(load, progress=progress)),
    )  # fmt: skip


def _load(
    directory: Path,
    config: ModelConfig,
    dtype: str | torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    load_format: str,
) -> Qwen3_5ForCausalLM:
    """The model with its weights, or with random ones."""
    if load_format == "dummy":
        return dummy_model(config, dtype=resolve_dtype(dtype, config), device=device)
    return load_model(directory, config, dtype=dtype, device=device, progress=progress)
