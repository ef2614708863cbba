"""Checks of the CUDA kernels against the float64 reference, on a GPU or played on the host.

Each check draws a fresh case, runs an operator through a `Machine` and raises AssertionError where
the result is beyond the tolerance or a bit changed that had to stay. Reference runs are on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from gdn_cases import (
    DECAYS,
    Dims,
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

from trtllm_treewy import cuda_library, cuda_ops, reference
from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.cuda_ops.fields import set_stash, set_state, set_tree, set_weights
from trtllm_treewy.cuda_ops.rules import DTYPES
from trtllm_treewy.runtime import acceptance

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
treewy = torch.ops.treewy

# Relative Frobenius errors: in float32, and what rounding the result to 16 bits adds.
TOLERANCE = {F32: 1e-5, BF16: 4e-3, F16: 6e-4}
TYPES = ((F32, F32), (BF16, F32), (BF16, BF16), (F16, F32), (F16, BF16), (F32, BF16))


@dataclass
class Machine:
    """Where kernels run.

    Attributes:
        device: of the tensors.
        errors: greatest error of each result seen, by name.
    """

    device: str
    errors: dict[str, float] = field(default_factory=dict)

    def put(self, x):
        """A copy of a tensor on the device."""
        return x.clone() if self.device == "cpu" else x.to(self.device)

    def call(self, name, *args):
        """Run an operator's kernel; fails if the torch reference served it instead."""
        before = cuda_ops.reference_calls.total()
        if self.device == "cpu":
            result = cuda_ops.KERNELS[name](*args)
        else:
            result = getattr(treewy, name)(*args)
        assert cuda_ops.reference_calls.total() == before, dict(cuda_ops.reference_calls)
        return result

    def close(self, name, got, truth, *, tolerance=None):
        """Check a result's relative error and remember it."""
        got, truth = got.cpu(), truth.cpu()
        tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
        assert got.isfinite().all(), f"{name} is not finite"
        size = float(truth.double().norm())
        error = float((got.double() - truth.double()).norm()) / max(size, 1e-30)
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        assert error <= tolerance, f"{name}: relative error {error:.2e}, at most {tolerance:.0e}"


def spread(x, machine, *, pad=(1, 1), fill=float("nan")):
    """x [.., heads, dim] on the machine, a view of a larger tensor with poison around it."""
    shape = list(x.shape)
    for dim, more in zip(range(-1, -len(pad) - 1, -1), pad, strict=True):
        shape[dim] += more
    whole = torch.full(shape, fill, dtype=x.dtype, device=machine.device)
    view = whole[tuple(slice(0, n) for n in x.shape)]
    view.copy_(x)
    return view


def wide(*tensors):
    """Floating tensors in float64, others as they are."""
    return [x.double() if x.is_floating_point() else x for x in tensors]


def wide_history(history):
    """Pools of a history in float64, where keys are normalised; those of 16 bits are raw."""
    if not history:
        return []
    u, k, g, length = wide(*history)
    return [u, reference.l2norm(k) if history[1].dtype.itemsize == 2 else k, g, length]


class TreeCase:
    """One layer's batch of trees, with float64 truth of verification."""

    def __init__(
        self, seed, dims, nodes, *, dtype=F32, state_dtype=F32, decay="mild", shape="random",
        batch=3, slots=6, pads=0, full=False, layers=1,
    ):  # fmt: skip
        gen = generator(seed)
        self.gen, self.dims, self.nodes, self.layers = gen, dims, nodes, layers
        self.slot = random_slots(gen, batch, slots, pads=pads)
        self.parents, self.num_nodes = random_trees(gen, batch, nodes, shape=shape, full=full)
        self.accepted = random_accepted(gen, self.num_nodes)
        self.raw = [
            projections(gen, dims, batch, nodes, dtype=dtype, decay=decay) for _ in range(layers)
        ]
        for raw in self.raw:
            raw["A_log"], raw["dt_bias"] = raw["A_log"].float(), raw["dt_bias"].float()
        self.state = random_state(gen, dims, layers, slots, dtype=state_dtype)

    @property
    def trees(self):
        return self.slot, self.parents, self.num_nodes

    @property
    def live_slots(self):
        return [s for s in self.slot.tolist() if s >= 0]

    def truth(self, layer=0, history=()):
        """out, u and g in float64."""
        inputs = wide(*self.raw[layer].values(), self.state[layer])
        return treewy.tree_verify(*inputs, *self.trees, *wide_history(history))

    def stash(self, u_dtype=F32):
        """u and g of all layers in float32, as a verify leaves them, and the raw keys."""
        results = [self.truth(layer) for layer in range(self.layers)]
        u = torch.stack([r[1] for r in results]).to(u_dtype)
        g = torch.stack([r[2] for r in results]).float()
        return u, torch.stack([raw["k"] for raw in self.raw]), g


# ------------------------------------------------------------------ verification


def run_verify(machine, case, *, layer=0, pad=None, history=(), raw=None):
    """out, u, g of the kernel; `pad` spreads the inputs out among poison."""
    raw = case.raw[layer] if raw is None else raw
    if pad is None:
        inputs = [machine.put(x) for x in raw.values()]
    else:
        inputs = [spread(raw[name], machine, pad=pad) for name in ("q", "k", "v")]
        inputs += [spread(raw[name], machine, pad=(3, 1)) for name in ("a", "b")]
        inputs += [machine.put(raw[name]) for name in ("A_log", "dt_bias")]
    rest = [machine.put(x) for x in (case.state[layer], *case.trees, *history)]
    return machine.call("tree_verify", *inputs, *rest)


def random_history(case, capacity, *, stash=None):
    """Histories [slots, H, ...] of one layer with lengths from 0 to H, junk behind them.

    `stash`: u in this type and keys raw where they have 16 bits, as verification leaves them; else
    all in float32.
    """
    gen, dims, slots = case.gen, case.dims, case.state.shape[1]
    u = torch.randn(slots, capacity, dims.value_heads, dims.value_dim, generator=gen)
    k = torch.randn(slots, capacity, dims.key_heads, dims.key_dim, generator=gen)
    g = -2 * torch.rand(slots, capacity, dims.value_heads, generator=gen)
    length = torch.randint(0, capacity + 1, (slots,), generator=gen).int()
    key_dtype = case.raw[0]["k"].dtype
    k = (3 * k).to(key_dtype) if stash and key_dtype != F32 else reference.l2norm(k).float()
    u = u.to(stash or F32)
    for slot, used in enumerate(length.tolist()):
        for x in (u, k, g):
            x[slot, used:] = float("nan")
    return u, k, g, length


