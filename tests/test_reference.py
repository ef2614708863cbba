"""The reference mathematics: closed form against recurrence, precision, and what must not leak."""

from __future__ import annotations

import math

import pytest
import torch
from gdn_cases import (
    DECAYS,
    DIMS,
    Dims,
    generator,
    naive_step,
    path_of,
    projections,
    randint,
    random_accepted,
    random_state,
    random_trees,
    relative_error,
    same_bits,
)

from trtllm_treewy import reference, topology

SHAPES = ("random", "chain", "star", "levels")
F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepare(inputs, dtype=None):
    """q, k, v, g, beta from projections, in the type asked for."""
    cast = {name: x if dtype is None else x.to(dtype) for name, x in inputs.items()}
    q, k = reference.normalize_qk(cast["q"], cast["k"])
    g, beta = reference.gates(cast["a"], cast["b"], cast["A_log"], cast["dt_bias"])
    return q, k, cast["v"], g, beta


class Case:
    """A batch of random trees in float64 with the recurrence's answer."""

    def __init__(self, seed, dims, shape="random", decay="mild", batch=3, nodes=17):
        gen = generator(seed)
        self.dims, self.gen = dims, gen
        self.parents, self.num_nodes = random_trees(gen, batch, nodes, shape=shape, full=True)
        self.ancestors = topology.ancestor_mask(self.parents, self.num_nodes)
        self.blocks = topology.independent_blocks(self.parents, self.num_nodes)
        self.raw = projections(gen, dims, batch, nodes, decay=decay)
        self.inputs = prepare(self.raw)
        self.state = random_state(gen, dims, batch, dtype=F64)
        self.out, self.states = reference.tree_recurrence(*self.inputs, self.state, self.parents)

    def at(self, dtype):
        """Inputs and state rounded to the type."""
        return [x.to(dtype) for x in self.inputs], self.state.to(dtype)


def commit(state, inputs, u, row, path):
    """State of one row after a path."""
    _, k, _, g, _ = inputs
    at = (slice(row, row + 1), path)
    valid = torch.ones(1, len(path), dtype=torch.bool)
    return reference.commit_path(state[row : row + 1], u[at], k[at], g[at], valid)[0]


# ---------------------------------------------------------------- the equations


