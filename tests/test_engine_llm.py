"""`LLM` over an engine's directory: the tokens and texts of the checkpoint's own."""

from __future__ import annotations

import pytest

from trtllm_treewy import LLM, SamplingParams

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PROMPTS = ["The river", "Once upon a time there was", "He"]
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
SETTINGS = {"max_batch_size": 3, "max_seq_len": 128}


@pytest.fixture(scope="module")
def engine(tmp_path_factory, shipped_model):
    from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory
    from trtllm_treewy.export.profiles import BuildLimits

    out = tmp_path_factory.mktemp("llm") / "engine"
    limits = BuildLimits(max_seq_len=256, max_num_tokens=64)
    build_engine_directory(shipped_model, out, BuildOptions("float32", limits=limits))
    return out


@pytest.fixture(scope="module")
def expected(shipped_model):
    with LLM(shipped_model, dtype="float32", device="cpu", **SETTINGS) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "speculation", [None, {"draft_tree_widths": [3, 3, 3]}, {"max_draft_len": 3}], ids=str
)
def test_same_texts_as_the_checkpoint(engine, expected, speculation):
    with LLM(engine, speculative_config=speculation, **SETTINGS) as llm:
        for _ in range(2):  # the second time from the prefix cache, where there is one
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == [o.token_ids for o in expected]
            assert [o.outputs[0].text for o in outputs] == [o.text for o in expected]
        if speculation:
            assert max(o.speculation.acceptance_length for o in outputs) > 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_len": 512}, "max_seq_len is 512, .* at most 256"),
        ({"dtype": "bfloat16"}, "dtype is float32 as built, got bfloat16"),
        ({"max_batch_size": 9, "max_seq_len": 64}, "max_batch_size is 9, .* at most 8"),
        (
            {"speculative_config": {"max_draft_len": 2, "state_commit": "deferred"}},
            "commits by reconstruct, got state_commit='deferred'",
        ),
        (
            {"kv_cache_config": {"mamba_ssm_cache_dtype": "bfloat16"}},
            "the state's type is float32 as built, got bfloat16",
        ),
    ],
)
def test_what_the_engine_does_not_do_is_refused(engine, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(engine, **settings)
