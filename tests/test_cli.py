"""The command line: parsing, what goes to stdout and to stderr, exit codes, interruptions.

`generate` runs here over a stand-in for `LLM` that yields a fixed text word by word.
"""

import argparse
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import types

import pytest

from trtllm_treewy import LLM, cli
from trtllm_treewy.cli import arguments, sizes
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.model_directory import ModelDirectory
from trtllm_treewy.outputs import AcceptanceStats, CompletionOutput, RequestOutput
from trtllm_treewy.sampling_params import SamplingParams

WORDS = ["Once ", "upon ", "a ", "time"]


class FakeTokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class FakeLLM:
    """Records what the command asked for."""

    made: list["FakeLLM"] = []
    words = WORDS
    failing = ()  # prompts whose requests end with an error

    def __init__(self, model, **settings):
        self.model, self.settings, self.tokenizer = model, settings, FakeTokenizer()
        self.prompts, self.params, self.closed, self.aborted = [], None, False, False
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def memory_report(self):
        return {"state_bytes": 3 << 20, "stash_bytes": 1536, "snapshot_bytes": 120 << 20}

    def _output(self, prompt, count):
        stats = None
        if self.settings["speculative_config"].enabled:
            stats = AcceptanceStats(num_steps=2, num_drafted=78, num_accepted=2)
        completion = CompletionOutput(
            text="".join(self.words[:count]),
            token_ids=list(range(count)),
            finish_reason="length" if count == len(self.words) else None,
            text_diff=self.words[count - 1],
            token_ids_diff=[count - 1],
        )
        error = None
        if prompt in self.failing and completion.finish_reason is not None:
            completion.finish_reason, error = "error", "the logits are not finite"
        return RequestOutput(0, prompt, [1, 2], [completion], True, stats, error)

    def generate(self, prompts, params):
        self.prompts, self.params = prompts, params
        return [self._output(prompt, len(self.words)) for prompt in prompts]

    def generate_async(self, prompt, params, streaming):
        assert streaming
        self.prompts, self.params = [prompt], params
        outputs = (self._output(prompt, count) for count in range(1, len(self.words) + 1))
        return FakeStream(self, outputs)


class FakeStream:
    def __init__(self, llm, outputs):
        self.llm, self.outputs = llm, outputs

    def __iter__(self):
        return self.outputs

    def close(self):
        self.llm.aborted = True


@pytest.fixture
def fake_llm(monkeypatch):
    monkeypatch.setitem(sys.modules, "trtllm_treewy.llm", types.SimpleNamespace(LLM=FakeLLM))
    FakeLLM.made = []
    return FakeLLM


@pytest.fixture
def model(tmp_path):
    """A model directory with an MTP module, as far as its config says."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(autouse=True)
def no_openmp_settings(monkeypatch):
    """The command sets these in its own process, which here is the tests'."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch knows what to restore
        monkeypatch.delenv(name)


@pytest.fixture
def no_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)


def run(*argv):
    """Exit code of the command, whichever way it ends."""
    try:
        return cli.main(list(argv))
    except SystemExit as exit_:
        return exit_.code


# --- generate ---


def test_text_alone_on_stdout(fake_llm, model, capsys):
    assert run("generate", model, "Tell me") == 0
    out, err = capsys.readouterr()
    assert out == "Once upon a time\n"
    assert "4 tokens in" in err
    assert "2 verification steps, acceptance length 2.00" in err
    assert "state of a sequence: 3.0 MiB; verification adds 1.5 KiB (reconstruct)" in err
    assert "; snapshots of 40 nodes would add 120.0 MiB]\n" in err
    (llm,) = fake_llm.made
    assert llm.prompts == ["Tell me"]
    assert llm.closed
    assert llm.settings["speculative_config"] == MTPDecodingConfig(draft_tree_widths=(3, 3, 3))
    assert llm.settings["kv_cache_config"] == KvCacheConfig()
    assert llm.settings["max_batch_size"] == 1
    assert llm.params == SamplingParams(max_tokens=arguments.DEFAULT_MAX_TOKENS)


