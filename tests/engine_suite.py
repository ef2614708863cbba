"""Checks of whole engines with the plugins inside, for any TensorRT: see engine_backends.py.

The engines hold two GDN layers' state work: convs, verifications, commits and prefills by plugins,
with sums of TensorRT's own between them. What they compute is compared with the kernels called
directly, bit for bit, and with the float64 reference.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from gdn_cases import Dims, generator, randint, random_accepted, random_slots, random_trees
from kernel_suite import BF16, TOLERANCE, same_bits
from plugin_host import Refused

from trtllm_treewy import ops as ops  # registers torch.ops.treewy

treewy = torch.ops.treewy
INT32 = torch.int32
LAYERS, WIDTH, SLOTS = 2, 4, 11
MAX_BATCH, MAX_NODES, MAX_TOKENS = 6, 24, 96
DIMS = Dims(1, 2, 64, 128)


@dataclass
class Network:
    """A network, as steps that every backend knows how to build."""

    inputs: list[tuple[str, torch.dtype, tuple, tuple, tuple]] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    outputs: list[tuple[str, torch.dtype]] = field(default_factory=list)

    def input(self, name, dtype, shape, **ranges):
        """An input; letters of its shape are dynamic, from and to what `ranges` says."""
        low, opt, high = (
            tuple(ranges[x][place] if isinstance(x, str) else x for x in shape)
            for place in range(3)
        )
        self.inputs.append((name, dtype, low, opt, high))
        return name

    def constant(self, name, x):
        self.steps.append(("constant", name, x.cpu().contiguous()))
        return name

    def sum(self, name, left, right):
        self.steps.append(("sum", name, left, right))
        return name

    def plugin(self, name, fields, inputs, outputs):
        self.steps.append(("plugin", name, fields, list(inputs), list(outputs)))

    def output(self, name, dtype):
        self.outputs.append((name, dtype))


TREE = {"B": (1, 3, MAX_BATCH), "N": (1, 8, MAX_NODES)}
PACKED = {"T": (1, 16, MAX_TOKENS), "B": (1, 3, MAX_BATCH), "B1": (2, 4, MAX_BATCH + 1)}


class Model:
    """Random weights of two layers."""

    def __init__(self, dtype, state_dtype, device, dims=DIMS, seed=5):
        gen = generator(seed)
        self.dims, self.dtype, self.state_dtype, self.device = dims, dtype, state_dtype, device
        heads, channels = dims.value_heads, dims.conv_dim
        self.weight = (torch.randn(LAYERS, channels, WIDTH, generator=gen) / 2).to(dtype)
        self.A_log = torch.rand(LAYERS, heads, generator=gen).mul(2).sub(2)
        self.dt_bias = torch.randn(LAYERS, heads, generator=gen)
        shape = (heads, dims.value_dim, dims.key_dim)
        self.state = torch.randn(LAYERS, SLOTS, *shape, generator=gen).to(state_dtype)
        self.windows = torch.randn(LAYERS, SLOTS, WIDTH - 1, channels, generator=gen).to(dtype)
        for name in ("weight", "A_log", "dt_bias", "state", "windows"):
            setattr(self, name, getattr(self, name).to(device))

    @property
    def heads(self):
        dims = self.dims
        return {
            "num_k_heads": dims.key_heads,
            "num_v_heads": dims.value_heads,
            "head_k_dim": dims.key_dim,
            "head_v_dim": dims.value_dim,
        }

    @property
    def pool(self):
        return (SLOTS, *self.state.shape[2:])

    def split(self, y):
        """q, k and v as views of a conv's output."""
        dims = self.dims
        keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
        q, k, v = y.split((keys, keys, values), -1)
        sizes = (dims.key_heads, dims.key_dim), (dims.value_heads, dims.value_dim)
        return q.unflatten(-1, sizes[0]), k.unflatten(-1, sizes[0]), v.unflatten(-1, sizes[1])


# ------------------------------------------------------------------ networks


