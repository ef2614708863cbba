"""The LLM class: inputs, stop conditions, streaming, failures, memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import hf_config, write_checkpoint

from trtllm_treewy import LLM, KvCacheConfig, MTPDecodingConfig, SamplingParams, engine_driver
from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.runtime import async_engine, engine_memory

TREE = {"draft_tree_widths": [2, 2, 2]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, hf_config(), seed=3)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    settings = {"dtype": "float32", "device": "cpu", "max_batch_size": 2, "max_seq_len": 128}
    with LLM(checkpoint, skip_tokenizer_init=True, speculative_config=TREE, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def text_llm(shipped_model):
    """The shipped model, with its tokenizer."""
    with LLM(
        shipped_model, dtype="float32", device="cpu", speculative_config=TREE, max_seq_len=256
    ) as llm:
        yield llm


def tokens(llm, prompt, **settings):
    return llm.generate(prompt, SamplingParams(**settings)).outputs[0].token_ids


def slots_are_free(llm):
    executor = llm._engine._executor
    return executor.kv_cache.free_blocks == executor.limits.num_blocks


def test_forms_of_input(llm):
    """One prompt or a list; ids, or a dict of them; results in the order of the prompts."""
    one = llm.generate([5, 6, 7], SamplingParams(max_tokens=4))
    assert one.prompt_token_ids == [5, 6, 7]
    assert one.finished
    assert one.outputs[0].finish_reason == "length"
    many = llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}, (9,), [8] * 20], SamplingParams(max_tokens=4)
    )
    assert many[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert [len(o.prompt_token_ids) for o in many] == [3, 1, 20]
    assert llm.generate([], SamplingParams()) == []
    assert isinstance(llm.generate([[1, 2]], SamplingParams(max_tokens=1)), list)
    numpy_ids = list(torch.tensor([5, 6, 7]).numpy())
    again = llm.generate(numpy_ids, SamplingParams(max_tokens=4))
    assert again.outputs[0].token_ids == one.outputs[0].token_ids


def test_one_sampling_params_each(llm):
    params = [SamplingParams(max_tokens=n) for n in (1, 9, 3)]
    outputs = llm.generate([[1], [2], [3]], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 9, 3]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], params[:2])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "expected at least one"),
        ([1, 97], r"token 1 is 97, expected an id in \[0, vocab_size=97\)"),
        ([-1], "token 0 is -1"),
        ([True], "token 0 is True"),
        ([1.5], "a prompt is a text, token ids or a dict, got float"),
        ({"prompt_token_ids": [1, "2"]}, "token 1 is '2', expected an integer"),
        ("text", "needs a tokenizer"),
        ({"text": "x"}, "'prompt' or 'prompt_token_ids'"),
        (7, "must be a text, token ids"),
        ([[1], 7], "a prompt is a text"),
        (b"ab", "inputs must be a text"),
        ([b"ab"], "a prompt is a text, token ids or a dict, got bytes"),
        ({"prompt": None}, "a prompt's text must be a string, got NoneType"),
        ({"prompt": 3}, "a prompt's text must be a string, got int"),
        ("a\ud800", r"'\\ud800' at 1 is half a character"),
        ([1] * 100, "expected at most max_seq_len=128"),
    ],
)
def test_bad_prompts_start_nothing(prompt, message, llm):
    """A bad prompt among good ones is refused, and the good ones are not run either."""
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt] if prompt == [] else prompt, SamplingParams(max_tokens=30))
    with pytest.raises(ValueError):
        llm.generate([[1, 2], prompt], SamplingParams(max_tokens=30))
    assert not llm._engine.has_work
    assert slots_are_free(llm)


def test_end_and_stop_tokens(llm):
    free = tokens(llm, [5, 6, 7], max_tokens=20)
    stop = free[5]
    first = free.index(stop)
    output = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == free[: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    ended = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, end_id=stop))
    assert ended.outputs[0].token_ids == free[: first + 1]
    assert ended.outputs[0].stop_reason is None
    ignored = tokens(llm, [5, 6, 7], max_tokens=20, end_id=stop, ignore_eos=True)
    assert ignored == free


def test_min_tokens_is_the_same_with_and_without_drafts(llm, checkpoint):
    """An end token cannot be chosen early, at whatever depth of a tree it would come."""
    free = tokens(llm, [5, 6, 7], max_tokens=30)
    settings = {"max_tokens": 30, "end_id": free[2], "min_tokens": 11}
    with LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", device="cpu") as plain:
        expected = tokens(plain, [5, 6, 7], **settings)
    assert tokens(llm, [5, 6, 7], **settings) == expected
    assert len(expected) >= 11
    assert free[2] not in expected[:10]


def test_streaming_adds_up(llm):
    whole = llm.generate([3, 1, 4], SamplingParams(max_tokens=25)).outputs[0]
    pieces, last = [], None
    for last in llm.generate_async([3, 1, 4], SamplingParams(max_tokens=25), streaming=True):
        pieces += last.outputs[0].token_ids_diff
        assert pieces == last.outputs[0].token_ids
    assert last.finished
    assert pieces == whole.token_ids


def test_streams_side_by_side(llm):
    """More streams than slots, read in turn; each gives what it would give alone."""
    params = SamplingParams(max_tokens=12)
    alone = [tokens(llm, [i, i + 1], max_tokens=12) for i in range(5)]
    streams = [llm.generate_async([i, i + 1], params, streaming=True) for i in range(5)]
    found = {}
    while len(found) < 5:
        for index, stream in enumerate(streams):
            output = next(stream, None)
            if output is not None:
                found[index] = output.outputs[0].token_ids
                if not output.finished:
                    found.pop(index)
    assert [found[i] for i in range(5)] == alone
    assert slots_are_free(llm)


def test_async_iteration_and_result(llm):
    expected = tokens(llm, [9, 9], max_tokens=8)

    async def read():
        stream = llm.generate_async([9, 9], SamplingParams(max_tokens=8), streaming=True)
        return [output async for output in stream]

    outputs = asyncio.run(read())
    assert outputs[-1].outputs[0].token_ids == expected

    async def wait():
        return await llm.generate_async([9, 9], SamplingParams(max_tokens=8))

    assert asyncio.run(wait()).outputs[0].token_ids == expected
    result = llm.generate_async([9, 9], SamplingParams(max_tokens=8)).result()
    assert result.outputs[0].token_ids == expected


def test_abort_frees_the_slot(llm):
    stream = llm.generate_async([1, 2, 3], SamplingParams(max_tokens=90), streaming=True)
    next(stream)
    assert not slots_are_free(llm)
    stream.abort()
    last = next(stream)
    assert last.finished
    assert last.outputs[0].finish_reason == "cancelled"
    assert slots_are_free(llm)
    assert next(stream, None) is None


@pytest.mark.parametrize("place", ["verify", "commit", "draft", "prefill"])
def test_interrupt_in_a_step_leaves_the_engine_usable(place, llm, monkeypatch):
    """Whatever stage is interrupted, nothing stays half done and the next request is right."""
    expected = tokens(llm, [5, 6, 7], max_tokens=15)
    executor, calls = llm._engine._executor, []
    original = getattr(executor, place)

    def failing(*args, **kwargs):
        calls.append(place)
        if len(calls) == (1 if place == "prefill" else 3):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(executor, place, failing)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [1, 2], [3]], SamplingParams(max_tokens=15))
    monkeypatch.undo()
    assert not llm._engine.has_work
    assert slots_are_free(llm)
    assert tokens(llm, [5, 6, 7], max_tokens=15) == expected


@pytest.mark.parametrize("place", ["verify", "commit", "draft", "prefill"])
def test_an_error_in_a_step_is_told_or_made_up_for(place, llm, monkeypatch):
    """A step of several sequences that raises once costs no token; a lone one fails with it."""
    prompts = [[5, 6, 7], [1, 2]]
    expected = [tokens(llm, prompt, max_tokens=15) for prompt in prompts]
    executor, calls = llm._engine._executor, []
    original = getattr(executor, place)

    def failing(*args, **kwargs):
        calls.append(place)
        if len(calls) == 1:
            raise RuntimeError("boom")
        return original(*args, **kwargs)

    monkeypatch.setattr(executor, place, failing)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=15))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    calls.clear()
    output = llm.generate(prompts[0], SamplingParams(max_tokens=15))
    assert output.outputs[0].finish_reason == "error"
    assert output.error == "the engine step failed: RuntimeError: boom"
    assert slots_are_free(llm)
    assert tokens(llm, [5, 6, 7], max_tokens=15) == expected[0]


@pytest.mark.parametrize("place", ["clear", "try_reserve", "free", "forget"])
def test_interrupt_while_a_slot_changes_hands(place, llm, monkeypatch):
    """Neither a slot nor a block is lost, or held twice, whatever was under way."""
    executor = llm._engine._executor
    owner = {
        "clear": executor.state.policy,
        "try_reserve": executor.kv_cache,
        "free": executor.kv_cache,
        "forget": llm._engine._drafter,
    }[place]
    original = getattr(owner, place)
    expected = tokens(llm, [5, 6, 7], max_tokens=5)
    for before in (True, False):

        def interrupted(*args, before=before):
            monkeypatch.undo()
            if not before:
                original(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3]], SamplingParams(max_tokens=5))
        assert not llm._engine.has_work
        assert slots_are_free(llm)
        outputs = llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=5))
        assert all(o.outputs[0].token_ids == expected for o in outputs)


@pytest.mark.parametrize("where", ["prompt", "tree"])
def test_non_finite_logits_end_their_request_alone(where, llm, monkeypatch):
    """A fault is told, to the request that has it, and the others do not notice."""
    expected = tokens(llm, [5, 6, 7], max_tokens=12)
    executor = llm._engine._executor
    name = "prefill" if where == "prompt" else "verify"
    original = getattr(executor, name)

    def poisoned(batch):
        output = original(batch)
        with torch.inference_mode():
            output.logits[1:] = torch.nan
        return output

    monkeypatch.setattr(executor, name, poisoned)
    outputs = llm.generate([[5, 6, 7], [1, 2]], SamplingParams(max_tokens=12))
    monkeypatch.undo()
    assert outputs[0].outputs[0].token_ids == expected
    assert outputs[0].error is None
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "not finite" in outputs[1].error
    assert slots_are_free(llm)
    assert tokens(llm, [1, 2], max_tokens=12) == tokens(llm, [1, 2], max_tokens=12)


def test_model_without_attention(tmp_path):
    """All layers linear and no MTP module: there is no KV cache at all."""
    raw = hf_config(layer_types=["linear_attention"] * 4, mtp_num_hidden_layers=0)
    reference = write_checkpoint(tmp_path, raw)
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", dtype="float32") as llm:
        ours = tokens(llm, [1, 2, 3], max_tokens=20)
    ids = [1, 2, 3]
    with torch.no_grad():
        for _ in range(20):  # transformers' own caches want an attention layer
            logits = reference(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    assert ours == ids[3:]


def test_shutdown(checkpoint):
    with LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
        stream = llm.generate_async([1], SamplingParams(max_tokens=50), streaming=True)
        next(stream)
    assert next(stream).outputs[0].finish_reason == "cancelled"
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate([1])


def test_acceptance_statistics(llm, checkpoint):
    stats = llm.generate([5, 6, 7], SamplingParams(max_tokens=30)).speculation
    assert stats.num_accepted + stats.num_steps == 29, "the first token is the prompt's"
    assert stats.num_drafted == 14 * stats.num_steps
    with LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", device="cpu") as plain:
        assert plain.generate([5], SamplingParams(max_tokens=3)).speculation is None


def test_text_and_stop_strings(text_llm):
    """Stop strings end the text exactly, with drafts accepted beyond them thrown away."""
    prompt = "The following function"
    whole = text_llm.generate(prompt, SamplingParams(max_tokens=40)).outputs[0]
    assert whole.text == text_llm.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    stop = whole.text[len(whole.text) // 2 :][:4]
    cut = whole.text.index(stop)
    output = text_llm.generate(prompt, SamplingParams(max_tokens=40, stop=[stop, "\x00"]))
    assert output.outputs[0].text == whole.text[:cut]
    assert output.outputs[0].stop_reason == stop
    assert output.outputs[0].finish_reason == "stop"
    ids = output.outputs[0].token_ids
    assert whole.token_ids[: len(ids)] == ids
    assert stop in text_llm.tokenizer.decode(ids), "the tokens end with the stop string's last"
    assert stop not in text_llm.tokenizer.decode(ids[:-1])
    kept = SamplingParams(max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert text_llm.generate(prompt, kept).outputs[0].text == whole.text[: cut + 4]
    streamed = ""
    for part in text_llm.generate_async(
        prompt, SamplingParams(max_tokens=40, stop=stop), streaming=True
    ):
        streamed += part.outputs[0].text_diff
    assert streamed == whole.text[:cut]
    assert slots_are_free(text_llm)


def test_detokenize_off(text_llm):
    output = text_llm.generate("The", SamplingParams(max_tokens=5, detokenize=False))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 5


def test_end_tokens_of_the_generation_config(checkpoint, tmp_path):
    """generation_config.json decides over config.json, as in transformers."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu"}
    with LLM(tmp_path, **settings) as llm:
        free = tokens(llm, [5, 6], max_tokens=20)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [96, free[3]]}))
    with LLM(tmp_path, **settings) as llm:
        assert tokens(llm, [5, 6], max_tokens=20) == free[: free.index(free[3]) + 1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 97}))
    with pytest.raises(ValueError, match="eos_token_id 97 is not an id below vocab_size=97"):
        LLM(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "size 2 does not divide vocab_size 97"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer >= 1, got 0"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
        ({"trust_remote_code": True}, "trust_remote_code=True is not supported"),
        ({"max_batchsize": 2}, "no setting 'max_batchsize'; did you mean 'max_batch_size'"),
        ({"device": "gpu"}, "device 'gpu' is not a torch device"),
        ({"device": "meta"}, "device must be 'cpu' or 'cuda'"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not there"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer >= 1"),
        ({"max_batch_size": 10**9}, "max_batch_size is 1000000000, expected at most 65536"),
        ({"max_seq_len": 5000}, "max_seq_len is 5000, expected at most"),
        ({"max_num_tokens": 3}, "max_num_tokens is 3, expected at least max_batch_size"),
        ({"dtype": "int8"}, "dtype: expected"),
        ({"speculative_config": {"draft_tree_width": [3]}}, "did you mean 'draft_tree_widths'"),
        ({"speculative_config": {"draft_tree_widths": [6, 6, 6]}}, "259 nodes"),
        ({"kv_cache_config": {"max_checkpoints": 4}}, "needs enable_block_reuse=True"),
    ],
)
def test_bad_settings(settings, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, skip_tokenizer_init=True, **{"device": "cpu", **settings})


