"""`benchmarks/capacity.py` and `projection.py`: what they compute, and what docs quote of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import capacity
import projection

from trtllm_treewy.memory_plan import plan

REPOSITORY = Path(__file__).resolve().parent.parent


def test_sequences_are_those_of_the_plan():
    config, ranks, name = capacity.sharded("qwen3.5-397b-a17b:8")
    assert (ranks, name, config.linear_num_value_heads) == (8, "qwen3.5-397b-a17b", 8)
    sizes = plan(config, draft_tree_widths=(1, 1, 1), context_length=4096)
    reconstruct, deferred, snapshot, factor = capacity.counts(config, 10**10, "3", "float32", 4096)
    assert {"reconstruct": int(reconstruct), "deferred": int(deferred), "snapshot": int(snapshot)} \
        == sizes.max_sequences(10**10)  # fmt: skip
    assert factor == f"{int(reconstruct) / int(snapshot):.1f}"
    assert capacity.counts(config, -1, "3", "float32", 4096)[0] == "weights do not fit"
    with pytest.raises(ValueError, match="expected one of"):
        capacity.sharded("gpt:1")


def test_the_floor_of_the_experts():
    """Every weight once where all experts are met; a token's eight where it is alone."""
    config, _, _ = capacity.sharded("qwen3.5-35b-a3b:1")
    layer = 256 * 3 * 2048 * 512 * 2
    whole = projection.traffic(config, 10**6, (), "float32")
    assert whole.experts == pytest.approx(40 * layer)
    assert whole.floor_ms(4.33)[0] == pytest.approx(14.88, abs=0.01)
    alone = projection.traffic(config, 1, (), "float32")
    assert alone.experts == pytest.approx(40 * layer * 8 / 256)
    # Each level of drafts but the last runs through the module, after the accepted tokens.
    chain = projection.traffic(config, 10**6, (1, 1, 1), "float32")
    assert chain.experts == pytest.approx(43 * layer)
    sizes = plan(config, draft_tree_widths=(1, 1, 1))
    assert chain.states == 10**6 * (3 * sizes.state + 2 * sizes.stash)


def test_the_profiled_step_projects_to_itself():
    row = json.loads(projection.PROFILE.read_text())["rows"][0]
    base = projection.reached(row)
    whole = sum(v for k, v in row["kinds_ms"].items() if k != "largest")
    assert base.experts + base.states + base.rest == pytest.approx(whole)
    cells = projection.project(row, base, projection.PROFILED_MODEL, "H200", "4.8", 3.0)
    assert cells[-2:] == (f"{whole:.1f}", f"{64 * 3e3 / whole:.0f}")
    fast = projection.project(row, base, projection.PROFILED_MODEL, "X", "9.6", 3.0)
    assert fast[-2].startswith(f"{whole / 2:.1f} to ")


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (projection.main, []),
        (capacity.main, ["--tree", "3", "3,3,3", "--state-dtype", "float32"]),
    ],
)
def test_docs_quote_what_the_scripts_print(main, flags, capsys):
    main(flags)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) > 3
    assert "\n".join(lines) in (REPOSITORY / "docs" / "comparison.md").read_text()


def test_a_projection_is_called_one(capsys):
    projection.main(["--gpu", "X=9.6"])
    assert "PROJECTION, not measured" in capsys.readouterr().out


def test_a_size_that_is_none(capsys):
    with pytest.raises(SystemExit):
        capacity.main(["--gpu", "X=many"])
    assert "expected a size" in capsys.readouterr().err