def add_trees(net, *, accepted=False):
    names = [
        net.input("slot", INT32, ("B",), **TREE),
        net.input("parents", INT32, ("B", "N"), **TREE),
        net.input("num_nodes", INT32, ("B",), **TREE),
    ]
    if accepted:
        names.append(net.input("accepted", INT32, ("B",), **TREE))
    return names


def verify_network(model, *, stash="pseudo_values", max_nodes=MAX_NODES):
    """Layer l gets x_l plus what layer l-1's conv gave."""
    net, dims = Network(), model.dims
    ranges = {**TREE, "N": (1, 8, max_nodes)}
    trees = [
        net.input("slot", INT32, ("B",), **ranges),
        net.input("parents", INT32, ("B", "N"), **ranges),
        net.input("num_nodes", INT32, ("B",), **ranges),
    ]
    for i in range(LAYERS):
        x = net.input(f"x{i}", model.dtype, ("B", "N", dims.conv_dim), **ranges)
        a = net.input(f"a{i}", model.dtype, ("B", "N", dims.value_heads), **ranges)
        b = net.input(f"b{i}", model.dtype, ("B", "N", dims.value_heads), **ranges)
        state = net.input(f"state{i}", model.state_dtype, model.pool)
        window = net.input(f"window{i}", model.dtype, tuple(model.windows.shape[1:]))
        weights = [
            net.constant(f"{name}{i}", getattr(model, name)[i])
            for name in ("weight", "A_log", "dt_bias")
        ]
        xin = net.sum(f"xin{i}", x, f"y{i - 1}" if i else x)
        net.plugin("TreeConv1d", {}, [xin, window, weights[0], *trees], [f"y{i}"])
        outputs = [f"out{i}"] + ([f"u{i}", f"g{i}"] if stash == "pseudo_values" else [])
        inputs = [f"y{i}", a, b, *weights[1:], state, *trees]
        net.plugin("TreeWyVerify", {**model.heads, "stash": stash}, inputs, outputs)
        for name in (xin, f"y{i}", outputs[0]):
            net.output(name, model.dtype)
        for name in outputs[1:]:
            net.output(name, torch.float32)
    return net


def commit_network(model):
    net, dims = Network(), model.dims
    trees = add_trees(net, accepted=True)
    heads = dims.value_heads
    state = net.input("state", model.state_dtype, (LAYERS, *model.pool))
    window = net.input("windows", model.dtype, tuple(model.windows.shape))
    u = net.input("u", torch.float32, (LAYERS, "B", "N", heads, dims.value_dim), **TREE)
    k = net.input("k", model.dtype, (LAYERS, "B", "N", dims.key_heads, dims.key_dim), **TREE)
    g = net.input("g", torch.float32, (LAYERS, "B", "N", heads), **TREE)
    x = net.input("x", model.dtype, (LAYERS, "B", "N", dims.conv_dim), **TREE)
    net.plugin("TreeWyCommit", {}, [state, *trees, u, k, g], ["state_out", "errors"])
    net.plugin("TreeConvCommit", {}, [window, *trees, x], ["windows_out", "conv_errors"])
    for name, dtype in (("state_out", model.state_dtype), ("errors", INT32),
                        ("windows_out", model.dtype), ("conv_errors", INT32)):  # fmt: skip
        net.output(name, dtype)
    return net


def commit_inputs_network(model):
    net, dims = Network(), model.dims
    trees = add_trees(net, accepted=True)
    state = net.input("state", model.state_dtype, (LAYERS, *model.pool))
    window = net.input("windows", model.dtype, tuple(model.windows.shape))
    x = net.input("x", model.dtype, (LAYERS, "B", "N", dims.conv_dim), **TREE)
    gates = [net.input(name, model.dtype, (LAYERS, "B", "N", dims.value_heads), **TREE)
             for name in "ab"]  # fmt: skip
    weights = [net.constant(n, getattr(model, n)) for n in ("weight", "A_log", "dt_bias")]
    net.plugin(
        "TreeWyCommitInputs",
        {"num_k_heads": dims.key_heads},
        [state, window, *trees, x, *gates, *weights],
        ["state_out", "windows_out", "errors"],
    )
    for name, dtype in (("state_out", model.state_dtype), ("windows_out", model.dtype),
                        ("errors", INT32)):  # fmt: skip
        net.output(name, dtype)
    return net