def test_settings_of_tensorrt_llm_that_ask_for_nothing(checkpoint):
    """A script that only changes its import may pass these."""
    with LLM(
        checkpoint,
        skip_tokenizer_init=True,
        device="cpu",
        backend="pytorch",
        trust_remote_code=False,
        speculative_config=MTPDecodingConfig(decoding_type="MTP", num_nextn_predict_layers=2),
    ) as llm:
        assert llm.generate([1], SamplingParams(max_tokens=3)).speculation.num_steps


def test_bad_sampling_params(llm):
    with pytest.raises(ValueError, match="must be a SamplingParams, got dict"):
        llm.generate([[1]], [{"max_tokens": 3}])
    for settings in ({"stop_token_ids": [97]}, {"end_id": 500, "min_tokens": 2}):
        with pytest.raises(ValueError, match="is not an id below vocab_size=97"):
            llm.generate([1], SamplingParams(max_tokens=3, **settings))


def test_drafts_need_an_mtp_module(tmp_path):
    write_checkpoint(tmp_path, hf_config(mtp_num_hidden_layers=0))
    with pytest.raises(ValueError, match="no MTP module"):
        LLM(tmp_path, skip_tokenizer_init=True, device="cpu", speculative_config=TREE)
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", dtype="float32") as llm:
        assert len(tokens(llm, [1], max_tokens=5)) == 5