def check_verify(machine, case, *, pad=None, history=(), name="verify"):
    out, u, g = run_verify(machine, case, pad=pad, history=history)
    truth = case.truth(history=history)
    assert (out.dtype, u.dtype, g.dtype) == (case.raw[0]["v"].dtype, F32, F32)
    kind = f"{name} {str(out.dtype)[6:]}/{str(case.state.dtype)[6:]}"
    machine.close(f"{kind} out", out, truth[0])
    machine.close(f"{kind} u", u, truth[1])
    machine.close(f"{kind} g", g, truth[2])
    padded = torch.arange(case.nodes) >= case.num_nodes[:, None]
    padded |= (case.slot < 0)[:, None]
    for x in (out, u, g):
        assert not x.cpu()[padded].any(), "outputs of padding must be zero"


@contextlib.contextmanager
def verify_tile(library, tile):
    """Tree verification takes this `treewy_verify_tile` in place of AUTO's."""
    name = "treewy_tree_verify"
    launcher = library.launchers[name]

    def launch_tile(address, stream):
        params = cuda_library.TreeVerifyParams.from_address(address)
        before, params.tile = params.tile, tile
        try:
            return launcher(address, stream)
        finally:
            params.tile = before  # the structure is kept for later calls

    library.launchers[name] = launch_tile
    try:
        yield
    finally:
        library.launchers[name] = launcher