def test_quiet_leaves_stderr_empty(fake_llm, model, capsys):
    assert run("generate", model, "Tell me", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_text_that_ends_its_line_gets_no_second_newline(fake_llm, model, capsys, monkeypatch):
    monkeypatch.setattr(fake_llm, "words", ["one\n"])
    assert run("generate", model, "p") == 0
    assert capsys.readouterr().out == "one\n"


DRAFTS = [
    ([], {"draft_tree_widths": (3, 3, 3)}),
    (["--draft-tree-widths", "2,2"], {"draft_tree_widths": (2, 2)}),
    (["--draft-tree-parents", "-1,0,0,1"], {"draft_tree_parents": (-1, 0, 0, 1)}),
    (["--draft-tree-parents=-1,0"], {"draft_tree_parents": (-1, 0)}),
    (["--max-draft-len", "3"], {"max_draft_len": 3}),
    (["--dynamic-tree", "20"], {"use_dynamic_tree": True, "max_total_draft_tokens": 20}),
    (
        ["--dynamic-tree", "20", "--dynamic-tree-top-k", "5", "--max-draft-len", "6"],
        {
            "use_dynamic_tree": True,
            "max_total_draft_tokens": 20,
            "dynamic_tree_max_topK": 5,
            "max_draft_len": 6,
        },
    ),
    (["--no-speculation"], {"draft_tree_widths": ()}),
    (["--tree-policy", "auto"], {"tree_policy": "auto"}),
    (["--tree-policy", "dynamic"], {"tree_policy": "dynamic"}),
    (["--tree-policy", "static"], {"tree_policy": "static", "draft_tree_widths": (3, 3, 3)}),
    (
        ["--tree-policy", "auto", "--draft-tree-widths", "2,2"],
        {"tree_policy": "auto", "draft_tree_widths": (2, 2)},
    ),
    (
        ["--tree-policy", "dynamic", "--dynamic-tree-top-k", "5", "--max-draft-len", "2"],
        {"tree_policy": "dynamic", "dynamic_tree_max_topK": 5, "max_draft_len": 2},
    ),
    (
        ["--acceptance-rule", "rejection"],
        {"acceptance_rule": "rejection", "draft_tree_widths": (3, 3, 3)},
    ),
]


@pytest.mark.parametrize(("flags", "settings"), DRAFTS)
@pytest.mark.parametrize("commit", ["reconstruct", "deferred", "snapshot"])
def test_draft_flags(fake_llm, model, flags, settings, commit):
    assert run("generate", model, "p", *flags, "--state-commit", commit) == 0
    made = fake_llm.made[0].settings["speculative_config"]
    assert made == MTPDecodingConfig(state_commit=commit, **settings)


@pytest.mark.parametrize("stash", ["auto", "pseudo_values", "inputs"])
def test_stash_flag(stash, fake_llm, model):
    assert run("generate", model, "p", "--stash", stash) == 0
    made = fake_llm.made[0].settings["speculative_config"]
    assert made == MTPDecodingConfig(draft_tree_widths=(3, 3, 3), stash=stash)


@pytest.mark.parametrize(
    ("flags", "reuse"),
    [
        ((), KvCacheConfig().enable_block_reuse),
        (("--block-reuse",), True),
        (("--no-block-reuse",), False),
        (("--block-reuse", "--no-block-reuse"), False),
    ],
)
def test_block_reuse_flags(flags, reuse, fake_llm, model):
    assert run("generate", model, "p", *flags) == 0
    assert fake_llm.made[0].settings["kv_cache_config"] == KvCacheConfig(enable_block_reuse=reuse)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), {}),
        (("--free-gpu-memory-fraction", "0.4"), {"free_gpu_memory_fraction": 0.4}),
        (("--memory", "60GB"), {"memory_bytes": 60 * 10**9}),
    ],
)
def test_memory_flags(flags, settings, fake_llm, model):
    assert run("generate", model, "p", *flags) == 0
    assert fake_llm.made[0].settings["kv_cache_config"] == KvCacheConfig(**settings)


def test_too_little_memory_is_told_in_flags(shipped_model, capsys):
    assert run("generate", str(shipped_model), "p", "--memory", "1MB", "--device", "cpu") == 2
    told = capsys.readouterr().err
    assert "exceed the 1.0 MiB that may be used on cpu (--memory)" in told


@pytest.mark.parametrize("value", ["0", "1.1", "-1", "all"])
def test_memory_fractions_that_are_refused(value, capsys):
    with pytest.raises(SystemExit):
        arguments.parse(["generate", "MODEL", "p", f"--free-gpu-memory-fraction={value}"])
    assert "argument --free-gpu-memory-fraction: expected a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "steps", "ratio"),
    [
        ((), 0, 0.5),
        (("--batch-wait-iters", "6"), 6, 0.5),
        (("--batch-wait-iters", "6", "--batch-wait-max-tokens-ratio", "0.25"), 6, 0.25),
    ],
)
def test_batch_wait_flags(flags, steps, ratio, fake_llm, model):
    assert run("generate", model, "p", *flags) == 0
    settings = fake_llm.made[0].settings
    assert settings["batch_wait_timeout_iters"] == steps
    assert settings["batch_wait_max_tokens_ratio"] == ratio


def test_the_flags_of_the_wait_have_the_defaults_of_the_python_api():
    args = arguments.parse(["generate", "MODEL", "p"])
    own = inspect.signature(LLM).parameters
    assert args.batch_wait_iters == own["batch_wait_timeout_iters"].default
    assert args.batch_wait_max_tokens_ratio == own["batch_wait_max_tokens_ratio"].default


GRAPHS = [
    ("", "absent"),
    ("--no-cuda-graphs", None),
    ("--cuda-graph-batch-sizes 8,1,1", CudaGraphConfig(batch_sizes=(1, 8))),
    ("--cuda-graph-max-batch-size 4", CudaGraphConfig(max_batch_size=4)),
    (
        "--cuda-graph-batch-sizes 2 --no-cuda-graph-padding",
        CudaGraphConfig(batch_sizes=(2,), enable_padding=False),
    ),
    ("--cuda-graph-max-prompt-tokens 0", CudaGraphConfig(max_prompt_tokens=0)),
]