@pytest.mark.parametrize("blocks", [None, ((0, 1), (1, 2), (2, 3))])
def test_worked_example(blocks):
    """Computed by hand: pseudo-values 1, 1.05, -0.3775 and state 1.3775; beta must count once."""
    ones = torch.ones(1, 3, 1, 1, dtype=F64)
    v = torch.tensor([2.0, 3.0, 1.0], dtype=F64).view(1, 3, 1, 1)
    g = torch.full((1, 3, 1), math.log(0.9), dtype=F64)
    beta = torch.full((1, 3, 1), 0.5, dtype=F64)
    state = torch.zeros(1, 1, 1, 1, dtype=F64)
    chain = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    out, u = reference.tree_wy(ones, ones, v, g, beta, state, chain, blocks=blocks)
    expected_u = torch.tensor([1.0, 1.05, -0.3775], dtype=F64)
    expected_states = torch.tensor([1.0, 1.95, 1.3775], dtype=F64)
    torch.testing.assert_close(u.flatten(), expected_u, rtol=0, atol=1e-14)
    torch.testing.assert_close(out.flatten(), expected_states, rtol=0, atol=1e-14)
    after = reference.commit_path(state, u, ones, g, torch.ones(1, 3, dtype=torch.bool))
    assert after.item() == pytest.approx(1.3775, abs=1e-14)
    parents = torch.tensor([[-1, 0, 1]])
    _, states = reference.tree_recurrence(ones, ones, v, g, beta, state, parents)
    torch.testing.assert_close(states.flatten(), expected_states, rtol=0, atol=1e-14)
    _, final = reference.chunk_prefill(ones, ones, v, g, beta, state)
    assert final.item() == pytest.approx(1.3775, abs=1e-14)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_recurrence_is_the_written_out_formula(dims):
    case = Case(1, dims, nodes=9)
    q, k, v, g, beta = case.inputs
    for row in range(3):
        states = {-1: case.state[row]}
        for t in range(9):
            before = states[int(case.parents[row, t])]
            at = (row, t)
            out, states[t] = naive_step(before, q[at], k[at], v[at], g[at], beta[at])
            torch.testing.assert_close(case.out[at], out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(case.states[at], states[t], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_closed_form_equals_recurrence(dims, shape, decay):
    case = Case(2, dims, shape, decay)
    for blocks in (None, case.blocks):
        out, u = reference.tree_wy(*case.inputs, case.state, case.ancestors, blocks=blocks)
        torch.testing.assert_close(out, case.out, rtol=1e-11, atol=1e-12)
        for row in range(3):
            node = randint(case.gen, 0, 17)
            after = commit(case.state, case.inputs, u, row, path_of(case.parents, row, node))
            torch.testing.assert_close(after, case.states[row, node], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("decay", DECAYS)
def test_node_equals_its_path_run_alone(seed, decay):
    """A node's output is the last output of its ancestor path run as a chain."""
    case = Case(10 + seed, DIMS[seed % len(DIMS)], decay=decay, nodes=23)
    out, u = reference.tree_wy(*case.inputs, case.state, case.ancestors, blocks=case.blocks)
    for row in range(3):
        for node in (randint(case.gen, 0, 23) for _ in range(5)):
            path = path_of(case.parents, row, node)
            alone = [x[row : row + 1, path] for x in case.inputs]
            chain = torch.ones(1, len(path), len(path), dtype=torch.bool).tril()
            state = case.state[row : row + 1]
            out_alone, u_alone = reference.tree_wy(*alone, state, chain)
            torch.testing.assert_close(out[row, node], out_alone[0, -1], rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(u[row, node], u_alone[0, -1], rtol=1e-11, atol=1e-12)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_within_the_bound_and_near_the_recurrence(shape, decay):
    """At most 1e-5, and at most twice the float32 recurrence's own error."""
    case = Case(3, Dims(2, 4, 32, 24), shape, decay, batch=4, nodes=40)
    inputs, state = case.at(torch.float32)
    truth, states = reference.tree_recurrence(
        *[x.double() for x in inputs], state.double(), case.parents
    )
    plain_out, plain_states = reference.tree_recurrence(*inputs, state, case.parents)
    out, u = reference.tree_wy(*inputs, state, case.ancestors, blocks=case.blocks)
    assert out.dtype == u.dtype == torch.float32
    error, plain = relative_error(out, truth), relative_error(plain_out, truth)
    assert error <= 1e-5
    assert error <= 2 * plain
    nodes = random_accepted(case.gen, case.num_nodes).tolist()
    at = (range(4), nodes)
    after = torch.stack(
        [commit(state, inputs, u, row, path_of(case.parents, row, nodes[row])) for row in range(4)]
    )
    error, plain = relative_error(after, states[at]), relative_error(plain_states[at], states[at])
    assert error <= 1e-5
    assert error <= 2 * max(plain, 1e-8)  # a root's commit may be exact to the last bit


@pytest.mark.parametrize("shape", SHAPES)
def test_strongest_decay_gives_numbers(shape):
    """Case 18: exp(-G) overflows and exp(G) underflows here; exp(G_t - G_i) alone is safe."""
    dims = Dims(2, 4, 16, 8)
    case = Case(4, dims, shape, "strong", nodes=64)
    case.raw["A_log"].fill_(math.log(64.0))
    case.raw["a"].add_(30.0)
    inputs = prepare(case.raw, torch.float32)
    path_sum = (inputs[3].transpose(1, 2)[:, :, None] * case.ancestors[:, None]).sum(-1)
    assert (-path_sum).max().exp().isinf()
    assert path_sum.min().exp() == 0
    state = case.state.float()
    truth, states = reference.tree_recurrence(
        *[x.double() for x in inputs], state.double(), case.parents
    )
    out, u = reference.tree_wy(*inputs, state, case.ancestors)
    assert relative_error(out, truth) <= 1e-5
    after = commit(state, inputs, u, 0, path_of(case.parents, 0, 63))
    assert relative_error(after, states[0, 63]) <= 1e-5


def test_a_reset_in_the_path_does_not_cost_the_digits_of_later_decays():
    """One node that forgets everything, then mild ones: float32 path sums would be off by 1e-4."""
    dims = Dims(1, 2, 16, 8)
    case = Case(5, dims, "chain", "mild", nodes=48)
    q, k, v, g, beta = case.at(torch.float32)[0]
    g = g.clone()
    g[:, 3] = -3000.3
    inputs, state = (q, k, v, g, beta), case.state.float()
    wide = [x.double() for x in inputs]
    truth, states = reference.tree_recurrence(*wide, state.double(), case.parents)
    out, u = reference.tree_wy(*inputs, state, case.ancestors, blocks=case.blocks)
    assert relative_error(out[:, 4:], truth[:, 4:]) <= 1e-6
    after = commit(state, inputs, u, 0, list(range(48)))
    assert relative_error(after, states[0, -1]) <= 1e-6
    out, final = reference.chunk_prefill(*inputs, state)
    assert relative_error(out[:, 4:], truth[:, 4:]) <= 1e-6
    assert relative_error(final, states[:, -1]) <= 1e-6


def test_infinite_gate_input_forgets_and_stays_finite():
    """A gate input at infinity means alpha = 0, not NaN for what comes after."""
    case = Case(6, DIMS[0], "chain", nodes=6)
    case.raw["a"][:, 2] = math.inf
    inputs = prepare(case.raw)
    out, _ = reference.tree_wy(*inputs, case.state, case.ancestors)
    truth, _ = reference.tree_recurrence(*inputs, case.state, case.parents)
    assert out.isfinite().all()
    torch.testing.assert_close(out, truth)


def test_gates_stay_in_float32():
    """Case 20: beta and g of 16-bit inputs are not rounded to 16 bits."""
    gen = generator(7)
    raw = projections(gen, DIMS[1], 2, 5, dtype=torch.bfloat16)
    g, beta = reference.gates(raw["a"], raw["b"], raw["A_log"], raw["dt_bias"])
    assert g.dtype == beta.dtype == torch.float32
    assert torch.equal(beta, raw["b"].float().sigmoid())
    assert not torch.equal(beta, beta.bfloat16().float())
    assert not torch.equal(g, g.bfloat16().float())


EXTREMES = (0.0, 1.0, -1.0, 100.0, -200.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, F64], ids=str)
@pytest.mark.parametrize("A_log", [0.0, 88.0, 100.0, 1e30, -200.0, -1e30])
def test_gates_are_never_nan(A_log, dtype):
    """exp(A_log) = Inf meets softplus = 0, and exp(A_log) = 0 meets softplus = Inf."""
    a = torch.tensor([*EXTREMES, math.inf, -math.inf], dtype=F64).to(dtype)[:, None]
    wide = torch.promote_types(dtype, torch.float32)
    dt_bias = torch.tensor(EXTREMES, dtype=wide)
    g, beta = reference.gates(a, a, torch.full_like(dt_bias, A_log), dt_bias)
    assert ((g >= reference.MIN_LOG_DECAY) & (g <= 0)).all()
    assert ((beta >= 0) & (beta <= 1)).all()


def test_gates_keep_a_nan():
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    for a, A_log, dt_bias in ((nan, one, one), (one, nan, one), (one, one, nan)):
        assert reference.gates(a, one, A_log, dt_bias)[0].isnan().all()


# ---------------------------------------------------------------- what must not leak


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
def test_poison_reaches_the_node_and_its_descendants_alone(name, poison):
    """Non-ancestors are selected away: NaN, Inf or an overflow elsewhere changes no bit."""
    dims = DIMS[1]
    case = Case(8, dims, batch=2, nodes=15)
    case.parents[:] = torch.tensor([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6])
    ancestors = topology.ancestor_mask(case.parents, case.num_nodes)
    blocks = topology.independent_blocks(case.parents, case.num_nodes)
    state = case.state.float()
    raw = {key: x.float() for key, x in case.raw.items()}
    clean = reference.tree_wy(*prepare(raw), state, ancestors, blocks=blocks)
    raw[name][1, 3] = poison
    dirty = reference.tree_wy(*prepare(raw), state, ancestors, blocks=blocks)
    touched = ancestors[1, :, 3]
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1, ~touched], after[1, ~touched])
    if name in ("k", "v") and math.isnan(poison):
        assert dirty[1][1, touched].isnan().all()


def test_select_sum_takes_the_selected_alone():
    gen = generator(9)
    selected = torch.rand(6, 8, generator=gen) < 0.5
    weights = torch.where(selected, torch.randn(6, 8, generator=gen), 0.0)
    values = torch.randn(8, 3, generator=gen)
    clean = reference.select_sum(weights, selected, values)
    values[2, 1] = math.nan
    dirty = reference.select_sum(weights, selected, values)
    bad = selected[:, 2]
    assert bad.any()
    assert not bad.all()
    assert dirty[bad, 1].isnan().all()
    assert torch.equal(dirty[~bad], clean[~bad])
    assert torch.equal(dirty[:, [0, 2]], clean[:, [0, 2]])


# ---------------------------------------------------------------- history


@pytest.mark.parametrize("decay", DECAYS)
def test_history_applied_equals_history_folded(decay):
    case = Case(11, DIMS[1], decay=decay, nodes=12)
    _, u = reference.tree_wy(*case.inputs, case.state, case.ancestors)
    lengths = torch.tensor([0, 3, 7])
    k, g = case.inputs[1].clone(), case.inputs[3].clone()
    for row in range(3):  # leftovers behind the entries in use
        for x in (u, k, g):
            x[row, lengths[row] :] = math.nan
    history = reference.History(u, k, g, lengths)
    folded = reference.fold_history(case.state, history)
    assert torch.equal(folded[0], case.state[0])
    following = Case(12, DIMS[1], nodes=9, decay=decay)
    plain = reference.tree_wy(*following.inputs, folded, following.ancestors)
    applied = reference.tree_wy(*following.inputs, case.state, following.ancestors, history=history)
    for x, y in zip(applied, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


# ---------------------------------------------------------------- prefill


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 200])
def test_chunked_prefill_equals_recurrence(tokens, decay):
    case = Case(13, DIMS[1], "chain", decay, batch=2, nodes=tokens)
    out, final = reference.chunk_prefill(*case.inputs, case.state)
    torch.testing.assert_close(out, case.out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(final, case.states[:, -1], rtol=1e-10, atol=1e-12)


def test_chunked_prefill_of_float32_is_within_the_bound():
    for decay in DECAYS:
        case = Case(14, Dims(1, 2, 32, 24), "chain", decay, batch=2, nodes=150)
        inputs, state = case.at(torch.float32)
        wide = [x.double() for x in inputs]
        truth, states = reference.tree_recurrence(*wide, state.double(), case.parents)
        plain, _ = reference.tree_recurrence(*inputs, state, case.parents)
        out, final = reference.chunk_prefill(*inputs, state)
        assert relative_error(out, truth) <= min(1e-5, 2 * relative_error(plain, truth))
        assert relative_error(final, states[:, -1]) <= 1e-5


def test_ragged_prefill_takes_the_tokens_that_are_there():
    lengths = [131, 64, 64, 7]
    case = Case(15, DIMS[2], "chain", batch=4, nodes=131)
    inputs = [x.clone() for x in case.inputs]
    for row, length in enumerate(lengths):
        for x in inputs:
            x[row, length:] = math.nan
    out, final = reference.chunk_prefill(*inputs, case.state, lengths=lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[row, :length], case.out[row, :length])
        torch.testing.assert_close(final[row], case.states[row, length - 1])
        assert not out[row, length:].any()


def test_ragged_prefill_refuses_lengths_out_of_order():
    case = Case(16, DIMS[0], "chain", batch=2, nodes=4)
    with pytest.raises(ValueError, match="longest first"):
        reference.chunk_prefill(*case.inputs, case.state, lengths=[2, 4])


def test_prefill_is_causal_for_poison_too():
    case = Case(17, DIMS[0], "chain", batch=1, nodes=80)
    inputs = [x.clone() for x in case.inputs]
    clean, _ = reference.chunk_prefill(*inputs, case.state)
    inputs[2][:, 40] = math.nan
    dirty, _ = reference.chunk_prefill(*inputs, case.state)
    assert torch.equal(clean[:, :40], dirty[:, :40])
    assert dirty[:, 40:].isnan().all()


def test_prefill_has_gradients():
    """The shipped model is trained through this function."""
    case = Case(18, DIMS[0], "chain", batch=1, nodes=6)
    inputs = [x.detach().requires_grad_() for x in case.inputs]

    def total(*args):
        out, final = reference.chunk_prefill(*args, case.state, chunk=4)
        return out.square().sum() + final.sum()

    assert torch.autograd.gradcheck(total, inputs)


def test_recurrence_and_prefill_agree_with_transformers():
    """An implementation no one here wrote, in float32 as it computes."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    dims = Dims(4, 4, 16, 8)
    case = Case(19, dims, "chain", batch=2, nodes=100)
    inputs, state = case.at(torch.float32)
    _, _, v, g, beta = inputs
    raw = {name: case.raw[name].float() for name in ("q", "k")}
    theirs, final = qwen.torch_recurrent_gated_delta_rule(
        raw["q"],
        raw["k"],
        v,
        g,
        beta,
        initial_state=state.transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for ours, last in (
        reference.chunk_prefill(*inputs, state),
        reference.tree_recurrence(*inputs, state, case.parents),
    ):
        last = last[:, -1] if last.dim() == 5 else last
        assert relative_error(ours, theirs) <= 1e-5
        assert relative_error(last, final.transpose(-1, -2)) <= 1e-5


# ---------------------------------------------------------------- convolution


def naive_conv(window, inputs, weight, bias):
    """Last output of a causal conv with SiLU over (window, inputs), and the window after it."""
    rows = torch.cat((window, inputs))
    width = weight.shape[1]
    total = (rows[-width:] * weight.t()).sum(0) + (0 if bias is None else bias)
    return total * total.sigmoid(), rows[-(width - 1) :]


@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_conv_is_the_causal_conv_along_the_path(shape, width):
    """Cases 11 and 12: by depth along the path, from the raw inputs, depths below and above W."""
    gen = generator(20)
    parents, num_nodes = random_trees(gen, 3, 12, shape=shape)
    valid = topology.valid_nodes(parents, num_nodes)
    x = torch.randn(3, 12, 10, generator=gen, dtype=F64)
    window = torch.randn(3, width - 1, 10, generator=gen, dtype=F64)
    weight = torch.randn(10, width, generator=gen, dtype=F64)
    bias = torch.randn(10, generator=gen, dtype=F64)
    taps = reference.tap_rows(parents, valid, width)
    y = reference.tree_conv(x, window, taps, weight, bias)
    rows = torch.arange(3)
    for node in range(12):
        moved = reference.conv_window(window, x, taps[rows, node], rows)
        for row in range(3):
            if node < num_nodes[row]:
                path = x[row, path_of(parents, row, node)]
                expected, after = naive_conv(window[row], path, weight, bias)
                torch.testing.assert_close(y[row, node], expected)
                assert torch.equal(moved[row], after)


@pytest.mark.parametrize("channels", [8, 37, 64])
def test_conv_of_a_path_has_the_same_bits_in_every_tree(channels):
    gen = generator(21)
    weight = torch.randn(channels, 4, generator=gen)
    window = torch.randn(1, 3, channels, generator=gen)
    path = torch.randn(5, channels, generator=gen)
    chain, after = reference.causal_conv(path, window[0], weight)
    assert torch.equal(after, path[-3:])
    for seed in range(5):
        parents, num_nodes = random_trees(generator(seed), 1, 19, full=True)
        place = sorted(torch.randperm(18, generator=gen)[:4].add(1).tolist())
        for before, node in zip([0, *place], place, strict=False):
            parents[0, node] = before
        nodes = [0, *place]
        x = torch.randn(1, 19, channels, generator=gen)
        x[0, nodes] = path
        valid = topology.valid_nodes(parents, num_nodes)
        taps = reference.tap_rows(parents, valid, 4)
        y = reference.tree_conv(x, window, taps, weight)
        assert same_bits(y[0, nodes], chain)
