"""Time of the greedy acceptance walk, one call a step."""

from __future__ import annotations

import torch

from trtllm_treewy import cuda_library

from .bench import Bench
from .cases import Case
from .layer import Trees

MAX_PATH = 16


def time_greedy_accept(bench: Bench, case: Case) -> float:
    """All drafts match, so that every walk goes to a leaf."""
    trees = Trees(case.topology, case.nodes, case.batch, bench.slots, bench.device)
    ids = torch.zeros(2, case.batch, case.nodes, dtype=torch.int64, device=bench.device)
    counts = torch.empty(2, case.batch, dtype=torch.int32, device=bench.device)
    path = torch.empty(case.batch, MAX_PATH, dtype=torch.int64, device=bench.device)
    bonus = torch.empty(case.batch, dtype=torch.int64, device=bench.device)
    drawn = bench.draw_slots(case.batch)
    calls = []
    for slot in drawn.slot:
        params = cuda_library.GreedyAcceptParams(tree=trees.params(slot), max_path=MAX_PATH)
        params.target_ids, params.token_ids = ids[0].data_ptr(), ids[1].data_ptr()
        params.target_stride = params.token_stride = ids.stride(1)
        params.accepted, params.num_accepted = counts[0].data_ptr(), counts[1].data_ptr()
        params.path, params.bonus_ids = path.data_ptr(), bonus.data_ptr()
        calls.append(bench.call("treewy_greedy_accept", params))
    us = bench.clock.us(calls, drawn.draw)
    if bool((counts[1] < 2).any()) and case.nodes > 1:
        raise RuntimeError("greedy_accept: a walk ended at the root although every draft matched")
    return us