def test_no_tokenizer(checkpoint):
    with pytest.raises(ValueError, match="expected a tokenizer"):
        LLM(checkpoint, device="cpu")


def test_memory_is_planned_before_it_is_taken(checkpoint, monkeypatch):
    """The error says what to lower and by how much, and no weight is read before (CASE 27)."""
    monkeypatch.setattr(engine_memory, "free_memory", lambda device: 8 << 20)
    settings = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    seen = []
    with pytest.raises(MemoryError, match=r"lower max_batch_size by \d+") as caught:
        LLM(checkpoint, max_batch_size=600, progress=lambda *a: seen.append(a), **settings)
    assert not seen
    fewer = int(re.search(r"max_batch_size by (\d+)", str(caught.value)).group(1))
    LLM(checkpoint, max_batch_size=600 - fewer, **settings).shutdown()
    with pytest.raises(MemoryError):
        LLM(checkpoint, max_batch_size=601 - fewer, **settings)


def test_memory_advice_is_possible(checkpoint, monkeypatch):
    """Where no smaller batch would do, the advice does not ask for one."""
    settings = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    monkeypatch.setattr(engine_memory, "free_memory", lambda device: 1 << 20)
    with pytest.raises(MemoryError, match=r"lower the KV tokens .* by \d+$"):
        LLM(checkpoint, max_batch_size=1, **settings)
    monkeypatch.setattr(engine_memory, "free_memory", lambda device: 1000)
    with pytest.raises(MemoryError, match="take a smaller dtype or model"):
        LLM(checkpoint, max_batch_size=1, **settings)


