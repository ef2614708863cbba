"""The settings objects: what they accept, what follows from them, and every refusal."""

import dataclasses

import pytest

from trtllm_treewy.llmapi import (
    MAX_TREE_NODES,
    CudaGraphConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    cuda_graph_config_from,
    kv_cache_config_from,
    speculation_config_from,
)
from trtllm_treewy.outputs import AcceptanceStats, CompletionOutput, RequestOutput
from trtllm_treewy.sampling_params import SamplingParams

SHAPES = [
    # settings, kind, depth, draft tokens, top_k
    ({}, "static", 1, 1, 1),
    ({"draft_tree_widths": ()}, "none", 0, 0, 0),
    ({"max_draft_len": 0}, "none", 0, 0, 0),
    ({"draft_tree_parents": [-1]}, "none", 0, 0, 0),
    ({"max_draft_len": 3}, "static", 3, 3, 1),
    ({"num_nextn_predict_layers": 3}, "static", 3, 3, 1),
    ({"num_nextn_predict_layers": 3, "max_draft_len": 3}, "static", 3, 3, 1),
    ({"draft_tree_widths": [3, 3, 3]}, "static", 3, 39, 3),
    ({"draft_tree_widths": [4, 1, 2], "max_draft_len": 3}, "static", 3, 16, 4),
    ({"draft_tree_widths": [3], "max_total_draft_tokens": 3}, "static", 1, 3, 3),
    ({"draft_tree_parents": [-1, 0, 0, 1, 1, 3]}, "static", 3, 5, 2),
    ({"use_dynamic_tree": True}, "dynamic", 3, 15, 4),
    (
        {
            "use_dynamic_tree": True,
            "max_draft_len": 5,
            "max_total_draft_tokens": 31,
            "dynamic_tree_max_topK": 8,
        },
        "dynamic",
        5,
        31,
        8,
    ),
]


@pytest.mark.parametrize(("settings", "kind", "depth", "drafts", "top_k"), SHAPES)
def test_what_follows_from_the_drafts(settings, kind, depth, drafts, top_k):
    config = MTPDecodingConfig(**settings)
    assert (config.kind, config.enabled) == (kind, kind != "none")
    assert (config.max_depth, config.num_draft_tokens, config.max_nodes) == (
        depth,
        drafts,
        drafts + 1,
    )
    assert config.top_k == top_k
    # Frozen, hashable whatever sequence was given, and the commit policy is independent.
    other = dataclasses.replace(config, state_commit="deferred")
    assert other.kind == kind
    assert hash(other) != hash(config)


@pytest.mark.parametrize("settings", [shape[0] for shape in SHAPES if shape[1] != "dynamic"])
def test_topology_has_the_promised_size(settings):
    config = MTPDecodingConfig(**settings)
    topology = config.topology()
    assert topology.num_nodes == config.max_nodes
    assert topology.depth == config.max_depth
    assert max(map(len, topology.children)) == config.top_k