def prefill_network(model):
    net, dims = Network(), model.dims
    packed = [net.input("slot", INT32, ("B",), **PACKED),
              net.input("cu_seqlens", INT32, ("B1",), **PACKED)]  # fmt: skip
    for i in range(LAYERS):
        x = net.input(f"x{i}", model.dtype, ("T", dims.conv_dim), **PACKED)
        a = net.input(f"a{i}", model.dtype, ("T", dims.value_heads), **PACKED)
        b = net.input(f"b{i}", model.dtype, ("T", dims.value_heads), **PACKED)
        state = net.input(f"state{i}", model.state_dtype, model.pool)
        window = net.input(f"window{i}", model.dtype, tuple(model.windows.shape[1:]))
        weight, *rates = [
            net.constant(f"{name}{i}", getattr(model, name)[i])
            for name in ("weight", "A_log", "dt_bias")
        ]
        xin = net.sum(f"xin{i}", x, f"y{i - 1}" if i else x)
        inputs = [xin, window, weight, *packed]
        net.plugin("GdnPrefillConv1d", {}, inputs, [f"y{i}", f"window_out{i}"])
        inputs = [f"y{i}", a, b, *rates, state, *packed]
        net.plugin("GdnPrefill", model.heads, inputs, [f"out{i}", f"state_out{i}"])
        for name, dtype in ((xin, model.dtype), (f"y{i}", model.dtype), (f"out{i}", model.dtype),
                            (f"window_out{i}", model.dtype),
                            (f"state_out{i}", model.state_dtype)):  # fmt: skip
            net.output(name, dtype)
    return net


# ------------------------------------------------------------------ steps


class Step:
    """One batch of trees: buffers of the largest size, and random content of a given size."""

    def __init__(self, model, gen, batch, nodes, *, pads=1):
        self.model, self.device = model, model.device
        self.slot = random_slots(gen, batch, SLOTS, pads=min(pads, batch - 1))
        shape = ("random", "chain", "star", "levels")[randint(gen, 0, 4)]
        self.parents, self.num_nodes = random_trees(gen, batch, nodes, shape=shape)
        self.accepted = random_accepted(gen, self.num_nodes)
        if batch > 2:
            self.accepted[randint(gen, 0, batch)] = -1
        dims = model.dims

        def draw(size):
            x = torch.randn(LAYERS, batch, nodes, size, generator=gen)
            return x.to(model.dtype).to(self.device)

        self.x, self.a, self.b = (draw(n) for n in (dims.conv_dim, *[dims.value_heads] * 2))
        for name in ("slot", "parents", "num_nodes", "accepted"):
            setattr(self, name, getattr(self, name).to(self.device))
        lead = (LAYERS, batch, nodes)
        self.xin, self.y = torch.empty_like(self.x), torch.empty_like(self.x)
        values = (*lead, dims.value_heads, dims.value_dim)
        self.out = torch.empty(values, dtype=model.dtype, device=self.device)
        self.u = torch.empty(values, device=self.device)
        self.g = torch.empty(values[:-1], device=self.device)
        self.errors = torch.full((2, 1), 99, dtype=INT32, device=self.device)

    def copy_(self, other):
        """Takes over the content of a step of the same size, at the addresses of this one."""
        for name, x in vars(other).items():
            if isinstance(x, torch.Tensor):
                getattr(self, name).copy_(x)

    @property
    def trees(self):
        return self.slot, self.parents, self.num_nodes

    def tree_bindings(self):
        return dict(zip(("slot", "parents", "num_nodes"), self.trees, strict=True))

    def verify_bindings(self, state, windows, stash="pseudo_values"):
        result = self.tree_bindings()
        for i in range(LAYERS):
            result |= {
                f"{name}{i}": getattr(self, name)[i] for name in ("x", "a", "b", "xin", "y", "out")
            }
            if stash == "pseudo_values":
                result |= {f"u{i}": self.u[i], f"g{i}": self.g[i]}
            result |= {f"state{i}": state[i], f"window{i}": windows[i]}
        return result

    def keys(self):
        """The raw keys of all layers, as the stash holds them."""
        return self.model.split(self.y)[1].contiguous()

    def commit_bindings(self, state, windows, k):
        result = {**self.tree_bindings(), "accepted": self.accepted}
        return result | {
            "state": state, "state_out": state, "windows": windows, "windows_out": windows,
            "u": self.u, "k": k, "g": self.g, "x": self.xin, "errors": self.errors[0],
            "conv_errors": self.errors[1],
        }  # fmt: skip

    def inputs_bindings(self, state, windows):
        result = {**self.tree_bindings(), "accepted": self.accepted}
        return result | {
            "state": state, "state_out": state, "windows": windows, "windows_out": windows,
            "x": self.xin, "a": self.a, "b": self.b, "errors": self.errors[0],
        }  # fmt: skip


