"""Random prompts in chunks, run by an executor with captured prompt steps and by one without.

Used on the CPU, in Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

import random

import torch
from engine_world import VOCAB, make_executor

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.runtime.cuda_graphs import GraphRunner, RecordedCalls
from trtllm_treewy.runtime.prompt_buffers import PromptShape

# Small, so that batches of every fill occur: full, padded, of fewer sequences than there is room.
SHAPES = tuple(
    PromptShape(tokens, sequences)
    for tokens, sequences in ((8, 1), (8, 3), (24, 1), (24, 4), (40, 4))
)
SLOTS = 4
# Room for `random_steps`.
ROOM = dict(max_batch_size=SLOTS, num_blocks=140)


def captured_executor(model, *, runner: GraphRunner | None = None, shapes=SHAPES, **changes):
    """An executor whose prompt steps are captured."""
    executor = make_executor(model, **changes)
    graphs = executor.make_prompt_graphs(runner or RecordedCalls(), shapes, drafts=True)
    graphs.capture_all()
    return executor


def random_steps(seed: int, most: int, count: int):
    """Prompt steps: lengths, slots (-1 among them) and contexts; who has ended starts again."""
    rng = random.Random(seed)
    contexts = dict.fromkeys(range(SLOTS), 0)
    steps = []
    for _ in range(count):
        rows = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        left = rng.randint(len(rows), most)
        lengths, slots = [], []
        for at, slot in enumerate(rows):
            rest = len(rows) - at - 1
            length = left - rest if rest == 0 else rng.randint(1, max(1, (left - rest) // 2))
            left -= length
            lengths.append(length)
            slots.append(-1 if rng.random() < 0.1 else slot)
        ended = [s for s in rows if contexts[s] + most > 100]
        contexts.update(dict.fromkeys(ended, 0))
        behind = [contexts[slot] if slot >= 0 else 0 for slot in slots]
        steps.append((lengths, slots, behind, ended))
        for slot, length in zip(slots, lengths, strict=True):
            if slot >= 0:
                contexts[slot] += length
    return steps


def play(executor, steps, seed: int):
    """Runs the steps: logits and hidden of every prompt step, and those of the MTP module after."""
    gen = torch.Generator().manual_seed(seed)
    results = []
    for slot in range(SLOTS):
        assert executor.try_allocate(slot, 110)
    for lengths, slots, contexts, ended in steps:
        for slot in ended:
            executor.free(slot)
            assert executor.try_allocate(slot, 110)
        ids = torch.randint(VOCAB, (2, sum(lengths)), generator=gen).tolist()
        batch = PrefillBatch.pack(ids[0], lengths, slots, contexts, executor.device)
        model = executor.prefill(batch)
        batch = PrefillBatch.pack(ids[1], lengths, slots, contexts, executor.device)
        draft = executor.draft_extend(batch, model.hidden)
        results.append((model.logits, model.hidden, draft.logits, draft.hidden))
    return results


def committed(executor):
    """States, conv states and the rows of every sequence: all that a step may leave."""
    executor.state.policy.materialize(
        torch.arange(SLOTS, dtype=torch.int32, device=executor.device)
    )
    cache = executor.kv_cache
    rows = torch.cat([cache.host_rows(slot, 0, cache.reserved(slot)) for slot in range(SLOTS)])
    rows = rows.to(executor.device)
    return executor.state.state, executor.state.conv_state, cache.k[:, :, rows], cache.v[:, :, rows]


def real_rows(step):
    """Rows and tokens of a step whose results are of use: those of slots."""
    lengths, slots, _, _ = step
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    tokens = [sum(lengths[:row]) + token for row in rows for token in range(lengths[row])]
    return rows, tokens


def check_equal(ours, theirs, steps, close):
    """Results of both executors' `play`, by `close(got, want)`."""
    for step, got, want in zip(steps, ours, theirs, strict=True):
        rows, tokens = real_rows(step)
        if not rows:
            continue
        close(got[0][rows], want[0][rows])
        close(got[1][tokens], want[1][tokens])
        close(got[2][rows], want[2][rows])
        close(got[3][rows], want[3][rows])