@pytest.mark.parametrize(("flags", "config"), GRAPHS)
def test_graph_flags(flags, config, fake_llm, model):
    """Without one, LLM's own default holds, of which it never warns that it has no effect."""
    assert run("generate", model, "p", *flags.split()) == 0
    settings = fake_llm.made[0].settings
    assert settings.get("cuda_graph_config", "absent") == config
    assert settings["load_format"] == "auto"


def test_random_weights(tmp_path, shipped_model, capsys):
    """`--load-format dummy`, for real: a config and a tokenizer are all that is there."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((shipped_model / name).read_bytes())
    flags = ["--device", "cpu", "--max-tokens", "5", "--max-seq-len", "64", "--ignore-eos"]
    flags += ["--json", "--quiet", "--load-format"]
    assert run("generate", str(tmp_path), "p", *flags, "dummy") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 5
    assert run("generate", str(tmp_path), "p", *flags, "auto") == 2
    assert "safetensors" in capsys.readouterr().err


def test_no_speculation_summary(fake_llm, model, capsys):
    assert run("generate", model, "p", "--no-speculation") == 0
    err = capsys.readouterr().err
    assert "without drafts" in err
    assert "acceptance" not in err
    assert "snapshots" not in err


def test_snapshots_are_not_compared_with_themselves(fake_llm, model, capsys):
    assert run("generate", model, "p", "--state-commit", "snapshot") == 0
    assert "verification adds 1.5 KiB (snapshot)]\n" in capsys.readouterr().err


OPENMP = [
    ((), {}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
    (("--device", "cpu"), {}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
    (("--device", "cuda:1"), {}, {}),
    ((), {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ((), {"GOMP_SPINCOUNT": "9"}, {"GOMP_SPINCOUNT": "9"}),
]


@pytest.mark.parametrize(("flags", "before", "after"), OPENMP)
def test_waiting_threads_sleep_on_a_cpu(flags, before, after, fake_llm, model, monkeypatch):
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    assert run("generate", model, "p", *flags) == 0
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    assert {name: os.environ[name] for name in names if name in os.environ} == after


def test_model_without_mtp_decodes_without_drafts(fake_llm, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    assert run("generate", str(tmp_path), "p") == 0
    assert not fake_llm.made[0].settings["speculative_config"].enabled
    assert "has no MTP module" in capsys.readouterr().err


def test_settings_reach_the_api(fake_llm, model):
    flags = "--dtype float32 --state-dtype bfloat16 --device cpu --max-seq-len 99 --max-tokens 7"
    stops = ["--stop", "A", "--stop", "B", "--ignore-eos"]
    assert run("generate", model, *flags.split(), "p", *stops) == 0
    (llm,) = fake_llm.made
    assert (llm.settings["dtype"], llm.settings["device"]) == ("float32", "cpu")
    assert llm.settings["max_seq_len"] == 99
    assert llm.settings["kv_cache_config"].state_dtype == "bfloat16"
    assert llm.params == SamplingParams(max_tokens=7, stop=["A", "B"], ignore_eos=True)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--temperature 0.8 --seed 7", {"temperature": 0.8, "seed": 7}),
        ("--top-p 0.9 --top-k 0", {"top_p": 0.9, "top_k": 0}),
        ("--temperature 0", {"temperature": 0.0}),
        (f"--seed {2**64 - 1}", {"seed": 2**64 - 1}),
    ],
)
def test_sampling_flags(flags, settings, fake_llm, model):
    assert run("generate", model, "p", *flags.split()) == 0
    expected = SamplingParams(max_tokens=arguments.DEFAULT_MAX_TOKENS, **settings)
    assert fake_llm.made[0].params == expected


def test_a_seed_gives_one_text_with_any_drafts(shipped_model, capsys):
    """The real model: `--seed` with `--temperature`, over all that may not change the text."""
    sampling = ["--temperature", "0.8", "--max-tokens", "24", "--json", "--quiet", "--seed"]
    engine = ["--dtype", "float32", "--device", "cpu", "--max-seq-len", "128"]

    def ids(seed, *flags):
        prompt = "The location of the error log"
        words = ["generate", str(shipped_model), prompt, *sampling, str(seed), *engine, *flags]
        assert run(*words) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    expected = ids(3, "--no-speculation")
    assert ids(3, "--stash", "inputs") == expected
    assert ids(3, "--tree-policy", "auto", "--block-reuse") == expected
    assert ids(4) != expected


def test_prompts_from_everywhere(fake_llm, model, tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n\n", encoding="utf-8")
    stdin = types.SimpleNamespace(buffer=io.BytesIO("aus der Röhre\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    flags = ["--prompt", "flag", "--prompt-file", str(file), "--prompt-file", "-"]
    assert run("generate", model, "first", "--max-tokens", "4", "second", *flags) == 0
    prompts = ["first", "second", "flag", "from a file\n", "aus der Röhre"]
    assert fake_llm.made[0].prompts == prompts
    assert fake_llm.made[0].settings["max_batch_size"] == 5
    out, err = capsys.readouterr()
    assert out == "Once upon a time\n" * 5
    assert "--- prompt 5 of 5" in err


@pytest.mark.parametrize(
    ("flags", "gpu", "few", "many", "most"),
    [
        ([], False, 3, 8, None),
        ([], True, 3, None, 9),
        (["--device", "cpu"], True, 3, 8, None),
        (["--device", "cuda:1"], False, 3, None, 9),
        (["--max-batch-size", "auto"], False, 3, None, 9),
        (["--max-batch-size", "2"], True, 2, 2, None),
        (["--max-batch-size", "20"], True, 3, 9, None),
    ],
)
def test_as_many_at_once_as_memory_holds(flags, gpu, few, many, most, fake_llm, model, monkeypatch):
    """None is what `LLM` takes for it; prompts need no more than one place each."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert run("generate", model, *["p"] * 3, *flags) == 0
    assert run("generate", model, *["p"] * 9, *flags) == 0
    assert [llm.settings["max_batch_size"] for llm in fake_llm.made] == [few, many]
    assert [llm.settings.get("max_auto_batch_size") for llm in fake_llm.made] == [None, most]


