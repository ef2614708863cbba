"""Times of the CUDA kernels beside the floor of memory and beside peers.

    python benchmarks/kernels.py --quick
    python benchmarks/kernels.py --output results.json --plot results.png

First the kernels are checked against the float64 reference on the CPU; a wrong kernel is not timed.
Then, for a layer of Qwen3.5-35B-A3B (HK 16, HV 32, K = V = 128), every case is captured as a CUDA
graph of several launches, each over other slots of a pool far larger than the L2 cache; the slots
are drawn anew before every replay, so that states come from memory. A time is the median of the
replays over the launches of a graph. Inputs and outputs are the same from launch to launch and may
stay in the cache, for peers as for us.

The floor of a call is every byte that must move once, at the read bandwidth measured first. Peers
are timed where they can be imported: FlashInfer (bf16 state, chains of 2 to 16, no state written)
and flash-linear-attention (fp32 state, chains; gates not included).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from trtllm_treewy import cuda_library, ops

HK, HV, K, V, LAYERS = 16, 32, 128, 128, 30
SLOTS = 1024
NODES = (1, 4, 8, 16, 40, 64, 128)
BATCHES = (1, 8, 32, 64, 128, 256)
LAUNCHES = 8
REPLAYS = 15
PATH = 4  # accepted nodes of a commit
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CODES = {
    torch.float32: cuda_library.FLOAT32,
    torch.bfloat16: cuda_library.BFLOAT16,
    torch.float16: cuda_library.FLOAT16,
}
TILES = {"auto": 0, "64": 1, "128": 2, "128x8": 3}
# Bounds of `check`, relative to the reference: u of a bf16 and of an fp32 state, out in bf16.
U_BOUND = {"bf16": 1e-5, "fp32": 1e-6}
OUT_BOUND = 4e-3


@dataclass(frozen=True)
class Row:
    """One measurement. `us` is a launch (a layer's step where the operation is a step)."""

    operation: str
    state: str
    topology: str
    nodes: int
    batch: int
    tile: str
    us: float
    floor_us: float

    @property
    def ratio(self) -> float:
        return self.us / self.floor_us


# ------------------------------------------------------------------ inputs


def parents_of(topology: str, nodes: int) -> list[int]:
    """A chain, or the tree whose nodes have three children each, level by level."""
    if topology == "chain":
        return [node - 1 for node in range(nodes)]
    return [(node - 1) // 3 if node else -1 for node in range(nodes)]


class Layer:
    """Buffers of one verification: inputs as a conv leaves them, a pool of states, outputs."""

    def __init__(
        self, batch: int, nodes: int, topology: str, pool: Tensor, device: str, seed: int = 0
    ) -> None:
        gen = torch.Generator(device=device).manual_seed(seed)
        self.batch, self.nodes, self.pool = batch, nodes, pool

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, device=device).bfloat16()

        qkv = draw(batch, nodes, 2 * HK * K + HV * V)
        q, k, v = qkv.split((HK * K, HK * K, HV * V), -1)
        self.q, self.k = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K))
        self.v = v.unflatten(-1, (HV, V))
        self.a, self.b = draw(batch, nodes, 2 * HV).split(HV, -1)
        self.A_log = torch.empty(HV, device=device).uniform_(-3.0, 1.0, generator=gen)
        self.dt_bias = torch.randn(HV, generator=gen, device=device)
        parents = torch.tensor(parents_of(topology, nodes), dtype=torch.int32, device=device)
        self.parents = parents.expand(batch, -1).contiguous()
        self.num_nodes = torch.full((batch,), nodes, dtype=torch.int32, device=device)
        self.out = torch.empty(batch, nodes, HV, V, dtype=torch.bfloat16, device=device)
        self.u = torch.empty(batch, nodes, HV, V, device=device)
        self.g = torch.empty(batch, nodes, HV, device=device)

    def tree(self, slot: Tensor) -> cuda_library.Tree:
        return cuda_library.Tree(
            batch=self.batch,
            max_nodes=self.nodes,
            num_slots=self.pool.shape[-4],
            slot=slot.data_ptr(),
            parents=self.parents.data_ptr(),
            num_nodes=self.num_nodes.data_ptr(),
        )

    def params(self, slot: Tensor, tile: str = "auto") -> cuda_library.TreeVerifyParams:
        params = cuda_library.TreeVerifyParams(
            tree=self.tree(slot), state=state_pool(self.pool[None])
        )
        for name in ("q", "k", "v", "out", "u", "a", "b", "g"):
            tensor = getattr(self, name)
            setattr(params, name, tensor.data_ptr())
            strides = getattr(params, f"{name}_stride")
            strides[:] = tensor.stride()[: len(strides)]
        params.A_log, params.dt_bias = self.A_log.data_ptr(), self.dt_bias.data_ptr()
        params.dtype = params.gate_dtype = CODES[torch.bfloat16]
        params.u_dtype, params.tile = CODES[torch.float32], TILES[tile]
        return params

    def floor_bytes(self) -> int:
        state = HV * V * K * self.pool.element_size()
        per_node = 2 * (2 * HK * K + 2 * HV * V + 2 * HV) + 4 * HV * (V + 1)
        return self.batch * (state + self.nodes * per_node)