def test_kv_cache_shrinks_to_the_memory_there_is(checkpoint, monkeypatch):
    """Fewer blocks than all slots could use: requests wait, and come out right."""
    monkeypatch.setattr(engine_memory, "free_memory", lambda device: 3 << 20)
    settings = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    with LLM(checkpoint, max_batch_size=4, max_seq_len=2048, **settings) as llm:
        assert llm._engine._executor.limits.num_blocks < 4 * 65
        alone = tokens(llm, [5, 6], max_tokens=5)
        outputs = llm.generate([[5, 6]] * 6, SamplingParams(max_tokens=1500, end_id=alone[4]))
    assert all(output.outputs[0].token_ids == alone for output in outputs)


def test_request_that_can_never_fit(checkpoint):
    cache = KvCacheConfig(max_tokens=64)
    settings = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    with LLM(checkpoint, kv_cache_config=cache, **settings) as llm:
        with pytest.raises(ValueError, match="KV cache, which has 64; raise kv_cache_config"):
            llm.generate([1] * 60, SamplingParams(max_tokens=10))
        assert len(tokens(llm, [1], max_tokens=5)) == 5


@pytest.mark.parametrize("policy", ["reconstruct", "deferred", "snapshot"])
def test_memory_report(policy, checkpoint):
    config = MTPDecodingConfig(draft_tree_widths=(3, 3, 3), state_commit=policy)
    with LLM(
        checkpoint,
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        speculative_config=config,
    ) as llm:
        report = llm.memory_report()
    state = 3 * 4 * 24 * 16 * 4  # GDN layers, HV, V, K, float32
    conv = 3 * 3 * (2 * 2 * 16 + 4 * 24) * 4
    assert report["snapshot_bytes"] == 40 * state
    if policy == "reconstruct":
        assert report["state_bytes"] == state + conv
        per_node = 4 * 24 * 4 + 4 * 4 + (2 * 2 * 16 + 4 * 24) * 4
        assert report["stash_bytes"] == 3 * 40 * per_node
    elif policy == "snapshot":
        assert report["stash_bytes"] > report["snapshot_bytes"]