def test_more_prompts_than_an_engine_takes_by_itself(fake_llm, model):
    assert run("generate", model, *["p"] * 1025, "--max-batch-size", "auto") == 0
    assert fake_llm.made[0].settings["max_auto_batch_size"] == 1024


def test_memory_of_a_run_is_that_of_its_prompts(shipped_model, capsys):
    """Of nine prompts the states and caches of nine, wherever memory would hold more."""
    flags = ["--max-tokens", "1", "--max-seq-len", "64", "--device", "cpu", "--json"]
    memory = []
    for batch in ("1", "auto"):
        prompts = ["Once"] * 9
        assert run("generate", str(shipped_model), *prompts, *flags, "--max-batch-size", batch) == 0
        memory.append(json.loads(capsys.readouterr().out.splitlines()[0])["memory"])
    one, nine = memory
    assert (one["max_batch_size"], nine["max_batch_size"]) == (1, 9)
    assert nine["kv_blocks"] == 9 * one["kv_blocks"]


def test_an_engine_for_the_cpu_runs_there_though_there_is_a_gpu(fake_llm, model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(ModelDirectory, "for_cpu", property(lambda self: True))
    assert run("generate", model, *["p"] * 9) == 0
    assert fake_llm.made[0].settings["max_batch_size"] == 8


@pytest.mark.parametrize("value", ["0", "-1", "many", "AUTO", ""])
def test_a_batch_size_that_is_none(value, model, capsys):
    assert run("generate", model, "p", f"--max-batch-size={value}") == 2
    assert f"expected an integer >= 1 or auto, got {value!r}" in capsys.readouterr().err


def test_prompt_is_read_from_a_pipe_when_none_is_given(fake_llm, model, monkeypatch):
    stdin = types.SimpleNamespace(buffer=io.BytesIO(b"piped"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "--model", model) == 0
    assert fake_llm.made[0].prompts == ["piped"]


def test_json_is_one_object_a_prompt(fake_llm, model, capsys):
    assert run("generate", "--model", model, "a", "ß", "--json", "-q") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["a", "ß"]
    assert lines[0]["text"] == "Once upon a time"
    assert lines[0]["token_ids"] == [0, 1, 2, 3]
    assert lines[0]["finish_reason"] == "length"
    assert lines[0]["speculation"]["acceptance_length"] == 2.0
    assert lines[0]["memory"]["state_bytes"] == 3 << 20


def test_request_that_fails_in_json(fake_llm, model, capsys, monkeypatch):
    monkeypatch.setattr(fake_llm, "failing", ("b",))
    assert run("generate", "--model", model, "a", "b", "c", "--json", "-q") == 1
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["error"] for line in lines] == [None, "the logits are not finite", None]
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert err == ""


@pytest.mark.parametrize("prompts", [("a",), ("a", "b", "c"), ("b", "a", "c")])
def test_request_that_fails_is_told_after_its_text(prompts, fake_llm, model, capsys, monkeypatch):
    monkeypatch.setattr(fake_llm, "failing", ("a",))
    assert run("generate", "--model", model, *prompts) == 1
    out, err = capsys.readouterr()
    assert out == "Once upon a time\n" * len(prompts)  # the others are not concerned
    number = 1 + prompts.index("a")
    lines = err.splitlines()
    told = f"trtllm-treewy: error: prompt {number}: the logits are not finite"
    assert [line for line in lines if "error" in line] == [told]
    if len(prompts) > 1:
        assert lines[lines.index(told) - 1] == f"--- prompt {number} of 3"
    assert "tokens in" in err  # the summary comes all the same


def test_request_that_fails_is_told_in_quiet(fake_llm, model, capsys, monkeypatch):
    monkeypatch.setattr(fake_llm, "failing", ("a",))
    assert run("generate", model, "a", "-q") == 1
    told = "trtllm-treewy: error: prompt 1: the logits are not finite\n"
    assert capsys.readouterr().err == told


def test_chat(fake_llm, model):
    assert run("generate", model, "Hi", "--chat", "--system", "Be brief") == 0
    (llm,) = fake_llm.made
    assert llm.prompts == ["<system>Be brief<user>Hi<assistant>"]
    assert not llm.params.add_special_tokens


def test_chat_without_a_template(fake_llm, model, capsys, monkeypatch):
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    assert run("generate", model, "Hi", "--chat") == 2
    assert "has no chat template" in capsys.readouterr().err


def test_chat_template_that_refuses(fake_llm, model, capsys, monkeypatch):
    import jinja2

    def refuse(*_, **__):
        raise jinja2.TemplateError("no system message, please")

    monkeypatch.setattr(FakeTokenizer, "apply_chat_template", refuse)
    assert run("generate", model, "Hi", "--chat") == 2
    assert "no system message, please" in capsys.readouterr().err


ERRORS = [
    ([], "required: COMMAND"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    (["generate"], "no model given"),
    (["generate", "MODEL"], "no prompt given"),
    (["generate", "MODEL", ""], "the prompt is empty"),
    (["generate", "MODEL", "p", "--nope", "3"], "unrecognized arguments: --nope"),
    (["generate", "MODEL", "p", "--max-tok", "3"], "unrecognized arguments: --max-tok"),
    (["generate", "/no/such/model", "p"], "'/no/such/model' does not exist"),
    (["generate", "MODEL", "--prompt-file", "/no/such/file"], "/no/such/file"),
    (["generate", "MODEL", "--prompt-file", "-"], "no standard input"),
    (
        ["generate", "MODEL", "p", "--max-tokens", "0"],
        "--max-tokens: expected an integer >= 1, got '0'",
    ),
    (
        ["generate", "MODEL", "p", "--max-tokens", "x"],
        "--max-tokens: expected an integer >= 1, got 'x'",
    ),
    (["generate", "MODEL", "p", "--system", "s"], "argument --system: needs --chat"),
    (["generate", "MODEL", "p", "--draft-tree-widths", "3,x"], "separated by commas, got '3,x'"),
    (["generate", "MODEL", "p", "--draft-tree-widths", "9,9,9"], "widths=9,9,9 makes 820 nodes"),
    (["generate", "MODEL", "p", "--draft-tree-parents", "0,0"], "--draft-tree-parents must"),
    (
        ["generate", "MODEL", "p", "--draft-tree-widths", "3", "--max-draft-len", "2"],
        "error: --max-draft-len=2 contradicts --draft-tree-widths=3, which makes it 1; leave it",
    ),
    (
        ["generate", "MODEL", "p", "--draft-tree-widths", "3", "--dynamic-tree", "2"],
        "--dynamic-tree: not allowed with argument --draft-tree-widths",
    ),
    (["generate", "MODEL", "p", "--dynamic-tree", "0"], "integer >= 1, got '0'"),
    (
        ["generate", "MODEL", "p", "--dynamic-tree", "300"],
        r"--dynamic-tree must be.*127\], got 300",
    ),
    (
        ["generate", "MODEL", "p", "--dynamic-tree-top-k", "3"],
        "argument --dynamic-tree-top-k: needs --dynamic-tree ",
    ),
    (
        ["generate", "MODEL", "p", "--dynamic-tree-top-k", "3", "--tree-policy", "static"],
        "argument --dynamic-tree-top-k: needs --dynamic-tree ",
    ),
    (
        ["generate", "MODEL", "p", "--tree-policy", "static", "--dynamic-tree", "3"],
        "argument --tree-policy static: not allowed with argument --dynamic-tree",
    ),
    (
        ["generate", "MODEL", "p", "--tree-policy", "dynamic", "--draft-tree-widths", "3"],
        "argument --tree-policy dynamic: not allowed with argument --draft-tree-widths",
    ),
    (
        ["generate", "MODEL", "p", "--tree-policy", "dynamic", "--draft-tree-parents", "-1,0"],
        "argument --tree-policy dynamic: not allowed with argument --draft-tree-parents",
    ),
    (["generate", "MODEL", "p", "--tree-policy", "best"], "invalid choice: 'best'"),
    (["generate", "MODEL", "p", "--acceptance-rule", "any"], "invalid choice: 'any'"),
    (["generate", "MODEL", "p", "--stash", "states"], "invalid choice: 'states'"),
    (
        ["generate", "MODEL", "p", "--stash", "inputs", "--state-commit", "deferred"],
        "argument --stash inputs: needs --state-commit reconstruct",
    ),
    (
        ["generate", "MODEL", "p", "--temperature", "hot"],
        "--temperature: expected a number, got 'hot'",
    ),
    (["generate", "MODEL", "p", "--temperature", "nan"], "expected a number, got 'nan'"),
    (
        ["generate", "MODEL", "p", "--temperature", "-1"],
        "error: --temperature must be a number >= 0, got -1.0",
    ),
    (
        ["generate", "MODEL", "p", "--top-p", "1.5"],
        r"error: --top-p must be a number in \[0, 1\], got 1.5",
    ),
    (
        ["generate", "MODEL", "p", "--batch-wait-max-tokens-ratio", "1.5"],
        "--batch-wait-max-tokens-ratio: expected a number from 0 to 1, got '1.5'",
    ),
    (["generate", "MODEL", "p", "--top-k", "-1"], "--top-k: expected an integer >= 0, got '-1'"),
    (["generate", "MODEL", "p", "--seed", "x"], "--seed: expected an integer >= 0, got 'x'"),
    (["generate", "MODEL", "p", "--seed", str(2**64)], r"error: --seed must be below 2\^64"),
    (["generate", "MODEL", "p", "--state-commit", "copy"], "invalid choice: 'copy'"),
    (["generate", "MODEL", "p", "--dtype", "int8"], "invalid choice: 'int8'"),
    (["plan"], "required: CONFIG"),
    (["plan", "no-such-model"], "'no-such-model' is neither .* shipped configs: .*35b-a3b"),
    (["plan", "qwen3.5-35b-a3b", "extra"], "unrecognized arguments: extra"),
    (["plan", "qwen3.5-35b-a3b", "--memory", "lots"], "size such as 141GB"),
    (["plan", "qwen3.5-35b-a3b", "--batch-size", "-1"], "expected"),
    (
        ["plan", "qwen3.5-35b-a3b", "--tp", "3"],
        "error: tensor parallel size 3 does not divide num_attention_heads 16, ",
    ),
    (["generate", "MODEL", "p", "--load-format", "random"], "invalid choice: 'random'"),
    (
        ["generate", "MODEL", "p", "--cuda-graph-batch-sizes", "4,0"],
        "error: each of --cuda-graph-batch-sizes must be an integer >= 1, got 0",
    ),
    (
        ["generate", "MODEL", "p", "--no-cuda-graphs", "--cuda-graph-max-batch-size", "4"],
        "argument --no-cuda-graphs: not allowed with argument --cuda-graph-max-batch-size",
    ),
    (["generate", "MODEL", "p", "--tp", "0"], "--tensor-parallel-size/--tp: expected an integer"),
]


UNDECODABLE = [
    (["a\udcff"], r"error: prompt 1 is not text that can be decoded: 'a\udcff'"),
    (["fine", "--prompt", "\udc80"], "error: prompt 2 is not text"),
    (["p", "--stop", "\udc80"], "error: argument --stop is not text"),
    (["p", "--chat", "--system", "\udc80"], "error: argument --system is not text"),
]


@pytest.mark.parametrize(("words", "message"), UNDECODABLE)
def test_arguments_that_are_not_text(words, message, fake_llm, model, capsys):
    assert run("generate", model, *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not fake_llm.made


@pytest.mark.parametrize(
    ("argv", "prompts"),
    [
        (["MODEL", "--max-tokens", "4", "--", "-x"], ["-x"]),
        (["MODEL", "--", "-x", "--", "--json"], ["-x", "--", "--json"]),
        (["MODEL", "a", "--max-tokens", "4", "b", "--", "-x"], ["a", "b", "-x"]),
        (["--max-tokens", "4", "--", "MODEL", "--draft-tree-parents", "-1"], None),
    ],
)
def test_prompts_behind_two_dashes_are_taken_as_they_stand(argv, prompts, fake_llm, model):
    assert run("generate", *[model if word == "MODEL" else word for word in argv]) == 0
    (llm,) = fake_llm.made
    assert llm.prompts == (prompts or ["--draft-tree-parents", "-1"])
    assert llm.params.max_tokens in (4, arguments.DEFAULT_MAX_TOKENS)


SHAPES = [
    ("--draft-tree-widths", "3"),
    ("--draft-tree-parents", "-1,0"),
    ("--dynamic-tree", "3"),
    ("--max-draft-len", "3"),
    ("--dynamic-tree-top-k", "3"),
    ("--tree-policy", "auto"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [True, False])
def test_no_speculation_excludes_every_shape(shape, first, fake_llm, model, capsys):
    flags = ("--no-speculation", *shape) if first else (*shape, "--no-speculation")
    assert run("generate", model, "p", *flags) == 2
    err = capsys.readouterr().err
    given = {shape[0], "--no-speculation"}
    assert set(re.findall(r"argument (--[\w-]+)", err)) == given
    assert ": not allowed with argument " in err
    assert not fake_llm.made


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["--nope"], "trtllm-treewy"),
        (["generate", "MODEL", "p", "--nope"], "trtllm-treewy generate"),
        (["generate"], "trtllm-treewy generate"),
        (["generate", "MODEL", "p", "--system", "s"], "trtllm-treewy generate"),
        (["plan", "--nope"], "trtllm-treewy plan"),
        (["plan", "qwen3.5-35b-a3b", "extra"], "trtllm-treewy plan"),
        (["doctor", "--nope"], "trtllm-treewy doctor"),
    ],
)
def test_usage_errors_name_the_help_to_read(argv, program, model, capsys):
    assert run(*[model if word == "MODEL" else word for word in argv]) == 2
    assert capsys.readouterr().err.endswith(f" (see {program} --help)\n")


@pytest.mark.parametrize(("argv", "message"), ERRORS)
def test_user_errors_are_one_line(argv, message, fake_llm, model, capsys, no_stdin):
    argv = [model if word == "MODEL" else word for word in argv]
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trtllm-treewy: error: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert not fake_llm.made  # refused before anything was loaded


def test_errors_of_the_engine_keep_their_lines(fake_llm, model, capsys, monkeypatch):
    def refuse(self, *_, **__):
        raise ValueError("model.norm.weight:\n  expected shape [8], got [4]")

    monkeypatch.setattr(FakeLLM, "__init__", refuse)
    assert run("generate", model, "p") == 2
    expected = "trtllm-treewy: error: model.norm.weight:\n  expected shape [8], got [4]\n"
    assert capsys.readouterr().err == expected
    monkeypatch.setenv("TREEWY_DEBUG", "1")
    with pytest.raises(ValueError, match="norm.weight"):
        cli.main(["generate", model, "p"])


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "max_tokens=9 is 12, at most max_seq_len=10",
            "--max-tokens=9 is 12, at most --max-seq-len=10",
        ),
        ("lower kv_cache_config.max_tokens", "lower kv_cache_config.max_tokens"),
        ("/models/max_tokens/x: absent", "/models/max_tokens/x: absent"),
        ("MTPDecodingConfig: draft_tree_widths=(3,) is", "--draft-tree-widths=3 is"),
        ("draft_tree_parents[2] is 5", "--draft-tree-parents[2] is 5"),
        ("expected max_draft_length", "expected max_draft_length"),
    ],
)
def test_errors_speak_of_flags(message, shown, fake_llm, model, capsys, monkeypatch):
    def refuse(self, *_, **__):
        raise ValueError(message)

    monkeypatch.setattr(FakeLLM, "__init__", refuse)
    assert run("generate", model, "p") == 2
    assert capsys.readouterr().err == f"trtllm-treewy: error: {shown}\n"


