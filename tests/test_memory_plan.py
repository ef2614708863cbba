import json

import pytest
import torch
from checkpoints import hf_config

from trtllm_treewy.config import ModelConfig, read_json, shipped_configs
from trtllm_treewy.llmapi import STATE_COMMITS
from trtllm_treewy.memory_plan import plan
from trtllm_treewy.runtime.state_manager import StateManager

MIB = 1024**2
GIB = 1024**3
SMALL = ModelConfig.from_dict(hf_config())


def shipped(name):
    return ModelConfig.from_dict(read_json(shipped_configs()[name]))


@pytest.mark.parametrize(
    ("name", "layers", "value_heads", "state_mib", "kv_gib", "attention_layers"),
    [("qwen3.5-35b-a3b", 30, 32, 30, 0.625, 10), ("qwen3.5-397b-a17b", 45, 64, 90, 0.9375, 15)],
)
def test_figures_of_shipped_configs(name, layers, value_heads, state_mib, kv_gib, attention_layers):
    config = shipped(name)
    half = plan(config, state_dtype="bfloat16")
    full = plan(config)
    assert half.state == state_mib * MIB
    assert full.state == 2 * half.state
    assert full.num_nodes == 40
    assert full.snapshots == 40 * full.state
    conv_dim = 2 * 16 * 128 + value_heads * 128
    assert full.stash == layers * 40 * (value_heads * 128 * 4 + 4 * value_heads + 2 * conv_dim)
    assert half.stash == full.stash
    inputs = layers * 40 * (4 * value_heads + 2 * conv_dim)
    assert full.inputs == inputs
    assert plan(config, stash="inputs").stash == inputs
    assert full.conv_state == layers * 3 * conv_dim * 2
    assert full.kv_cache_per_token == attention_layers * 2 * 2 * 256 * 2
    assert full.kv_cache == kv_gib * GIB
    assert full.draft_kv_cache_per_token == 2 * 2 * 256 * 2


def test_snapshots_of_the_35b_cost_more_than_the_context():
    p = plan(shipped("qwen3.5-35b-a3b"))
    assert p.added("snapshot") == 2400 * MIB
    assert p.added("reconstruct") / MIB == pytest.approx(37.65, abs=0.01)
    assert p.ratio_to_snapshot("reconstruct") == pytest.approx(0.0403, abs=1e-4)
    assert p.ratio_to_snapshot("snapshot") == 1.0


def test_stash_type_is_independent_of_the_state_type():
    config = shipped("qwen3.5-35b-a3b")
    single, half = plan(config), plan(config, stash_dtype="bfloat16")
    assert single.stash - half.stash == 30 * 40 * 32 * 128 * 2