class Checks:
    """All checks of one backend in one pair of types; what was seen is in `rows`."""

    def __init__(self, backend, machine, dtype, state_dtype, folder):
        self.backend, self.machine, self.folder = backend, machine, folder
        self.model = Model(dtype, state_dtype, machine.device)
        self.types = f"{str(dtype)[6:]}, state {str(state_dtype)[6:]}"
        self.rows = []

    def run(self, name, check, **options):
        """Runs a check; a failed one is recorded and does not stop the others."""
        started = time.monotonic()
        self.machine.errors.clear()
        try:
            said, passed = check(self, **options) or "", True
        except (AssertionError, Refused, RuntimeError) as error:
            said, passed = f"{type(error).__name__}: {error}"[:600], False
        errors = {key: float(f"{x:.3g}") for key, x in self.machine.errors.items()}
        seconds = round(time.monotonic() - started, 2)
        self.rows.append({"check": name, "types": self.types, "passed": passed, "said": said,
                          "errors": errors, "seconds": seconds})  # fmt: skip
        return passed

    def engine(self, name, network):
        """Builds, writes to a file, and loads again."""
        path = self.folder / f"{name}-{self.types.replace(', ', '-').replace(' ', '-')}.engine"
        self.backend.build(network, path)
        return self.backend.load(path)


def direct_verify(checks, step, state, windows):
    """Every layer by the kernels called directly, on what the engine gave the conv."""
    model, call = checks.model, checks.machine.call
    results = []
    for i in range(LAYERS):
        y = call("tree_conv", step.xin[i], windows[i], *step.trees, model.weight[i])
        rest = (step.a[i], step.b[i], model.A_log[i], model.dt_bias[i], state[i])
        results.append((y, *call("tree_verify", *model.split(y), *rest, *step.trees)))
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def expect_bits(name, got, wanted):
    assert same_bits(got.cpu(), wanted.cpu()), (
        f"{name} differs from the kernel's own: greatest difference "
        f"{float((got.double() - wanted.double()).abs().max()):.3g}"
    )


def expect_inputs(checks, step):
    """What reached the convs is the sum of what it should be, but for one rounding."""
    previous = torch.cat([step.x[:1], step.y[:-1]]).double()
    checks.machine.close("sums", step.xin, step.x.double() + previous)


def expect_verify(checks, step, state, windows, *, stash="pseudo_values"):
    expect_inputs(checks, step)
    y, out, u, g = direct_verify(checks, step, state, windows)
    expect_bits("y", step.y, y)
    expect_bits("out", step.out, out)
    if stash == "pseudo_values":
        expect_bits("u", step.u, u)
        expect_bits("g", step.g, g)


def sizes(gen):
    return randint(gen, 1, MAX_BATCH + 1), randint(gen, 1, MAX_NODES + 1)