def test_bfloat16_pseudo_values_need_a_bfloat16_state(checkpoint):
    config = MTPDecodingConfig(draft_tree_widths=(2,), stash_dtype="bfloat16")
    settings = {"skip_tokenizer_init": True, "device": "cpu", "speculative_config": config}
    with pytest.raises(ValueError, match="stash_dtype='bfloat16' needs a bfloat16 state"):
        LLM(checkpoint, **settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "stash",
    [
        {"stash": "inputs"},
        {"stash_dtype": "bfloat16"},
        {"stash_dtype": "bfloat16", "state_commit": "deferred"},
    ],
)
def test_stashes_of_low_precision_run(stash, dtype, checkpoint):
    config = MTPDecodingConfig(draft_tree_widths=(3, 3), **stash)
    with LLM(
        checkpoint,
        skip_tokenizer_init=True,
        device="cpu",
        dtype=dtype,
        speculative_config=config,
        kv_cache_config={"mamba_ssm_cache_dtype": "bfloat16"},
    ) as llm:
        assert len(tokens(llm, [5, 6, 7], max_tokens=20)) == 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs(dtype, checkpoint):
    """Half types run end to end; tokens may differ from float32's, their number does not."""
    cache = {"mamba_ssm_cache_dtype": "bfloat16"}
    with LLM(
        checkpoint,
        skip_tokenizer_init=True,
        device="cpu",
        dtype=dtype,
        speculative_config=TREE,
        kv_cache_config=cache,
    ) as llm:
        assert llm._engine._executor.state.state.dtype == torch.bfloat16
        assert len(tokens(llm, [5, 6, 7], max_tokens=20)) == 20


SHARED = list(range(40))