def test_prompt_file_that_is_not_text(fake_llm, model, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert run("generate", model, "--prompt-file", str(tmp_path / "binary")) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GB", 141 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("1.5k", 1500),
        ("1024", 1024),
        ("12B", 12),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(text, size):
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "0", "3XB", "inf", "nanGB", "1GB2", "3BB"])
def test_sizes_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        sizes.parse_size(text)


# --- the process itself ---

DRIVER = """
import sys, time, types
sys.path[:0] = [{tests!r}]
from test_cli import FakeLLM
from trtllm_treewy import cli
sys.modules["trtllm_treewy.llm"] = types.SimpleNamespace(LLM=FakeLLM)

def words(self, prompt, params, streaming):
    self._closed_by = None
    def outputs():
        for number in range({count}):
            time.sleep({pause})
            self.words = ["word\\n"]
            yield self._output(prompt, 1)
    class Stream:
        def __iter__(self): return outputs()
        def close(self): print("aborted", file=sys.stderr, flush=True)
    return Stream()

FakeLLM.generate_async = words
sys.exit(cli.main(["generate", {model!r}, "p"]))
"""


def spawn(code, *argv):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        # A run in the background may ignore SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def start(model, *, count, pause):
    return spawn(
        DRIVER.format(tests=os.path.dirname(__file__), model=model, count=count, pause=pause)
    )


