"""`LLM`: prompts in, texts out. The names and shapes are those of TensorRT-LLM's LLM API."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .config import ModelConfig
from .engine_driver import EngineDriver
from .export.checkpoint import resolve_dtype
from .llm_settings import (
    DEFAULT_GRAPHS,
    check_batch_wait,
    check_load_format,
    refuse_others,
    warn_of_graphs,
    warn_of_law,
)
from .llmapi import (
    CudaGraphConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    cuda_graph_config_from,
    kv_cache_config_from,
    speculation_config_from,
)
from .model_directory import ModelDirectory
from .outputs import RequestOutput
from .prompt_input import PromptInput, is_single, params_for
from .request_maker import RequestMaker
from .request_stream import RequestStream
from .runtime.build import build_engine
from .runtime.devices import Devices, devices_of
from .runtime.engine_settings import EngineSettings, check_limit
from .runtime.memory_budget import MAX_AUTO_BATCH
from .runtime.scheduler import BatchWait
from .runtime.stats import EngineStats
from .sampling_params import SamplingParams
from .text_group import TextGroup
from .tokenizer import end_token_ids, load_tokenizer
from .weights import Weights

DEFAULT_MAX_SEQ_LEN = 8192


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
        max_auto_batch_size: and no more than so many then. Where a known number of prompts is all
            that will come, it is that number: states and caches for more would be taken for
            nothing. Without effect beside a `max_batch_size`.
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
        max_auto_batch_size: int = MAX_AUTO_BATCH,
        max_seq_len: int | None = None,
        max_num_tokens: int = 8192,
        batch_wait_timeout_iters: int = 0,
        batch_wait_max_tokens_ratio: float = 0.5,
        device: Devices | None = None,
        progress: Callable[[int, int], None] | None = None,
        **others: Any,
    ) -> None:
        refuse_others(others, _names_of_settings())
        check_limit("tensor_parallel_size", tensor_parallel_size)
        check_limit("max_num_tokens", max_num_tokens)
        check_batch_wait(batch_wait_timeout_iters, batch_wait_max_tokens_ratio)
        check_load_format(load_format)
        self.speculation = speculation_config_from(speculative_config)
        cache = kv_cache_config_from(kv_cache_config)
        graphs = cuda_graph_config_from(cuda_graph_config)
        warn_of_law(self.speculation)
        directory = Path(model)
        self.config = config = ModelConfig.from_pretrained(directory)
        end_ids = end_token_ids(directory, config)
        self.tokenizer: Any = None
        if not skip_tokenizer_init:
            self.tokenizer = load_tokenizer(Path(tokenizer or directory))
        found = ModelDirectory.read(directory)
        ranks = found.ranks(tensor_parallel_size, load_format)
        devices = devices_of("cpu" if found.for_cpu and device is None else device, ranks)
        self.device = devices[0]
        if found.is_engine or ranks > 1:
            warn_of_graphs(graphs, self.device)
        captured = graphs is not None
        weights = Weights(directory, config, found.dtype(dtype), load_format == "dummy", progress)
        if max_seq_len is None:
            max_seq_len = min(found.max_seq_len(config), DEFAULT_MAX_SEQ_LEN)
        max_num_tokens = found.max_num_tokens(max_num_tokens)
        settings = EngineSettings(
            config=config,
            speculation=self.speculation,
            cache=cache,
            dtype=resolve_dtype(weights.dtype, config),
            device=self.device,
            max_batch_size=max_batch_size,
            max_auto_batch_size=max_auto_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            graphs=graphs if self.device.type == "cuda" else None,
        )
        self._engine, self._memory = build_engine(
            settings,
            partial(weights.load, self.device),
            source=found.source(self.speculation, cache, dtype, self.device, graphs=captured),
            make_ranks=found.ranks_maker(weights, devices, graphs=captured),
            batch_wait=BatchWait(
                batch_wait_timeout_iters, int(batch_wait_max_tokens_ratio * max_num_tokens)
            ),
        )
        self._requests = RequestMaker(
            self.tokenizer, config.vocab_size, end_ids, self.speculation.enabled
        )
        self._driver = EngineDriver(self._engine, self.device)

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
        self._driver.close()

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
        with self._driver.lock:
            groups = self._submit(prompts, params)
            try:
                self._run(groups, use_tqdm)
            finally:
                for group in groups:
                    self._driver.release(group.texts)
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
        (group,) = self._submit([inputs], [sampling_params or SamplingParams()])
        return RequestStream(self._driver, group, streaming)

    def _submit(
        self, prompts: Sequence[PromptInput], params: Sequence[SamplingParams]
    ) -> list[TextGroup]:
        """Checks every prompt first, then queues them all, each with its texts."""
        groups = [
            self._requests.make_group(prompt, one)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        self._driver.submit([handle for group in groups for handle in group.texts])
        return groups

    def _run(self, groups: Sequence[TextGroup], use_tqdm: bool) -> None:
        from tqdm import tqdm

        with tqdm(total=len(groups), disable=not use_tqdm, unit="prompt") as bar:
            while running := [group for group in groups if not group.finished]:
                bar.update(len(groups) - len(running) - bar.n)
                self._driver.step()
            bar.update(len(groups) - bar.n)


def _names_of_settings() -> list[str]:
    return [name for name in inspect.signature(LLM).parameters if name != "others"]
