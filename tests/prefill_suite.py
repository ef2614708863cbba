"""Checks of the prefill kernels against the float64 reference, on a GPU or played on the host."""

from __future__ import annotations

import ctypes

import torch
from gdn_cases import generator, projections, random_slots, random_state, same_bits
from kernel_suite import BF16, F16, F32, spread, treewy, wide

from trtllm_treewy import cuda_library

CHUNKS, GENERAL = "prefill_chunks", "prefill_general"
POISONED = ("q", "k", "v", "a", "b")


def kernel_of(machine, call):
    """Which of the two kernels `call` launches."""
    if machine.device == "cpu":
        call()
        last = cuda_library.load_library()._library.host_cuda_last_kernel
        last.restype = ctypes.c_char_p
        names = [last().decode()]
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        names = [event.key for event in seen.key_averages()]
    found = [kind for kind in (CHUNKS, GENERAL) if any(kind in name for name in names)]
    assert len(found) == 1, names
    return found[0]


class PromptCase:
    """Packed prompts of one layer, and where they start from."""

    def __init__(self, seed, dims, lengths, *, dtype=F32, state_dtype=F32, decay="mild", pads=0):
        gen = generator(seed)
        slots = len(lengths) + 3
        self.lengths = lengths
        self.raw = projections(gen, dims, sum(lengths), dtype=dtype, decay=decay)
        for name in ("A_log", "dt_bias"):
            self.raw[name] = self.raw[name].float()
        self.state = random_state(gen, dims, slots, dtype=state_dtype)
        self.slot = random_slots(gen, len(lengths), slots, pads=pads)

    @property
    def cu_seqlens(self):
        bounds = torch.tensor(self.lengths).cumsum(0).tolist()
        return torch.tensor([0, *bounds], dtype=torch.int32)

    def truth(self):
        """Outputs and states in float64."""
        state = self.state.double()
        out = treewy.prefill(*wide(*self.raw.values()), state, self.slot, self.cu_seqlens)
        return out, state

    def run(self, machine, *, pad=8):
        """Outputs and states of the kernel; heads lie `pad` elements apart, poison between."""
        state = machine.put(self.state)
        inputs = [spread(self.raw[name], machine, pad=(pad, 1)) for name in ("q", "k", "v")]
        inputs += [spread(self.raw[name], machine, pad=(3,)) for name in ("a", "b")]
        inputs += [machine.put(self.raw[name]) for name in ("A_log", "dt_bias")]
        rows = machine.put(self.slot), machine.put(self.cu_seqlens)
        return machine.call("prefill", *inputs, state, *rows), state


def check_prefill(
    machine, seed, dims, *, lengths, dtype=F32, state_dtype=F32, decay="mild", pad=4, kernel=None
):  # fmt: skip
    """Outputs and final states of packed sequences, by `kernel` where it is named."""
    pads = 1 if len(lengths) > 2 else 0
    case = PromptCase(
        seed, dims, lengths, dtype=dtype, state_dtype=state_dtype, decay=decay, pads=pads
    )
    truth, exact = case.truth()
    slots = range(case.state.shape[0])
    case.state[[s for s in slots if s not in case.slot.tolist()]] = float("nan")
    out, state = case.run(machine, pad=pad)
    if kernel is not None:
        assert kernel_of(machine, lambda: case.run(machine, pad=pad)) == kernel
    kind = f"{kernel or 'prefill'} {str(dtype)[6:]}/{str(state_dtype)[6:]}"
    machine.close(f"{kind} out", out, truth)
    live = [s for s, n in zip(case.slot.tolist(), lengths, strict=True) if s >= 0 and n > 0]
    machine.close(f"{kind} state", state.cpu()[live], exact[live])
    still = [s for s in slots if s not in live]
    assert same_bits(state.cpu()[still], case.state[still])
    bounds = case.cu_seqlens.tolist()
    for row, slot in enumerate(case.slot.tolist()):
        assert slot >= 0 or not out[bounds[row] : bounds[row + 1]].any()


def check_prefill_poison(machine, seed, dims, *, dtype=F32, state_dtype=F32, lengths=(40, 23)):
    """A NaN token spoils its own sequence from there on, and nothing before or beside it.

    A query spoils its own output alone; a value only its row of V.
    """
    at = 17

    def run(name=None, row=slice(None), poison=float("nan")):
        case = PromptCase(seed, dims, lengths, dtype=dtype, state_dtype=state_dtype)
        if name is not None:
            case.raw[name] = case.raw[name].clone()
            case.raw[name][at, ..., row] = poison  # of a and b all heads
        return [case.slot.tolist(), *(x.cpu() for x in case.run(machine))]

    (own, other), clean, clean_state = run()
    for name in POISONED:
        _, dirty, dirty_state = run(name)
        assert same_bits(dirty[:at], clean[:at]), name
        assert dirty[at].isnan().all(), name
        assert same_bits(dirty[lengths[0] :], clean[lengths[0] :]), name
        assert same_bits(dirty_state[other], clean_state[other]), name
        if name == "q":
            assert same_bits(dirty[at + 1 :], clean[at + 1 :])
            assert same_bits(dirty_state, clean_state)
        else:
            assert dirty[at : lengths[0]].isnan().all(), name
            assert dirty_state[own].isnan().all(), name
    row = dims.value_dim // 2 + 1
    others = [r for r in range(dims.value_dim) if r != row]
    _, dirty, dirty_state = run("v", row, float("inf"))
    assert same_bits(dirty[..., others], clean[..., others])
    assert same_bits(dirty_state[..., others, :], clean_state[..., others, :])
    assert same_bits(dirty[:at], clean[:at])
    assert not dirty[at : lengths[0], :, row].isfinite().any()


def check_prefill_cuts(machine, seed, dims, *, length, cuts, dtype=BF16, decay="mild"):
    """A prompt that comes in pieces gives what it gives in one, with a float32 state."""
    case = PromptCase(seed, dims, (length,), dtype=dtype, decay=decay)
    truth, exact = case.truth()
    slot = int(case.slot[0])
    pieces, state = [], case.state
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        piece = PromptCase(seed, dims, (stop - start,), dtype=dtype)
        for name, x in case.raw.items():
            piece.raw[name] = x if name in ("A_log", "dt_bias") else x[start:stop]
        piece.slot, piece.state = case.slot, state
        out, state = (x.cpu() for x in piece.run(machine))
        pieces.append(out)
    kind = f"prefill {str(dtype)[6:]}/float32 in pieces"
    machine.close(f"{kind} out", torch.cat(pieces), truth)
    machine.close(f"{kind} state", state[slot], exact[slot])


def check_prefill_choice(machine, dims):
    """Tensor cores wherever 16-bit vectors may be moved, plain float32 elsewhere."""
    for dtype in (BF16, F16):
        for state_dtype in (F32, BF16):
            case = PromptCase(1, dims, (3,), dtype=dtype, state_dtype=state_dtype)
            assert kernel_of(machine, lambda case=case: case.run(machine)) == CHUNKS
            assert kernel_of(machine, lambda case=case: case.run(machine, pad=4)) == GENERAL
    case = PromptCase(1, dims, (3,))
    assert kernel_of(machine, lambda: case.run(machine)) == GENERAL
