"""State manager and commit policies against the plain recurrence over the accepted tokens."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.draft_tree import DraftTree, to_tree_batch
from trtllm_treewy.runtime.commit_policy import (
    POLICIES,
    GdnInputs,
    LayerStack,
    choose_stash,
)
from trtllm_treewy.runtime.state_manager import StateManager

# Commit policies; "inputs" is reconstruct from its other stash.
POLICY_NAMES = ("reconstruct", "inputs", "deferred", "snapshot")
NAN = float("nan")
LAYERS, HK, HV, K, V, W = 2, 2, 4, 8, 6, 4  # head_k_dim != head_v_dim, two value heads a key head
SLOTS, MAX_BATCH, MAX_NODES = 7, 4, 9


def make_config(layers: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 32,
            "hidden_size": 16,
            "num_hidden_layers": layers + 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 16,
            "linear_conv_kernel_dim": W,
            "linear_key_head_dim": K,
            "linear_value_head_dim": V,
            "linear_num_key_heads": HK,
            "linear_num_value_heads": HV,
            "layer_types": ["linear_attention"] * layers + ["full_attention"],
        }
    )


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return make_config(LAYERS)


def make_manager(config, commit, dtype=torch.float32, **options) -> StateManager:
    options = {"state_dtype": dtype, "activation_dtype": dtype, **options}
    if commit == "inputs":
        commit, options["stash"] = "reconstruct", "inputs"
    return StateManager(
        config,
        num_slots=SLOTS,
        max_batch_size=MAX_BATCH,
        max_nodes=MAX_NODES,
        device="cpu",
        commit=commit,
        **options,
    )


# --------------------------------------------------------------- the plain recurrence, float64


@dataclass
class Weights:
    """Of one layer."""

    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @staticmethod
    def random(channels: int) -> "Weights":
        return Weights(torch.randn(channels, W) * 0.5, torch.randn(HV) - 1.0, torch.randn(HV))


@dataclass
class Tokens:
    """Raw inputs of one layer: x [.., C], a and b [.., HV]."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def random(*lead: int, channels: int, dtype=torch.float32) -> "Tokens":
        return Tokens(
            torch.randn(*lead, channels, dtype=dtype),
            torch.randn(*lead, HV, dtype=dtype),
            torch.randn(*lead, HV, dtype=dtype),
        )

    def __getitem__(self, index) -> "Tokens":
        return Tokens(self.x[index], self.a[index], self.b[index])