@pytest.mark.parametrize(
    "speculation", [None, TREE, {"tree_policy": "auto"}, {**TREE, "state_commit": "deferred"}]
)
def test_prefix_cache_by_its_setting(speculation, checkpoint):
    """Prompts that share a start, twice over: the same texts, and most of the prompts not run."""
    prompts = [[*SHARED, *range(n)] for n in (3, 9, 20)] + [SHARED[:33]]
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu"}
    settings |= {"max_seq_len": 128, "max_batch_size": 2}
    with LLM(checkpoint, **settings) as plain:
        expected = [tokens(plain, prompt, max_tokens=12) for prompt in prompts]
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8, max_checkpoints=12)
    with LLM(checkpoint, kv_cache_config=cache, speculative_config=speculation, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(max_tokens=12))
            assert [output.outputs[0].token_ids for output in outputs] == expected
        stats = llm.stats
        assert stats.prefix_hits >= 4
        assert stats.prefilled_tokens == stats.prefix_queried_tokens - stats.prefix_hit_tokens
        assert stats.checkpoints_total == 12
        assert stats.requests_finished == 8
        llm._engine.drop_prefixes()
        assert slots_are_free(llm)


def test_as_many_sequences_as_memory_allows(checkpoint):
    """max_batch_size=None: the number comes from the memory that was given."""
    settings = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    settings |= {"max_batch_size": None, "max_seq_len": 64, "speculative_config": TREE}
    sizes = []
    for memory in (2 << 20, 4 << 20):
        cache = KvCacheConfig(memory_bytes=memory, tokens_per_block=8)
        with LLM(checkpoint, kv_cache_config=cache, **settings) as llm:
            report = llm.memory_report()
            assert report["total_bytes"] <= memory
            sizes.append(report["max_batch_size"])
            assert len(tokens(llm, [1, 2], max_tokens=5)) == 5
    assert 1 < sizes[0] < sizes[1]


def test_seeded_sampling_is_the_same_with_and_without_drafts(llm, checkpoint):
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=11)
    with LLM(checkpoint, skip_tokenizer_init=True, dtype="float32", device="cpu") as plain:
        expected = plain.generate([5, 6, 7], params).outputs[0].token_ids
    outputs = llm.generate([[5, 6, 7], [1], [5, 6, 7]], params)
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == expected
    assert expected != tokens(llm, [5, 6, 7], max_tokens=20)
    with pytest.raises(ValueError, match="logit_bias has token id 97"):
        llm.generate([1], SamplingParams(logit_bias={97: 1.0}))


PROMPT = "The location of the error log"


def test_a_seed_gives_one_text_with_and_without_drafts(text_llm, shipped_model):
    """The shipped model at temperature 0.8: as text, streamed, and with the log probabilities."""
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, logprobs=2)
    with LLM(shipped_model, dtype="float32", device="cpu", max_seq_len=256) as plain:
        expected = plain.generate(PROMPT, params).outputs[0]
    output = text_llm.generate(PROMPT, params)
    found = output.outputs[0]
    assert output.speculation.num_accepted > 0
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    for own, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert list(own) == list(other)
        for token in own:
            assert own[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
    streamed = text_llm.generate_async(PROMPT, params).result().outputs[0]
    assert (streamed.text, streamed.token_ids) == (expected.text, expected.token_ids)
    reseeded = SamplingParams(max_tokens=40, temperature=0.8, seed=6)
    assert text_llm.generate(PROMPT, reseeded).outputs[0].text != expected.text


def check_logprobs(completion, count):
    """One entry a token: the chosen one and the `count` best, ranked as their values are."""
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert all(at.logprob <= 0 for at in entry.values())
        best = sorted((at for at in entry.values() if at.rank <= count), key=lambda at: at.rank)
        assert [at.rank for at in best] == list(range(1, count + 1))
        values = [at.logprob for at in best]
        assert values == sorted(values, reverse=True)
        assert len(entry) == count + (entry[token].rank > count)
        assert all(entry[token].logprob <= value for value in values[: entry[token].rank])


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_of_the_tokens(count, temperature, text_llm):
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=5, logprobs=count)
    completion = text_llm.generate(PROMPT, params).outputs[0]
    check_logprobs(completion, count)
    chosen = [e[t] for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert all(at.rank == 1 for at in chosen) == (temperature is None)
    told = []
    for output in text_llm.generate_async(PROMPT, params, streaming=True):
        check_logprobs(output.outputs[0], count)
        told.append(output.outputs[0].logprobs)
    assert len(told) > 1
    assert all(whole[: len(part)] == part for part, whole in itertools.pairwise(told))
    assert told[-1] == completion.logprobs
    plain = SamplingParams(max_tokens=4)
    assert text_llm.generate(PROMPT, plain).outputs[0].logprobs is None


def test_logprobs_are_of_the_models_logits(text_llm):
    """Those of the first token against a pass over the prompt alone, at any temperature."""
    params = SamplingParams(max_tokens=1, temperature=1.7, seed=2, logprobs=5)
    output = text_llm.generate(PROMPT, params)
    (entry,) = output.outputs[0].logprobs
    executor, ids = text_llm._engine._executor, output.prompt_token_ids
    assert executor.try_allocate(0, len(ids))
    step = executor.prefill(PrefillBatch.pack(ids, [len(ids)], [0], [0], executor.device))
    executor.free(0)
    expected = step.logits[0].log_softmax(-1)
    assert {token: at.logprob for token, at in entry.items()} == pytest.approx(
        {token: float(expected[token]) for token in entry}, abs=1e-4
    )
    best = expected.topk(5).indices.tolist()
    assert [t for t, at in sorted(entry.items(), key=lambda i: i[1].rank) if at.rank <= 5] == best


@pytest.mark.parametrize("streaming", [False, True])
def test_logprobs_end_where_the_text_does(streaming, text_llm):
    """Stop strings, stop tokens and max_tokens cut off what a step had accepted beyond them."""
    whole = text_llm.generate(PROMPT, SamplingParams(max_tokens=30, logprobs=1)).outputs[0]
    for place in (4, 6, 9):
        stop = text_llm.tokenizer.decode(whole.token_ids[place : place + 1])
        for cut in ({"stop": stop}, {"stop_token_ids": [whole.token_ids[place]]}, {}):
            limit = 30 if cut else place
            params = SamplingParams(max_tokens=limit, logprobs=1, **cut)
            found = text_llm.generate_async(PROMPT, params, streaming).result().outputs[0]
            count = len(found.token_ids)
            assert found.finish_reason == ("stop" if cut else "length")
            assert count <= place + 1
            assert found.token_ids == whole.token_ids[:count]
            check_logprobs(found, 1)
            assert [list(e) for e in found.logprobs] == [list(e) for e in whole.logprobs[:count]]


# ------------------------------------------------------------------ several texts of a prompt


SEVERAL = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "ignore_eos": True}


