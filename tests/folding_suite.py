"""Checks of verification that folds histories, on a GPU or played on the host.

As in `kernel_suite`: each check draws a fresh case and compares with the float64 reference, and
with the bits of the operators that it takes the place of.
"""

from __future__ import annotations

import pytest
import torch
from gdn_cases import path_of, randint, random_accepted, same_bits
from kernel_suite import (
    F32,
    F64,
    TOLERANCE,
    launch,
    over_steps,
    random_history,
    set_state,
    set_tree,
    spread,
    treewy,
    wide,
    wide_history,
)

from trtllm_treewy import cuda_library, reference


class FoldingPools:
    """Pools of a deferred commit on a machine, verification folding, beside their float64 truth.

    The truth never folds in verification, so that what it stands for is the same and where that is
    kept is not.

    Attributes:
        state [L, slots, HV, V, K], history (u, k, g, length) and folds (folded, folding): ours.
        exact, truth: state and history in float64.
    """

    def __init__(self, machine, case, capacity, u_dtype):
        dims, slots = case.dims, case.state.shape[1]
        self.machine, self.case = machine, case
        self.state, self.exact = machine.put(case.state), case.state.double()
        ours, self.truth = [], []
        for shape, dtype in (
            ((dims.value_heads, dims.value_dim), u_dtype),
            ((dims.key_heads, dims.key_dim), case.raw[0]["k"].dtype),
            ((dims.value_heads,), F32),
        ):
            pool = torch.full((case.layers, slots, capacity, *shape), float("nan"), dtype=dtype)
            ours.append(machine.put(pool))
            self.truth.append(torch.zeros_like(pool, dtype=F64))
        self.truth.append(torch.zeros(slots, dtype=torch.int32))
        self.history = [*ours, machine.put(self.truth[3])]
        parts = -(-dims.value_dim // cuda_library.FOLD_ROWS)
        flags = torch.zeros(case.layers, slots, dims.value_heads, parts, dtype=torch.uint8)
        self.folds = [machine.put(flags), machine.put(torch.zeros(slots, dtype=torch.int32))]

    @property
    def lengths(self):
        return self.history[3].cpu()

    @property
    def flags(self):
        """Bool [L, slots]: layers whose state holds a slot's history; flags of one are alike."""
        flags = self.folds[0].cpu().flatten(2).bool()
        assert torch.equal(flags.any(2), flags.all(2))
        folding = self.folds[1].cpu()
        assert torch.equal(flags.any(2).any(0), folding == 1)
        assert not folding[self.lengths == 0].any()
        return flags.any(2)

    def commit(self, accepted, stash, pad=(0, 0)):
        """The deferred commit of case, ours and in float64."""
        u, k, g = stash
        put, wanted, capacity = self.machine.put, self.lengths.clone(), self.history[0].shape[2]
        for row, slot in enumerate(self.case.slot.tolist()):
            if slot >= 0 <= accepted[row]:
                added = len(path_of(self.case.parents, row, int(accepted[row])))
                full = bool(self.folds[1][slot]) or int(wanted[slot]) + added > capacity
                wanted[slot] = added + (0 if full else int(wanted[slot]))
        treewy.commit_deferred(self.exact, *self.truth, *self.case.trees, accepted, *wide(u, k, g))
        tree = [put(x) for x in (*self.case.trees, accepted)]
        left = [spread(u, self.machine, pad=pad), spread(k, self.machine, pad=pad), put(g)]
        given = (*self.history, *tree, *left, *self.folds)
        self.machine.call("commit_deferred_folding", self.state, *given)
        assert torch.equal(self.lengths, wanted)

    def verify(self, layer, fold_above, *, case=None, pad=None):
        """Verification of a layer that may fold; checks its results."""
        case, machine = case or self.case, self.machine
        raw = case.raw[layer]
        inputs = [machine.put(x) for x in raw.values()]
        if pad is not None:
            inputs[:3] = [spread(raw[name], machine, pad=pad) for name in ("q", "k", "v")]
        u = torch.empty(raw["v"].shape, dtype=F32, device=machine.device)
        g = torch.empty(raw["v"].shape[:3], dtype=F32, device=machine.device)
        trees = [machine.put(x) for x in case.trees]
        pools = [x[layer] for x in self.history[:3]] + self.history[3:]
        flags = self.folds[0][layer], self.folds[1]
        args = (*inputs, self.state[layer], *trees, u, g, *pools, *flags, fold_above)
        out = machine.call("tree_verify_folding", *args)
        exact = self.exact[layer], *case.trees, *(x[layer] for x in self.truth[:3]), self.truth[3]
        truth = treewy.tree_verify(*wide(*raw.values()), *exact)
        state = self.state
        for name, got, wanted in zip(("out", "u", "g"), (out, u, g), truth, strict=True):
            # What a rounded state adds, where several folds have rounded it.
            tolerance = max(TOLERANCE[got.dtype], over_steps(state) if name != "g" else 0.0)
            kind = f"folding {name} {str(got.dtype)[6:]}/{str(state.dtype)[6:]}"
            machine.close(kind, got, wanted, tolerance=tolerance)

    def check(self, name):
        """State and history together are the truth's, of all slots of the case."""
        slot = torch.tensor(self.case.live_slots, dtype=torch.int32)
        exact, truth = self.exact.clone(), [x.clone() for x in self.truth]
        treewy.flush_history(exact, *truth, slot)
        state, history = self.state.clone(), [x.clone() for x in self.history]
        folds = [x.clone() for x in self.folds]
        given = (*history, self.machine.put(slot), *folds)
        self.machine.call("flush_history_folding", state, *given)
        live = self.case.live_slots
        assert not any(x.cpu()[live].any() for x in (history[3], folds[1]))
        assert not folds[0].cpu()[:, live].any()
        name = f"{name} {str(state.dtype)[6:]}"
        tolerance = over_steps(state)
        self.machine.close(name, state.cpu()[:, live], exact[:, live], tolerance=tolerance)
        still = [s for s in range(state.shape[1]) if s not in live]
        assert same_bits(state.cpu()[:, still], self.case.state[:, still])


def accepted_within(case, capacity):
    """Random accepted nodes whose paths a history can hold."""
    accepted = random_accepted(case.gen, case.num_nodes)
    for row in range(len(accepted)):
        while len(path_of(case.parents, row, int(accepted[row]))) > capacity:
            accepted[row] = case.parents[row, accepted[row]]
    return accepted


def check_folding(machine, case, *, capacity, stash, folds=True, pad=None):
    """One verification: the bits of `tree_verify`, and of a flush in the states of long histories.

    Said twice it changes nothing more, and a commit that moves nothing leaves all as it is.

    `folds`: whether the kernel can; else no bit of a state changes.
    """
    pools, above = FoldingPools(machine, case, capacity, stash), capacity // 2
    junk = [x[None].expand(case.layers, *[-1] * x.dim()) for x in
            random_history(case, capacity, stash=stash)[:3]]  # fmt: skip
    length = torch.randint(0, capacity + 1, (case.state.shape[1],), generator=case.gen).int()
    length[case.slot[0]], length[case.slot[-1]] = capacity, above  # one of each, but for padding
    for ours, there in zip(pools.history, (*junk, length), strict=True):
        ours.copy_(there.nan_to_num() if there.is_floating_point() else there)
    pools.truth = wide_history([x.cpu().clone() for x in pools.history])
    live = torch.zeros_like(length, dtype=torch.bool)
    live[case.live_slots] = True
    long = (live & (length > above)).nonzero().flatten().int()
    flushed, history = pools.state.clone(), [x.clone() for x in pools.history]
    machine.call("flush_history", flushed, *history, machine.put(long))
    wanted = flushed.cpu() if folds else case.state
    for repeat in range(2):
        for layer in range(case.layers):
            inputs = [machine.put(x) for x in case.raw[layer].values()]
            of_layer = [x[layer] for x in pools.history[:3]] + pools.history[3:]
            trees = [machine.put(x) for x in case.trees]
            if repeat == 0 and pad is None:
                plain = machine.call("tree_verify", *inputs, pools.state[layer], *trees, *of_layer)
                u, g = (torch.empty_like(x) for x in plain[1:])
                folding = pools.folds[0][layer], pools.folds[1], above
                args = (*inputs, pools.state[layer], *trees, u, g, *of_layer, *folding)
                got = machine.call("tree_verify_folding", *args), u, g
                for mine, there in zip(got, plain, strict=True):
                    assert same_bits(mine.cpu(), there.cpu())
            else:
                pools.verify(layer, above, pad=pad)
        assert same_bits(pools.state.cpu(), wanted)
        found = pools.flags
        assert torch.equal(found.any(0).nonzero().flatten().int(), long if folds else long[:0])
        assert torch.equal(found.all(0), found.any(0))
    before = [x.clone() for x in (pools.state, *pools.history, *pools.folds)]
    pools.commit(torch.full_like(case.accepted, -1), case.stash(stash))
    for x, y in zip(before, (pools.state, *pools.history, *pools.folds), strict=True):
        assert same_bits(x.cpu(), y.cpu())
    pools.commit(accepted_within(case, capacity), case.stash(stash))
    moved = case.slot >= 0
    assert not pools.flags[:, case.slot[moved].long()].any()
    pools.check("folding committed")


def check_deferred_folding(machine, case, *, capacity, stash, steps=6, other=None):
    """Steps in which layers fold or not, some verify twice, and rows are rejected.

    A commit meets histories folded in all layers, in some and in none, in one batch.

    `other`: a case of the same pools whose kernel cannot fold; it verifies behind the folds.
    """
    pools, gen = FoldingPools(machine, case, capacity, stash), case.gen
    seen = set()
    for step in range(steps):
        above = randint(gen, 0, capacity + 1)
        for layer in range(case.layers):
            limit = capacity if randint(gen, 0, 3) == 0 else above
            for _ in range(1 + randint(gen, 0, 2)):
                pools.verify(layer, limit)
            if other is not None:
                pools.verify(layer, 0, case=other)
        folded = pools.flags.sum(0)[case.live_slots].tolist()
        seen |= {"none" if n == 0 else "all" if n == case.layers else "some" for n in folded}
        if step % 3 == 1:
            pools.check("folding between")
        accepted = accepted_within(case, capacity)
        if len(accepted) > 1 or step % 3 == 2:
            accepted[step % len(accepted)] = -1
        pools.commit(accepted, case.stash(stash), pad=((0, 0), (1, 1))[step % 2])
    pools.check("folding at the end")
    return seen


def check_flush_of_flags(machine, case, *, capacity):
    """Flags set by hand, of random rows of V: a flush leaves these alone, and moves the others."""
    dtype = case.raw[0]["k"].dtype
    pools = FoldingPools(machine, case, capacity, F32)
    shapes = [x.shape for x in pools.history[:3]]
    u, k, g = (torch.randn(shape, generator=case.gen) for shape in shapes)
    length = torch.randint(1, capacity + 1, (case.state.shape[1],), generator=case.gen).int()
    k = (3 * k).to(dtype) if dtype != F32 else reference.l2norm(k)
    for ours, there in zip(pools.history, (u, k, -g.abs(), length), strict=True):
        ours.copy_(there)
    flags = torch.randint(0, 2, pools.folds[0].shape, generator=case.gen).to(torch.uint8)
    flags[:, case.slot[0]] = 1
    pools.folds[0].copy_(flags)
    pools.folds[1].fill_(1)
    pools.folds[1][int(case.slot[-1])] = 0  # so that nobody looks at its flags
    flags[:, case.slot[-1]] = 0
    whole, history = pools.state.clone(), [x.clone() for x in pools.history]
    machine.call("flush_history", whole, *history, machine.put(case.slot))
    slot = machine.put(case.slot)
    machine.call("flush_history_folding", pools.state, *pools.history, slot, *pools.folds)
    rows = flags.repeat_interleave(cuda_library.FOLD_ROWS, 3)[..., : case.dims.value_dim]
    wanted = torch.where(rows[..., None].bool(), case.state, whole.cpu())
    assert same_bits(pools.state.cpu(), wanted)
    live = case.slot.long()
    assert not pools.history[3].cpu()[live].any()
    assert not pools.folds[1].cpu()[live].any()
    assert not pools.folds[0].cpu()[:, live[:-1]].any()


def check_folding_arguments(machine, case, library):
    """What the C interface refuses."""
    params = cuda_library.TreeVerifyParams(fold_above=-1)
    address = case.state.data_ptr()
    set_tree(params.tree, case.parents, case.state.shape[1])
    set_state(params.state, case.state[0], case.dims.key_heads)
    params.state.data, params.history.length = address, address
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "out"):
        setattr(params, name, address)
    for name in ("slot", "parents", "num_nodes"):
        setattr(params.tree, name, address)
    for name in ("u", "k", "g", "folded"):
        setattr(params.history, name, address)
    params.history.capacity = 4
    with pytest.raises(ValueError, match=r"tree_verify: history.folding is null"):
        launch(library, "treewy_tree_verify", params)
    params.history.folding = address
    with pytest.raises(ValueError, match=r"tree_verify: fold_above must not be negative, got -1"):
        launch(library, "treewy_tree_verify", params)
    flush = cuda_library.FlushHistoryParams(batch=1, slot=address, history=params.history)
    set_state(flush.state, case.state, case.dims.key_heads)
    flush.state.data, flush.history.folded = address, None
    with pytest.raises(ValueError, match=r"flush_history: history.folded is null"):
        launch(library, "treewy_flush_history", flush)