@pytest.mark.parametrize(
    ("policy", "stash", "stash_dtype"),
    [
        *((policy, "pseudo_values", "float32") for policy in STATE_COMMITS),
        ("reconstruct", "pseudo_values", "bfloat16"),
        ("deferred", "pseudo_values", "bfloat16"),
        ("reconstruct", "inputs", "float32"),
    ],
)
@pytest.mark.parametrize(
    ("state_dtype", "activation_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_agrees_with_what_the_state_manager_allocates(
    policy, stash, stash_dtype, state_dtype, activation_dtype
):
    if stash_dtype == "bfloat16" and state_dtype == "float32":
        pytest.skip("bfloat16 pseudo-values go with a bfloat16 state")
    slots, batch, widths, history = 3, 2, (2, 2), 5
    p = plan(
        SMALL,
        draft_tree_widths=widths,
        state_dtype=state_dtype,
        activation_dtype=activation_dtype,
        history=history,
        stash=stash,
        stash_dtype=stash_dtype,
    )
    manager = StateManager(
        SMALL,
        num_slots=slots,
        max_batch_size=batch,
        max_nodes=p.num_nodes,
        state_dtype=getattr(torch, state_dtype),
        activation_dtype=getattr(torch, activation_dtype),
        device="cpu",
        commit=policy,
        history_capacity=history,
        stash=stash,
        stash_dtype=getattr(torch, stash_dtype),
    )
    pool = p.state + p.conv_state + (p.history_pool if policy == "deferred" else 0)
    assert manager.pool_bytes == slots * pool
    amount = p.stash if policy == "reconstruct" else p.pseudo_values
    if policy == "snapshot":  # counted as engines do; ours keeps the conv inputs as well
        conv_inputs = len(SMALL.linear_layers) * p.num_nodes * SMALL.conv_dim
        amount = p.snapshots + conv_inputs * (2 if activation_dtype == "bfloat16" else 4)
    assert manager.stash_bytes == batch * amount == batch * p.per_row(policy)
    assert manager.pool_bytes == slots * p.per_slot(policy)
    assert manager.snapshot_bytes == batch * p.snapshots


def test_totals_add_up():
    p = plan(SMALL, context_length=100, batch_size=3)
    for policy, extra in (("reconstruct", 0), ("deferred", p.history_pool)):
        assert p.added(policy) == p.stash + extra
    for policy in STATE_COMMITS:
        assert p.state_memory(policy) == p.state + p.conv_state + p.added(policy)
        kv = 100 * (p.kv_cache_per_token + p.draft_kv_cache_per_token)
        assert p.total(policy) == p.state_memory(policy) + kv
    # 1 attention layer and 1 MTP layer, 2 kv heads of 16, keys and values, 2 bytes.
    assert p.kv_cache_per_token == p.draft_kv_cache_per_token == 2 * 2 * 16 * 2


def test_model_without_mtp_has_no_draft_cache():
    config = ModelConfig.from_dict(hf_config(mtp_num_hidden_layers=0))
    assert plan(config).draft_kv_cache == 0
    assert "MTP" not in plan(config).table()


@pytest.mark.parametrize(
    ("widths", "nodes"), [((3, 3, 3), 40), ((1, 1, 1), 4), ((2, 5), 13), ((), 1), (None, 1)]
)
def test_nodes_from_widths(widths, nodes):
    assert plan(SMALL, draft_tree_widths=widths).num_nodes == nodes


def test_nodes_of_any_other_tree():
    assert plan(SMALL, num_nodes=17).num_nodes == 17
    assert plan(SMALL, num_nodes=17).snapshots == 17 * plan(SMALL).state


def test_history_holds_the_longest_path():
    assert plan(SMALL, draft_tree_widths=(1,) * 20, history=16).history == 21
    assert plan(SMALL, history=16).history == 16


def test_max_sequences():
    p = plan(SMALL, context_length=10)
    assert p.blocks(10) == 2  # 10 tokens and 40 nodes in blocks of 32
    assert p.reserved("reconstruct") == p.held("reconstruct") + 2 * p.kv_block
    exact = 7 * p.reserved("reconstruct") + p.kv_block
    assert p.max_sequences(exact)["reconstruct"] == 7
    assert p.max_sequences(exact - 1)["reconstruct"] == 6
    assert p.max_sequences(0) == dict.fromkeys(STATE_COMMITS, 0)
    with pytest.raises(ValueError, match="memory_bytes"):
        p.max_sequences(-1)


def test_dictionary_is_json_and_in_bytes():
    p = plan(SMALL, batch_size=2)
    data = json.loads(json.dumps(p.to_dict()))
    assert data["state_bytes"] == p.state
    assert data["kv_cache_bytes"] == p.kv_cache
    assert list(data["policies"]) == list(STATE_COMMITS)
    for policy, row in data["policies"].items():
        assert row["total_bytes"] == p.total(policy)
        assert row["batch_total_bytes"] == 2 * p.total(policy)


def test_table():
    text = plan(shipped("qwen3.5-35b-a3b"), batch_size=4).table()
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["reconstruct"][1:] == ["60.0", "1.4", "37.6", "99.1", "4.0%", "803.1"]
    assert rows["snapshot"][1:5] == ["60.0", "1.4", "2400.0", "2461.4"]
    assert "KV cache at 32768 tokens: 640.0 MiB" in text
    assert "4 sequences with KV cache" in text
    assert len({len(line) for line in text.splitlines()[2:6]}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_tree_widths": (3, 0)}, "width of level 1"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"batch_size": 0}, "batch_size"),
        ({"context_length": -1}, "context_length"),
        ({"history": 0}, "history"),
        ({"state_dtype": "int8"}, "state_dtype: expected one of"),
        ({"activation_dtype": "fp8"}, "activation_dtype"),
        ({"stash_dtype": ""}, "stash_dtype"),
        ({"kv_dtype": "int8"}, "kv_dtype"),
        ({"tokens_per_block": 0}, "tokens_per_block"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(SMALL, **changes)


def test_unknown_policy():
    with pytest.raises(ValueError, match="policy: expected one of reconstruct, deferred, snapshot"):
        plan(SMALL).total("copy")