def test_dynamic_tree_has_no_topology():
    with pytest.raises(ValueError, match="no fixed topology"):
        MTPDecodingConfig(use_dynamic_tree=True).topology()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_tree_widths": [3], "use_dynamic_tree": True}, "exclude each other"),
        ({"draft_tree_widths": [3], "draft_tree_parents": [-1, 0]}, "exclude each other"),
        ({"draft_tree_widths": [3, 3], "max_draft_len": 3}, "contradicts.*makes it 2"),
        ({"draft_tree_widths": [3], "num_nextn_predict_layers": 3}, "contradicts.*makes it 1"),
        ({"max_draft_len": 3, "max_total_draft_tokens": 4}, "contradicts a chain of 3"),
        ({"max_draft_len": 3, "num_nextn_predict_layers": 2}, "must agree"),
        ({"draft_tree_widths": [5, 5, 5]}, "makes 156 nodes.*limit is 128"),
        ({"draft_tree_widths": [0]}, r"in \[1, 64\], got 0"),
        ({"draft_tree_widths": [65]}, r"in \[1, 64\], got 65"),
        ({"draft_tree_widths": [True]}, "integers, got True"),
        ({"draft_tree_widths": "333"}, "list of integers, got '333'"),
        ({"draft_tree_widths": 3}, "list of integers, got 3"),
        ({"draft_tree_widths": [2.0]}, "integers, got 2.0"),
        ({"draft_tree_parents": []}, "start with -1"),
        ({"draft_tree_parents": [0, 0]}, "start with -1"),
        ({"draft_tree_parents": [-1, 1]}, r"parents\[1\] is 1.*\[0, 1\)"),
        ({"draft_tree_parents": [-1, 0, -1]}, r"parents\[2\] is -1"),
        ({"draft_tree_parents": [-1] + [0] * 65}, "65 children.*limit is 64"),
        ({"draft_tree_parents": list(range(-1, MAX_TREE_NODES))}, "129 nodes.*limit is 128"),
        ({"max_draft_len": 128}, r"in \[0, 127\], got 128"),
        ({"max_draft_len": -1}, r"in \[0, 127\], got -1"),
        ({"use_dynamic_tree": True, "max_draft_len": 0}, ">= 1, got 0"),
        ({"use_dynamic_tree": True, "max_total_draft_tokens": 0}, ">= 1, got 0"),
        ({"dynamic_tree_max_topK": 3}, "needs use_dynamic_tree"),
        ({"use_dynamic_tree": True, "dynamic_tree_max_topK": 0}, r"in \[1, 64\]"),
        ({"state_commit": "copy"}, "reconstruct, deferred, snapshot, got 'copy'"),
        ({"stash": "keys"}, "stash must be one of auto, pseudo_values, inputs, got 'keys'"),
        ({"stash_dtype": "float16"}, "stash_dtype must be one of float32, bfloat16, got 'float16'"),
        ({"stash": "inputs", "state_commit": "deferred"}, "needs state_commit='reconstruct'"),
        ({"deferred_history": 0}, ">= 1, got 0"),
        ({"relaxed_topk": 2}, "relaxed_topk=2 is not supported"),
        ({"use_relaxed_acceptance_for_thinking": True}, "not supported"),
        ({"use_mtp_vanilla": True}, "not supported"),
    ],
)
def test_speculation_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        MTPDecodingConfig(**settings)
    with pytest.raises(ValueError, match=message):
        speculation_config_from(settings)


def test_largest_trees_are_accepted():
    assert MTPDecodingConfig(max_draft_len=127).max_nodes == 128
    assert MTPDecodingConfig(draft_tree_widths=[63, 1]).max_nodes == 127
    assert MTPDecodingConfig(draft_tree_parents=[-1] + [0] * 64).max_nodes == 65


def test_speculation_from_dict_and_none():
    assert speculation_config_from(None).kind == "none"
    config = MTPDecodingConfig(draft_tree_widths=(2, 2), state_commit="snapshot")
    assert speculation_config_from(config) is config
    as_dict = {"draft_tree_widths": [2, 2], "state_commit": "snapshot"}
    for key in ("decoding_type", "method"):
        assert speculation_config_from({**as_dict, key: "MTP"}) == config
        assert speculation_config_from({**as_dict, key: "mtp"}) == config
    assert as_dict == {"draft_tree_widths": [2, 2], "state_commit": "snapshot"}


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"draft_tree_width": [3]}, "'draft_tree_width'; did you mean 'draft_tree_widths'"),
        ({"dynamic_tree_max_topk": 3}, "did you mean 'dynamic_tree_max_topK'"),
        ({"zzz": 3}, "known keys: num_nextn_predict_layers"),
        ({1: 2}, "unknown key 1"),
        ({"decoding_type": "Eagle"}, "decoding_type must be 'MTP'.*got 'Eagle'"),
        ({"method": None}, "method must be 'MTP'"),
        ("MTP", "must be a MTPDecodingConfig, a dict.*got str"),
        ([3, 3, 3], "got list"),
    ],
)
def test_speculation_dict_refusals(obj, message):
    with pytest.raises(ValueError, match=message):
        speculation_config_from(obj)


