"""The operators: by slot against the reference, what must stay untouched, and every refusal."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from gdn_cases import (
    DECAYS,
    DIMS,
    Dims,
    bits,
    expected_step,
    generator,
    path_of,
    projections,
    randint,
    random_accepted,
    random_slots,
    random_state,
    random_trees,
    relative_error,
    same_bits,
)
from torch.overrides import TorchFunctionMode

from trtllm_treewy import ops, reference, topology
from trtllm_treewy.op_inputs import Folds

F64 = torch.float64
SLOTS, BATCH, NODES, LAYERS = 7, 4, 11, 2
treewy = torch.ops.treewy


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """Pools of several layers, and a batch of trees over random slots of them."""

    def __init__(
        self, seed, dims=DIMS[1], *, dtype=F64, state_dtype=None, shape="random", decay="mild",
        nodes=NODES, pads=1, full=False,
    ):  # fmt: skip
        gen = generator(seed)
        self.gen, self.dims, self.dtype = gen, dims, dtype
        state_dtype = state_dtype or torch.promote_types(dtype, torch.float32)
        self.slot = random_slots(gen, BATCH, SLOTS, pads=pads)
        self.parents, self.num_nodes = random_trees(gen, BATCH, nodes, shape=shape, full=full)
        self.accepted = random_accepted(gen, self.num_nodes)
        self.state = random_state(gen, dims, LAYERS, SLOTS, dtype=state_dtype)
        window = (LAYERS, SLOTS, dims.width - 1, dims.conv_dim)
        self.conv_state = torch.randn(window, generator=gen, dtype=F64).to(dtype)
        inputs = (LAYERS, BATCH, nodes, dims.conv_dim)
        self.x = torch.randn(inputs, generator=gen, dtype=F64).to(dtype)
        self.weight = torch.randn(dims.conv_dim, dims.width, generator=gen, dtype=F64).to(dtype)
        self.raw = [
            projections(gen, dims, BATCH, nodes, dtype=dtype, decay=decay) for _ in range(LAYERS)
        ]

    @property
    def trees(self):
        return self.slot, self.parents, self.num_nodes

    @property
    def goal(self):
        return *self.trees, self.accepted

    @property
    def real(self):
        return topology.valid_nodes(self.parents, self.num_nodes) & (self.slot >= 0)[:, None]

    @property
    def inputs(self):
        """x, a and b of all layers."""
        return self.x, *(torch.stack([raw[name] for raw in self.raw]) for name in "ab")

    def layers(self, *, bias=True):
        """Conv weights and bias, A_log and dt_bias of all layers."""
        weight = torch.stack([self.weight * (1 + layer) for layer in range(LAYERS)])
        parameters = (torch.stack([raw[n] for raw in self.raw]) for n in ("A_log", "dt_bias"))
        return weight, weight[:, :, 0] if bias else None, *parameters

    def of_conv(self, *, bias=True):
        """The case with q, k and v as the conv of x gives them."""
        weight, of_bias, *_ = self.layers(bias=bias)
        for layer, raw in enumerate(self.raw):
            given = None if of_bias is None else of_bias[layer]
            y = treewy.tree_conv(
                self.x[layer], self.conv_state[layer], *self.trees, weight[layer], given
            )
            keys = self.dims.key_heads * self.dims.key_dim
            q, k, v = y.split((keys, keys, y.shape[-1] - 2 * keys), -1)
            raw["q"], raw["k"] = (x.unflatten(-1, (-1, self.dims.key_dim)) for x in (q, k))
            raw["v"] = v.unflatten(-1, (-1, self.dims.value_dim))
        return self

    def verify(self, layer=0, history=()):
        return treewy.tree_verify(
            *self.raw[layer].values(), self.state[layer], *self.trees, *history
        )

    def snapshot(self, layer=0):
        return treewy.tree_verify_snapshot(
            *self.raw[layer].values(), self.state[layer], *self.trees
        )

    def conv(self, layer=0):
        return treewy.tree_conv(self.x[layer], self.conv_state[layer], *self.trees, self.weight)

    def verify_all(self, history=None):
        """out of all layers, and the stash: u, raw k and g."""
        outs = []
        for layer in range(LAYERS):
            of_layer = () if history is None else (*(x[layer] for x in history[:3]), history[3])
            out, u, g = self.verify(layer, of_layer)
            outs.append((out, u, self.raw[layer]["k"], g))
        out, *stash = (torch.stack(x) for x in zip(*outs, strict=True))
        return out, stash

    def stash(self, history=None):
        return self.verify_all(history)[1]

    def snapshots(self):
        return torch.stack([self.snapshot(layer)[1] for layer in range(LAYERS)])

    def history(self, capacity=16):
        dims, dtype = self.dims, torch.promote_types(self.dtype, torch.float32)
        lead = (LAYERS, SLOTS, capacity)
        return [
            torch.zeros(*lead, dims.value_heads, dims.value_dim, dtype=dtype),
            torch.zeros(*lead, dims.key_heads, dims.key_dim, dtype=dtype),
            torch.zeros(*lead, dims.value_heads, dtype=dtype),
            torch.zeros(SLOTS, dtype=torch.int32),
        ]

    def filled_history(self, capacity=16):
        """The same with random entries and lengths."""
        u, k, g, length = self.history(capacity)
        u.normal_(generator=self.gen)
        k = reference.l2norm(k.normal_(generator=self.gen))
        g.uniform_(-1.0, 0.0, generator=self.gen)
        lengths = torch.randint(0, capacity + 1, (SLOTS,), generator=self.gen)
        return [u, k, g, lengths.int()]

    def folds(self):
        """history_folded and history_folding of pools in which nothing is folded."""
        heads, dim = self.dims.value_heads, self.dims.value_dim
        return list(Folds.new(LAYERS, SLOTS, heads, dim, torch.device("cpu")))

    def expected(self, layer=0):
        """Outputs and states of the float64 recurrence, [B, N, ...]."""
        raw, state = self.raw[layer], self.state[layer]
        return expected_step(raw, state, self.slot, self.parents, self.real)


# ---------------------------------------------------------------- registration


def calls():
    """One call of every operator with small inputs."""
    case = Case(0, DIMS[2], dtype=torch.float32)
    u, k, g = case.stash()
    _, states = case.snapshot()
    history = case.history()
    one = Case(1, DIMS[2], dtype=torch.float32)
    packed = {name: x[0] if x.dim() > 1 else x for name, x in one.raw[0].items()}
    chunks = (int32(4, -1, 2), int32(0, 5, 7, NODES))
    of_layer = [x[0] for x in history[:3]]
    delta = (*case.raw[0].values(), case.state[0], *case.trees)
    ids = torch.randint(0, 2, (2, BATCH, NODES), generator=case.gen)
    filled, folds = case.filled_history(), case.folds()
    folds[0][:, 2], folds[1][2] = 1, 1  # what is folded already
    return {
        "tree_conv": (case.x[0], case.conv_state[0], *case.trees, case.weight, case.weight[:, 0]),
        "tree_conv_into": (
            case.x[0],
            case.conv_state[0],
            *case.trees,
            case.weight,
            case.weight[:, 0],
            case.x[1].clone(),
        ),
        "tree_verify": delta,
        "tree_verify_into": (*delta, u[0].clone(), g[0].clone()),
        "tree_verify_snapshot": delta,
        "tree_outputs": delta,
        "greedy_accept": (*ids, *case.trees, 4),
        "commit": (case.state, *case.goal, u, k, g),
        "commit_inputs": (case.state, case.conv_state, *case.goal, *case.inputs, *case.layers()),
        "commit_deferred": (case.state, *history, *case.goal, u, k, g),
        "flush_history": (case.state, *history[:3], int32(*[2] * SLOTS), case.slot),
        "commit_snapshot": (case.state, *case.goal, states.expand(LAYERS, *states.shape).clone()),
        "conv_commit": (case.conv_state, *case.goal, case.x),
        "path_conv": (case.x.clone(), case.conv_state, *case.goal, case.x, *case.layers()[:2]),
        "prefill": (*packed.values(), case.state[1], *chunks),
        "prefill_conv": (case.x[0, 0], case.conv_state[1], *chunks, case.weight),
        "tree_verify with history": (*delta, *of_layer, int32(*[2] * SLOTS)),
        "tree_verify_folding": (
            *delta[:7],
            case.state[0].clone(),
            *case.trees,
            *(u[0].clone(), g[0].clone()),
            *(x[0] for x in filled[:3]),
            filled[3],
            *(folds[0][0].clone(), folds[1].clone(), 8),
        ),
        "commit_deferred_folding": (case.state, *filled, *case.goal, u, k, g, *folds),
        "flush_history_folding": (case.state, *filled, case.slot, *folds),
    }


COMMITS = ("commit", "commit_inputs", "commit_deferred", "commit_snapshot", "conv_commit")
OF_PATHS = (*COMMITS, "commit_deferred_folding", "path_conv")  # what takes an accepted node


def goal_at(op):
    """Where slot, parents, num_nodes and accepted start among the arguments."""
    deferred = dict.fromkeys(("commit_deferred", "commit_deferred_folding"), 5)
    return (deferred | {"commit_inputs": 2, "path_conv": 2}).get(op, 1)


@pytest.mark.parametrize("name", calls())
def test_operator_is_registered_as_torch_wants_it(name):
    """Schema, fake kernel, aliasing and tracing, by torch's own checker."""
    operator = getattr(ops, name.split()[0])
    torch.library.opcheck(operator, calls()[name])
    # torch 2.11 looks for every argument that is written among those that were given.
    for argument in getattr(treewy, name.split()[0]).default._schema.arguments:
        assert not (argument.has_default_value() and argument.alias_info), argument.name