def state_pool(pools: Tensor) -> cuda_library.StatePool:
    """Of pools [L, slots, HV, V, K]."""
    return cuda_library.StatePool(
        data=pools.data_ptr(),
        layer_stride=pools.stride(0),
        slot_stride=pools.stride(1),
        dtype=CODES[pools.dtype],
        layers=pools.shape[0],
        key_heads=HK,
        value_heads=HV,
        key_dim=K,
        value_dim=V,
    )


def run(name: str, params: ctypes.Structure) -> None:
    """Launch an operation of the library on torch's current stream."""
    library = cuda_library.load_library()
    stream = torch.cuda.current_stream().cuda_stream
    library.check(library.launchers[name](ctypes.addressof(params), stream))


# ------------------------------------------------------------------ correctness


def check(quick: bool) -> float:
    """Verify's u, out and g against the float64 reference. Returns the worst error of u.

    Raises:
        RuntimeError: a result is wrong; the message says which.
    """
    worst = 0.0
    for state, tile in (("bf16", "64"), ("bf16", "128"), ("bf16", "128x8"), ("fp32", "64")):
        for nodes in (16, 40) if quick else (1, 7, 16, 33, 40, 64, 128):
            for topology in ("chain", "tree"):
                worst = max(worst, check_one(state, tile, nodes, topology))
    return worst


def check_one(state: str, tile: str, nodes: int, topology: str) -> float:
    pool = 0.3 * torch.randn(5, HV, V, K, device="cuda")
    layer = Layer(3, nodes, topology, pool.to(DTYPES[state]), "cuda", seed=nodes)
    layer.num_nodes[1] = max(1, nodes - 3)
    slot = torch.tensor([3, 0, -1], dtype=torch.int32, device="cuda")
    for tensor in (layer.out, layer.u, layer.g):
        tensor.fill_(torch.nan)
    run("treewy_tree_verify", layer.params(slot, tile))
    # One row and four heads are enough for the CPU.
    keys, values = slice(0, 2), slice(0, 4)
    wide = [
        x.double().cpu()
        for x in (
            layer.q[:, :, keys],
            layer.k[:, :, keys],
            layer.v[:, :, values],
            layer.a[..., values],
            layer.b[..., values],
            layer.A_log[values],
            layer.dt_bias[values],
            layer.pool[:, values],
        )
    ]
    trees = (slot.cpu(), layer.parents.cpu(), layer.num_nodes.cpu())
    expected = ops.tree_verify(*wide, *trees)
    found = (layer.out[:, :, values], layer.u[:, :, values], layer.g[..., values])
    errors = [
        ((x.double().cpu() - y).norm() / y.norm()).item()
        for x, y in zip(found, expected, strict=True)
    ]
    bounds = (OUT_BOUND, U_BOUND[state], 1e-6)
    if not all(error <= bound for error, bound in zip(errors, bounds, strict=True)):
        raise RuntimeError(
            f"tree_verify is wrong: state {state}, tile {tile}, {topology} of {nodes} nodes: "
            f"relative errors of out, u, g {errors}, expected at most {bounds}"
        )
    return errors[1]


