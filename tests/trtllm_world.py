"""The double of TensorRT-LLM in a test's process, and out of it again."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

DOUBLE = Path(__file__).parent / "trtllm_double"
_OURS = (
    "trtllm_treewy.export.trtllm.inputs",
    "trtllm_treewy.export.trtllm.layers",
    "trtllm_treewy.export.trtllm.model",
    "trtllm_treewy.export.trtllm.model_class",
    "trtllm_treewy.export.trtllm.plugin_config",
    "trtllm_treewy.export.trtllm.plugin_nodes",
)


def _forget():
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorrt", "tensorrt_llm", "models") or name in _OURS:
            del sys.modules[name]
    package = sys.modules.get("trtllm_treewy.export.trtllm")
    for name in _OURS:
        if package is not None and hasattr(package, name.rpartition(".")[2]):
            delattr(package, name.rpartition(".")[2])


@contextmanager
def trtllm_double(monkeypatch, version="1.2.0", devices=1):
    """tensorrt_llm of this version, with `devices` GPUs, and a plugin library that loads."""
    from importlib import metadata

    import torch

    _forget()
    monkeypatch.syspath_prepend(DOUBLE)
    monkeypatch.setenv("TRTLLM_DOUBLE", version.rpartition(".")[0])
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == "tensorrt_llm" else real(name)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    try:
        yield
    finally:
        _forget()


def build(checkpoint, output, library, *flags):
    """Runs the wrapped command over a converted checkpoint; the networks of all ranks."""
    from trtllm_treewy.export import trtllm_build

    sizes = {"max_batch_size": 5, "max_seq_len": 192, "max_num_tokens": 512}
    words = [x for name, size in sizes.items() for x in (f"--{name}", str(size))]
    library.write_bytes(b"")
    trtllm_build.run(
        [
            *("--checkpoint_dir", str(checkpoint), "--output_dir", str(output)),
            *("--treewy_library", str(library), "--treewy_max_nodes", "40"),
            *words,
            *flags,
        ]
    )
    from tensorrt_llm import builder

    networks, builder.built[:] = list(builder.built), []
    return networks


class DoubleNetwork:
    """`trtllm_executor.EngineNetwork` over the recorded networks of all ranks, run in step.

    Rank 0's feeds and outputs are the caller's; the other ranks have pools of their own, which live
    as long as this object.
    """

    def __init__(self, networks):
        self.networks = networks
        self.executor = None
        self.others = []

    def run(self, inputs):
        from tensorrt_llm.functional import POOLS
        from tensorrt_llm.network import run_ranks

        pool = self.executor.attention.data
        POOLS[pool.data_ptr()] = pool
        given = dict(inputs)
        if len(self.networks) > 1:
            import torch

            size = 7 * len(self.networks) + 3
            given["all_reduce_workspace"] = torch.zeros(size, dtype=torch.int64)
        feeds = [given, *(self._rank_feeds(rank, given) for rank in range(1, len(self.networks)))]
        self.last = run_ranks(self.networks, feeds)
        return {n: x for n, x in self.last[0].items() if not n.startswith("present_")}

    def _rank_feeds(self, rank, given):
        import torch
        from tensorrt_llm.functional import POOLS

        while len(self.others) < rank:
            pools = {n: torch.zeros_like(x) for n, x in given.items() if n.startswith("past_")}
            self.others.append((pools, torch.zeros_like(self.executor.attention.data)))
        pools, cache = self.others[rank - 1]
        POOLS[cache.data_ptr()] = cache
        pointers = torch.tensor([[cache.data_ptr(), 0]])
        return {**given, **pools, "host_kv_cache_pool_pointers": pointers}