def test_operators_are_traced_with_the_right_shapes_and_types():
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case(0, dtype=torch.bfloat16)
    real = [*case.verify(), *case.snapshot(), case.conv()]
    with FakeTensorMode() as mode:
        for name in ("slot", "parents", "num_nodes", "state", "conv_state", "x", "weight"):
            setattr(case, name, mode.from_tensor(getattr(case, name)))
        case.raw = [{name: mode.from_tensor(x) for name, x in raw.items()} for raw in case.raw]
        fake = [*case.verify(), *case.snapshot(), case.conv()]
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


# ---------------------------------------------------------------- verification


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", ["random", "chain", "star", "levels"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_verify_equals_the_recurrence_by_slot(dims, shape, decay):
    """Cases 6, 7 and 14: random slots, padded rows and nodes zero, everything else right."""
    case = Case(2, dims, shape=shape, decay=decay)
    expected, states = case.expected(layer=1)
    out, u, g = case.verify(1)
    stepped, stored = case.snapshot(1)
    real = case.real
    for x in (out, stepped):
        torch.testing.assert_close(x[real], expected[real], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(stored[real], states[real], rtol=1e-11, atol=1e-12)
    for x in (out, u, g, stepped, stored):
        assert not x[~real].any()
        assert x.dtype == F64


@pytest.mark.parametrize("seed", range(3))
def test_verify_of_a_node_equals_its_path_run_alone(seed):
    """As in the reference, through the operators, convolution included."""
    case = Case(20 + seed, DIMS[seed])
    out, conv = case.verify()[0], case.conv()
    for row in range(BATCH):
        if case.slot[row] < 0:
            continue
        node = randint(case.gen, 0, int(case.num_nodes[row]))
        path = path_of(case.parents, row, node)
        parents = int32(*range(-1, len(path) - 1))[None]
        chain = (case.slot[row : row + 1], parents, int32(len(path)))
        raw = {
            name: x[row : row + 1, path] if x.dim() > 1 else x for name, x in case.raw[0].items()
        }
        alone, _, _ = treewy.tree_verify(*raw.values(), case.state[0], *chain)
        torch.testing.assert_close(out[row, node], alone[0, -1], rtol=1e-11, atol=1e-12)
        x = case.x[0, row : row + 1, path]
        alone = treewy.tree_conv(x, case.conv_state[0], *chain, case.weight)
        assert same_bits(conv[row, node], alone[0, -1])


@pytest.mark.parametrize("nodes", [1, 2, 64, 130, 200])
def test_every_tree_size_works(nodes):
    """Case 5: no private limit on the number of nodes, for bushy trees and for chains."""
    for shape in ("random", "chain"):
        case = Case(3, DIMS[2], nodes=nodes, shape=shape, full=True)
        expected, _ = case.expected()
        real = case.real
        torch.testing.assert_close(case.verify()[0][real], expected[real], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_computed_in_float32(dtype):
    """Case 20: only the output is rounded; gates, pseudo-values and state products are not."""
    case = Case(4, dtype=dtype)
    out, u, g = case.verify()
    assert out.dtype == dtype
    assert u.dtype == g.dtype == torch.float32
    wide = Case(4, dtype=dtype)
    wide.raw = [{name: x.float() for name, x in raw.items()} for raw in wide.raw]
    out_wide, u_wide, g_wide = wide.verify()
    assert same_bits(u, u_wide)
    assert same_bits(g, g_wide)
    assert same_bits(out, out_wide.to(dtype))
    real = case.real
    assert relative_error(out_wide[real], case.expected()[0][real]) <= 1e-5


def test_strided_views_give_the_bits_of_copies():
    case = Case(5, dtype=torch.float32)
    assert not case.raw[0]["q"].is_contiguous()
    views = [*case.verify(), *case.snapshot()]
    case.raw = [{name: x.contiguous() for name, x in raw.items()} for raw in case.raw]
    for x, y in zip(views, [*case.verify(), *case.snapshot()], strict=True):
        assert same_bits(x, y)


def test_verification_writes_nothing():
    case = Case(6)
    pools = case.state, case.conv_state, case.x
    before = [bits(x) for x in pools]
    case.verify()
    case.snapshot()
    case.conv()
    for x, y in zip(pools, before, strict=True):
        assert torch.equal(bits(x), y)


def test_metadata_changed_in_place_is_seen():
    """Case 23's kind: the same buffers hold another tree at the next step."""
    case = Case(7, full=True, pads=0)
    case.verify()
    parents, _ = random_trees(generator(99), BATCH, NODES, shape="star", full=True)
    case.parents.copy_(parents)
    case.num_nodes.copy_(int32(2, 5, 11, 7))
    real = case.real
    torch.testing.assert_close(case.verify()[0][real], case.expected()[0][real])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_elsewhere_changes_no_bit(poison):
    """Cases 7 and 8: NaN or Inf in siblings, padded nodes and rows, and other slots stays there."""
    case = Case(8, dtype=torch.float32)
    _, num_nodes, slot = case.parents, case.num_nodes, case.slot
    row = int((slot >= 0).nonzero()[1])
    case.parents[row, :6] = int32(-1, 0, 0, 1, 2, 1)
    num_nodes[row] = 6
    history = case.history()
    for layer_pool in history[:3]:
        layer_pool.normal_(generator=case.gen)
    history[2].abs_().neg_()
    history[3][:] = 5
    of_layer = [*(x[0] for x in history[:3]), history[3]]

    def run():
        return [*case.verify(), *case.verify(history=of_layer), *case.snapshot(), case.conv()]

    clean = run()
    touched = ~case.real
    touched[row, [2, 4]] = True  # the poisoned sibling and its child
    used = slot[slot >= 0].long()
    free = torch.ones(SLOTS, dtype=torch.bool)
    free[used] = False
    for pool in (case.state, case.conv_state, *history[:3]):
        pool[:, free] = poison
    for pool in history[:3]:
        pool[:, :, 5:] = poison
    for x in (*case.raw[0].values(), case.x[0]):
        if x.dim() > 1:
            x[touched] = poison
    for before, after in zip(clean, run(), strict=True):
        assert torch.equal(before[~touched], after[~touched])
        assert before[~touched].isfinite().all()
        assert not after[~case.real].any()


def test_padded_rows_do_not_depend_on_slot_zero():
    """Case 6: -1 is not slot 0 and not the last slot."""
    case = Case(9, pads=BATCH)
    case.slot[2] = 3
    before = [*case.verify(), *case.snapshot(), case.conv()]
    for pool in (case.state, case.conv_state):
        pool[:, [0, 6]] = math.nan
    after = [*case.verify(), *case.snapshot(), case.conv()]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y)
        assert not y[[0, 1, 3]].any()


# ---------------------------------------------------------------- commits


def commit_all(case):
    """The state pools after the same step under the three policies, and the conv pool."""
    plain, deferred, snapshot = (case.state.clone() for _ in range(3))
    stash, history = case.stash(), case.history()
    treewy.commit(plain, *case.goal, *stash)
    treewy.commit_deferred(deferred, *history, *case.goal, *stash)
    treewy.flush_history(deferred, *history, case.slot)
    stored = case.snapshots()
    treewy.commit_snapshot(snapshot, *case.goal, stored)
    conv_state = case.conv_state.clone()
    treewy.conv_commit(conv_state, *case.goal, case.x)
    return {"reconstruct": plain, "deferred": deferred, "snapshot": snapshot}, conv_state


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_commit_moves_every_layer_to_the_accepted_node(dims, decay):
    """Cases 9, 10 and 14: scattered accepted nodes, random slots, each layer its own data."""
    case = Case(10, dims, decay=decay)
    states, conv_state = commit_all(case)
    moved = [row for row in range(BATCH) if case.slot[row] >= 0]
    assert any(int(case.accepted[row]) > 0 for row in moved)
    for layer in range(LAYERS):
        _, expected = case.expected(layer)
        for row in moved:
            slot, node = int(case.slot[row]), int(case.accepted[row])
            for state in states.values():
                torch.testing.assert_close(
                    state[layer, slot], expected[row, node], rtol=1e-11, atol=1e-12
                )
            path = case.x[layer, row, path_of(case.parents, row, node)]
            window = torch.cat((case.conv_state[layer, slot], path))[-(dims.width - 1) :]
            assert torch.equal(conv_state[layer, slot], window)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_commit_from_inputs_equals_that_from_pseudo_values(dims, decay):
    for bias in (True, False):
        case = Case(13, dims, decay=decay, pads=1).of_conv(bias=bias)
        case.accepted[int((case.slot >= 0).nonzero()[0])] = -1
        free = [s for s in range(SLOTS) if s not in case.slot.tolist()]
        case.conv_state[:, free] = math.nan
        stash, windows = case.stash(), case.conv_state.clone()
        off = torch.ones(BATCH, NODES, dtype=torch.bool)
        for row, node in enumerate(case.accepted.tolist()):
            off[row, path_of(case.parents, row, node)] = False
        x, a, b = (t.masked_fill(off[None, :, :, None], math.nan) for t in case.inputs)
        state = case.state.clone()
        given = (x, a, b, *case.layers(bias=bias))
        treewy.commit_inputs(state, case.conv_state, *case.goal, *given)
        treewy.commit(case.state, *case.goal, *stash)
        torch.testing.assert_close(state, case.state, rtol=1e-11, atol=1e-12)
        assert same_bits(case.conv_state, windows)


def test_outputs_alone_have_the_bits_of_verification():
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(14, dtype=dtype)
        args = (*case.raw[0].values(), case.state[0], *case.trees)
        assert same_bits(treewy.tree_outputs(*args), treewy.tree_verify(*args)[0])


def test_a_stash_may_be_written_in_place():
    for dtype, of_u in ((torch.float64, None), (torch.bfloat16, torch.bfloat16)):
        case = Case(16, dtype=dtype, state_dtype=dtype)
        args = (*case.raw[0].values(), case.state[0], *case.trees)
        out, u, g = treewy.tree_verify(*args, *(None,) * 4, of_u)
        # Rows of a larger buffer, as the stash of a smaller batch has them.
        wide = [torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), -7.0).to(x.dtype)
                for x in (u, g)]  # fmt: skip
        cut = [x[:, :NODES] for x in wide]
        assert same_bits(treewy.tree_verify_into(*args, *cut), out)
        assert same_bits(cut[0], u)
        assert same_bits(cut[1], g)
        assert all((x[:, NODES:] == -7).all() for x in wide)
    for bad in ((u[:1], g), (u, g.double()), (u.half(), g), (u.transpose(2, 3), g)):
        with pytest.raises(ValueError, match="tree_verify_into"):
            treewy.tree_verify_into(*args, *bad)