class Truth:
    """The pools in float64, moved by the reference."""

    def __init__(self, model):
        self.model = model
        self.state = model.state.cpu().double()

    def advance(self, checks, step):
        """Outputs of a step against the reference, then its commit."""
        model = self.model
        trees = [x.cpu() for x in step.trees]
        stash = []
        for i in range(LAYERS):
            raw = [x[i].cpu().double() for x in (step.y, step.a, step.b, model.A_log,
                                                model.dt_bias)]  # fmt: skip
            q, k, v = model.split(raw[0])
            out, u, g = treewy.tree_verify(q, k, v, *raw[1:], self.state[i], *trees)
            checks.machine.close("out", step.out[i], out, tolerance=self.tolerance(step.out.dtype))
            stash.append((u, k, g))
        u, k, g = (torch.stack(parts) for parts in zip(*stash, strict=True))
        treewy.commit(self.state, *trees, step.accepted.cpu(), u, k, g)

    def tolerance(self, dtype):
        """A 16-bit state was rounded at every commit before."""
        return TOLERANCE[dtype] if self.model.state_dtype != BF16 else 4 * TOLERANCE[BF16]

    def compare(self, checks, state):
        bound = TOLERANCE[state.dtype] * (4 if state.dtype == BF16 else 1)
        checks.machine.close("state", state, self.state, tolerance=bound)


# ------------------------------------------------------------------ checks


def check_steps(checks, *, steps=40):
    """Many verify and commit steps over random topologies, batches and node counts."""
    model, gen = checks.model, generator(1)
    verify = checks.engine("verify", verify_network(model)).context()
    commit = checks.engine("commit", commit_network(model)).context()
    state, windows = model.state.clone(), model.windows.clone()
    ours, old = model.state.clone(), model.windows.clone()
    truth = Truth(model)
    for _ in range(steps):
        step = Step(model, gen, *sizes(gen))
        verify.run(step.verify_bindings(state, windows))
        expect_verify(checks, step, ours, old)
        k = step.keys()
        commit.run(step.commit_bindings(state, windows, k))
        goal = (*step.trees, step.accepted)
        checks.machine.call("commit", ours, *goal, step.u, k, step.g)
        checks.machine.call("conv_commit", old, *goal, step.xin)
        expect_bits("the state", state, ours)
        expect_bits("the conv windows", windows, old)
        assert not step.errors.any(), "rows were counted as errors"
        truth.advance(checks, step)
    assert not same_bits(state.cpu(), model.state.cpu()), "the state never moved"
    truth.compare(checks, state)
    return f"{steps} steps"


def check_steps_from_inputs(checks, *, steps=20):
    """The same with the input stash."""
    model, gen = checks.model, generator(2)
    verify = checks.engine("verify-inputs", verify_network(model, stash="inputs")).context()
    commit = checks.engine("commit-inputs", commit_inputs_network(model)).context()
    state, windows = model.state.clone(), model.windows.clone()
    truth = Truth(model)
    for _ in range(steps):
        step = Step(model, gen, *sizes(gen))
        verify.run(step.verify_bindings(state, windows, "inputs"))
        expect_verify(checks, step, state, windows, stash="inputs")
        before = windows.clone()
        commit.run(step.inputs_bindings(state, windows))
        checks.machine.call("conv_commit", before, *step.trees, step.accepted, step.xin)
        expect_bits("the conv windows", windows, before)
        assert not step.errors[0].any(), "rows were counted as errors"
        truth.advance(checks, step)
    truth.compare(checks, state)
    return f"{steps} steps"