def test_kv_cache_config():
    assert kv_cache_config_from(None) == KvCacheConfig()
    assert KvCacheConfig().state_dtype == "float32"
    config = kv_cache_config_from({"mamba_ssm_cache_dtype": "bfloat16", "max_tokens": 4096})
    assert (config.state_dtype, config.max_tokens) == ("bfloat16", 4096)
    assert kv_cache_config_from(config) is config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_block_reuse": 1}, "enable_block_reuse must be True or False, got 1"),
        ({"max_checkpoints": 3}, "max_checkpoints needs enable_block_reuse=True"),
        ({"enable_block_reuse": True, "max_checkpoints": 0}, ">= 1, got 0"),
        (
            {"enable_block_reuse": True, "checkpoint_interval": 33},
            r"tokens_per_block \(32\), got 33",
        ),
        ({"memory_bytes": 0}, "memory_bytes must be an integer >= 1, got 0"),
        ({"dtype": "fp8"}, "one of auto, float32.*got 'fp8'"),
        ({"mamba_ssm_cache_dtype": "float16"}, "one of auto, float32, bfloat16"),
        ({"free_gpu_memory_fraction": 0}, "above 0"),
        ({"free_gpu_memory_fraction": 1.5}, "at most 1, got 1.5"),
        ({"free_gpu_memory_fraction": "90%"}, "at most 1, got '90%'"),
        ({"max_tokens": 0}, ">= 1, got 0"),
        ({"tokens_per_block": 1.5}, ">= 1, got 1.5"),
        ({"mamba_cache_dtype": "auto"}, "did you mean 'mamba_ssm_cache_dtype'"),
    ],
)
def test_kv_cache_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        kv_cache_config_from(settings)


def test_sampling_defaults_are_those_of_tensorrt_llm():
    params = SamplingParams()
    assert (params.max_tokens, params.end_id, params.stop, params.n) == (32, None, None, 1)
    assert params.skip_special_tokens
    assert params.add_special_tokens
    assert params.detokenize
    assert not params.ignore_eos
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # keyword only, as there
    with pytest.raises(TypeError):
        SamplingParams(max_token=3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 0.9, "top_k": 50},
        {"top_k": 1, "temperature": 1.3},
        {"top_p": 0.0},
        {"seed": 7, "best_of": 1, "repetition_penalty": 1.0, "logprobs": 0},
    ],
)
def test_greedy_settings(settings):
    assert SamplingParams(**settings).greedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "must be a number >= 0"),
        ({"temperature": float("nan")}, "must be a number >= 0"),
        ({"temperature": "0"}, "must be a number >= 0"),
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"best_of": 4}, "best_of=4 is not supported"),
        ({"use_beam_search": True}, "no beam search"),
        ({"logprobs": True}, "logprobs must be"),
        ({"prompt_logprobs": 1}, "generated tokens only"),
        ({"bad": "word"}, "no forbidden words"),
        ({"logits_processor": print}, "no logits processors"),
        ({"guided_decoding": object()}, "no guided decoding"),
        ({"return_generation_logits": True}, "no logits"),
        ({"exclude_input_from_output": False}, "never holds the prompt"),
        ({"truncate_prompt_tokens": 8}, "never shortened"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"max_tokens": 2.0}, "max_tokens must be an integer"),
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"min_tokens": 33}, r"min_tokens \(33\) is above max_tokens \(32\)"),
        ({"min_tokens": -1}, "min_tokens must be"),
        ({"stop": ""}, "non-empty"),
        ({"stop": ["a", ""]}, "non-empty"),
        ({"stop": ["a", 3]}, "non-empty"),
        ({"stop": 5}, "stop must be a non-empty string or several, got 5"),
        ({"stop": 0}, "stop must be"),
        ({"stop": iter("ab")}, "stop must be"),
        ({"stop": {"a": 1}}, "stop must be"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"stop_token_ids": True}, "stop_token_ids must be"),
        ({"stop": "a", "detokenize": False}, "use stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be"),
    ],
)
def test_sampling_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