def check_verify_stashes(machine, case):
    """Pseudo-values in bfloat16, and none at all: the same outputs to the bit."""
    raw = [machine.put(x) for x in case.raw[0].values()]
    rest = [machine.put(x) for x in (case.state[0], *case.trees)]
    out, u, g = machine.call("tree_verify", *raw, *rest)
    none = (None, None, None, None)
    again, rounded, decays = machine.call("tree_verify", *raw, *rest, *none, BF16)
    alone = machine.call("tree_outputs", *raw, *rest)
    wide = [torch.cat([x, x], 1).fill_(-7) for x in (u, g)]
    cut = [x[:, : x.shape[1] // 2] for x in wide]
    placed = machine.call("tree_verify_into", *raw, *rest, *cut)
    for x, y in ((placed, out), (cut[0], u), (cut[1], g)):
        assert same_bits(x.cpu().contiguous(), y.cpu())
    assert all((x[:, x.shape[1] // 2 :] == -7).all() for x in wide)
    assert same_bits(again.cpu(), out.cpu())
    assert same_bits(alone.cpu(), out.cpu())
    assert same_bits(decays.cpu(), g.cpu())
    assert same_bits(rounded.cpu(), u.cpu().to(BF16))


def check_no_worse_than_recurrence(machine, case):
    """In float32: at most twice the error of the step-by-step recurrence in float32."""
    out, u, _ = run_verify(machine, case)
    raw = case.raw[0]
    q, k = reference.normalize_qk(raw["q"].float(), raw["k"].float())
    g, beta = reference.gates(raw["a"].float(), raw["b"].float(), raw["A_log"], raw["dt_bias"])
    rows = case.state[0].float()[case.slot.long()]
    step_by_step, _ = reference.tree_recurrence(
        q, k, raw["v"].float(), g, beta, rows, case.parents.clamp(max=case.nodes - 1)
    )
    valid = torch.arange(case.nodes) < case.num_nodes[:, None]
    truth = case.truth()[0][valid]
    allowed = 2 * relative_error(step_by_step[valid], truth)
    ours = relative_error(out.cpu()[valid], truth)
    machine.errors["verify over recurrence"] = max(
        machine.errors.get("verify over recurrence", 0.0), 2 * ours / allowed
    )
    assert ours <= allowed, f"error {ours:.2e}, the recurrence has {allowed / 2:.2e}"


def check_verify_oracle(machine, case):
    """A node's output is the last output of its path run alone as a chain."""
    out, u, g = (x.cpu() for x in run_verify(machine, case))
    for row, node in [(r, int(case.accepted[r])) for r in range(len(case.slot))]:
        path = path_of(case.parents, row, node)
        chain = dict(case.raw[0])
        for name in ("q", "k", "v", "a", "b"):
            chain[name] = chain[name][row : row + 1, path]
        alone = TreeCase.__new__(TreeCase)
        alone.state, alone.dims, alone.nodes = case.state, case.dims, len(path)
        alone.slot = case.slot[row : row + 1]
        alone.parents = torch.arange(-1, len(path) - 1, dtype=torch.int32)[None]
        alone.num_nodes = torch.tensor([len(path)], dtype=torch.int32)
        chain_out, chain_u, chain_g = run_verify(machine, alone, raw=chain)
        machine.close("oracle out", out[row, node], chain_out[0, -1])
        machine.close("oracle u", u[row, node], chain_u[0, -1])
        assert same_bits(g[row, node], chain_g[0, -1].cpu())


def check_verify_poison(machine, case, poison, *, history=()):
    """Poison in siblings, in padding and in free slots changes no result of the others' paths."""
    clean = [x.cpu() for x in run_verify(machine, case, history=history)]
    on_path = torch.zeros(case.parents.shape, dtype=torch.bool)
    for row, node in enumerate(case.accepted.tolist()):
        on_path[row, path_of(case.parents, row, node)] = True
    raw = dict(case.raw[0])
    for name in ("q", "k", "v", "a", "b"):
        raw[name] = torch.where(
            on_path.view(*on_path.shape, *[1] * (raw[name].dim() - 2)), raw[name], poison
        )
    state = case.state.clone()
    free = [s for s in range(state.shape[1]) if s not in case.live_slots]
    state[:, free] = poison
    poisoned = TreeCase.__new__(TreeCase)
    poisoned.__dict__.update(case.__dict__, state=state)
    dirty = [x.cpu() for x in run_verify(machine, poisoned, history=history, raw=raw)]
    for name, before, after in zip(("out", "u", "g"), clean, dirty, strict=True):
        machine.close(f"verify poisoned {name}", after[on_path], before[on_path])


def check_verify_huge_keys(machine, case, huge):
    """Keys so large that their product overflows where their norms do not show it.

    They are those of nodes 8 and 9, a path beside all others: these keep their results, and padding
    its zeros, whose nodes begin within the same 8.
    """
    case.parents[:], case.parents[:, 0], case.parents[:, 9] = 0, -1, 8
    case.num_nodes[:] = 14
    clean = [x.cpu() for x in run_verify(machine, case)]
    raw = dict(case.raw[0], k=case.raw[0]["k"].clone())
    raw["k"][:, 8:10] = huge
    dirty = [x.cpu() for x in run_verify(machine, case, raw=raw)]
    others = [t for t in range(case.nodes) if t not in (8, 9)]
    for name, before, after in zip(("out", "u", "g"), clean, dirty, strict=True):
        machine.close(f"verify huge keys {name}", after[:, others], before[:, others])
        assert not after[:, 14:].any(), "outputs of padding must be zero"


def check_verify_of_odd_rows(machine, case):
    """Slots, counts and parents out of range: the bits of what they count as."""
    nodes, batch, slots = case.nodes, len(case.slot), case.state.shape[1]
    odd = TreeCase.__new__(TreeCase)
    odd.__dict__.update(case.__dict__, slot=case.slot.clone(), num_nodes=case.num_nodes.clone())
    odd.parents = case.parents.clone()
    largest = 2**31 - 1
    for row in range(batch):
        odd.slot[row] = (odd.slot[row], -1, odd.slot[row], slots, odd.slot[row], -7)[row % 6]
        odd.num_nodes[row] = (0, nodes, nodes + 1, 9, largest, 3, nodes, -largest)[row % 8]
        for node, parent in ((3, 3), (5, largest), (9, -largest), (11, 12), (nodes - 1, nodes)):
            odd.parents[row, node] = parent if row % 3 else odd.parents[row, node]
    plain = TreeCase.__new__(TreeCase)
    known = (odd.slot >= 0) & (odd.slot < slots)
    plain.__dict__.update(case.__dict__, slot=torch.where(known, odd.slot, -1))
    plain.num_nodes = odd.num_nodes.clamp(0, nodes)
    before = (odd.parents >= 0) & (odd.parents < torch.arange(nodes))
    plain.parents = torch.where(before, odd.parents, -1)
    padded = (torch.arange(nodes) >= plain.num_nodes[:, None]) | (plain.slot < 0)[:, None]
    for mine, wanted in zip(run_verify(machine, odd), run_verify(machine, plain), strict=True):
        assert mine.isfinite().all()
        assert same_bits(mine.cpu(), wanted.cpu())
        assert not mine.cpu()[padded].any(), "outputs of padding must be zero"


def check_verify_replays(machine, capture, *, dims, nodes, capacity, types, replays=6):
    """One captured call over other trees, slots, states and histories in the same buffers.

    `capture` takes a function and returns one that runs it again and gives its results.
    """

    def draw(seed):
        case = TreeCase(
            seed, dims, nodes, dtype=types[0], state_dtype=types[1], batch=5, slots=9,
            decay=DECAYS[seed % 3], pads=seed % 3,
        )  # fmt: skip
        history = random_history(case, capacity, stash=types[1])
        history[3][case.slot[seed % 5]] = 0  # of the last slot where the row is padding
        return case, (*case.raw[0].values(), case.state[0], *case.trees, *history)

    static = [machine.put(x) for x in draw(0)[1]]
    replay = capture(lambda: machine.call("tree_verify", *static))
    for seed in range(1, 1 + replays):
        case, inputs = draw(seed)
        for buffer, x in zip(static, inputs, strict=True):
            buffer.copy_(x)
        results, truth = replay(), case.truth(history=inputs[-4:])
        for name, got, wanted in zip(("out", "u", "g"), results, truth, strict=True):
            machine.close(f"replayed {name} {str(got.dtype)[6:]}", got, wanted)


# ------------------------------------------------------------------ commits


def check_commit(machine, case, *, pad=(1, 1, 1), u_dtype=F32):
    """States of the accepted nodes; free slots, padded and rejected rows keep their bits."""
    u, k, g = case.stash(u_dtype)
    accepted = case.accepted.clone()
    accepted[-1] = -1
    free = [s for s in range(case.state.shape[1]) if s not in case.live_slots]
    case.state[:, free[:1]] = float("nan")
    truth = case.state.double()
    treewy.commit(truth, *case.trees, accepted, *wide(u, k, g))
    state = machine.put(case.state)
    stash = [
        spread(u, machine, pad=pad),
        spread(k, machine, pad=pad),
        spread(g, machine, pad=(2, 1)),
    ]
    tree = [machine.put(x) for x in (*case.trees, accepted)]
    machine.call("commit", state, *tree, *stash)
    moved = [s for s, a in zip(case.slot.tolist(), accepted.tolist(), strict=True) if s >= 0 <= a]
    still = [s for s in range(state.shape[1]) if s not in moved]
    assert same_bits(state.cpu()[:, still], case.state[:, still])
    if moved:
        kind = f"commit {str(k.dtype)[6:]}/{str(state.dtype)[6:]}"
        machine.close(kind, state.cpu()[:, moved], truth[:, moved])


def check_commit_tiles(machine, case, library):
    """Every tile and number of items gives the same bits, in place of AUTO's."""
    u, k, g = (machine.put(x) for x in case.stash())
    tree = [machine.put(x) for x in (*case.trees, case.accepted)]
    states = []
    for tile in range(5):
        for items in (0, 1, 3):
            state = machine.put(case.state)
            params = cuda_library.CommitParams(tile=tile, items=items)
            set_tree(params.tree, case.parents, state.shape[1])
            set_state(params.state, state, k.shape[3])
            set_stash(params.stash, u, k, g)
            params.state.data = state.data_ptr()
            for name, x in zip(("slot", "parents", "num_nodes"), tree, strict=False):
                setattr(params.tree, name, x.data_ptr())
            for name, x in zip("ukg", (u, k, g), strict=True):
                setattr(params.stash, name, x.data_ptr())
            params.accepted = tree[3].data_ptr()
            launch(library, "treewy_commit", params)
            states.append(state.cpu())
    assert all(same_bits(state, states[0]) for state in states)
    assert not same_bits(states[0], case.state)
    params.tile = 5
    with pytest.raises(ValueError, match=r"commit: tile must be in \[0, 4\], got 5"):
        launch(library, "treewy_commit", params)


def launch(library, name, params):
    """A launcher on the current stream; waits for it."""
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
    library.check(library.launchers[name](ctypes.addressof(params), stream))
    if stream is not None:
        torch.cuda.synchronize()


class InputsCase(TreeCase):
    """Trees whose q, k and v are the conv of raw inputs `x`, and all layers' parameters."""

    def __init__(self, seed, dims, nodes, *, dtype=F32, width=4, bias=False, **options):
        super().__init__(seed, dims, nodes, dtype=dtype, **options)
        gen, channels, slots = self.gen, dims.conv_dim, self.state.shape[1]

        def draw(*shape):
            return torch.randn(*shape, generator=gen).to(dtype)

        self.x = draw(self.layers, len(self.slot), nodes, channels)
        self.windows = draw(self.layers, slots, width - 1, channels)
        self.weight = draw(self.layers, channels, width)
        self.bias = draw(self.layers, channels) if bias else None
        self.a, self.b, self.A_log, self.dt_bias = (
            torch.stack([raw[name] for raw in self.raw]) for name in ("a", "b", "A_log", "dt_bias")
        )
        for layer, raw in enumerate(self.raw):
            of_layer = None if self.bias is None else self.bias[layer]
            conv = (self.x[layer], self.windows[layer], *self.trees, self.weight[layer], of_layer)
            y = treewy.tree_conv(*conv)
            keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
            q, k, v = y.split((keys, keys, values), -1)
            raw["q"], raw["k"] = (x.unflatten(-1, (-1, dims.key_dim)) for x in (q, k))
            raw["v"] = v.unflatten(-1, (-1, dims.value_dim))

    @property
    def layer_weights(self):
        return self.weight, self.bias, self.A_log, self.dt_bias

    def on_path(self, accepted):
        """Bool [B, N]: nodes of the accepted paths."""
        mask = torch.zeros(self.parents.shape, dtype=torch.bool)
        for row, node in enumerate(accepted.tolist()):
            mask[row, path_of(self.parents, row, node)] = True
        return mask


def run_inputs(machine, case, state, accepted, *, pad=(0, 1, 0), poison=None):
    """The kernel on a state; poison goes wherever no accepted path is."""
    x, a, b, windows = case.x, case.a, case.b, case.windows.clone()
    if poison is not None:
        on_path = case.on_path(accepted)[None, :, :, None]
        x, a, b = (torch.where(on_path, t, poison) for t in (x, a, b))
        free = [s for s in range(windows.shape[1]) if s not in case.live_slots]
        windows[:, free] = poison
    before = machine.put(windows)
    machine.call(
        "commit_inputs",
        state,
        before,
        *(machine.put(t) for t in (*case.trees, accepted)),
        *(spread(t, machine, pad=pad) for t in (x, a, b)),
        *(None if t is None else machine.put(t) for t in case.layer_weights),
    )
    assert same_bits(before.cpu(), windows), "the windows are only read"


def check_commit_inputs(machine, case, *, pad=(0, 1, 0)):
    """The states that a commit of float64 pseudo-values gives, and every other bit as it was."""
    accepted = case.accepted.clone()
    accepted[-1] = -1
    free = [s for s in range(case.state.shape[1]) if s not in case.live_slots]
    case.state[:, free[:1]] = float("nan")
    results = [case.truth(layer) for layer in range(case.layers)]
    u, g = (torch.stack([r[i] for r in results]) for i in (1, 2))
    keys = torch.stack([raw["k"] for raw in case.raw]).double()
    truth = case.state.double()
    treewy.commit(truth, *case.trees, accepted, u, keys, g)
    state = machine.put(case.state)
    run_inputs(machine, case, state, accepted, pad=pad, poison=float("nan"))
    moved = [s for s, a in zip(case.slot.tolist(), accepted.tolist(), strict=True) if s >= 0 <= a]
    still = [s for s in range(state.shape[1]) if s not in moved]
    assert same_bits(state.cpu()[:, still], case.state[:, still])
    if moved:
        kind = f"commit_inputs {str(case.x.dtype)[6:]}/{str(state.dtype)[6:]}"
        # The fast SiLU of 16 bits may round a few conv outputs to the neighbour.
        tolerance = TOLERANCE[state.dtype] if case.x.dtype == F32 else TOLERANCE[BF16]
        machine.close(kind, state.cpu()[:, moved], truth[:, moved], tolerance=tolerance)


def check_inputs_conv_bits(machine, case):
    """One node, S_0 = 0, alpha and beta 1: the state is v k^T of the very bits of tree_conv."""
    case.state.zero_()
    case.accepted.zero_()
    case.a.fill_(-3e4)
    case.b.fill_(3e4)
    state = machine.put(case.state)
    run_inputs(machine, case, state, case.accepted)
    group = case.dims.value_heads // case.dims.key_heads
    for layer in range(case.layers):
        of_layer = None if case.bias is None else machine.put(case.bias[layer])
        y = machine.call(
            "tree_conv",
            *(machine.put(t) for t in (case.x[layer], case.windows[layer], *case.trees)),
            machine.put(case.weight[layer]),
            of_layer,
        ).cpu()
        keys = case.dims.key_heads * case.dims.key_dim
        _, k, v = y[:, 0].split((keys, keys, y.shape[-1] - 2 * keys), -1)
        k = reference.l2norm(k.double().unflatten(-1, (-1, case.dims.key_dim)))
        k = k.repeat_interleave(group, 1)
        v = v.double().unflatten(-1, (-1, case.dims.value_dim))
        wanted = v[..., None] * k[..., None, :]
        rows = [row for row, s in enumerate(case.slot.tolist()) if s >= 0]
        got = state.cpu()[layer, case.slot[rows].long()]
        # One bit of a bfloat16 input is 4e-3: what float32 leaves shows that there is none.
        machine.close("commit_inputs conv", got, wanted[rows], tolerance=1e-6)


def check_inputs_tiles(machine, case, library):
    """Every tile and number of items gives the states of AUTO, up to the order of sums."""
    names = ("x", "conv_state", "a", "b", "A_log", "dt_bias", "accepted")
    values = (case.x, case.windows, case.a, case.b, case.A_log, case.dt_bias, case.accepted)
    given = {name: machine.put(x) for name, x in zip(names, values, strict=True)}
    tree = dict(zip(("slot", "parents", "num_nodes"), map(machine.put, case.trees), strict=True))
    weight, bias = machine.put(case.weight), None if case.bias is None else machine.put(case.bias)
    states = []
    for tile in range(5):
        for items in (0, 1, 3):
            state = machine.put(case.state)
            params = cuda_library.CommitInputsParams(tile=tile, items=items)
            set_tree(params.tree, case.parents, state.shape[1])
            set_state(params.state, state, case.dims.key_heads)
            set_weights(params.weights, weight)
            params.state.data, params.weights.weight = state.data_ptr(), weight.data_ptr()
            params.weight_stride = weight.stride(0)
            if bias is not None:
                params.weights.bias, params.bias_stride = bias.data_ptr(), bias.stride(0)
            for name, x in given.items():
                setattr(params, name, x.data_ptr())
            for name, x in tree.items():
                setattr(params.tree, name, x.data_ptr())
            for name in ("x", "conv_state", "a", "b"):
                getattr(params, f"{name}_stride")[:] = given[name].stride()[:3]
            params.A_log_stride = params.dt_bias_stride = case.A_log.stride(0)
            params.dtype, params.gate_dtype = DTYPES[case.x.dtype], DTYPES[case.a.dtype]
            launch(library, "treewy_commit_inputs", params)
            states.append(state.cpu())
    for state in states[1:]:
        machine.close("commit_inputs tiles", state, states[0].double())
    assert not same_bits(states[0], case.state)


def check_inputs_leave_rows_alone(machine, case):
    """Rejected, padded, malformed and out-of-range rows keep every bit; the wrong ones count."""
    batch, slots = len(case.slot), case.state.shape[1]
    none = torch.full((batch,), -1, dtype=torch.int32)
    wrong, bad_slot, bad_parents = none.clone(), case.slot.clone(), case.parents.clone()
    wrong[0], wrong[1] = int(case.num_nodes[0]), -2
    bad_slot[0], bad_slot[1] = slots, -5
    bad_parents[0] = torch.arange(case.nodes).int() + 1
    first = torch.where(torch.arange(batch) == 0, 0, -1).int()
    two = torch.where(torch.arange(batch) < 2, case.accepted, -1).int()
    good = case.trees
    for trees, accepted, count in (
        (good, none, 0),
        ((none, *good[1:]), case.accepted, 0),
        (good, wrong, 2),
        ((bad_slot, *good[1:]), two, 2),
        ((good[0], bad_parents, good[2]), first, 1),
    ):
        state = machine.put(case.state)
        cuda_ops.error_count(machine.device, reset=True)
        machine.call(
            "commit_inputs",
            state,
            *(machine.put(t) for t in (case.windows, *trees, accepted, case.x, case.a, case.b)),
            *(None if t is None else machine.put(t) for t in case.layer_weights),
        )
        assert same_bits(state.cpu(), case.state)
        assert cuda_ops.error_count(machine.device, reset=True) == count


def check_nothing_accepted(machine, case):
    """All rejected, padded or wrong rows: every bit of every pool stays, and wrong ones count."""
    batch = len(case.slot)
    u, k, g = (machine.put(x) for x in case.stash())
    slots, capacity = case.state.shape[1], 4
    accepted = torch.full((batch,), -1, dtype=torch.int32)
    wrong = accepted.clone()
    wrong[0], wrong[1] = int(case.num_nodes[0]), -2
    bad_slot = case.slot.clone()
    bad_slot[0], bad_slot[1] = slots, -5
    dims, width = case.dims, 4
    history = [
        torch.randn(case.layers, slots, capacity, dims.value_heads, dims.value_dim),
        torch.randn(case.layers, slots, capacity, dims.key_heads, dims.key_dim),
        -torch.rand(case.layers, slots, capacity, dims.value_heads),
        torch.full((slots,), capacity, dtype=torch.int32),
    ]
    conv_state = torch.randn(case.layers, slots, width - 1, 24)
    x = machine.put(torch.randn(case.layers, batch, case.nodes, 24))
    for slot, goal, count in (
        (case.slot, accepted, 0),
        (torch.full_like(case.slot, -1), case.accepted, 0),
        (case.slot, wrong, 2),
        (bad_slot, torch.where(torch.arange(batch) < 2, case.accepted, -1).int(), 2),
    ):
        tree = [machine.put(t) for t in (slot, case.parents, case.num_nodes, goal)]
        state, pools = machine.put(case.state), [machine.put(h) for h in history]
        windows = machine.put(conv_state)
        cuda_ops.error_count(machine.device, reset=True)
        machine.call("commit", state, *tree, u, k, g)
        machine.call("commit_deferred", state, *pools, *tree, u, k, g)
        machine.call("conv_commit", windows, *tree, x)
        assert same_bits(state.cpu(), case.state)
        assert same_bits(windows.cpu(), conv_state)
        for pool, before in zip(pools, history, strict=True):
            assert same_bits(pool.cpu(), before)
        assert cuda_ops.error_count(machine.device, reset=True) == 3 * count


def check_commit_poison(machine, case):
    """What is not on the accepted path may hold anything: the commit's bits are the same."""
    stash = case.stash()
    on_path = torch.zeros(case.parents.shape, dtype=torch.bool)
    for row, node in enumerate(case.accepted.tolist()):
        on_path[row, path_of(case.parents, row, node)] = True
    states = []
    for poison in (None, float("nan"), float("inf")):
        dirty = [
            x
            if poison is None
            else torch.where(on_path.view(1, *on_path.shape, *[1] * (x.dim() - 3)), x, poison)
            for x in stash
        ]
        state = machine.put(case.state)
        tree = [machine.put(x) for x in (*case.trees, case.accepted)]
        machine.call("commit", state, *tree, *(machine.put(x) for x in dirty))
        states.append(state.cpu())
    assert all(same_bits(state, states[0]) for state in states[1:])


def check_deferred(machine, case, *, capacity, steps=6, stash=None, pad=(0, 0)):
    """Step after step the histories and states of the float64 reference; then all of it flushed.

    `stash`: type of u in a history of what verification leaves, see `random_history`. `pad`: of the
    stash's u and k, see `spread`.
    """
    dims, slots = case.dims, case.state.shape[1]
    u_dtype, k_dtype = (stash, case.raw[0]["k"].dtype) if stash else (F32, F32)
    ours, truth = [], []
    for shape, dtype in (
        ((dims.value_heads, dims.value_dim), u_dtype),
        ((dims.key_heads, dims.key_dim), k_dtype),
        ((dims.value_heads,), F32),
    ):
        pool = torch.full((case.layers, slots, capacity, *shape), float("nan"), dtype=dtype)
        ours.append(machine.put(pool))
        truth.append(torch.zeros_like(pool, dtype=F64))
    ours.append(machine.put(torch.zeros(slots, dtype=torch.int32)))
    truth.append(torch.zeros(slots, dtype=torch.int32))
    state, exact = machine.put(case.state), case.state.double()
    for step in range(steps):
        accepted = random_accepted(case.gen, case.num_nodes)
        for row in range(len(accepted)):
            while len(path_of(case.parents, row, int(accepted[row]))) > capacity:
                accepted[row] = case.parents[row, accepted[row]]
        accepted[step % len(accepted)] = -1
        u, k, g = case.stash(u_dtype)
        treewy.commit_deferred(exact, *truth, *case.trees, accepted, *wide(u, k, g))
        tree = [machine.put(x) for x in (*case.trees, accepted)]
        left = [spread(u, machine, pad=pad), spread(k, machine, pad=pad), machine.put(g)]
        machine.call("commit_deferred", state, *ours, *tree, *left)
        assert torch.equal(ours[3].cpu(), truth[3])
        used = torch.arange(capacity) < truth[3][:, None]
        for name, mine, there in zip("ukg", ours, truth, strict=False):
            if not used.any():
                continue
            kept = mine.cpu()[:, used]
            if name == "k" and k_dtype.itemsize == 2:
                kept = reference.l2norm(kept.double())
            machine.close(f"history {name}", kept, there[:, used], tolerance=TOLERANCE[F32])
    case_live = case.live_slots
    kind, tolerance = f"deferred {str(state.dtype)[6:]}", over_steps(state)
    machine.close(kind, state.cpu()[:, case_live], exact[:, case_live], tolerance=tolerance)
    slot = case.slot[torch.randperm(len(case.slot), generator=case.gen)]
    treewy.flush_history(exact, *truth, slot)
    machine.call("flush_history", state, *ours, machine.put(slot))
    assert not ours[3].cpu()[case_live].any()
    kind = f"{kind} flushed"
    machine.close(kind, state.cpu()[:, case_live], exact[:, case_live], tolerance=tolerance)
    still = [s for s in range(slots) if s not in case_live]
    assert same_bits(state.cpu()[:, still], case.state[:, still])


def over_steps(state):
    """Several roundings of a 16-bit state add up."""
    return TOLERANCE[state.dtype] * (2 if state.dtype == BF16 else 1)


def check_too_long_for_history(machine, case):
    """A path longer than the history moves nothing, and counts; the other rows move."""
    dims, slots, capacity = case.dims, case.state.shape[1], 2
    deep = [len(path_of(case.parents, r, int(a))) for r, a in enumerate(case.accepted.tolist())]
    assert max(deep) > capacity
    pools = [
        torch.zeros(case.layers, slots, capacity, dims.value_heads, dims.value_dim),
        torch.zeros(case.layers, slots, capacity, dims.key_heads, dims.key_dim),
        torch.zeros(case.layers, slots, capacity, dims.value_heads),
        torch.zeros(slots, dtype=torch.int32),
    ]
    ours = [machine.put(x) for x in pools]
    state = machine.put(case.state)
    tree = [machine.put(x) for x in (*case.trees, case.accepted)]
    cuda_ops.error_count(machine.device, reset=True)
    machine.call("commit_deferred", state, *ours, *tree, *(machine.put(x) for x in case.stash()))
    length = ours[3].cpu()
    for slot, nodes in zip(case.slot.tolist(), deep, strict=True):
        if slot >= 0:
            assert int(length[slot]) == (nodes if nodes <= capacity else 0)
    live = [n for n, s in zip(deep, case.slot.tolist(), strict=True) if s >= 0]
    assert cuda_ops.error_count(machine.device, reset=True) == sum(n > capacity for n in live)
    assert same_bits(state.cpu(), case.state)


def check_malformed_parents(machine, case):
    """Parents that do not come first: nothing is read out of bounds, no row of them moves."""
    parents = case.parents.clone()
    parents[0, : case.nodes] = torch.arange(case.nodes).int() + 1  # upwards, past the end
    accepted = case.accepted.clone()
    accepted[0] = max(int(case.num_nodes[0]) - 1, 0)
    trees = (case.slot, parents, case.num_nodes)
    state = machine.put(case.state)
    u, k, g = (machine.put(x) for x in case.stash())
    cuda_ops.error_count(machine.device, reset=True)
    machine.call("commit", state, *(machine.put(x) for x in (*trees, accepted)), u, k, g)
    assert same_bits(state.cpu()[:, case.slot[0]], case.state[:, case.slot[0]])
    assert cuda_ops.error_count(machine.device, reset=True) == 1
    x = torch.randn(len(case.slot), case.nodes, 16)
    window = torch.randn(case.state.shape[1], 3, 16)
    rest = [machine.put(t) for t in (*trees, torch.randn(16, 4))]
    machine.call("tree_conv", machine.put(x), machine.put(window), *rest)
    ids = torch.zeros(case.parents.shape, dtype=torch.int64)
    got = cuda_ops.greedy_accept(*(machine.put(t) for t in (ids, ids, *trees)))
    assert int(got[0][0]) == -1


# ------------------------------------------------------------------ convolution


def conv_case(
    seed, *, nodes, dtype, channels, width, layers=2, batch=4, slots=7, weight_dtype=None
):
    gen, of_weight = generator(seed), weight_dtype or dtype
    case = {
        "x": torch.randn(layers, batch, nodes, channels, generator=gen).to(dtype),
        "state": torch.randn(layers, slots, width - 1, channels, generator=gen).to(dtype),
        "weight": torch.randn(channels, width, generator=gen).to(of_weight),
        "bias": torch.randn(channels, generator=gen).to(of_weight),
        "slot": random_slots(gen, batch, slots, pads=1),
        "gen": gen,
    }
    case["parents"], case["num_nodes"] = random_trees(gen, batch, nodes)
    case["accepted"] = random_accepted(gen, case["num_nodes"])
    return case


def check_conv(machine, case, *, bias, pad):
    """Values, zeros of padding, and poison around the inputs and in the padding."""
    trees = [case[name] for name in ("slot", "parents", "num_nodes")]
    x, state = case["x"][0].clone(), case["state"][0].clone()
    given = case["bias"] if bias else None
    wider = None if given is None else given.double()
    truth = treewy.tree_conv(x.double(), state.double(), *trees, case["weight"].double(), wider)
    padded = torch.arange(x.shape[1]) >= case["num_nodes"][:, None]
    x[padded] = float("nan")
    free = [s for s in range(state.shape[0]) if s not in case["slot"].tolist()]
    state[free] = float("inf")
    y = machine.call(
        "tree_conv",
        spread(x, machine, pad=(pad, 1)),
        spread(state, machine, pad=(pad, 0)),
        *(machine.put(t) for t in trees),
        machine.put(case["weight"]),
        None if given is None else machine.put(given),
    )
    machine.close(f"tree_conv {str(x.dtype)[6:]}", y, truth)
    padded |= (case["slot"] < 0)[:, None]
    assert not y.cpu()[padded].any()


def check_conv_stash(machine, case, *, pad):
    """tree_conv_into: the bits of tree_conv, and the inputs of real nodes, nothing beside them."""
    trees = [case[name] for name in ("slot", "parents", "num_nodes")]
    x, weight = case["x"][0], machine.put(case["weight"])
    real = (torch.arange(x.shape[1]) < trees[2][:, None]) & (trees[0] >= 0)[:, None]
    args = (spread(x, machine, pad=(pad, 1)), machine.put(case["state"][0]))
    args = (*args, *(machine.put(t) for t in trees), weight, machine.put(case["bias"]))
    stash = spread(torch.full_like(x, 7.0), machine, pad=(pad, 2))
    y = machine.call("tree_conv_into", *args, stash)
    assert same_bits(y.cpu(), machine.call("tree_conv", *args).cpu())
    assert same_bits(stash.cpu()[real], x[real])
    assert bool((stash.cpu()[~real] == 7.0).all())


def check_conv_path_bits(machine, case):
    """The same path gives the same bits in a tree, in a chain, and in a prefill."""
    x, state = case["x"][0], case["state"][0]
    trees = [case[name] for name in ("slot", "parents", "num_nodes")]
    weight = machine.put(case["weight"])
    y = machine.call("tree_conv", *(machine.put(t) for t in (x, state, *trees)), weight).cpu()
    for row, node in enumerate(case["accepted"].tolist()):
        slot = int(case["slot"][row])
        if slot < 0:
            continue
        path = path_of(case["parents"], row, node)
        cu_seqlens = torch.tensor([0, len(path)], dtype=torch.int32)
        chain = machine.call(
            "prefill_conv",
            machine.put(x[row, path]),
            machine.put(state),
            machine.put(torch.tensor([slot], dtype=torch.int32)),
            machine.put(cu_seqlens),
            weight,
        )
        assert same_bits(chain[-1].cpu(), y[row, node])


def check_conv_commit(machine, case, *, pad):
    """The windows, bit for bit; poison beside the path and in padding stays where it is."""
    trees = [case[name] for name in ("slot", "parents", "num_nodes")]
    x, state, accepted = case["x"].clone(), case["state"], case["accepted"].clone()
    accepted[0] = -1
    truth = state.clone()
    treewy.conv_commit(truth, *trees, accepted, x)
    on_path = torch.zeros(case["parents"].shape, dtype=torch.bool)
    for row, node in enumerate(accepted.tolist()):
        on_path[row, path_of(case["parents"], row, node)] = True
    x[:, ~on_path] = float("nan")
    windows = spread(state, machine, pad=(pad, 1))
    tree = [machine.put(t) for t in (*trees, accepted)]
    machine.call("conv_commit", windows, *tree, spread(x, machine, pad=(pad, 1)))
    assert same_bits(windows.cpu(), truth)


def check_path_conv(machine, case, *, bias, pad):
    """The bits of tree_conv on the accepted paths, of all layers; all else stays as it is.

    Poison beside the paths, in padding and in free slots is not read.
    """
    trees = [case[name] for name in ("slot", "parents", "num_nodes")]
    x, state, accepted = case["x"].clone(), case["state"].clone(), case["accepted"].clone()
    layers, _, _, channels = x.shape
    shape = (layers, channels, state.shape[2] + 1)
    weight = torch.randn(shape, generator=case["gen"]).to(case["weight"].dtype)
    biases = torch.randn(layers, channels, generator=case["gen"]).to(weight.dtype) if bias else None
    accepted[0] = -1
    on_path = torch.zeros(case["parents"].shape, dtype=torch.bool)
    for row, node in enumerate(accepted.tolist()):
        if trees[0][row] >= 0:
            on_path[row, path_of(case["parents"], row, node)] = True
    put = [machine.put(t) for t in trees]
    weight, biases = machine.put(weight), None if biases is None else machine.put(biases)
    truth = torch.full(x.shape, 7.0, dtype=x.dtype)
    for layer in range(layers):
        of_layer = None if biases is None else biases[layer]
        inputs = (machine.put(x[layer]), machine.put(state[layer]), *put, weight[layer], of_layer)
        truth[layer][on_path] = machine.call("tree_conv", *inputs).cpu()[on_path]
    x[:, ~on_path] = float("nan")
    state[:, [s for s in range(state.shape[1]) if s not in trees[0].tolist()]] = float("inf")
    y = spread(torch.full(x.shape, 7.0, dtype=x.dtype), machine, pad=(pad, 1))
    windows = spread(state, machine, pad=(pad, 1))
    inputs = spread(x, machine, pad=(pad, 2))
    machine.call("path_conv", y, windows, *put, machine.put(accepted), inputs, weight, biases)
    assert same_bits(y.cpu(), truth)
    assert same_bits(windows.cpu(), state)


def check_path_conv_of_odd_rows(machine):
    """Rows that no commit moves get nothing, and are not counted: the commit does that."""
    case = conv_case(5, nodes=6, dtype=BF16, channels=64, width=4, batch=4)
    slot = torch.tensor([0, 99, 1, 2], dtype=torch.int32)
    accepted = torch.tensor([6, 2, 3, -2], dtype=torch.int32)
    parents = torch.arange(-1, 5, dtype=torch.int32).repeat(4, 1)
    parents[2, 2] = 3  # behind its child
    num_nodes = torch.full((4,), 6, dtype=torch.int32)
    y = machine.put(torch.full_like(case["x"], 7.0))
    weight = machine.put(case["weight"].expand(2, -1, -1).contiguous())
    cuda_ops.error_count(machine.device, reset=True)
    rows = [machine.put(t) for t in (slot, parents, num_nodes, accepted, case["x"])]
    machine.call("path_conv", y, machine.put(case["state"]), *rows, weight)
    assert same_bits(y.cpu(), torch.full_like(case["x"], 7.0))
    assert cuda_ops.error_count(machine.device, reset=True) == 0


def check_prefill_conv(machine, seed, *, dtype, channels, width, lengths, pad=0):
    """Values, and windows bit for bit, whatever the lengths; the -1 row is skipped."""
    gen = generator(seed)
    tokens, slots = sum(lengths), len(lengths) + 3
    x = torch.randn(tokens, channels, generator=gen).to(dtype)
    state = torch.randn(slots, width - 1, channels, generator=gen).to(dtype)
    weight = torch.randn(channels, width, generator=gen).to(dtype)
    bias = torch.randn(channels, generator=gen).to(dtype)
    slot = random_slots(gen, len(lengths), slots, pads=1 if len(lengths) > 2 else 0)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    windows = state.clone()
    treewy.prefill_conv(x, windows, slot, cu_seqlens, weight, bias)
    truth = treewy.prefill_conv(
        x.double(), state.double(), slot, cu_seqlens, weight.double(), bias.double()
    )
    ours = spread(state, machine, pad=(pad, 0))
    rest = [machine.put(t) for t in (slot, cu_seqlens, weight, bias)]
    y = machine.call("prefill_conv", spread(x, machine, pad=(pad,)), ours, *rest)
    machine.close(f"prefill_conv {str(dtype)[6:]}", y, truth)
    assert same_bits(ours.cpu(), windows)


# ------------------------------------------------------------------ acceptance


def check_greedy(machine, seed, nodes, *, max_path=None):
    """Accepted node, path and bonus of the runtime's own rule."""
    gen = generator(seed)
    batch = 9
    parents, num_nodes = random_trees(gen, batch, nodes)
    slot = random_slots(gen, batch, 20, pads=2)
    if nodes > 1:
        num_nodes[3] = 0
    token_ids = torch.randint(0, 2, (batch, nodes), generator=gen)
    target_ids = torch.randint(0, 2, (batch, nodes), generator=gen)
    inside = parents.clamp(max=nodes - 1)  # the rule in torch reads the parents of padding
    tree = TreeBatch(token_ids, inside, num_nodes, slot, torch.zeros(batch).int(), 0)
    truth = acceptance.greedy_accept(tree, target_ids, max_path=max_path)
    args = (token_ids, target_ids, slot, parents, num_nodes)
    got = machine.call("greedy_accept", *(machine.put(x) for x in args), max_path)
    wanted = (truth.accepted, truth.num_accepted, truth.path, truth.bonus_ids)
    for mine, there in zip(got, wanted, strict=True):
        assert torch.equal(mine.cpu(), there)


# ------------------------------------------------------------------ many steps


@dataclass
class Decoder:
    """A sequence of trees through verify and commit, beside the float64 recurrence."""

    machine: Machine
    dims: Dims
    batch: int
    nodes: int
    policy: str  # reconstruct, deferred, or inputs (reconstruct from that stash)
    capacity: int = 8
    state_dtype: torch.dtype = F32
    dtype: torch.dtype = F32  # of the activations
    u_dtype: torch.dtype = F32  # of stash and history

    def __post_init__(self):
        self.gen = generator(5)
        slots = self.batch + 2
        self.slot = random_slots(self.gen, self.batch, slots)
        start = random_state(self.gen, self.dims, 1, slots, dtype=self.state_dtype)
        self.state = self.machine.put(start)
        self.exact = start[0].double()[self.slot.long()]
        self.plain = self.exact.to(F32)
        dims = self.dims
        entries = (1, slots, self.capacity)
        self.history = [
            torch.zeros(*entries, dims.value_heads, dims.value_dim, dtype=self.u_dtype),
            torch.zeros(*entries, dims.key_heads, dims.key_dim, dtype=self.dtype),
            torch.zeros(*entries, dims.value_heads),
            torch.zeros(slots, dtype=torch.int32),
        ]
        self.history = [self.machine.put(x) for x in self.history]
        self.windows = self.machine.put(torch.zeros(1, slots, dims.width - 1, dims.conv_dim))
        weight = torch.randn(dims.conv_dim, dims.width, generator=self.gen)
        self.weight = self.machine.put(weight)

    def step_from_inputs(self, accept):
        """`step` with the stash of inputs: q, k and v come from a conv, and so do the commit's."""
        gen, machine, dims = self.gen, self.machine, self.dims
        parents, num_nodes = random_trees(gen, self.batch, self.nodes, full=True)
        raw = projections(gen, dims, self.batch, self.nodes, dtype=F32)
        x = machine.put(torch.randn(self.batch, self.nodes, dims.conv_dim, generator=gen))
        accepted = accept(parents, num_nodes)
        tree = [machine.put(t) for t in (self.slot, parents, num_nodes)]
        y = machine.call("tree_conv", x, self.windows[0], *tree, self.weight, None)
        keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
        for name, part in zip("qkv", y.split((keys, keys, values), -1), strict=True):
            raw[name] = part.unflatten(-1, raw[name].shape[-2:])
        inputs = {name: machine.put(t) for name, t in raw.items()}
        out = machine.call("tree_outputs", *inputs.values(), self.state[0], *tree)
        goal = *tree, machine.put(accepted)
        gates = (inputs["a"][None], inputs["b"][None])
        layers = (self.weight[None], None, inputs["A_log"][None], inputs["dt_bias"][None])
        machine.call("commit_inputs", self.state, self.windows, *goal, x[None], *gates, *layers)
        machine.call("conv_commit", self.windows, *goal, x[None])
        self._advance({name: t.cpu() for name, t in raw.items()}, parents, accepted)
        return out

    def step(self, accept):
        """One tree; `accept` gives the accepted nodes from (parents, num_nodes)."""
        if self.policy == "inputs":
            return self.step_from_inputs(accept)
        gen, machine = self.gen, self.machine
        parents, num_nodes = random_trees(gen, self.batch, self.nodes, full=True)
        raw = projections(gen, self.dims, self.batch, self.nodes, dtype=self.dtype)
        raw["A_log"], raw["dt_bias"] = raw["A_log"].float(), raw["dt_bias"].float()
        accepted = accept(parents, num_nodes)
        tree = [machine.put(x) for x in (self.slot, parents, num_nodes)]
        inputs = [machine.put(x) for x in raw.values()]
        history = [None] * 4
        if self.policy == "deferred":
            history = [x[0] for x in self.history[:3]] + self.history[3:]
        args = (*inputs, self.state[0], *tree, *history, self.u_dtype)
        out, u, g = machine.call("tree_verify", *args)
        stash = u[None], inputs[1][None], g[None]
        goal = *tree, machine.put(accepted)
        if self.policy == "deferred":
            machine.call("commit_deferred", self.state, *self.history, *goal, *stash)
        else:
            machine.call("commit", self.state, *goal, *stash)
        self._advance(raw, parents, accepted)
        return out

    def _advance(self, raw, parents, accepted):
        """The accepted tokens one by one, in float64 and in float32."""
        paths = [path_of(parents, row, int(a)) for row, a in enumerate(accepted.tolist())]
        for at in range(max(len(p) for p in paths)):
            rows = [row for row, path in enumerate(paths) if at < len(path)]
            nodes = [paths[row][at] for row in rows]
            for name in ("exact", "plain"):
                state = getattr(self, name)
                cast = {key: x.to(state.dtype) for key, x in raw.items()}
                q, k = reference.normalize_qk(cast["q"][rows, nodes], cast["k"][rows, nodes])
                g, beta = reference.gates(
                    cast["a"][rows, nodes], cast["b"][rows, nodes], cast["A_log"], cast["dt_bias"]
                )
                _, after = reference.tree_recurrence(
                    q[:, None], k[:, None], cast["v"][rows, nodes][:, None], g[:, None],
                    beta[:, None], state[rows], torch.full((len(rows), 1), -1),
                )  # fmt: skip
                state[rows] = after[:, 0]

    def committed(self):
        """The states of the rows, histories folded in."""
        if self.policy == "deferred":
            slot = self.machine.put(self.slot)
            self.machine.call("flush_history", self.state, *self.history, slot)
        return self.state[0].cpu()[self.slot.long()]


def accept_root(parents, num_nodes):
    return torch.zeros(len(num_nodes), dtype=torch.int32)


def accept_last(parents, num_nodes):
    return num_nodes - 1


def accept_any(gen):
    return lambda parents, num_nodes: random_accepted(gen, num_nodes)


def check_drift(machine, mode, *, steps, dims, policy="reconstruct"):
    """After many commits: as near to the float64 recurrence as plain float32 decoding, times 2."""
    decoder = Decoder(machine, dims, batch=3, nodes=5, policy=policy)
    accept = {"reject": accept_root, "full": accept_last, "random": accept_any(decoder.gen)}[mode]
    for _ in range(steps):
        decoder.step(accept)
    plain = relative_error(decoder.plain, decoder.exact)
    ours = decoder.committed()
    machine.close(f"drift {policy} {mode}", ours, decoder.exact)
    allowed = max(2 * plain, 5e-7)
    error = relative_error(ours, decoder.exact)
    assert error <= allowed, f"{error:.1e} after {steps} steps, plain decoding has {plain:.1e}"


def check_drift_in_bfloat16(machine, *, steps, dims):
    """A history in bfloat16 beside a bfloat16 state: within 10% of commits with u in float32.

    Its pseudo-values are rounded, but the state is rounded seldom; most of either error is the
    last rounding of the state.
    """
    kinds = {"reconstruct": F32, "deferred": BF16}
    errors = {}
    for policy, u_dtype in kinds.items():
        decoder = Decoder(
            machine, dims, batch=3, nodes=5, policy=policy, capacity=16, state_dtype=BF16,
            dtype=BF16, u_dtype=u_dtype,
        )  # fmt: skip
        accept = accept_any(generator(3))
        for _ in range(steps):
            decoder.step(accept)
        errors[policy] = relative_error(decoder.committed(), decoder.exact)
    machine.errors["drift bfloat16 deferred"] = errors["deferred"]
    assert errors["deferred"] <= 1.1 * errors["reconstruct"], errors


def check_policies_agree(machine, *, steps, dims):
    """Deferred and reconstructing commits give the same outputs and states, step after step."""
    one = Decoder(machine, dims, batch=3, nodes=6, policy="reconstruct")
    two = Decoder(machine, dims, batch=3, nodes=6, policy="deferred", capacity=11)
    for _ in range(steps):
        seed = randint(one.gen, 0, 1 << 30)
        randint(two.gen, 0, 1 << 30)
        outs = [d.step(accept_any(generator(seed))) for d in (one, two)]
        machine.close("policies out", outs[1], outs[0])
    machine.close("policies state", two.committed(), one.committed())
