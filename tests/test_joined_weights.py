"""Weights of one input as one matrix: the model computes, loads and saves what it did."""

from __future__ import annotations

import pytest
import torch
from engine_world import make_executor, tiny_config, tiny_model
from parallel_ranks import random_model, rank_model, rank_tensors

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.model import FusedModel, Qwen3_5ForCausalLM, fuse
from trtllm_treewy.model.joined import ROWS_MULTIPLE, join

MOE = dict(moe=True, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16)
KINDS = {"dense": {}, "moe": MOE, "bias": {"attention_bias": True}}


def logits(model):
    executor = make_executor(model)
    assert executor.try_allocate(0, 5)
    return executor.prefill(PrefillBatch.pack([1, 2, 3, 4, 5], [5], [0], [0], executor.device))


def bytes_of(model):
    """Of all storages, each once, whatever views there are."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def padding(model):
    """The most bytes that rounding up can add: a few rows for each joined group."""
    groups = 4 * (len(model.model.layers) + len(model.mtp.layers))
    return groups * ROWS_MULTIPLE * 4 * model.config.hidden_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_joined_model_is_the_same_model(kind):
    config = tiny_config(**KINDS[kind])
    model, plain = tiny_model(2, config), tiny_model(2, config)
    before, pointers = bytes_of(model), [p.data_ptr() for p in model.parameters()]
    FusedModel(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.is_contiguous(), name
    assert torch.equal(logits(model).hidden, logits(plain).hidden)
    assert before <= bytes_of(model) <= before + padding(model)
    moved = sum(p.data_ptr() != q for p, q in zip(model.parameters(), pointers, strict=True))
    assert moved >= 2 + 3  # GDN and attention layers have theirs at the least


def test_weights_that_are_loaded_later_are_in_the_matrices(tmp_path):
    """state_dict to a file and back, into a model that is joined."""
    from safetensors.torch import load_file, save_file

    model, other = tiny_model(2), tiny_model(3)
    fused = FusedModel(model)
    save_file(other.state_dict(), str(tmp_path / "other.safetensors"))
    model.load_state_dict(load_file(tmp_path / "other.safetensors"))
    assert torch.equal(logits(model).hidden, logits(other).hidden)
    mixer = model.model.layers[0].linear_attn
    rows = mixer.in_proj_qkv.out_features
    assert torch.equal(fused._layers[0].mixer._weight[:rows], mixer.in_proj_qkv.weight)
    save_file(model.state_dict(), str(tmp_path / "own.safetensors"))
    fresh = Qwen3_5ForCausalLM(model.config)
    fresh.load_state_dict(load_file(tmp_path / "own.safetensors"))
    assert torch.equal(logits(fresh.eval()).hidden, logits(other).hidden)


def test_a_second_executor_of_a_model_moves_nothing():
    model = tiny_model(2, tiny_config(**MOE))
    first = FusedModel(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    second = FusedModel(model)
    assert pointers == [p.data_ptr() for p in model.parameters()]
    for a, b in zip(first._layers, second._layers, strict=True):
        assert a.mixer._weight.data_ptr() == b.mixer._weight.data_ptr()
        assert a.mixer._weight.shape == b.mixer._weight.shape


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_rank_joins_its_own_share(kind):
    model = random_model(kind)
    for rank in range(2):
        part = rank_model(model, 2, rank)
        FusedModel(part)
        for name, want in rank_tensors(model, 2, rank):
            assert torch.equal(part.state_dict()[name], want), name


def test_rows_are_padded_with_zeros_and_strangers_are_refused():
    parts = [torch.randn(3, 5), torch.randn(6, 5)]
    values = [part.clone() for part in parts]
    whole = join(parts)
    assert whole.shape == (16, 5)
    assert torch.equal(whole[:9], torch.cat(values))
    assert not whole[9:].any()
    assert join(parts).data_ptr() == whole.data_ptr()
    parts[0].fill_(7)
    assert (whole[:3] == 7).all()
    # Neighbours in memory, but without the rows of zeros.
    loose = torch.randn(9, 5)
    apart = join([loose[:3], loose[3:9]])
    assert apart.shape == (16, 5)
    with pytest.raises(ValueError, match="must agree in all but rows"):
        join([torch.zeros(2, 5), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="must agree in all but rows"):
        join([torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.float64)])


def test_without_kernels_the_model_itself_runs():
    model = tiny_model(2)
    assert fuse(model) is model
    assert fuse(model.double()) is model