def test_assigned_fields_are_checked_again():
    params = SamplingParams()
    params.temperature = -0.8
    with pytest.raises(ValueError, match="must be a number >= 0"):
        params.validate()


def test_stops_and_end_ids():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert params.stop_strings == ("END",)
    assert params.stop_ids == (3, 4)
    assert params.end_ids((1, 2)) == (1, 2)
    assert SamplingParams(end_id=9).end_ids((1, 2)) == (9,)
    assert SamplingParams(end_id=-1).end_ids((1, 2)) == ()
    assert SamplingParams(ignore_eos=True, end_id=9).end_ids((1, 2)) == ()


def test_acceptance_statistics():
    stats = AcceptanceStats()
    assert (stats.acceptance_length, stats.acceptance_rate) == (0.0, 0.0)
    stats.record(num_drafted=39, num_accepted=3)
    stats.record(num_drafted=39, num_accepted=0)
    stats.record(num_drafted=10, num_accepted=1)
    assert stats.accepted_per_depth == [2, 1, 1]
    assert stats.acceptance_length == pytest.approx(7 / 3)
    assert stats.acceptance_rate == pytest.approx(4 / 88)
    shorter = AcceptanceStats(num_steps=1, num_drafted=1, num_accepted=1, accepted_per_depth=[1])
    for total in (stats + shorter, shorter + stats):
        assert total.accepted_per_depth == [3, 1, 1]
        assert (total.num_steps, total.num_drafted, total.num_accepted) == (4, 89, 5)
    assert stats.to_dict()["acceptance_length"] == 2.3333
    with pytest.raises(ValueError, match="num_accepted must be in"):
        stats.record(num_drafted=2, num_accepted=3)


def test_outputs_have_the_names_of_tensorrt_llm():
    completion = CompletionOutput(text="ab", token_ids=[5, 6], finish_reason="stop")
    output = RequestOutput(7, "p", [1, 2], [completion], finished=True)
    assert output.outputs[0].length == 2
    assert (output.request_id, output.prompt, output.prompt_token_ids) == (7, "p", [1, 2])
    assert output.speculation is None


def test_graph_sizes():
    """Names and meaning are TensorRT-LLM's; what is larger than the engine is left out."""
    assert CudaGraphConfig().sizes(5) == (1, 2, 4, 5)
    assert CudaGraphConfig().sizes(1) == (1,)
    assert CudaGraphConfig().sizes(64)[-3:] == (48, 56, 64)
    assert CudaGraphConfig(max_batch_size=8).sizes(64) == (1, 2, 4, 8)
    assert CudaGraphConfig(batch_sizes=[8, 1, 8, 32]).sizes(16) == (1, 8)
    assert CudaGraphConfig(batch_sizes=(32,)).sizes(16) == ()
    for most in range(1, 700, 13):
        sizes = CudaGraphConfig().sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
    assert cuda_graph_config_from(None) is None
    assert cuda_graph_config_from({"enable_padding": False}) == CudaGraphConfig(
        enable_padding=False
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_sizes": []}, "batch_sizes is empty"),
        ({"batch_sizes": [0]}, "each of batch_sizes must be an integer >= 1"),
        ({"batch_sizes": "12"}, "batch_sizes must be a list of integers"),
        ({"max_batch_size": -1}, "max_batch_size must be an integer >= 0"),
        ({"enable_padding": 1}, "enable_padding must be True or False"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens must be an integer >= 0"),
        ({"max_batchsize": 1}, "did you mean 'max_batch_size'"),
    ],
)
def test_refused_graph_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        cuda_graph_config_from(settings)


@pytest.mark.parametrize("law", [[1.5], [-0.1], "11", [True], 0.5])
def test_a_law_of_acceptance_holds_probabilities(law):
    with pytest.raises(ValueError, match="simulated_acceptance must hold probabilities"):
        MTPDecodingConfig(max_draft_len=2, simulated_acceptance=law)