def separate(llm, prompt) -> list[str]:
    return [
        llm.generate(prompt, SamplingParams(**{**SEVERAL, "seed": 7 + i})).outputs[0].text
        for i in range(3)
    ]


def test_n_texts_are_those_of_n_seeds(text_llm):
    prompts = ["The error log", "Once upon"]
    params = [SamplingParams(n=3, **SEVERAL), SamplingParams(max_tokens=5)]
    first, second = text_llm.generate(prompts, params)
    assert [text.index for text in first.outputs] == [0, 1, 2]
    assert [text.text for text in first.outputs] == separate(text_llm, prompts[0])
    assert len({text.text for text in first.outputs}) == 3
    assert first.finished
    assert first.speculation.num_steps > 0
    assert len(second.outputs) == 1
    unseeded = text_llm.generate(prompts[0], SamplingParams(n=2, max_tokens=12, temperature=1.5))
    assert unseeded.outputs[0].text != unseeded.outputs[1].text


def test_n_texts_are_streamed_as_one(text_llm):
    params = SamplingParams(n=3, **SEVERAL)
    want, pieces = separate(text_llm, "The error log"), ["", "", ""]
    for output in text_llm.generate_async("The error log", params, streaming=True):
        for text in output.outputs:
            pieces[text.index] += text.text_diff
    assert pieces == want
    (whole,) = text_llm.generate_async("The error log", params)
    assert [text.text for text in whole.outputs] == want

    async def read():
        pieces, last = ["", "", ""], None
        async for last in text_llm.generate_async("The error log", params, streaming=True):
            for text in last.outputs:
                pieces[text.index] += text.text_diff
        return pieces, last, await text_llm.generate_async("The error log", params)

    pieces, last, whole = asyncio.run(read())
    assert pieces == want
    assert last.finished
    assert [text.text for text in whole.outputs] == want


def test_leaving_n_texts_ends_them_all(text_llm):
    params = SamplingParams(n=3, **{**SEVERAL, "max_tokens": 200})

    async def leave():
        stream = text_llm.generate_async("The error log", params, streaming=True)
        async for _ in stream:
            break
        stream.abort()
        async for last in stream:
            pass
        return last

    last = asyncio.run(leave())
    assert {text.finish_reason for text in last.outputs} == {"cancelled"}
    stream = text_llm.generate_async("The error log", params, streaming=True)
    next(stream)
    stream.abort()
    assert {text.finish_reason for text in next(stream).outputs} == {"cancelled"}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streaming", [True, False])