class Chain:
    """State of one layer of one sequence, token by token, as the definition says."""

    def __init__(self, dtype=torch.float64) -> None:
        self.dtype = dtype
        self.state = torch.zeros(HV, V, K, dtype=dtype)
        self.window = torch.zeros(W - 1, 2 * HK * K + HV * V, dtype=dtype)

    def copy(self) -> "Chain":
        twin = Chain(self.dtype)
        twin.state, twin.window = self.state, self.window
        return twin

    def step(self, token: Tokens, weights: Weights) -> torch.Tensor:
        rows = torch.cat((self.window, token.x.to(self.dtype)[None]))
        mixed = F.silu((rows * weights.conv.to(self.dtype).T).sum(0))
        self.window = rows[1:]
        q, k, v = mixed.split((HK * K, HK * K, HV * V))
        q, k = (unit(x.view(HK, K)).repeat_interleave(HV // HK, 0) for x in (q, k))
        rate = -weights.A_log.to(self.dtype).exp()
        decay = (rate * F.softplus(token.a.to(self.dtype) + weights.dt_bias.to(self.dtype))).exp()
        beta = token.b.to(self.dtype).sigmoid()
        kept = decay[:, None, None] * self.state
        error = v.view(HV, V) - torch.einsum("hvk,hk->hv", kept, k)
        self.state = kept + beta[:, None, None] * error[:, :, None] * k[:, None, :]
        return torch.einsum("hvk,hk->hv", self.state, q) * K**-0.5


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def run_layer(step, layer, tokens: Tokens, weights: Weights) -> torch.Tensor:
    """One layer through a GdnStep, as the model does it: views into the conv output."""
    mixed = step.conv(layer, tokens.x, weights.conv.to(tokens.x.dtype))
    q, k, v = mixed.split((HK * K, HK * K, HV * V), dim=-1)
    return step.delta_rule(
        layer,
        q.unflatten(-1, (HK, K)),
        k.unflatten(-1, (HK, K)),
        v.unflatten(-1, (HV, V)),
        tokens.a,
        tokens.b,
        weights.A_log,
        weights.dt_bias,
    )


def random_parents(count: int, rng: random.Random) -> list[int]:
    return [-1] + [rng.randrange(max(0, t - 4), t) for t in range(1, count)]


def path_of(parents, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def tree_batch(parents, slots, **padding) -> TreeBatch:
    trees = [DraftTree((0,) * len(p), tuple(p), (0.0,) * len(p)) for p in parents]
    return to_tree_batch(trees, slots, [0] * len(trees), "cpu", **padding)


def prefill_batch(slots, lengths) -> PrefillBatch:
    tokens, contexts = [0] * sum(lengths), [0] * len(slots)
    return PrefillBatch.pack(tokens, lengths, slots, contexts, torch.device("cpu"))


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(have, want, tolerance):
    """Relative Frobenius error."""
    want = want.double()
    error = (have.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < tolerance, f"relative error {error:.2e}"


class Run:
    """A state manager beside one `Chain` a slot and layer, fed the accepted tokens alone."""

    def __init__(self, config, commit, seed, dtype=torch.float32, **options) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = dtype
        self.tolerance = 1e-11 if dtype == torch.float64 else 1e-5
        self.manager = make_manager(config, commit, dtype, **options)
        self.channels = config.conv_dim
        self.weights = [Weights.random(self.channels) for _ in range(LAYERS)]
        self.chains: dict[int, list[Chain]] = {}

    def poison(self) -> None:
        """NaN in every pool and stash, as a past request could have left it."""
        policy = self.manager.policy
        owned = [x for x in vars(policy).values() if isinstance(x, torch.Tensor)]
        for tensor in [*owned, self.manager.conv_state, self.manager._conv_inputs]:
            if tensor.is_floating_point():
                tensor.fill_(NAN)

    def allocate(self, slot: int) -> None:
        self.manager.allocate(slot)
        self.chains[slot] = [Chain() for _ in range(LAYERS)]

    def prefill(self, slots, lengths) -> None:
        step = self.manager.prefill(prefill_batch(slots, lengths))
        for layer, weights in enumerate(self.weights):
            tokens = Tokens.random(sum(lengths), channels=self.channels, dtype=self.dtype)
            out = run_layer(step, layer, tokens, weights)
            start = 0
            for slot, length in zip(slots, lengths, strict=True):
                for i in range(start, start + length):
                    if slot < 0:
                        assert not out[i].any()
                    else:
                        want = self.chains[slot][layer].step(tokens[i], weights)
                        close(out[i], want, 3 * self.tolerance)
                start += length

    def tree(self, slots) -> tuple[TreeBatch, list[list[int]]]:
        parents = [random_parents(self.rng.randrange(1, MAX_NODES + 1), self.rng) for _ in slots]
        width = self.rng.randrange(max(len(p) for p in parents), MAX_NODES + 1)
        return tree_batch(parents, slots, pad_nodes_to=width), parents

    def verify(self, tree: TreeBatch, parents, accepted) -> list[list[Chain]]:
        """Verify with every node checked against its path; the chains after `accepted`."""
        slots = tree.slot.tolist()
        step = self.manager.verify(tree)
        after: list[list[Chain]] = [[] for _ in slots]
        for layer, weights in enumerate(self.weights):
            tokens = Tokens.random(*tree.parents.shape, channels=self.channels, dtype=self.dtype)
            for row, own in enumerate(parents):  # padding holds garbage
                tokens.x[row, len(own) :] = NAN
                tokens.a[row, len(own) :] = NAN
            out = run_layer(step, layer, tokens, weights)
            for row, slot in enumerate(slots):
                if slot < 0:
                    assert not out[row].any()
                    continue
                assert not out[row, len(parents[row]) :].any()
                nodes = {-1: self.chains[slot][layer]}
                for node, parent in enumerate(parents[row]):
                    nodes[node] = nodes[parent].copy()
                    want = nodes[node].step(tokens[row, node], weights)
                    close(out[row, node], want, 3 * self.tolerance)
                after[row].append(nodes[accepted[row]])
        return after

    def step(self, slots, accept=None) -> None:
        """Verify random trees and commit; `accept(parents)` picks the node, else at random."""
        tree, parents = self.tree(slots)
        accepted = [
            accept(p) if accept else self.rng.randrange(-1 if i == 0 else 0, len(p))
            for i, p in enumerate(parents)
        ]
        after = self.verify(tree, parents, accepted)
        self.manager.commit(int32(accepted))
        for row, slot in enumerate(slots):
            if slot >= 0:
                self.chains[slot] = after[row]

    def check(self) -> None:
        """The pools hold what the plain recurrence over the accepted tokens gives."""
        for slot, chains in self.chains.items():
            self.manager.materialize(slot)
            for layer, chain in enumerate(chains):
                if chain.state.any():
                    close(self.manager.state[layer, slot], chain.state, self.tolerance)
                    close(self.manager.conv_state[layer, slot], chain.window, self.tolerance)


# ------------------------------------------------------------------------------ correctness


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_state_after_random_steps_is_that_of_the_plain_recurrence(config, commit, dtype):
    """CASES 1, 6-12, 14: random slots, trees and accepted nodes, poisoned pools and padding.

    Each step starts from the last accepted node, of whatever kind the step is; padded rows and
    free slots hold NaN and touch nobody.
    """
    run = Run(config, commit, seed=5, dtype=dtype)
    run.poison()
    slots = run.rng.sample(range(SLOTS), 5)
    for slot in slots:
        run.allocate(slot)
    run.prefill([slots[2], -1, slots[0]], [5, 2, 70])
    for _ in range(6):
        rows = [*run.rng.sample(slots, 3), -1]
        run.rng.shuffle(rows)
        run.step(rows)
    run.prefill([slots[1], slots[2]], [1, 4])  # a prompt chunk after decoding
    run.step(slots[1:4])
    run.step([slots[4]], accept=lambda parents: 0)
    run.check()


def test_policies_agree(config):
    """The same steps under the three policies end in the same state."""
    ends = []
    for commit in POLICY_NAMES:
        run = Run(config, commit, seed=11, dtype=torch.float64)
        for slot in (6, 0, 3):
            run.allocate(slot)
        for _ in range(5):
            run.step([3, 6, 0])
        run.check()
        ends.append((run.manager.state.clone(), run.manager.conv_state.clone()))
    for state, window in ends[1:]:
        torch.testing.assert_close(state, ends[0][0], rtol=0, atol=1e-12)
        assert torch.equal(window, ends[0][1])


@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_rows_that_accept_nothing_keep_every_bit(config, commit):
    """CASES 2, 6: accepted -1, slot -1 and slots outside the batch: state and conv state equal."""
    run = Run(config, commit, seed=2)
    for slot in (5, 1, 4):
        run.allocate(slot)
    run.prefill([5, 1, 4], [3, 3, 3])
    manager = run.manager
    before = manager.state.clone(), manager.conv_state.clone()
    tree, parents = run.tree([1, -1, 5])
    accepted = [-1, len(parents[1]) - 1, len(parents[2]) - 1]
    after = run.verify(tree, parents, accepted)
    assert torch.equal(manager.state, before[0])
    assert torch.equal(manager.conv_state, before[1])
    manager.commit(int32(accepted))
    run.chains[5] = after[2]
    for slot in range(SLOTS):
        if slot in run.chains:
            manager.materialize(slot)
        for have, was in zip((manager.state, manager.conv_state), before, strict=True):
            assert torch.equal(have[:, slot], was[:, slot]) == (slot != 5)
    run.check()


@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_the_state_pool_itself_changes_under_bf16(config, commit):
    """CASES 21: what is updated is the pool, not a temporary; and it is close to the truth."""
    run = Run(config, commit, seed=3, state_dtype=torch.bfloat16)
    run.allocate(2)
    run.tolerance = 3e-2
    pool = run.manager.state
    run.prefill([2], [4])
    run.manager.materialize(2)
    before = pool[:, 2].clone()
    run.step([2], accept=lambda parents: len(parents) - 1)
    run.manager.materialize(2)
    assert run.manager.state is pool
    assert not torch.equal(pool[:, 2], before)
    for layer, chain in enumerate(run.chains[2]):
        close(pool[layer, 2], chain.state, 3e-2)


@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_a_reused_slot_is_clean(config, commit):
    """CASES 8: the last request's NaN, in state, conv state and history, ends with it."""
    run = Run(config, commit, seed=4)
    run.allocate(3)
    run.allocate(0)
    tree, parents = run.tree([3])
    step = run.manager.verify(tree)
    for layer, weights in enumerate(run.weights):
        tokens = Tokens.random(*tree.parents.shape, channels=run.channels)
        tokens.x[:] = NAN
        run_layer(step, layer, tokens, weights)
    run.manager.commit(int32([0]))
    run.step([0])
    run.manager.free(3)
    run.allocate(3)
    assert not run.manager.state[:, 3].any()
    assert not run.manager.conv_state[:, 3].any()
    run.step([0, 3])
    run.step([3])
    run.check()


@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_a_nan_sibling_does_not_reach_the_committed_state(config, commit):
    """CASES 8: a rejected draft with NaN inputs leaves outputs and state of the others alone."""
    run = Run(config, commit, seed=6)
    run.allocate(1)
    parents = [-1, 0, 0, 1, 2]
    chains = run.chains[1]
    step = run.manager.verify(tree_batch([parents], [1]))
    for layer, weights in enumerate(run.weights):
        tokens = Tokens.random(1, 5, channels=run.channels)
        for bad in (tokens.x, tokens.a, tokens.b):
            bad[0, 1] = NAN
        out = run_layer(step, layer, tokens, weights)
        assert out[0, [0, 2, 4]].isfinite().all()
        assert out[0, [1, 3]].isnan().all()
        for node in (0, 2, 4):
            close(out[0, node], chains[layer].step(tokens[0, node], weights), 3e-5)
    run.manager.commit(int32([4]))
    run.check()


def test_keys_are_those_that_verification_saw(config):
    """The stash holds no keys: they come again, bit for bit, from the stashed conv inputs.

    Those of the accepted paths: a commit reads no others.
    """
    run = Run(config, "reconstruct", seed=9)
    run.allocate(4)
    run.prefill([4], [6])
    tree, _ = run.tree([4, -1])
    step = run.manager.verify(tree)
    seen = []
    for layer, weights in enumerate(run.weights):
        tokens = Tokens.random(*tree.parents.shape, channels=run.channels)
        mixed = step.conv(layer, tokens.x, weights.conv)
        seen.append(mixed[..., HK * K : 2 * HK * K].unflatten(-1, (HK, K)))
    for node in range(int(tree.num_nodes[0])):
        keys = step.path_keys(int32([node, -1]))
        path = path_of(tree.parents[0], node)
        assert torch.equal(keys[:, 0, path], torch.stack(seen)[:, 0, path])


def test_deferred_rewrites_the_state_only_when_the_history_is_full(config):
    """CASES 26: runs past several flushes; between them the pool is not written."""
    run = Run(config, "deferred", seed=7, history_capacity=5)
    run.allocate(2)
    chain_tree, writes = tree_batch([[-1, 0, 1]], [2]), []
    for _ in range(9):
        before = run.manager.state.clone()
        after = run.verify(chain_tree, [[-1, 0, 1]], [1])  # two tokens a step
        run.manager.commit(int32([1]))
        run.chains[2] = after[0]
        writes.append(not torch.equal(before, run.manager.state))
    assert writes == [False, False, True, False, True, False, True, False, True]
    run.check()
    fresh = run.manager.state.clone()
    run.manager.materialize(2)  # nothing left to fold
    assert torch.equal(fresh, run.manager.state)


def test_verification_folds_a_history_that_the_longest_path_may_not_fit(config):
    """The state moves while the tree is verified; the commit only appends behind it."""
    run = Run(config, "deferred", seed=8, history_capacity=5, max_path=3)
    run.allocate(2)
    policy, tree = run.manager.policy, tree_batch([[-1, 0, 1]], [2])
    lengths = []
    for _ in range(6):
        before = run.manager.state.clone()
        folds = int(policy._history_len[2]) > policy.fold_above(tree) == 2
        after = run.verify(tree, [[-1, 0, 1]], [1])
        assert torch.equal(before, run.manager.state) != folds
        assert bool(policy._folds.folding[2]) == folds
        assert bool(policy._folds.folded.all(3).all(2)[:, 2].all()) == folds
        before = run.manager.state.clone()
        run.manager.commit(int32([1]))
        run.chains[2] = after[0]
        assert torch.equal(before, run.manager.state)
        assert not any(x.any() for x in policy._folds)
        lengths.append(int(policy._history_len[2]))
    assert lengths == [2, 4, 2, 4, 2, 4]
    run.check()


def test_steps_of_few_rows_commit_at_once_and_fold_what_others_left(config):
    """Histories that steps of two rows leave are folded by the next step of one, and stay empty."""
    run = Run(config, "deferred", seed=9, history_capacity=5)
    run.allocate(2)
    run.allocate(4)
    policy = run.manager.policy
    policy.few_rows, chain = 1, [-1, 0, 1]
    for slots in ([2, 4], [2], [2], [4, 2], [4, -1], [4]):
        tree = tree_batch([chain] * len(slots), slots)
        after = run.verify(tree, [chain] * len(slots), [1] * len(slots))
        run.manager.commit(int32([1] * len(slots)))
        for slot, state in zip(slots, after, strict=True):
            if slot >= 0:
                run.chains[slot] = state
        kept = [int(policy._history_len[slot]) for slot in slots if slot >= 0]
        assert all(length == 0 for length in kept) == (len(slots) == 1)
    run.check()


def test_a_tree_given_up_after_its_folds_leaves_the_sequence(config):
    """Given up after some layers, rejected, saved, and the slot given to another sequence."""
    run = Run(config, "deferred", seed=9, history_capacity=6, max_path=3, num_checkpoints=1)
    run.allocate(1)
    for _ in range(2):
        run.step([1], accept=lambda parents: min(2, len(parents) - 1))
    while int(run.manager.policy._history_len[1]) <= 3:
        run.step([1], accept=lambda parents: 0)
    policy, tree = run.manager.policy, tree_batch([[-1, 0, 1]], [1])
    assert policy.fold_above(tree) == 3
    step = run.manager.verify(tree)
    tokens = Tokens.random(1, 3, channels=run.channels, dtype=run.dtype)
    run_layer(step, 0, tokens, run.weights[0])
    assert policy._folds.folded[:, 1].flatten(1).any(1).tolist() == [True] + [False] * (LAYERS - 1)
    run.manager.discard()
    held = int(policy._history_len[1])
    run.verify(tree, [[-1, 0, 1]], [1])  # checked against every node's path
    run.manager.commit(int32([-1]))
    assert int(policy._history_len[1]) == held
    assert policy._folds.folding[1] == 1
    run.verify(tree, [[-1, 0, 1]], [1])
    run.manager.discard()
    run.manager.save(1, 0)
    assert not any(x.any() for x in (policy._history_len, *policy._folds))
    run.check()
    while int(policy._history_len[1]) <= 3:
        run.step([1], accept=lambda parents: 0)
    run.verify(tree, [[-1, 0, 1]], [1])
    run.manager.discard()
    assert policy._folds.folding[1] == 1
    run.manager.free(1)
    run.chains.clear()
    run.allocate(1)
    assert not any(x[..., 1].any() for x in (policy._history_len, policy._folds.folding))
    assert not policy._folds.folded.any()
    run.step([1])
    run.check()


@pytest.mark.parametrize(
    ("capacity", "max_path", "nodes", "above"),
    [(16, 4, 16, 12), (16, 4, 3, 13), (16, 9, 16, 8), (5, 5, 7, 2), (16, 40, 1, 15)],
)
def test_how_long_a_history_is_folded(config, capacity, max_path, nodes, above):
    """Room for the longest path, less half the capacity at least; known without the device."""
    options = {"history_capacity": capacity, "max_path": max_path}
    policy = make_manager(config, "deferred", **options).policy
    tree = tree_batch([[*range(-1, nodes - 1)]], [0])
    assert policy.fold_above(tree) == above


def test_a_thousand_commits_do_not_drift():
    """CASES 19: after a thousand steps the error is at most twice the plain recurrence's.

    One slot a way of accepting: reject every draft, accept the deepest path, accept at random.
    The bound does not go below 1e-5, where the plain error is tiny.
    """
    rng = random.Random(1)
    one_layer = make_config(1)
    channels = one_layer.conv_dim
    weights = Weights.random(channels)
    slots, parents = [5, 0, 3], [-1, 0, 0, 1]
    managers = [make_manager(one_layer, name) for name in ("reconstruct", "deferred")]
    for manager in managers:
        for slot in slots:
            manager.allocate(slot)
    exact = [Chain() for _ in slots]
    plain = [Chain(torch.float32) for _ in slots]
    tree = tree_batch([parents] * 3, slots)
    for _ in range(1000):
        accepted = [0, 3, rng.randrange(4)]
        tokens = Tokens.random(3, 4, channels=channels)
        for manager in managers:
            run_layer(manager.verify(tree), 0, tokens, weights)
            manager.commit(int32(accepted))
        for row, node in enumerate(accepted):
            for token in path_of(parents, node):
                exact[row].step(tokens[row, token], weights)
                plain[row].step(tokens[row, token], weights)
    for manager in managers:
        for slot, chain, rounded in zip(slots, exact, plain, strict=True):
            manager.materialize(slot)
            error = (rounded.state - chain.state).norm() / chain.state.norm()
            close(manager.state[0, slot], chain.state, max(2 * error.item(), 1e-5))


# ------------------------------------------------------------------------------ one commit a step


@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_discard_leaves_everything_and_allows_the_next_verify(config, commit):
    run = Run(config, commit, seed=8)
    run.allocate(0)
    run.prefill([0], [4])
    before = run.manager.state.clone(), run.manager.conv_state.clone()
    tree, parents = run.tree([0])
    run.verify(tree, parents, [0])
    run.manager.discard()
    run.manager.discard()
    assert torch.equal(run.manager.state, before[0])
    assert torch.equal(run.manager.conv_state, before[1])
    run.step([0])
    run.check()


def test_every_verify_has_exactly_one_commit(config):
    run = Run(config, "reconstruct", seed=8)
    run.allocate(0)
    run.allocate(1)
    manager = run.manager
    with pytest.raises(ValueError, match="no verified tree is pending"):
        manager.commit(int32([0]))
    tree, parents = run.tree([0])
    run.verify(tree, parents, [0])
    with pytest.raises(ValueError, match="pending"):
        manager.verify(tree)
    with pytest.raises(ValueError, match="cannot prefill slot 0"):
        manager.prefill(prefill_batch([1, 0], [2, 2]))
    with pytest.raises(ValueError, match="cannot free slot 0"):
        manager.free(0)
    manager.prefill(prefill_batch([1], [2]))  # another slot is no matter
    manager.commit(int32([0]))
    with pytest.raises(ValueError, match="no verified tree is pending"):
        manager.commit(int32([0]))


def test_a_step_is_used_whole_and_once(config):
    run = Run(config, "reconstruct", seed=8)
    run.allocate(0)
    tree, _ = run.tree([0])
    step = run.manager.verify(tree)
    tokens = Tokens.random(*tree.parents.shape, channels=run.channels)
    run_layer(step, 1, tokens, run.weights[1])
    with pytest.raises(ValueError, match="1 of 2 layers"):
        run.manager.commit(int32([0]))
    run.manager.discard()
    with pytest.raises(ValueError, match="committed or discarded"):
        run_layer(step, 0, tokens, run.weights[0])


@pytest.mark.parametrize("commit", POLICY_NAMES)
@pytest.mark.parametrize("bad", [[0, 99], [0, -2], [0, 3], [0]])
def test_accepted_out_of_range_writes_nothing(config, commit, bad):
    """CASES 3: bounded, reported, and nothing is half committed."""
    run = Run(config, commit, seed=8)
    run.allocate(0)
    run.allocate(4)
    before = run.manager.state.clone(), run.manager.conv_state.clone()
    parents = [[-1, 0, 1], [-1, 0, 0]]
    after = run.verify(tree_batch(parents, [4, 0], pad_nodes_to=5), parents, [2, 1])
    with pytest.raises(ValueError, match="accepted"):
        run.manager.commit(int32(bad))
    assert torch.equal(run.manager.state, before[0])
    assert torch.equal(run.manager.conv_state, before[1])
    run.manager.commit(int32([2, 1]))  # the tree is still pending
    run.chains[4], run.chains[0] = after
    run.check()


# ------------------------------------------------------------------------------ limits, slots


def test_slots_are_taken_and_given_back_once(config):
    manager = make_manager(config, "reconstruct")
    manager.allocate(2)
    with pytest.raises(ValueError, match="slot 2 is in use"):
        manager.allocate(2)
    manager.free(2)
    manager.free(2)  # whoever cleans up need not know how far an allocation came
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match=r"slot must be in \[0, 7\)"):
            manager.allocate(slot)
    with pytest.raises(ValueError, match="slot 2 is not allocated"):
        manager.verify(tree_batch([[-1]], [2]))
    with pytest.raises(ValueError, match="slot 2 is not allocated"):
        manager.prefill(prefill_batch([2], [1]))
    with pytest.raises(ValueError, match="slot 2 is not allocated"):
        manager.materialize(2)
    manager.allocate(2)
    with pytest.raises(ValueError, match="once in a batch"):
        manager.prefill(prefill_batch([2, 2], [1, 1]))


def test_a_tree_larger_than_the_stash_is_refused(config):
    """CASES 5: every size up to the limit works, above it the error names the limit."""
    manager = make_manager(config, "reconstruct")
    for slot in range(5):
        manager.allocate(slot)
    with pytest.raises(ValueError, match="max_nodes 9"):
        manager.verify(tree_batch([list(range(-1, MAX_NODES))], [0]))
    with pytest.raises(ValueError, match="max_batch_size 4"):
        manager.verify(tree_batch([[-1]] * 5, range(5)))
    manager.verify(tree_batch([list(range(-1, MAX_NODES - 1))] * 4, range(4)))


def test_deferred_refuses_a_path_that_its_history_cannot_hold(config):
    manager = make_manager(config, "deferred", history_capacity=3)
    manager.allocate(0)
    with pytest.raises(ValueError, match="path of 4 tokens does not fit the history of 3"):
        manager.verify(tree_batch([[-1, 0, 1, 2]], [0]))
    manager.verify(tree_batch([[-1, 0, 1, 1]], [0]))


def test_wrong_settings_are_refused(config):
    with pytest.raises(ValueError, match="one of reconstruct, deferred, snapshot, got 'copy'"):
        make_manager(config, "copy")
    with pytest.raises(ValueError, match="history_capacity"):
        make_manager(config, "deferred", history_capacity=0)
    with pytest.raises(ValueError, match="max_path must be >= 1, got 0"):
        make_manager(config, "deferred", max_path=0)
    with pytest.raises(ValueError, match="max_nodes"):
        StateManager(
            config,
            num_slots=1,
            max_batch_size=1,
            max_nodes=0,
            activation_dtype=torch.float32,
            device="cpu",
        )
    assert {*POLICIES, "inputs"} == set(POLICY_NAMES)
    with pytest.raises(ValueError, match="stash must be pseudo_values or inputs, got 'keys'"):
        make_manager(config, "reconstruct", stash="keys")
    for commit in ("deferred", "snapshot"):
        with pytest.raises(ValueError, match=f"policy {commit} cannot work from a stash of inputs"):
            make_manager(config, commit, stash="inputs")
    for wrong in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="stash_dtype must be torch.float32, or bfloat16"):
            make_manager(config, "reconstruct", stash_dtype=wrong)


def test_the_stash_is_the_one_that_is_asked_for():
    assert choose_stash("auto") == "pseudo_values"
    for wanted in ("inputs", "pseudo_values"):
        assert choose_stash(wanted) == wanted


def test_stacked_parameters_follow_what_layers_give():
    weights = [torch.randn(3, 2) for _ in range(4)]
    stack = LayerStack()
    first = stack.of(weights)
    assert torch.equal(first, torch.stack(weights))
    assert stack.of([w.view(3, 2) for w in weights]) is first
    weights[2].add_(1)
    second = stack.of(weights)
    assert second is not first
    assert torch.equal(second, torch.stack(weights))
    weights[1] = weights[1].clone()
    assert stack.of(weights) is not second


def test_gates_of_another_type_are_refused(config):
    manager = make_manager(config, "inputs", torch.bfloat16)
    gates = torch.zeros(1, 1, HV)
    keys, values = torch.zeros(1, 1, HK, K), torch.zeros(1, 1, HV, V)
    inputs = GdnInputs(keys, keys, values, gates, gates, gates[0, 0], gates[0, 0])
    with pytest.raises(ValueError, match=r"holds a in torch.bfloat16.*got torch.float32"):
        manager.policy.verify(0, None, inputs)


def test_memory_figures_of_each_policy(config):
    """What each policy keeps, by its shapes, for 16-bit activations."""
    bf16 = {"state_dtype": torch.bfloat16, "activation_dtype": torch.bfloat16}
    state = LAYERS * HV * V * K * 2
    conv = LAYERS * (W - 1) * config.conv_dim * 2
    nodes = MAX_BATCH * MAX_NODES
    inputs = LAYERS * nodes * 2 * config.conv_dim
    managers = {name: make_manager(config, name, **bf16) for name in POLICY_NAMES}
    for manager in managers.values():
        assert manager.snapshot_bytes == nodes * state
    reconstruct = managers["reconstruct"]
    assert reconstruct.pool_bytes == SLOTS * (state + conv)
    # Pseudo-values are kept in float32 whatever the state, unless asked otherwise.
    assert reconstruct.stash_bytes == inputs + LAYERS * nodes * (HV * V * 4 + 4 * HV)
    gates = LAYERS * nodes * 2 * HV * 2
    assert managers["inputs"].stash_bytes == inputs + gates
    assert managers["inputs"].pool_bytes == reconstruct.pool_bytes
    half = make_manager(config, "reconstruct", stash_dtype=torch.bfloat16, **bf16)
    assert half.stash_bytes == reconstruct.stash_bytes - LAYERS * nodes * HV * V * 2
    assert managers["snapshot"].pool_bytes == reconstruct.pool_bytes
    assert managers["snapshot"].stash_bytes == inputs + managers["snapshot"].snapshot_bytes
    # A history is made of what verification leaves: keys of 16 bits, u as in the stash.
    history = LAYERS * 16 * (4 * HV * V + 2 * HK * K + 4 * HV) + 4
    history += LAYERS * HV * -(-V // 64) + 4  # what verification has folded
    assert managers["deferred"].pool_bytes == reconstruct.pool_bytes + SLOTS * history
    assert managers["deferred"].stash_bytes == reconstruct.stash_bytes


@pytest.mark.parametrize("commit", POLICY_NAMES)
def test_a_saved_state_is_the_committed_one(commit, config):
    """CASES 8, 15, 16: saved with its history folded in, restored into any slot, bit for bit."""
    manager = make_manager(config, commit, num_checkpoints=3)
    weights = [Weights.random(config.conv_dim) for _ in range(LAYERS)]
    manager.allocate(5)
    step = manager.prefill(PrefillBatch.pack([0] * 6, [6], [5], [0], torch.device("cpu")))
    for layer, weight in enumerate(weights):
        tokens = Tokens.random(6, channels=config.conv_dim)
        run_layer(step, layer, tokens, weight)
    for _ in range(2):
        tree = to_tree_batch([DraftTree((0,) * 4, (-1, 0, 1, 0), (0.0,) * 4)], [5], [6], "cpu")
        step = manager.verify(tree)
        for layer, weight in enumerate(weights):
            run_layer(step, layer, Tokens.random(1, 4, channels=config.conv_dim), weight)
        with pytest.raises(ValueError, match="cannot save slot 5"):
            manager.save(5, 2)
        manager.commit(torch.tensor([2]))
    manager.save(5, 2)
    state, conv = manager.state[:, 5].clone(), manager.conv_state[:, 5].clone()
    assert state.any()
    manager.free(5)
    manager.state.fill_(NAN)
    manager.allocate(1)
    manager.restore(1, 2)
    assert torch.equal(manager.state[:, 1], state)
    assert torch.equal(manager.conv_state[:, 1], conv)
    for call in (lambda: manager.save(1, 3), lambda: manager.restore(1, -1)):
        with pytest.raises(ValueError, match=r"checkpoint must be in \[0, 3\)"):
            call()
    with pytest.raises(ValueError, match="slot 4 is not allocated"):
        manager.restore(4, 2)