def test_pseudo_values_may_be_bfloat16_beside_a_bfloat16_state():
    case = Case(15, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    none = (None, None, None, None)
    args = (*case.raw[0].values(), case.state[0], *case.trees)
    out, u, g = treewy.tree_verify(*args, *none, torch.bfloat16)
    wide = treewy.tree_verify(*args)
    assert same_bits(out, wide[0])
    assert same_bits(u, wide[1].bfloat16())
    assert same_bits(g, wide[2])
    state, rounded = case.state[:1].clone(), case.state[:1].clone()
    k = case.raw[0]["k"][None]
    treewy.commit(state, *case.goal, u[None], k, g[None])
    treewy.commit(rounded, *case.goal, wide[1].bfloat16().float()[None], k, g[None])
    assert same_bits(state, rounded)
    with pytest.raises(ValueError, match="u_dtype must be float32, or bfloat16 where the state is"):
        treewy.tree_verify(*args, *none, torch.float16)
    single = (*case.raw[0].values(), case.state[0].float(), *case.trees)
    with pytest.raises(ValueError, match="got bfloat16"):
        treewy.tree_verify(*single, *none, torch.bfloat16)


def test_greedy_acceptance_of_nothing():
    ids = torch.zeros(2, 0, dtype=torch.int64)
    parents = torch.zeros(2, 0, dtype=torch.int32)
    got = treewy.greedy_accept(ids, ids, int32(0, 1), parents, int32(0, 0), 3)
    assert [x.tolist() for x in got] == [[-1, -1], [0, 0], [[-1] * 3] * 2, [-1, -1]]


@pytest.mark.parametrize("ignored", [0, 12345])
def test_rows_that_accept_nothing_keep_every_bit(ignored):
    """Case 2: accepted -1 and slot -1 move nothing, and neither do slots outside the batch."""
    case = Case(11, dtype=torch.float32)
    still = int((case.slot >= 0).nonzero()[0])
    case.accepted[still] = -1
    case.accepted[case.slot < 0] = ignored
    moved = case.slot[(case.slot >= 0) & (case.accepted >= 0)].long()
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[moved] = False
    assert others[0]
    assert int(case.slot[still]) in others.nonzero()[:, 0].tolist()
    stash = case.stash()
    case.state[:, others] = math.nan
    case.conv_state[:, others] = -0.0
    states, conv_state = commit_all(case)
    for after, before in [
        *((x, case.state) for x in states.values()),
        (conv_state, case.conv_state),
    ]:
        assert same_bits(after[:, others], before[:, others])
        for slot in moved.tolist():
            assert not same_bits(after[:, slot], before[:, slot])
            assert after[:, slot].isfinite().all()
    case.accepted[:] = -1
    before = bits(case.state)
    treewy.commit(case.state, *case.goal, *stash)
    assert torch.equal(bits(case.state), before)


def test_poisoned_nodes_off_the_path_do_not_reach_the_commit():
    case = Case(12, dtype=torch.float32, pads=0)
    stash = case.stash()
    stored = case.snapshots()
    off = torch.ones(BATCH, NODES, dtype=torch.bool)
    for row in range(BATCH):
        off[row, path_of(case.parents, row, int(case.accepted[row]))] = False
    clean, conv_clean = commit_all(case)
    for x in (*stash, stored, case.x):
        x[:, off] = math.nan
    plain, deferred, snapshot = (case.state.clone() for _ in range(3))
    history = case.history()
    treewy.commit(plain, *case.goal, *stash)
    treewy.commit_deferred(deferred, *history, *case.goal, *stash)
    treewy.flush_history(deferred, *history, case.slot)
    treewy.commit_snapshot(snapshot, *case.goal, stored)
    treewy.conv_commit(case.conv_state, *case.goal, case.x)
    assert same_bits(plain, clean["reconstruct"])
    assert same_bits(deferred, clean["deferred"])
    off_last = off.clone()
    for row in range(BATCH):
        off_last[row, int(case.accepted[row])] = False
    assert same_bits(snapshot, clean["snapshot"])
    assert same_bits(case.conv_state, conv_clean)


def test_sixteen_bit_state_is_written_to_the_pool():
    """Case 21: the pool itself changes, to the rounding of what float32 would hold."""
    case = Case(13, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    before = case.state.clone()
    wide = case.state.float()
    stash = case.stash()
    stored = case.snapshots()
    assert stored.dtype == torch.bfloat16
    treewy.commit(wide, *case.goal, *stash)
    treewy.commit(case.state, *case.goal, *stash)
    assert same_bits(case.state, wide.bfloat16())
    snapshot = before.clone()
    treewy.commit_snapshot(snapshot, *case.goal, stored)
    for row in range(BATCH):
        slot = int(case.slot[row])
        if slot >= 0:
            assert not same_bits(case.state[:, slot], before[:, slot])
    torch.testing.assert_close(snapshot, case.state, rtol=1e-2, atol=1e-2)


def test_a_node_of_the_snapshot_continues_from_the_unrounded_parent():
    case = Case(14, dtype=torch.bfloat16, state_dtype=torch.bfloat16, shape="chain", full=True)
    _, stored = case.snapshot()
    _, exact = case.expected()
    real = case.real
    # One rounding to 8 bits, however deep the node.
    error = (stored.double() - exact).abs()[real]
    assert bool((error <= exact.abs()[real] * 2.0**-8 + 1e-6).all())


@pytest.mark.parametrize("width", [2, 4, 6])
def test_conv_commit_of_short_and_long_paths(width):
    """Paths shorter than the window keep some of its rows, longer ones replace it."""
    dims = Dims(1, 1, 3, 2, width=width)
    case = Case(15, dims, shape="chain", full=True, pads=0)
    for length in (1, 2, width - 1, width, NODES):
        case.accepted[:] = length - 1
        conv_state = case.conv_state.clone()
        treewy.conv_commit(conv_state, *case.goal, case.x)
        for row in range(BATCH):
            slot = int(case.slot[row])
            rows = torch.cat((case.conv_state[:, slot], case.x[:, row, :length]), 1)
            assert torch.equal(conv_state[:, slot], rows[:, -(width - 1) :])


def path_conv_case(width, **options):
    """A case, y full of sevens, and of every layer what tree_conv gives."""
    case = Case(16, Dims(1, 1, 3, 2, width=width), **options)
    weight, bias, *_ = case.layers()
    given = [
        (case.x[i], case.conv_state[i], *case.trees, weight[i], bias[i]) for i in range(LAYERS)
    ]
    whole = torch.stack([treewy.tree_conv(*args) for args in given])
    return case, weight, bias, torch.full_like(case.x, 7.0), whole


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_path_conv_gives_the_bits_of_tree_conv_on_paths_alone(width, dtype):
    case, weight, bias, y, whole = path_conv_case(width, dtype=dtype)
    on_path = torch.zeros(BATCH, NODES, dtype=torch.bool)
    for row, node in enumerate(case.accepted.tolist()):
        if case.slot[row] >= 0:
            on_path[row, path_of(case.parents, row, node)] = True
    case.x[:, ~on_path] = math.nan
    windows = case.conv_state.clone()
    treewy.path_conv(y, case.conv_state, *case.goal, case.x, weight, bias)
    assert on_path.any()
    assert same_bits(y[:, on_path], whole[:, on_path])
    assert bool((y[:, ~on_path] == 7.0).all())
    assert same_bits(case.conv_state, windows)


def test_tree_conv_into_keeps_the_inputs_and_gives_the_bits_of_tree_conv():
    case = Case(17, dtype=torch.bfloat16)
    args = (case.x[0], case.conv_state[0], *case.trees, case.weight, case.weight[:, 0])
    stash = torch.zeros(BATCH + 1, NODES + 2, case.x.shape[-1]).bfloat16()[:BATCH, :NODES]
    assert same_bits(treewy.tree_conv_into(*args, stash), treewy.tree_conv(*args))
    assert same_bits(stash[case.real], case.x[0][case.real])
    with pytest.raises(ValueError, match=r"stash must be \[batch, N, C\]"):
        treewy.tree_conv_into(*args, stash[:, 1:])


def test_path_conv_on_other_devices_leaves_bad_rows_alone():
    case, weight, bias, y, _ = path_conv_case(4, pads=0, full=True)
    case.accepted[0], case.accepted[1] = NODES, -1
    on_device("path_conv", y, case.conv_state, *case.goal, case.x, weight, bias)
    assert bool((y[:, :2] == 7.0).all())
    assert not bool((y[:, 2:] == 7.0).all())


# ---------------------------------------------------------------- the deferred policy


@pytest.mark.parametrize("capacity", [6, 16])
def test_policies_agree_over_many_steps(capacity):
    """Cases 1 and 9: each step starts from the last accepted node, whatever was accepted before.

    Reconstruct, deferred (with flushes at different times in every slot), snapshot and the plain
    recurrence over the accepted tokens; verification reads the history in every second step of a
    slot and more.
    """
    dims = DIMS[1]
    gen = generator(30)
    case = Case(30, dims, nodes=6)
    truth = case.state.clone()
    deferred, snapshot = case.state.clone(), case.state.clone()
    history = case.history(capacity)
    flushed = waiting = 0
    for step in range(40):
        now = Case(1000 + step, dims, nodes=6, shape="random", pads=step % 2)
        if step % 5 == 4:  # a step without drafts
            now.parents, now.num_nodes = now.parents[:, :1].contiguous(), int32(1, 1, 1, 1)
            now.accepted[:] = 0
            now.raw = [
                {name: x[:, :1] if x.dim() > 1 else x for name, x in raw.items()} for raw in now.raw
            ]
        if step % 3 == 2:
            now.accepted[randint(gen, 0, BATCH)] = -1
        now.state = case.state
        out, stash = now.verify_all()
        now.state = deferred
        late_out, late_stash = now.verify_all(history)
        torch.testing.assert_close(late_out, out, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(late_stash[0], stash[0], rtol=1e-9, atol=1e-10)
        now.state = snapshot
        stored = now.snapshots()
        now.state = truth
        for layer in range(LAYERS):
            _, states = now.expected(layer)
            for row in range(BATCH):
                if now.slot[row] >= 0 and now.accepted[row] >= 0:
                    truth[layer, now.slot[row]] = states[row, now.accepted[row]]
        before = history[3].clone()
        treewy.commit(case.state, *now.goal, *stash)
        treewy.commit_deferred(deferred, *history, *now.goal, *late_stash)
        treewy.commit_snapshot(snapshot, *now.goal, stored)
        flushed += int((history[3] < before).sum())
        waiting += int((history[3] > 0).sum())
        assert int(history[3].max()) <= capacity
    assert flushed > 3
    assert waiting > 40
    unfolded = deferred.clone()
    treewy.flush_history(deferred, *history, torch.randperm(SLOTS, generator=gen).int())
    assert not history[3].any()
    assert not torch.equal(unfolded, deferred)
    for state in (case.state, deferred, snapshot):
        torch.testing.assert_close(state, truth, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("above", [0, 3, 6])
def test_verification_folds_what_a_flush_would(above):
    """The bits of `tree_verify`, and of a flush in the states of long histories of live rows."""
    case = Case(33, DIMS[0], nodes=6)
    case.num_nodes[1] = 0 if case.slot[1] >= 0 else case.num_nodes[1]
    history, (folded, folding) = case.filled_history(7), case.folds()
    history[3][case.slot[[0, 1]].long()] = 7
    state, flushed = case.state.clone(), case.state.clone()
    live = (case.slot >= 0) & (case.num_nodes > 0)
    long = sorted(s for s in case.slot[live].tolist() if history[3][s] > above)
    treewy.flush_history(flushed, *(x.clone() for x in history), int32(*long))
    for repeat in range(2):
        for layer in range(LAYERS):
            of_layer = (*(x[layer] for x in history[:3]), history[3])
            plain = case.verify(layer, of_layer)
            u, g = (torch.full_like(x, math.nan) for x in plain[1:])
            args = (*case.raw[layer].values(), state[layer], *case.trees, u, g, *of_layer)
            out = treewy.tree_verify_folding(*args, folded[layer], folding, above)
            for mine, there in zip((out, u, g), plain, strict=True):
                if repeat == 0:
                    assert same_bits(mine, there)
                torch.testing.assert_close(mine, there, rtol=1e-9, atol=1e-10)
        assert same_bits(state, flushed)
        assert folding.nonzero().flatten().tolist() == long
        assert folded.flatten(2).all(2).all(0).nonzero().flatten().tolist() == long
        assert folded.flatten(2).any(2).any(0).nonzero().flatten().tolist() == long


def test_a_commit_folds_what_verification_has_left():
    """Half of the layers are folded; rows that do not move keep every bit and flag."""
    case = Case(34, DIMS[0], nodes=6, pads=0, full=True)
    case.accepted[:] = int32(0, -1, 1, 0)
    history, folds = case.filled_history(7), case.folds()
    history[3][:] = 4  # room for the paths
    whole, copies = case.state.clone(), [x.clone() for x in history]
    treewy.flush_history(whole, *copies, case.slot)
    stash = case.stash(history)
    folded = case.slot[[0, 1]].long()  # of layer 0
    case.state[0, folded], folds[0][0, folded], folds[1][folded] = whole[0, folded], 1, 1
    before = [x.clone() for x in (case.state, *history, *folds)]
    treewy.commit_deferred_folding(case.state, *history, *case.goal, *stash, *folds)
    first, rejected, *others = case.slot.tolist()
    assert same_bits(case.state[:, first], whole[:, first])
    assert history[3][[first, rejected, *others]].tolist() == [1, 4, 6, 5]
    assert same_bits(case.state[:, others], before[0][:, others])
    for x, y in zip((case.state, *history[:3], folds[0]), (*before[:4], before[5]), strict=True):
        assert same_bits(x[:, rejected], y[:, rejected])
    assert folds[1].nonzero().flatten().tolist() == [rejected]
    assert not folds[0][:, [first, *others]].any()
    treewy.flush_history_folding(case.state, *history, int32(rejected), *folds)
    assert same_bits(case.state[:, rejected], whole[:, rejected])
    assert not any(x.any() for x in folds)


def test_deferred_commit_leaves_the_state_until_the_history_is_full():
    case = Case(31, shape="chain", full=True, pads=0)
    case.accepted[:] = int32(3, 0, 2, 1)
    state, history = case.state.clone(), case.history(8)
    treewy.commit_deferred(state, *history, *case.goal, *case.stash(history))
    assert same_bits(state, case.state)
    assert history[3][case.slot.long()].tolist() == [4, 1, 3, 2]
    keys = reference.l2norm(case.raw[1]["k"])
    slot = int(case.slot[0])
    torch.testing.assert_close(history[1][1, slot, :4], keys[0, :4])
    before = state.clone()
    treewy.flush_history(state, *history, int32(-1, slot))
    assert not same_bits(state[:, slot], before[:, slot])
    others = [row for row in range(SLOTS) if row != slot]
    assert same_bits(state[:, others], before[:, others])
    assert history[3][case.slot.long()].tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("run", ["here", "on a device"])
def test_lengths_out_of_range_are_none_and_all(run):
    """As in the kernels: below zero there is nothing, above its capacity a history is full."""
    case = Case(35, DIMS[0], nodes=6, pads=0, full=True)
    given, stash = case.filled_history(7), case.stash(case.filled_history(7))
    found = []
    for lengths in ((-1, -(2**31), 8, 2**31 - 1), (0, 0, 7, 7)):
        state, history = case.state.clone(), [x.clone() for x in given]
        history[3][case.slot.long()] = int32(*lengths)
        commit = treewy.commit_deferred_folding
        if run != "here":
            commit = partial(on_device, "commit_deferred_folding")
        commit(state, *history, *case.goal, *stash, *case.folds())
        found.append((state, *history))
    for mine, there in zip(*found, strict=True):
        assert same_bits(mine, there)


def test_deferred_commit_refuses_a_path_longer_than_the_history():
    case = Case(32, shape="chain", full=True, pads=0)
    history = case.history(4)
    stash = case.stash(history)
    case.accepted[:] = int32(2, 3, 4, 0)
    pools = (case.state, *history)
    before = [bits(x) for x in pools]
    with pytest.raises(ValueError, match=r"row 2 has 5 nodes.*holds \(4\)"):
        treewy.commit_deferred(case.state, *history, *case.goal, *stash)
    for x, y in zip(pools, before, strict=True):
        assert torch.equal(bits(x), y)


# ---------------------------------------------------------------- drift


def decode(state, raw, nodes, dtype):
    """A path of nodes in every row (-1: none), token by token, the state rounded after each."""
    compute = torch.promote_types(dtype, torch.float32)
    wide = {name: x.to(compute) for name, x in raw.items()}
    _, k = reference.normalize_qk(wide["q"], wide["k"])
    g, beta = reference.gates(wide["a"], wide["b"], wide["A_log"], wide["dt_bias"])
    rows = torch.arange(len(state))
    for node in nodes.t():
        at = (rows, node.clamp(min=0))
        key = reference.repeat_heads(k[at], state.shape[1])[:, :, None]
        before = state.to(compute) * g[at].exp()[..., None, None]
        error = beta[at][..., None] * (wide["v"][at] - (before * key).sum(-1))
        after = (before + error[..., None] * key).to(dtype)
        state = torch.where((node >= 0)[:, None, None, None], after, state)
    return state


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_thousand_commits_drift_no_more_than_plain_decoding(state_dtype):
    """Case 19: forced reject, forced full accept and random accept, in three slots.

    The float64 recurrence over the accepted tokens is the truth, and decoding them one by one with
    the same state type the measure. All three policies; decays remember for tens of tokens.
    Pseudo-values in bfloat16 add their rounding to that of the state: up to 1.42 times the error
    (where decays are strong), which is why they are an option.
    """
    dims, gen = Dims(1, 2, 8, 6), generator(40)
    slot, parents = int32(3, 0, 2), int32(-1, 0, 0, 1, 3).expand(3, -1).contiguous()
    trees = (slot, parents, int32(5, 5, 5))
    names = ("reconstruct", "deferred", "snapshot")
    if state_dtype == torch.bfloat16:
        names = (*names, "bfloat16 u")
    pools = {name: torch.zeros(1, 4, 2, 6, 8, dtype=state_dtype) for name in names}
    history = [
        torch.zeros(1, 4, 8, 2, 6),
        torch.zeros(1, 4, 8, 1, 8),
        torch.zeros(1, 4, 8, 2),
        torch.zeros(4, dtype=torch.int32),
    ]
    truth, plain = torch.zeros(3, 2, 6, 8, dtype=F64), torch.zeros(3, 2, 6, 8, dtype=state_dtype)
    steps = projections(gen, dims, 1000, 3, 5, dtype=torch.float32)
    worst = dict.fromkeys(("plain", *names), 0.0)
    for step in range(1000):
        raw = {name: x[step] if x.dim() > 1 else x for name, x in steps.items()}
        goal = (*trees, int32(0, 4, randint(gen, 0, 5)))
        for name, state in pools.items():
            args = (*raw.values(), state[0], *trees)
            if name == "snapshot":
                treewy.commit_snapshot(state, *goal, treewy.tree_verify_snapshot(*args)[1][None])
                continue
            late = name == "deferred"
            of_layer = [*(x[0] for x in history[:3]), history[3]] if late else [None] * 4
            of_u = torch.bfloat16 if name == "bfloat16 u" else None
            _, u, g = treewy.tree_verify(*args, *of_layer, of_u)
            stash = (u[None], raw["k"][None], g[None])
            if late:
                treewy.commit_deferred(state, *history, *goal, *stash)
            else:
                treewy.commit(state, *goal, *stash)
        paths, _ = topology.path_to(parents, goal[3], 4)
        truth, plain = decode(truth, raw, paths, F64), decode(plain, raw, paths, state_dtype)
        if step % 100 == 99:
            treewy.flush_history(pools["deferred"], *history, slot)
            worst["plain"] = max(worst["plain"], relative_error(plain, truth))
            for name, state in pools.items():
                worst[name] = max(worst[name], relative_error(state[0, slot.long()], truth))
    for name in names:
        assert 0 < worst[name] <= 1.5 * worst["plain"], worst


# ---------------------------------------------------------------- prefill


def packed_case(lengths, slots, dims=DIMS[1], *, seed=50, dtype=F64, decay="mild"):
    """Projections and conv inputs of packed sequences, and pools."""
    gen = generator(seed)
    tokens = sum(lengths)
    raw = projections(gen, dims, tokens, dtype=dtype, decay=decay)
    x = torch.randn(tokens, dims.conv_dim, generator=gen, dtype=F64).to(dtype)
    state = random_state(gen, dims, SLOTS, dtype=torch.promote_types(dtype, torch.float32))
    window = torch.randn(SLOTS, dims.width - 1, dims.conv_dim, generator=gen, dtype=F64)
    weight = torch.randn(dims.conv_dim, dims.width, generator=gen, dtype=F64).to(dtype)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return raw, x, state, window.to(dtype), weight, int32(*slots), int32(*starts)


def as_chain(raw, x, start, stop):
    """One sequence of packed inputs as a batch of one chain."""
    one = {name: y[None, start:stop] if y.dim() > 1 else y for name, y in raw.items()}
    parents = int32(*range(-1, stop - start - 1))[None]
    return one, x[None, start:stop], parents, int32(stop - start)


@pytest.mark.parametrize("decay", DECAYS)
def test_prefill_equals_the_recurrence_by_slot(decay):
    """Ragged lengths about the chunk size, an empty sequence, a skipped row, slots in no order."""
    lengths, slots = [1, 63, 0, 65, 5, 130, 64], [5, 2, 4, 0, -1, 3, 6]
    raw, x, state, window, weight, slot, bounds = packed_case(lengths, slots, decay=decay)
    before, window_before = state.clone(), window.clone()
    out = treewy.prefill(*raw.values(), state, slot, bounds)
    y = treewy.prefill_conv(x, window, slot, bounds, weight)
    for row, (slot_, start) in enumerate(zip(slots, bounds.tolist(), strict=False)):
        stop = start + lengths[row]
        if slot_ < 0:
            assert not out[start:stop].any()
            assert not y[start:stop].any()
            continue
        if start == stop:
            assert same_bits(state[slot_], before[slot_])
            assert same_bits(window[slot_], window_before[slot_])
            continue
        one, inputs, parents, count = as_chain(raw, x, start, stop)
        chain = (int32(slot_), parents, count)
        expected, states = treewy.tree_verify_snapshot(*one.values(), before, *chain)
        torch.testing.assert_close(out[start:stop], expected[0], rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(state[slot_], states[0, -1], rtol=1e-10, atol=1e-11)
        expected = treewy.tree_conv(inputs, window_before, *chain, weight)
        assert same_bits(y[start:stop], expected[0])
        rows = torch.cat((window_before[slot_], inputs[0]))
        assert torch.equal(window[slot_], rows[-3:])
    assert same_bits(state[1], before[1])
    assert same_bits(window[1], window_before[1])


@pytest.mark.parametrize("cuts", [[1, 199], [64, 136], [3, 60, 65, 1, 71], [2] * 100])
def test_prefill_in_several_calls_equals_one(cuts):
    raw, x, state, window, weight, slot, bounds = packed_case([200], [4])
    pools = state.clone(), window.clone()
    out = treewy.prefill(*raw.values(), state, slot, bounds)
    y = treewy.prefill_conv(x, window, slot, bounds, weight)
    start = 0
    for length in cuts:
        at = slice(start, start + length)
        part = {name: z[at] if z.dim() > 1 else z for name, z in raw.items()}
        piece = treewy.prefill(*part.values(), pools[0], slot, int32(0, length))
        torch.testing.assert_close(piece, out[at], rtol=1e-10, atol=1e-11)
        piece = treewy.prefill_conv(x[at], pools[1], slot, int32(0, length), weight)
        assert same_bits(piece, y[at])
        start += length
    torch.testing.assert_close(pools[0], state, rtol=1e-10, atol=1e-11)
    assert same_bits(pools[1], window)


def test_prefill_then_tree_equals_one_chain():
    """Case 17's kind: what prefill leaves is what verification starts from."""
    raw, x, state, window, weight, slot, bounds = packed_case([90], [2])
    whole_state, whole_window = state.clone(), window.clone()
    expected = treewy.prefill(*raw.values(), whole_state, slot, bounds)
    expected_conv = treewy.prefill_conv(x, whole_window, slot, bounds, weight)
    prompt = {name: y[:83] if y.dim() > 1 else y for name, y in raw.items()}
    treewy.prefill(*prompt.values(), state, slot, int32(0, 83))
    treewy.prefill_conv(x[:83], window, slot, int32(0, 83), weight)
    one, inputs, parents, count = as_chain(raw, x, 83, 90)
    out, u, g = treewy.tree_verify(*one.values(), state, slot, parents, count)
    torch.testing.assert_close(out[0], expected[83:], rtol=1e-10, atol=1e-11)
    y = treewy.tree_conv(inputs, window, slot, parents, count, weight)
    assert same_bits(y[0], expected_conv[83:])
    goal = (slot, parents, count, int32(6))
    treewy.commit(state[None], *goal, u[None], one["k"][None], g[None])
    treewy.conv_commit(window[None], *goal, inputs[None])
    torch.testing.assert_close(state, whole_state, rtol=1e-10, atol=1e-11)
    assert same_bits(window, whole_window)


def test_prefill_of_other_sequences_does_not_leak():
    """Case 8: NaN in one sequence, a free slot or a skipped row reaches no other sequence."""
    lengths, slots = [40, 70, 9], [3, 5, -1]
    raw, x, state, window, weight, slot, bounds = packed_case(lengths, slots, dtype=torch.float32)
    pools = [state.clone(), window.clone(), state.clone(), window.clone()]

    def run(state, window):
        out = treewy.prefill(*raw.values(), state, slot, bounds)
        return out, treewy.prefill_conv(x, window, slot, bounds, weight)

    clean = run(*pools[:2])
    for y in (*raw.values(), x):
        if y.dim() > 1:
            y[40:] = math.nan
    for pool in pools[2:]:
        pool[[0, 1, 2, 4, 6]] = math.nan
    dirty = run(*pools[2:])
    for before, after in zip(clean, dirty, strict=True):
        assert same_bits(before[:40], after[:40])
        assert not after[110:].any()
    assert same_bits(pools[0][3], pools[2][3])
    assert same_bits(pools[1][3], pools[3][3])


def test_sixteen_bit_prefill_writes_the_pool():
    """Case 21 for prefill."""
    raw, _, state, *_, slot, bounds = packed_case([50], [1], dtype=torch.bfloat16)
    pool = state.bfloat16()
    wide = pool.float()
    out = treewy.prefill(*raw.values(), pool, slot, bounds)
    assert same_bits(out, treewy.prefill(*raw.values(), wide, slot, bounds))
    assert same_bits(pool, wide.bfloat16())


# ---------------------------------------------------------------- other devices


class OnADevice(TorchFunctionMode):
    """Makes CPU tensors say that they are elsewhere, and refuses whatever would wait for a GPU."""

    WAITS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cpu.__get__:
            return False
        assert getattr(func, "__name__", "") not in self.WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def on_device(op, *args):
    """The operator's torch kernel as it runs on other devices."""
    with OnADevice():
        return getattr(ops, op)._init_fn(*args)


def both_ways(op, args, pools):
    """Results and pools of an operator as on the CPU and as on other devices."""
    results = []
    for run in (getattr(treewy, op), lambda *args: on_device(op, *args)):
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args[:pools]]
        out = run(*copies, *args[pools:])
        out = () if out is None else (out,) if isinstance(out, torch.Tensor) else out
        results.append([*out, *(x for x in copies if isinstance(x, torch.Tensor))])
    return zip(*results, strict=True)


@pytest.mark.parametrize("name", [name for name in calls() if "prefill" not in name])
def test_kernels_for_other_devices_agree_and_never_wait(name):
    """Case 23: all metadata stays on the device, so that a graph replays over any topology."""
    known = {"commit_deferred": 5, "flush_history": 5, "path_conv": 1}
    pools = known.get(name.split()[0], int("commit" in name))
    if "fold" in name:
        pools = len(calls()[name])  # what is written comes last, too
    for here, there in both_ways(name.split()[0], calls()[name], pools):
        assert here.dtype == there.dtype
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", COMMITS)
def test_commits_on_other_devices_leave_bad_rows_alone(op):
    """Cases 2, 3 and 6: out of range, nothing accepted, padded; and no row at all to move."""
    args = list(calls()[op])
    at = goal_at(op)
    slot, count = args[at], args[at + 2]
    rows = (slot >= 0).nonzero()[:, 0].tolist()
    for wrong in (-1, int(count[rows[0]]), 2**30, -(2**31)):
        args[at + 3] = args[at + 3].clone()
        args[at + 3][rows[0]] = wrong
        copies = [x.clone() for x in args[:at]]
        on_device(op, *copies, *args[at:])
        moved = copies[0] != args[0]
        assert not moved[:, int(slot[rows[0]])].any()
        # A path of the deferred commit waits in the history.
        moved = copies[-1] if op == "commit_deferred" else moved[:, slot[rows[1:]].long()]
        assert moved.any()
    args[at] = torch.full_like(slot, -1)
    copies = [x.clone() for x in args[:at]]
    on_device(op, *copies, *args[at:])
    for x, y in zip(copies, args[:at], strict=True):
        assert same_bits(x, y)


def test_deferred_commit_on_other_devices_flushes_and_leaves_long_paths_alone():
    case = Case(70, shape="chain", full=True, pads=0)
    case.accepted[:] = int32(2, 3, 4, 0)
    history = case.history(4)
    for pool in history[:3]:
        pool.normal_(generator=case.gen)
    history[2].abs_().neg_()
    history[3][:] = int32(*[3] * SLOTS)
    stash = case.stash(history)
    state, pools = case.state.clone(), [x.clone() for x in history]
    on_device("commit_deferred", state, *pools, *case.goal, *stash)
    case.accepted[2] = -1  # what the CPU refuses
    treewy.commit_deferred(case.state, *history, *case.goal, *stash)
    for x, y in zip((state, *pools), (case.state, *history), strict=True):
        torch.testing.assert_close(x, y)
    assert pools[3][case.slot.long()].tolist() == [3, 4, 3, 4]


# ---------------------------------------------------------------- nothing to do


POOLS = ("state", "conv_state", "history_u", "history_k", "history_g", "history_len")
POOLS += ("history_folded", "history_folding")
OF_ROWS = ("slot", "parents", "num_nodes", "accepted")
# After the layers, if there are any.
OF_NODES = ("q", "k", "v", "a", "b", "x", "y", "u", "g", "states", "stash")


def emptied(name, how):
    """A call by argument name with no rows, no nodes, or padded rows and pools of no slots."""
    op = name.split()[0]
    schema = getattr(treewy, op).default._schema
    args = dict(zip([arg.name for arg in schema.arguments], calls()[name], strict=False))
    axis = int(op in (*OF_PATHS, "flush_history", "flush_history_folding"))
    for key, x in args.items():
        if how == "no slots" and key in POOLS:
            of_slots = ("history_len", "history_folding")
            args[key] = x.narrow(0 if key in of_slots else axis, 0, 0)
        elif how == "no slots" and key == "slot":
            args[key] = torch.full_like(x, -1)
        elif how == "no rows" and key in OF_ROWS:
            args[key] = x[:0]
        elif how == "no rows" and key in OF_NODES:
            args[key] = x.narrow(axis, 0, 0)
        elif how == "no nodes" and key in OF_NODES:
            args[key] = x.narrow(axis + 1, 0, 0)
        elif how == "no nodes" and key in OF_ROWS:
            none = {"parents": x[..., :0], "slot": x, "num_nodes": torch.zeros_like(x)}
            args[key] = none.get(key, torch.full_like(x, -1))
    return op, args


NOTHING = [
    (name, how)
    for name in calls()
    for how in ("no rows", "no nodes", "no slots")
    if "prefill" not in name
    and name != "greedy_accept"
    and not (name.startswith("flush_history") and how == "no nodes")
]


@pytest.mark.parametrize(("name", "how"), NOTHING)
def test_nothing_to_do(name, how):
    op, args = emptied(name, how)
    before = {key: x.clone() for key, x in args.items() if isinstance(x, torch.Tensor)}
    lead = (0 if how == "no rows" else BATCH, 0 if how == "no nodes" else NODES)
    for run in (getattr(treewy, op), lambda *args: on_device(op, *args)):
        out = run(*args.values())
        for x in () if out is None else (out,) if isinstance(out, torch.Tensor) else out:
            assert x.shape[:2] == lead
            assert not x.any()
        for key, x in ((key, args[key]) for key in before):
            if op == "tree_conv_into" and key == "stash":
                continue  # undefined where no nodes are
            if op in ("tree_verify_into", "tree_verify_folding") and key in ("u", "g"):
                assert not x.any()  # an output, of nodes that are not there
            else:
                assert same_bits(x, before[key]), key
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(ops, op), tuple(args.values()), test_utils=tests)


@pytest.mark.parametrize("how", ["no rows", "no slots"])
@pytest.mark.parametrize("op", ["prefill", "prefill_conv"])
def test_nothing_to_prefill(op, how):
    _, args = emptied(op, "no slots" if how == "no slots" else "")
    if how == "no rows":
        tokens = ("q", "k", "v", "a", "b", "x", "slot")
        args = {key: x[:0] if key in tokens else x for key, x in args.items()}
        args["cu_seqlens"] = int32(0)
    out = getattr(treewy, op)(*args.values())
    assert len(out) == (0 if how == "no rows" else NODES)
    assert not out.any()


# ---------------------------------------------------------------- refusals


def changed(args, index, value):
    args = list(args)
    args[index] = value
    return args


DELTA = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")


@pytest.mark.parametrize("op", ["tree_verify", "tree_verify_snapshot", "tree_outputs"])
@pytest.mark.parametrize("name", DELTA)
def test_verify_refuses_a_wrong_shape_by_name(op, name):
    args = list(calls()[op])
    index = DELTA.index(name)
    args[index] = args[index][..., :-1]
    culprit = "q" if name == "state" else name  # all are measured against the state
    with pytest.raises(ValueError, match=rf"treewy::{op}: {culprit} must be \[.*got \["):
        getattr(treewy, op)(*args)


@pytest.mark.parametrize(
    ("op", "index", "change", "message"),
    [
        ("tree_verify", 0, lambda x: x.int(), "q must be float32 or .*got int32"),
        ("tree_verify", 5, lambda x: x.bfloat16(), "A_log must be float32 .*got bfloat16"),
        ("tree_verify", 7, lambda x: x[:, :3], "multiple of key heads|state|v must"),
        ("tree_verify", 8, lambda x: x.long(), "slot must be int32, got int64"),
        ("tree_verify", 9, lambda x: x[:, :-1], r"parents must be \[batch, N\]"),
        ("tree_verify", 10, lambda x: x[:-1], r"num_nodes must be \[batch\]"),
        ("tree_conv", 1, lambda x: x[:, 1:], r"weight must be \[C, W\]"),
        ("tree_conv", 5, lambda x: x[:-1], r"weight must be \[C, W\]"),
        ("tree_conv", 6, lambda x: x[:-1], r"bias must be \[C\]"),
        ("commit", 5, lambda x: x[:-1], r"u must be \[layers, batch, N, HV, V\]"),
        ("commit", 6, lambda x: x[..., :-1], r"k must be \[layers, batch, N, HK, K\]"),
        ("commit", 7, lambda x: x[:, :, :-1], r"g must be \[layers, batch, N, HV\]"),
        ("commit", 4, lambda x: x[:-1], r"accepted must be \[batch\]"),
        (
            "commit_inputs",
            1,
            lambda x: x[:, :, :-1],
            r"conv_state must be \[layers, slots, W-1, C\]",
        ),
        ("commit_inputs", 6, lambda x: x[..., :-1], r"x must have 2 HK K \+ HV V channels"),
        ("commit_inputs", 6, lambda x: x[:, :-1], r"x must be \[layers, batch, N, C\]"),
        ("commit_inputs", 7, lambda x: x[..., :-1], r"a must be \[layers, batch, N, HV\]"),
        ("commit_inputs", 8, lambda x: x[:-1], r"b must be \[layers, batch, N, HV\]"),
        ("commit_inputs", 9, lambda x: x[:, :-1], r"conv_weight must be \[layers, C, W\]"),
        ("commit_inputs", 10, lambda x: x[:-1], r"conv_bias must be \[layers, C\]"),
        ("commit_inputs", 11, lambda x: x[0], r"A_log must be \[layers, HV\]"),
        ("commit_inputs", 12, lambda x: x.half(), "dt_bias must be float32 .*got float16"),
        ("greedy_accept", 0, lambda x: x.int(), "token_ids must be int64, got int32"),
        ("greedy_accept", 1, lambda x: x[:, :-1], r"target_ids must be \[batch, N\]"),
        ("greedy_accept", 5, lambda x: 0, "max_path must be at least 1"),
        ("commit_deferred", 1, lambda x: x[:, :-1], "history_u must be"),
        ("commit_deferred", 2, lambda x: x[..., :-1], "history_k must be"),
        ("commit_deferred", 3, lambda x: x[..., :-1], "history_g must be"),
        ("commit_deferred", 4, lambda x: x[:-1], r"history_len must be \[slots\]"),
        ("flush_history", 1, lambda x: x[..., :-1], "history_u must be"),
        ("flush_history_folding", 6, lambda x: x[0], r"history_folded must be \[layers, slots"),
        ("flush_history_folding", 7, lambda x: x.long(), "history_folding must be int32"),
        ("commit_deferred_folding", 12, lambda x: x.int(), "history_folded must be uint8"),
        ("commit_deferred_folding", 13, lambda x: x[1:], r"history_folding must be \[slots\]"),
        ("tree_verify_folding", 17, lambda x: x[1:], r"history_folded must be \[slots, HV, P\]"),
        ("tree_verify_folding", 17, lambda x: x.expand(-1, -1, 2), "history_folded must be"),
        ("tree_verify_folding", 17, lambda x: x.repeat(1, 2, 1)[:, ::2], "contiguous within"),
        ("tree_verify_folding", 18, lambda x: x.repeat(2)[::2], r"contiguous, got strides \[2\]"),
        ("tree_verify_folding", 18, lambda x: x[1:], r"history_folding must be \[slots\]"),
        ("tree_verify_folding", 19, lambda x: -1, "fold_above must be >= 0, got -1"),
        ("tree_verify_folding", 14, lambda x: x[..., :-1], "history_k must be"),
        ("commit_snapshot", 5, lambda x: x[:, :, :-1], "states must be"),
        ("conv_commit", 5, lambda x: x[..., :-1], r"x must be \[layers, batch, N, C\]"),
        ("prefill", 9, lambda x: x[:-1], r"cu_seqlens must be \[batch \+ 1\]"),
        ("prefill", 2, lambda x: x[:-1], r"v must be \[tokens, HV, V\]"),
        ("prefill_conv", 4, lambda x: x[:-1], r"weight must be \[C, W\]"),
    ],
)
def test_operators_refuse_a_wrong_tensor_by_name(op, index, change, message):
    args, op = calls()[op], op.split()[0]
    with pytest.raises(ValueError, match=message):
        getattr(treewy, op)(*changed(args, index, change(args[index])))


def test_verify_refuses_half_a_history():
    args = calls()["tree_verify with history"]
    with pytest.raises(ValueError, match="go together, got 3 of the four"):
        treewy.tree_verify(*args[:-1])


@pytest.mark.parametrize("wrong", [-2, NODES, 2**30, -(2**31)])
@pytest.mark.parametrize("op", OF_PATHS)
def test_commit_refuses_an_accepted_node_out_of_range_and_writes_nothing(op, wrong):
    """Case 3: named by row, value and bound, before any row is written."""
    args = list(calls()[op])
    at = goal_at(op)
    slot, num_nodes, accepted = args[at], args[at + 2], args[at + 3].clone()
    row = int((slot >= 0).nonzero()[-1])
    accepted[row] = wrong
    args[at + 3] = accepted
    before = [bits(x) for x in args[:at]]
    bound = rf"accepted\[{row}\] must be in \[-1, {int(num_nodes[row])}\).*got {wrong}"
    with pytest.raises(ValueError, match=bound):
        getattr(treewy, op)(*args)
    for x, y in zip(args[:at], before, strict=True):
        assert torch.equal(bits(x), y)


@pytest.mark.parametrize("op", OF_PATHS)
def test_commit_refuses_a_padded_node_as_accepted(op):
    args = list(calls()[op])
    at = goal_at(op)
    row = int((args[at] >= 0).nonzero()[0])
    args[at + 2], args[at + 3] = args[at + 2].clone(), args[at + 3].clone()
    args[at + 2][row], args[at + 3][row] = 3, 3
    with pytest.raises(ValueError, match=rf"accepted\[{row}\] must be in \[-1, 3\)"):
        getattr(treewy, op)(*args)


@pytest.mark.parametrize(
    "op",
    [
        *OF_PATHS,
        *("prefill", "prefill_conv", "tree_verify_folding"),
        *("flush_history", "flush_history_folding"),
    ],
)
def test_a_slot_is_written_by_one_row_only(op):
    args = list(calls()[op])
    at = {"prefill": 8, "prefill_conv": 2, "tree_verify_folding": 8}
    at |= dict.fromkeys(("flush_history", "flush_history_folding"), 5)
    at = at.get(op, goal_at(op))
    args[at] = args[at].clone()
    args[at][[0, 2]] = 4
    with pytest.raises(ValueError, match="slot 4 is in rows 0 and 2"):
        getattr(treewy, op)(*args)


@pytest.mark.parametrize("wrong", [-2, SLOTS, 2**30])
@pytest.mark.parametrize("op", [n for n in calls() if " " not in n and n != "greedy_accept"])
def test_a_slot_out_of_range_is_refused(op, wrong):
    args = list(calls()[op])
    verify = ("tree_verify", "tree_verify_into", "tree_verify_folding", "tree_verify_snapshot")
    verify = dict.fromkeys((*verify, "tree_outputs"), 8)
    verify |= {"tree_conv": 2, "tree_conv_into": 2}
    verify |= dict.fromkeys(("flush_history", "flush_history_folding"), 5)
    at = {"prefill": 8, "prefill_conv": 2, **verify}.get(op, goal_at(op))
    args[at] = args[at].clone()
    args[at][1] = wrong
    with pytest.raises(ValueError, match=rf"slot\[1\] must be in \[-1, {SLOTS}\), got {wrong}"):
        getattr(treewy, op)(*args)


@pytest.mark.parametrize(
    ("node", "parent", "message"),
    [
        (0, 0, r"parents\[1, 0\] must be -1"),
        (3, 3, r"parents\[1, 3\] must be a node before it, in \[0, 3\), got 3"),
        (3, -1, r"parents\[1, 3\] must be a node before it"),
        (2, 9, r"parents\[1, 2\] must be a node before it"),
    ],
)
def test_a_malformed_tree_is_refused(node, parent, message):
    case = Case(60, full=True)
    case.parents[1, node] = parent
    for run in (case.verify, case.snapshot, case.conv):
        with pytest.raises(ValueError, match=message):
            run()


@pytest.mark.parametrize("wrong", [-1, NODES + 1])
def test_a_wrong_number_of_nodes_is_refused(wrong):
    case = Case(61)
    case.num_nodes[2] = wrong
    with pytest.raises(ValueError, match=rf"num_nodes\[2\] must be in \[0, {NODES}\], got {wrong}"):
        case.verify()


@pytest.mark.parametrize("bounds", [(1, 5, 7, 11), (0, 5, 7, 10), (0, 7, 5, 11), (0, 5, 7, 12)])
def test_prefill_refuses_bounds_that_do_not_tile_the_tokens(bounds):
    for op, at in (("prefill", 9), ("prefill_conv", 3)):
        args = changed(calls()[op], at, int32(*bounds))
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 11 tokens"):
            getattr(treewy, op)(*args)
