"""Peers' times of other runs, microseconds a layer, for goals that no peer in the run can settle.

One NVIDIA H200, 2026-11-29, Qwen3.5-35B-A3B layer, states cold, CUDA graph replay, median of 15.
TensorRT Edge-LLM 0.11's tree kernels built from source for sm_90 (float32 state; verification is
its gather, mask, prepare and apply launches), which are not timed by this benchmark; FlashInfer
0.7.2.post1 and SGLang 0.5.9, which are where they are installed.
"""

from __future__ import annotations

from .results import Results

DATE = "2026-11-29"
GPU = "NVIDIA H200"
_BATCHES = (1, 8, 32, 64, 128, 256)


def _by_batch(*us: float) -> dict[int, float]:
    return dict(zip(_BATCHES, us, strict=False))


# (implementation, topology, nodes): microseconds by batch
TIMES: dict[tuple[str, str, int], dict[int, float]] = {
    ("edge-llm", "tree", 4): _by_batch(26, 44, 152, 272, 512, 985),
    ("edge-llm", "tree", 15): _by_batch(40, 62, 199, 362, 681, 1309),
    ("edge-llm", "tree", 40): _by_batch(73, 128, 458, 870, 1674, 3295),
    ("edge-llm", "tree", 64): _by_batch(109, 187, 737, 1439, 2798, 5529),
    ("flashinfer", "chain", 4): _by_batch(6.1, 7.8, 14.7, 24.6, 43.7, 81.5),
    ("flashinfer", "chain", 8): _by_batch(6.1, 7.6, 16.1, 27.9, 49.4, 91.7),
    ("flashinfer", "chain", 16): _by_batch(5.2, 6.9, 14.9, 26.4, 47.4, 89.7),
    ("flashinfer-snapshots", "chain", 4): _by_batch(5.3, 16.9, 61.1, 106),
    ("sglang", "chain", 4): _by_batch(7.9, 35.9, 126, 245, 486, 969),
    ("sglang", "tree", 15): _by_batch(29, 158, 597, 1204, 2475, 5036),
    ("sglang", "tree", 40): _by_batch(86, 427, 1616, 3379),
}


def peer_us(
    results: Results, implementation: str, topology: str, nodes: int, batch: int
) -> tuple[float, bool] | None:
    """A peer's time, and whether it was taken in this very run.

    Recorded times count on the kind of GPU that they were taken on alone.
    """
    measured = results.us(
        implementation=implementation, topology=topology, nodes=nodes, batch=batch
    )
    if measured is not None:
        return measured, True
    us = TIMES.get((implementation, topology, nodes), {}).get(batch)
    if us is None or results.gpu != GPU:
        return None
    return us, False