def test_pieces_add_up_to_the_texts_however_they_are_read(text_llm, n, streaming):
    params = SamplingParams(n=n, **SEVERAL, stop=["e"])

    def add(outputs, pieces, ids):
        for text in outputs:
            pieces[text.index] += text.text_diff
            ids[text.index] += text.token_ids_diff

    async def read():
        pieces, ids, last = [""] * n, [[] for _ in range(n)], None
        async for last in text_llm.generate_async("The error log", params, streaming):
            add(last.outputs, pieces, ids)
        return pieces, ids, last

    pieces, ids, last = asyncio.run(read())
    assert pieces == [text.text for text in last.outputs]
    assert ids == [text.token_ids for text in last.outputs]
    pieces, ids = [""] * n, [[] for _ in range(n)]
    for output in text_llm.generate_async("The error log", params, streaming):
        add(output.outputs, pieces, ids)
    assert pieces == [text.text for text in last.outputs]
    assert ids == [text.token_ids for text in last.outputs]


@pytest.mark.parametrize("n", [1, 3])
def test_a_wait_for_the_next_piece_may_time_out(text_llm, n):
    params = SamplingParams(n=n, **SEVERAL)

    async def read():
        stream = text_llm.generate_async("The error log", params, streaming=True)
        pieces, late, last = [""] * n, 0, None
        while last is None or not last.finished:
            try:
                last = await asyncio.wait_for(anext(stream), 1e-4)
            except (TimeoutError, asyncio.TimeoutError):
                late += 1
                await asyncio.sleep(1e-3)
                continue
            for text in last.outputs:
                pieces[text.index] += text.text_diff
        return pieces, late, last

    pieces, late, last = asyncio.run(read())
    assert late > 0
    assert pieces == [text.text for text in last.outputs]
    assert {text.finish_reason for text in last.outputs} == {"length"}


@pytest.mark.parametrize("n", [1, 3])
def test_cancelling_the_wait_for_a_result_ends_the_request(text_llm, n):
    params = SamplingParams(n=n, **{**SEVERAL, "max_tokens": 200})

    async def leave():
        stream = text_llm.generate_async("The error log", params)
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await asyncio.wait_for(stream.aresult(), 0.05)
        for _ in range(2000):
            if stream._group.finished:
                break
            await asyncio.sleep(0.005)
        return stream._group.output()

    last = asyncio.run(leave())
    assert {text.finish_reason for text in last.outputs} == {"cancelled"}


def test_an_error_of_one_text_ends_the_others(text_llm, monkeypatch):
    params = SamplingParams(n=3, **{**SEVERAL, "max_tokens": 200})
    stream = text_llm.generate_async("The error log", params, streaming=True)

    async def read():
        await anext(stream)

        async def fail():
            raise RuntimeError("lost")

        monkeypatch.setattr(type(stream._adopted[1]), "__anext__", lambda _: fail())
        with pytest.raises(RuntimeError, match="lost"):
            _ = [output async for output in stream]
        return [text.aborted for text in stream._adopted]

    assert all(asyncio.run(read()))


def test_long_texts_are_no_matter_of_the_tokenizer(text_llm, caplog, capfd):
    """transformers warns of texts above its model_max_length; the limit is the engine's."""
    assert len(text_llm.tokenizer.encode("a b " * 5000)) > 8192
    assert "longer than" not in caplog.text + capfd.readouterr().err


def test_two_event_loops_share_one_engine_thread(text_llm, monkeypatch):
    """Both may be the first to need it; two threads would step one engine, and one never end."""
    made = []

    class Slow(async_engine.AsyncEngine):
        def __init__(self, *args, **settings):
            time.sleep(0.1)
            super().__init__(*args, **settings)
            made.append(self)

    monkeypatch.setattr(engine_driver, "AsyncEngine", Slow)
    monkeypatch.setattr(text_llm._driver, "_async_engine", None)
    params = SamplingParams(max_tokens=4)
    want = text_llm.generate(PROMPT, params).outputs[0].text

    def read(_):
        return asyncio.run(text_llm.generate_async(PROMPT, params).aresult()).outputs[0].text

    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(read, range(2))) == [want] * 2
    finally:
        for engine in made:
            engine.close()
    assert len(made) == 1