def test_interrupt_ends_cleanly(model):
    process = start(model, count=1000, pause=0.05)
    assert process.stdout.readline() == "word\n"  # text comes while it is generated
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "aborted\n\ninterrupted\n"


def test_closed_pipe_ends_quietly(model):
    process = start(model, count=200_000, pause=0)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 141
    assert err == "aborted\n"


def test_interrupt_while_loading_is_not_swallowed(model):
    """As an import of someone else's module may, with a bare except."""
    code = """
        import sys, time, types
        from trtllm_treewy import cli
        def load(*_, **__):
            try:
                print("loading", flush=True)
                time.sleep(60)
            except BaseException:
                print("swallowed", flush=True)
        sys.modules["trtllm_treewy.llm"] = types.SimpleNamespace(LLM=load)
        sys.exit(cli.main(["generate", sys.argv[1], "p"]))
    """
    process = spawn(code, model)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "\ninterrupted\n")


def command(*argv):
    return subprocess.run(
        [sys.executable, "-m", "trtllm_treewy.cli", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("argv", [("--help",), ("generate", "--help"), ("plan", "--help")])
def test_help_is_instant(argv):
    start = time.perf_counter()
    result = command(*argv)
    seconds = time.perf_counter() - start
    assert result.returncode == 0
    assert result.stdout.startswith("usage: trtllm-treewy")
    assert seconds < 5  # importing torch alone takes longer on a small machine


@pytest.mark.parametrize("name", ["generate", "plan", "doctor"])
def test_every_option_says_what_it_does_and_its_default(name, capsys):
    (commands,) = arguments._parser()._subparsers._group_actions
    for action in commands.choices[name]._actions:
        assert action.help, action
        assert not action.option_strings or action.dest == "help" or "(default: " in action.help
    assert run(name, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "TREEWY_DEBUG=1" in text
    assert name != "plan" or "(default: 32768, or the model's longest" in text


def test_importing_the_command_does_not_import_torch():
    code = "import sys, trtllm_treewy.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version():
    from importlib.metadata import version

    assert command("--version").stdout == f"trtllm-treewy {version('trtllm-treewy')}\n"


CLOSED = """
import os, sys, types
for fd in {closed}:
    os.close(fd)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
GENERATE = """
import sys, types
sys.path[:0] = [{tests!r}]
from test_cli import FakeLLM
from trtllm_treewy import cli
sys.modules["trtllm_treewy.llm"] = types.SimpleNamespace(LLM=FakeLLM)
sys.exit(cli.main(sys.argv[1:]))
"""


def with_closed(closed, *argv):
    code = GENERATE.format(tests=os.path.dirname(__file__))
    process = spawn(CLOSED.format(closed=closed), code, *argv)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("flags", [(), ("--json",), ("--nope",)])
def test_closed_stderr_takes_nothing_away(flags, model):
    code, out, err = with_closed((2,), "generate", model, "p", *flags)
    assert err == ""
    assert code == (2 if flags == ("--nope",) else 0)
    assert out == "" if code else "Once upon a time" in out


@pytest.mark.parametrize("closed", [(1,), (1, 2)])
@pytest.mark.parametrize(
    "argv",
    [("generate", "MODEL", "p", "-q"), ("generate", "MODEL", "p", "--json"), ("plan", "MODEL")],
)
def test_closed_stdout_is_a_pipe_without_a_reader(closed, argv, model):
    argv = [model if word == "MODEL" else word for word in argv]
    assert with_closed(closed, *argv) == (141, "", "")


@pytest.mark.parametrize("stream", [None, "closed"])
def test_streams_that_are_none_or_closed(stream, fake_llm, model, monkeypatch):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert run("generate", model, "p") == 0
    assert sys.stderr is stream  # whoever embeds the command gets its own back
    monkeypatch.setattr(sys, "stdout", stream)
    assert run("generate", model, "p") == 141
    assert fake_llm.made[-1].aborted
    assert run("plan", model) == 141
    assert sys.stdout is stream


# --- plan, doctor ---


def test_plan_json_and_table(capsys):
    flags = ["--state-dtype", "bfloat16", "--num-nodes", "7", "--memory", "60GB"]
    assert run("plan", "qwen3.5-35b-a3b", *flags, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["state_bytes"] == 30 * 2**20  # 30 layers of 32 heads, 128 x 128 of 2 bytes
    assert plan["num_nodes"] == 7
    assert plan["memory_bytes"] == 60 * 10**9
    reserved = plan["policies"]["reconstruct"]["reserved_bytes"]
    block = 32 * (plan["kv_cache_bytes_per_token"] + plan["draft_kv_cache_bytes_per_token"])
    assert plan["max_sequences"]["reconstruct"] == (60 * 10**9 - block) // reserved
    assert run("plan", "Qwen3.5-35B-A3B", *flags) == 0
    table = capsys.readouterr().out
    for policy in ("reconstruct", "deferred", "snapshot"):
        assert policy in table
    assert f"beside the weights: reconstruct {plan['max_sequences']['reconstruct']}," in table


def test_plan_of_a_model_over_several_gpus(capsys):
    """Of each GPU: an eighth of the states and weights, one of two KV heads on each."""
    flags = ["plan", "qwen3.5-35b-a3b", "--memory", "60GB"]
    assert run(*flags, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert run(*flags, "--json", "--tensor-parallel-size", "8") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tensor_parallel_size"] == 8
    assert plan["state_bytes"] * 8 == whole["state_bytes"]
    assert plan["kv_cache_bytes_per_token"] * 2 == whole["kv_cache_bytes_per_token"]
    assert 8 * 10**9 < plan["weights_bytes"] < 10 * 10**9
    assert run(*flags, "--tp", "8") == 0
    table = capsys.readouterr().out
    assert table.startswith("On each of 8 GPUs, beside 8.")
    assert "fit into 55.9 GiB of each GPU beside the weights" in table


def test_plan_counts_no_longer_context_than_the_model_has(capsys, tmp_path):
    config = {"model_type": "qwen3_5_text", "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for flags, length in (((), 512), (("--context-length", "700"), 700)):
        assert run("plan", str(tmp_path), *flags, "--json") == 0
        assert json.loads(capsys.readouterr().out)["context_length"] == length
    assert run("plan", "qwen3.5-35b-a3b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["context_length"] == 32768


def test_plan_of_a_file_and_of_a_directory(capsys, model):
    assert run("plan", model, "--json") == 0
    of_directory = json.loads(capsys.readouterr().out)
    assert run("plan", os.path.join(model, "config.json"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == of_directory


def test_doctor(capsys):
    assert run("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)
    assert run("doctor") == 0
    assert "torch" in capsys.readouterr().out