# ------------------------------------------------------------------ timing


def read_bandwidth() -> float:
    """Bytes a second of a reduction over 4 GiB, or of a copy if that is faster."""
    data = torch.ones(2**30, device="cuda")
    other = torch.empty_like(data)
    size = data.numel() * data.element_size()
    read = size / median_seconds(lambda: data.sum(), 10)
    copy = 2 * size / median_seconds(lambda: other.copy_(data), 10)
    return max(read, copy)


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[3:])


def capture(launches: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, which ran once before."""
    calls = list(launches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


class Slots:
    """Slots of every launch of a graph; a launch's are all different."""

    def __init__(self, batch: int, launches: int, slots: int) -> None:
        self._slots = slots
        self._perm = torch.empty(launches, slots, device="cuda")
        self.slot = torch.zeros(launches, batch, dtype=torch.int32, device="cuda")
        self.draw()

    def draw(self) -> None:
        order = self._perm.uniform_().argsort(-1)[:, : self.slot.shape[1]]
        self.slot.copy_(order)


def time_graph(calls: Sequence[Callable[[], object]], slots: Slots) -> float:
    """Median microseconds of one call."""
    graph = capture(calls)
    times = []
    for replay in range(REPLAYS + 2):
        slots.draw()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


@dataclass(frozen=True)
class Case:
    """What is verified, and by which tile of TILES."""

    state: str
    topology: str
    nodes: int
    batch: int
    tile: str = "auto"


def time_verify(case: Case, pool: Tensor, bandwidth: float) -> Row:
    layer = Layer(case.batch, case.nodes, case.topology, pool, "cuda")
    slots = Slots(case.batch, LAUNCHES, pool.shape[0])
    params = [layer.params(slots.slot[i], case.tile) for i in range(LAUNCHES)]
    us = time_graph([lambda p=p: run("treewy_tree_verify", p) for p in params], slots)
    floor = layer.floor_bytes() / bandwidth * 1e6
    return Row("tree_verify", *asdict(case).values(), us, floor)


def time_commit(state: str, batch: int, bandwidth: float) -> Row:
    """Commit of a path of 4 in all layers: one launch; `us` is for a layer."""
    nodes, slots_of_pool = 16, max(2 * batch, 64)
    pools = torch.randn(LAYERS, slots_of_pool, HV, V, K, device="cuda", dtype=DTYPES[state])
    layer = Layer(batch, nodes, "chain", pools[0], "cuda")
    u = torch.randn(LAYERS, batch, nodes, HV, V, device="cuda")
    k = torch.randn(LAYERS, batch, nodes, HK, K, device="cuda", dtype=torch.bfloat16)
    g = -torch.rand(LAYERS, batch, nodes, HV, device="cuda")
    accepted = torch.full((batch,), PATH - 1, dtype=torch.int32, device="cuda")
    stash = cuda_library.Stash(
        u=u.data_ptr(), k=k.data_ptr(), g=g.data_ptr(), k_dtype=CODES[k.dtype], k_normalized=0
    )
    stash.u_stride[:], stash.k_stride[:], stash.g_stride[:] = (
        u.stride()[:4],
        k.stride()[:4],
        g.stride()[:3],
    )
    launches = 2
    slots = Slots(batch, launches, slots_of_pool)
    params = [
        cuda_library.CommitParams(
            tree=layer.tree(slots.slot[i]),
            state=state_pool(pools),
            stash=stash,
            accepted=accepted.data_ptr(),
        )
        for i in range(launches)
    ]
    us = time_graph([lambda p=p: run("treewy_commit", p) for p in params], slots) / LAYERS
    path_bytes = PATH * (4 * HV * V + 2 * HK * K + 4 * HV)
    moved = batch * (2 * HV * V * K * pools.element_size() + path_bytes)
    return Row("commit", state, "chain", PATH, batch, "auto", us, moved / bandwidth * 1e6)


# ------------------------------------------------------------------ peers


def time_peers(case: Case, pool: Tensor, bandwidth: float) -> list[Row]:
    """Peers that can be imported and do this case; one that fails is said and left out."""
    rows = []
    for name, make in (("flashinfer", flashinfer_call), ("fla", fla_call)):
        try:
            layer = Layer(case.batch, case.nodes, case.topology, pool, "cuda")
            slots = Slots(case.batch, LAUNCHES, pool.shape[0])
            calls = [make(case, layer, slots.slot[i]) for i in range(LAUNCHES)]
            if None in calls:
                continue
            us = time_graph([call for call in calls if call is not None], slots)
        except ImportError:
            continue
        except Exception as error:  # a peer's own failure must not end ours
            print(f"{name}: {case}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        floor = layer.floor_bytes() / bandwidth * 1e6
        rows.append(Row(name, *asdict(case).values(), us, floor))
    return rows


def flashinfer_call(case: Case, layer: Layer, slot: Tensor) -> Callable[[], object] | None:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    if case.state != "bf16" or case.topology != "chain" or not 2 <= case.nodes <= 16:
        return None
    q, k, v, a, b = (x.contiguous() for x in (layer.q, layer.k, layer.v, layer.a, layer.b))
    return lambda: gated_delta_rule_decode_pretranspose(
        q,
        k,
        v,
        None,
        layer.A_log,
        a,
        layer.dt_bias,
        b,
        output=layer.out,
        initial_state=layer.pool,
        initial_state_indices=slot,
        disable_state_update=True,
    )


def fla_call(case: Case, layer: Layer, slot: Tensor) -> Callable[[], object] | None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    if case.state != "fp32" or case.topology != "chain" or case.batch > 64:
        return None
    q, k = (x.repeat_interleave(HV // HK, 2) for x in (layer.q, layer.k))
    v = layer.v.contiguous()
    g = -torch.rand(*v.shape[:3], device="cuda")
    beta = torch.rand(*v.shape[:3], device="cuda").bfloat16()
    # It takes the states of the batch in a row, so that these come from memory only where they do
    # not fit the cache.
    state = layer.pool[: case.batch].transpose(-1, -2).contiguous()
    return lambda: fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )


# ------------------------------------------------------------------ what is run, and what is said


def cases(quick: bool, tiles: bool) -> list[Case]:
    """Cases of verification. A tree of one node or of a chain's shape is left out."""
    nodes = (4, 16, 40, 64) if quick else NODES
    batches = (1, 8, 64, 256) if quick else BATCHES
    found = []
    for state in DTYPES:
        for count in nodes:
            for batch in batches:
                for topology in ("chain", "tree"):
                    if topology == "chain" or count > 3:
                        found.append(Case(state, topology, count, batch))
    if tiles:
        trees = [c for c in found if c.topology == "tree" and c.state == "bf16"]
        found += [replace(c, tile=tile) for c in trees for tile in TILES if tile != "auto"]
    return found


def print_table(rows: Sequence[Row]) -> None:
    """A line for every kernel, a column for every batch: microseconds (ratio to the floor)."""
    batches = sorted({row.batch for row in rows})
    groups: dict[tuple[str, str, str, int, str], dict[int, Row]] = {}
    for row in rows:
        key = (row.operation, row.state, row.topology, row.nodes, row.tile)
        groups.setdefault(key, {})[row.batch] = row
    head = f"{'':12}{'state':6}{'shape':7}{'nodes':>6} {'tile':6}"
    print(head + "".join(f"{'B=' + str(batch):>15}" for batch in batches))
    for (operation, state, topology, nodes, tile), by_batch in groups.items():
        line = f"{operation:12}{state:6}{topology:7}{nodes:6} {tile:6}"
        for batch in batches:
            row = by_batch.get(batch)
            line += f"{'':15}" if row is None else f"{row.us:8.1f} ({row.ratio:4.2f})"
        print(line)


def print_targets(rows: Sequence[Row]) -> None:
    """The numbers that the project holds itself to, where the cases were run."""
    at = {
        (r.state, r.topology, r.nodes, r.batch): r
        for r in rows
        if r.operation == "tree_verify" and r.tile == "auto"
    }
    small = [r for r in at.values() if r.nodes <= 16 and r.batch >= 64]
    if small:
        worst = max(small, key=lambda r: r.ratio)
        print(f"N <= 16, B >= 64: at most {worst.ratio:.2f}x the floor (goal 1.2): {worst}")
    base = at.get(("bf16", "tree", 16, 64))
    for nodes, goal in ((40, 1.5), (64, 2.0)):
        row = at.get(("bf16", "tree", nodes, 64))
        if base and row:
            print(f"bf16, B 64: {nodes} nodes / 16 nodes {row.us / base.us:.2f} (goal {goal})")
    first = at.get(("bf16", "tree", 16, 1))
    if first:
        print(f"bf16, B 1, 16 nodes: {first.us:.1f} us (goal 5)")
    shapes = [
        (r.us / other.us, r)
        for r in at.values()
        if r.topology == "tree" and (other := at.get((r.state, "chain", r.nodes, r.batch)))
    ]
    if shapes:
        spread, row = max(shapes, key=lambda pair: abs(pair[0] - 1))
        print(f"tree / chain: {spread:.3f} where furthest from 1 (goal 0.97 to 1.03): {row}")


def plot(rows: Sequence[Row], path: str) -> None:
    """Time against nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(DTYPES), figsize=(11, 4.5))
    for axis, state in zip(axes, DTYPES, strict=True):
        for batch in sorted({row.batch for row in rows}):
            line = sorted(
                (r.nodes, r.us, r.floor_us)
                for r in rows
                if (r.operation, r.state, r.tile, r.batch) == ("tree_verify", state, "auto", batch)
                and (r.topology == "tree" or r.nodes < 4)
            )
            if line:
                nodes, us, floor = zip(*line, strict=True)
                (drawn,) = axis.plot(nodes, us, marker="o", label=f"batch {batch}")
                axis.plot(nodes, floor, linestyle=":", color=drawn.get_color())
        axis.set(title=f"tree verify, {state} state", xlabel="nodes", ylabel="us a layer")
        axis.set(xscale="log", yscale="log")
        axis.legend(title="dotted: floor")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "flashinfer-python", "sglang", "flash-linear-attention"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, about a minute")
    parser.add_argument("--tiles", action="store_true", help="every way to cut blocks as well")
    parser.add_argument("--no-commit", action="store_true", help="verification alone")
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--plot", help="image file of time against nodes (takes matplotlib)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this takes a GPU, and torch sees none")

    bandwidth = read_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}: reads {bandwidth / 1e12:.2f} TB/s")
    print(f"checked against the reference: u within {check(options.quick):.1e}")

    rows: list[Row] = []
    for state, dtype in DTYPES.items():
        pool = torch.empty(SLOTS, HV, V, K, dtype=dtype, device="cuda").normal_(0.0, 0.3)
        for case in cases(options.quick, options.tiles):
            if case.state != state:
                continue
            rows.append(time_verify(case, pool, bandwidth))
            if case.tile == "auto":
                rows += time_peers(case, pool, bandwidth)
        del pool
        torch.cuda.empty_cache()
    if not options.no_commit:
        for state in DTYPES:
            for batch in (1, 64) if options.quick else (1, 8, 32, 64, 128):
                rows.append(time_commit(state, batch, bandwidth))
                torch.cuda.empty_cache()
    print_table(rows)
    print_targets(rows)
    if options.output:
        result = {
            "gpu": name,
            "date": datetime.date.today().isoformat(),
            "read_bandwidth": bandwidth,
            "versions": versions(),
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