def check_prefill(checks, *, steps=6):
    """Prompts of several lengths, one after the other into the same pools."""
    model, gen, dims = checks.model, generator(3), checks.model.dims
    prefill = checks.engine("prefill", prefill_network(model)).context()
    state, windows = model.state.clone(), model.windows.clone()
    ours, old = model.state.clone(), model.windows.clone()
    exact = model.state.cpu().double()
    for _ in range(steps):
        batch = randint(gen, 1, MAX_BATCH + 1)
        lengths = [randint(gen, 0 if batch > 1 else 1, 16) for _ in range(batch)]
        lengths[0] = max(lengths[0], 1)
        tokens = sum(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(model.device)
        slot = random_slots(gen, batch, SLOTS, pads=batch > 2).to(model.device)

        def draw(size, count=tokens):
            x = torch.randn(LAYERS, count, size, generator=gen)
            return x.to(model.dtype).to(model.device)

        x, a, b = draw(dims.conv_dim), draw(dims.value_heads), draw(dims.value_heads)
        xin, y = torch.empty_like(x), torch.empty_like(x)
        out = torch.empty(LAYERS, tokens, dims.value_heads, dims.value_dim, dtype=model.dtype,
                          device=model.device)  # fmt: skip
        bindings = {"slot": slot, "cu_seqlens": cu_seqlens}
        for i in range(LAYERS):
            bindings |= {f"x{i}": x[i], f"a{i}": a[i], f"b{i}": b[i], f"xin{i}": xin[i],
                         f"y{i}": y[i], f"out{i}": out[i], f"state{i}": state[i],
                         f"state_out{i}": state[i], f"window{i}": windows[i],
                         f"window_out{i}": windows[i]}  # fmt: skip
        prefill.run(bindings)
        for i in range(LAYERS):
            conv = checks.machine.call(
                "prefill_conv", xin[i], old[i], slot, cu_seqlens, model.weight[i]
            )
            expect_bits("y", y[i], conv)
            rest = a[i], b[i], model.A_log[i], model.dt_bias[i]
            mine = checks.machine.call(
                "prefill", *model.split(conv), *rest, ours[i], slot, cu_seqlens
            )
            expect_bits("out", out[i], mine)
            wide = [t.cpu().double() for t in (*model.split(conv), *rest)]
            treewy.prefill(*wide, exact[i], slot.cpu(), cu_seqlens.cpu())
        expect_bits("the state", state, ours)
        expect_bits("the conv windows", windows, old)
    bound = TOLERANCE[state.dtype] * (4 if state.dtype == BF16 else 1)
    checks.machine.close("state", state, exact, tolerance=bound)
    return f"{steps} batches"


def refusal(call, *args):
    """Why a call was refused, or that it was not."""
    try:
        call(*args)
    except Refused as error:
        return str(error) or "refused without a reason"
    return "not refused "


def check_refusals(checks):
    """Other addresses, slots and nodes out of range: the reason, and nothing written."""
    model, gen = checks.model, generator(4)
    commit = checks.engine("commit-refusals", commit_network(model)).context()
    step = Step(model, gen, 4, 6, pads=0)
    for x in (step.u, step.g, step.xin):
        x.copy_(torch.randn(x.shape, generator=gen))
    step.g.abs_().neg_()
    k = torch.randn(LAYERS, 4, 6, model.dims.key_heads, model.dims.key_dim, generator=gen)
    k = k.to(model.dtype).to(model.device)
    state, windows = model.state.clone(), model.windows.clone()
    bindings = step.commit_bindings(state, windows, k)
    for name in ("state_out", "windows_out"):
        other = torch.zeros_like(bindings[name])
        said = refusal(commit.run, {**bindings, name: other})
        assert "bound to one address" in said, f"{name} at another address: {said}"
        expect_bits(f"{name} elsewhere", other, torch.zeros_like(other))
    # The first of the two nodes may have run before the second was refused.
    state.copy_(model.state)
    windows.copy_(model.windows)
    step.slot[0], step.slot[1] = SLOTS, -7
    step.accepted[2] = step.num_nodes[2]
    step.accepted[3] = 0
    commit.run(bindings)
    assert step.errors.flatten().tolist() == [3, 3], f"errors are {step.errors.tolist()}"
    still = [s for s in range(SLOTS) if s != int(step.slot[3])]
    expect_bits("the state of rows that cannot move", state[:, still], model.state[:, still])
    expect_bits("their windows", windows[:, still], model.windows[:, still])
    assert not same_bits(state.cpu(), model.state.cpu()), "the good row did not move"
    return "addresses, slots, nodes"


def check_build_refusals(checks):
    """What no kernel does is told when the engine is built."""
    model = checks.model
    cases = (
        ("head_k_dim 96", Model(model.dtype, model.state_dtype, "cpu", Dims(1, 2, 96, 128)),
         {}, "key_dim is 96"),
        ("129 nodes", model, {"max_nodes": 129}, "N is 129"),
    )  # fmt: skip
    for name, other, options, message in cases:
        path = checks.folder / "refused"
        said = refusal(checks.backend.build, verify_network(other, **options), path)
        # TensorRT 8.6's plugins cannot refuse a profile, but they log what is wrong with it.
        said += checks.backend.log()
        assert message in said, f"{name}: no reason in the log: {said[-300:]}"
    return "K = 96, N = 129"


def check_graph(checks, *, replays=12):
    """One captured step, verify and commit, replayed over other topologies and inputs."""
    model, gen = checks.model, generator(6)
    verify = checks.engine("verify-graph", verify_network(model)).context()
    commit = checks.engine("commit-graph", commit_network(model)).context()
    state, windows = model.state.clone(), model.windows.clone()
    ours, old = model.state.clone(), model.windows.clone()
    batch, nodes = 4, 9
    step = Step(model, gen, batch, nodes)
    k = step.keys().zero_()
    stream = torch.cuda.Stream()

    def run(handle):
        verify.run(step.verify_bindings(state, windows), stream=handle)
        k.copy_(model.split(step.y)[1])
        commit.run(step.commit_bindings(state, windows, k), stream=handle)

    with torch.cuda.stream(stream):
        run(stream.cuda_stream)  # before the capture, as shapes are new
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(torch.cuda.current_stream().cuda_stream)
    state.copy_(model.state)
    windows.copy_(model.windows)
    for _ in range(replays):
        step.copy_(Step(model, gen, batch, nodes, pads=randint(gen, 0, 3)))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expect_verify(checks, step, ours, old)
        goal = (*step.trees, step.accepted)
        checks.machine.call("commit", ours, *goal, step.u, k, step.g)
        checks.machine.call("conv_commit", old, *goal, step.xin)
        expect_bits("the state", state, ours)
        expect_bits("the conv windows", windows, old)
    return f"{replays} replays"


def check_two_contexts(checks, *, rounds=8):
    """Two contexts of one engine on two streams at once."""
    model, gen = checks.model, generator(7)
    engine = checks.engine("verify-contexts", verify_network(model))
    contexts = [engine.context(), engine.context()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(rounds):
        steps = [Step(model, gen, *sizes(gen)) for _ in contexts]
        torch.cuda.synchronize()
        for context, stream, step in zip(contexts, streams, steps, strict=True):
            bindings = step.verify_bindings(model.state, model.windows)
            context.run(bindings, stream=stream.cuda_stream)
        torch.cuda.synchronize()
        for step in steps:
            expect_verify(checks, step, model.state, model.windows)
    return f"{rounds} rounds"


def run_all(backend, machine, types, folder, *, steps=40, say=print):
    """Every check in every pair of types. Returns the rows."""
    rows = []
    for dtype, state_dtype in types:
        checks = Checks(backend, machine, dtype, state_dtype, folder)
        plan = [
            ("verify and commit", check_steps, {"steps": steps}),
            ("input stash", check_steps_from_inputs, {"steps": max(steps // 2, 2)}),
            ("prefill", check_prefill, {}),
            ("refusals", check_refusals, {}),
            ("refusals in the build", check_build_refusals, {}),
        ]
        if machine.device != "cpu":
            plan += [("graph replay", check_graph, {}), ("two contexts", check_two_contexts, {})]
        for name, check, options in plan:
            checks.run(name, check, **options)
            row = checks.rows[-1]
            verdict = "ok" if row["passed"] else "FAILED"
            say(f"{verdict:7} {row['types']:28} {name:24} {row['seconds']:7.1f} s  {row['said']}")
        rows += checks.rows
    return rows
