"""Paged KV cache: tree attention equals chain attention, compaction, padding, poison, refusals."""

import random

import pytest
import torch

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.draft_tree import DraftTree, to_tree_batch
from trtllm_treewy.runtime.acceptance import greedy_accept
from trtllm_treewy.runtime.kv_cache import KvCache

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 2, 6, 2, 5, 4
SCALE = 0.7
NAN = float("nan")


def make_cache(num_blocks: int = 40, num_slots: int = 6, max_seq_len: int = 64) -> KvCache:
    return KvCache(
        LAYERS, num_blocks, BLOCK, KV_HEADS, DIM, torch.float32, "cpu", num_slots, max_seq_len
    )


def plain_attention(q, k, v):
    """One query [heads, D] over rows [S, kv_heads, D], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        shared = head // (q.shape[0] // k.shape[1])
        weights = torch.softmax(SCALE * k[:, shared] @ q[head], 0)
        out[head] = weights @ v[:, shared]
    return out.float()


def random_parents(count: int, rng: random.Random) -> list[int]:
    return [-1] + [rng.randrange(max(0, t - 5), t) for t in range(1, count)]


def path_of(parents, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def random_kv(*lead: int):
    return (
        torch.randn(*lead, HEADS, DIM),
        torch.randn(*lead, KV_HEADS, DIM),
        torch.randn(*lead, KV_HEADS, DIM),
    )


def prefill_batch(slots, contexts, lengths) -> PrefillBatch:
    tokens = [0] * sum(lengths)
    return PrefillBatch.pack(tokens, lengths, slots, contexts, torch.device("cpu"))


def tree_batch(parents, slots, contexts, **padding) -> TreeBatch:
    trees = [DraftTree((0,) * len(p), tuple(p), (0.0,) * len(p)) for p in parents]
    return to_tree_batch(trees, slots, contexts, "cpu", **padding)


class Model:
    """What the cache must hold: committed keys and values of every slot, as plain lists."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self.lengths = [0] * cache.num_slots
        empty = torch.zeros(0, KV_HEADS, DIM)
        self.k = {s: [empty] * LAYERS for s in range(cache.num_slots)}
        self.v = {s: [empty] * LAYERS for s in range(cache.num_slots)}

    def rows(self, slot, layer, k, v):
        """Committed rows followed by k, v [n, kv_heads, D]."""
        return torch.cat((self.k[slot][layer], k)), torch.cat((self.v[slot][layer], v))

    def commit(self, slot, layer, k, v):
        self.k[slot][layer], self.v[slot][layer] = self.rows(slot, layer, k, v)

    def prefill(self, slots, lengths):
        contexts = [self.lengths[slot] if slot >= 0 else 0 for slot in slots]
        step = self.cache.prefill(prefill_batch(slots, contexts, lengths))
        for layer in range(LAYERS):
            q, k, v = random_kv(sum(lengths))
            out = step.attend(layer, q, k, v, SCALE)
            start = 0
            for slot, length in zip(slots, lengths, strict=True):
                span = slice(start, start + length)
                start += length
                if slot < 0:
                    assert not out[span].any()
                    continue
                keys, values = self.rows(slot, layer, k[span], v[span])
                for i in range(length):
                    seen = keys.shape[0] - length + i + 1
                    expected = plain_attention(q[span][i], keys[:seen], values[:seen])
                    torch.testing.assert_close(out[span][i], expected, rtol=1e-5, atol=1e-5)
                self.commit(slot, layer, k[span], v[span])
        for slot, length in zip(slots, lengths, strict=True):
            if slot >= 0:
                self.lengths[slot] += length

    def check_pool(self):
        """Every committed row is where a plain run would have put it."""
        for slot in range(self.cache.num_slots):
            length = self.lengths[slot]
            rows = self.cache.physical(torch.tensor([slot]), torch.arange(length)[None])[0]
            for layer in range(LAYERS):
                held = self.cache.k[layer][:, rows].transpose(0, 1)
                assert torch.equal(held, self.k[slot][layer])
                held = self.cache.v[layer][:, rows].transpose(0, 1)
                assert torch.equal(held, self.v[slot][layer])


@pytest.mark.parametrize("seed", range(4))
def test_trees_prompts_and_compaction_follow_a_plain_run(seed):
    """CASES 1, 9, 10, 14: random slots, trees and accepted nodes; each step starts from the last.

    Every node's output is that of its path behind the committed rows, and after compaction the
    pool holds what a run without speculation would hold.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache = make_cache(num_blocks=50)
    cache.k.fill_(NAN)  # free blocks hold leftovers
    cache.v.fill_(NAN)
    model = Model(cache)
    slots = rng.sample(range(cache.num_slots), 4)
    for rows in range(8, 49, 8):  # in turn, so that no slot's blocks lie together
        assert all(cache.try_reserve(slot, rows) for slot in slots)
    model.prefill([slots[0], -1, slots[1]], [5, 3, 1])
    model.prefill([slots[2]], [9])
    for _ in range(4):
        rows = [*rng.sample(slots, 3), -1]
        parents = [random_parents(rng.randrange(1, 9), rng) for _ in rows]
        contexts = [model.lengths[slot] if slot >= 0 else 0 for slot in rows]
        tree = tree_batch(parents, rows, contexts, pad_nodes_to=10)
        accepted = [rng.randrange(len(p)) for p in parents]
        paths = [path_of(p, a) for p, a in zip(parents, accepted, strict=True)]
        step = cache.verify(tree)
        for layer in range(LAYERS):
            q, k, v = random_kv(4, 10)
            out = step.attend(layer, q, k, v, SCALE)
            for row, slot in enumerate(rows):
                count = len(parents[row]) if slot >= 0 else 0
                assert not out[row, count:].any()
                for node in range(count):
                    path = path_of(parents[row], node)
                    seen = model.rows(slot, layer, k[row, path], v[row, path])
                    expected = plain_attention(q[row, node], *seen)
                    torch.testing.assert_close(out[row, node], expected, rtol=1e-5, atol=1e-5)
                if slot >= 0:
                    model.commit(slot, layer, k[row, paths[row]], v[row, paths[row]])
        table = torch.full((4, 10), -1)
        for row, path in enumerate(paths):
            table[row, : len(path)] = torch.tensor(path)
        cache.compact(tree.slot, table, tree.context_lens)
        for row, slot in enumerate(rows):
            if slot >= 0:
                model.lengths[slot] += len(paths[row])
        model.check_pool()
        model.prefill([slots[3]], [2])  # a prompt in chunks beside decoding sequences
    model.check_pool()


def test_compaction_gathers_before_it_writes():
    """CASES 10: a path whose targets overlap the sources of later nodes, taken from acceptance."""
    cache = make_cache()
    assert cache.try_reserve(2, 12)
    parents = [-1, 0, 0, 2, 2, 4, 4]  # accepted path 0, 2, 4, 6 moves to rows 0, 1, 2, 3
    tree = tree_batch([parents], [2], [0])
    k = torch.arange(7.0)[None, :, None, None].expand(1, 7, KV_HEADS, DIM)
    for layer in range(LAYERS):
        cache.verify(tree).attend(layer, torch.randn(1, 7, HEADS, DIM), k + layer, -k, SCALE)
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6]])
    tree = TreeBatch(tokens, tree.parents, tree.num_nodes, tree.slot, tree.context_lens, 0)
    target = torch.tensor([[2, 0, 4, 0, 6, 0, 0]])
    result = greedy_accept(tree, target)
    cache.compact(tree.slot, result.path, tree.context_lens)
    rows = cache.physical(torch.tensor([2]), torch.arange(4)[None])[0]
    for layer in range(LAYERS):
        assert cache.k[layer, 0, rows, 0].tolist() == [layer + x for x in (0.0, 2.0, 4.0, 6.0)]
        assert cache.v[layer, 1, rows, 0].tolist() == [0.0, -2.0, -4.0, -6.0]


def test_compaction_of_padded_rows_and_empty_paths_changes_nothing():
    """CASES 2, 6: nothing accepted, or slot -1: every live row keeps its bits."""
    cache = make_cache(num_blocks=8, num_slots=2, max_seq_len=16)
    for slot in (0, 1):
        assert cache.try_reserve(slot, 16)
    cache.k.normal_()
    cache.v.normal_()
    before = cache.k[:, :, : cache._sink].clone(), cache.v[:, :, : cache._sink].clone()
    path = torch.tensor([[2, 3], [-1, -1]])
    cache.compact(torch.tensor([-1, 1], dtype=torch.int32), path, torch.tensor([0, 4]))
    assert torch.equal(cache.k[:, :, : cache._sink], before[0])
    assert torch.equal(cache.v[:, :, : cache._sink], before[1])


def test_padded_rows_write_nothing():
    """CASES 6, 7: slot -1 and padded nodes leave every row of the pool as it was."""
    cache = make_cache(num_blocks=8, num_slots=2, max_seq_len=16)
    assert cache.try_reserve(0, 16)
    cache.k.normal_()
    before = cache.k[:, :, : cache._sink].clone()
    tree = tree_batch([[-1], [-1, 0]], [0, -1], [3, 0], pad_nodes_to=4)
    out = cache.verify(tree).attend(0, *random_kv(2, 4), SCALE)
    written = (cache.k[:, :, : cache._sink] != before).any(-1).any(1)
    row = cache.physical(torch.tensor([0]), torch.tensor([[3]]))[0, 0]
    assert written.nonzero().tolist() == [[0, row.item()]]
    assert out[0, 0].abs().sum() > 0
    assert not out[0, 1:].any()
    assert not out[1].any()


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_a_non_finite_sibling_reaches_nobody_else(poison):
    """CASES 8: selected away, not multiplied by zero; who attends it sees the fault."""
    parents = [-1, 0, 0, 1, 2]
    tree = tree_batch([parents], [3], [6], pad_nodes_to=7)
    outs = []
    for bad in (False, True):
        torch.manual_seed(3)
        cache = make_cache()
        if bad:
            cache.k.fill_(poison)
            cache.v.fill_(poison)
        assert cache.try_reserve(3, 20)
        step = cache.prefill(prefill_batch([3], [0], [6]))
        step.attend(0, *random_kv(6), SCALE)
        q, k, v = random_kv(1, 7)
        if bad:
            k[:, 5:], v[:, 5:], q[:, 5:] = NAN, poison, NAN  # padding
            v[:, 2, 0, 1] = poison
        outs.append(cache.verify(tree).attend(0, q, k, v, SCALE))
    for node in (0, 1, 3):
        assert torch.equal(outs[0][0, node], outs[1][0, node])
    for node in (2, 4):  # heads of key head 0 see it, the others do not
        assert outs[1][0, node, : HEADS // 2].isnan().all()
        assert torch.equal(outs[0][0, node, HEADS // 2 :], outs[1][0, node, HEADS // 2 :])
    assert not outs[1][0, 5:].any()


def test_an_attended_nan_key_or_context_row_shows():
    tree = tree_batch([[-1, 0, 0]], [1], [2])
    cache = make_cache()
    assert cache.try_reserve(1, 8)
    q, k, v = random_kv(1, 3)
    k[0, 1, 0, 0] = NAN
    out = cache.verify(tree).attend(0, q, k, v, SCALE)
    assert out[0, 1, 0].isnan().all()
    assert out[0, [0, 2]].isfinite().all()
    context = cache.physical(torch.tensor([1]), torch.tensor([[1]]))[0]
    cache.v[0, 1, context] = NAN
    out = cache.verify(tree).attend(0, q, v, v, SCALE)
    assert out[0, :, HEADS // 2 :].isnan().all()
    assert out[0, :, : HEADS // 2].isfinite().all()


@pytest.mark.parametrize("context", [0, 3])
def test_prefill_a_nan_token_spoils_only_later_ones(context):
    cache = make_cache()
    assert cache.try_reserve(0, 20)
    cache.prefill(prefill_batch([0], [0], [3])).attend(0, *random_kv(3), SCALE)
    step = cache.prefill(prefill_batch([0], [context], [6]))
    q, k, v = random_kv(6)
    clean = step.attend(0, q, k, v, SCALE)
    v[2, 1, 4] = NAN
    out = step.attend(0, q, k, v, SCALE)
    assert torch.equal(out[:2], clean[:2])
    assert out[2:, HEADS // 2 :].isnan().all()
    torch.testing.assert_close(out[:, : HEADS // 2], clean[:, : HEADS // 2])


def test_general_step_with_its_own_mask():
    """Rows written behind the context by several levels, as a drafter does."""
    cache = make_cache()
    assert cache.try_reserve(4, 20)
    keys, values = [], []
    slot = torch.tensor([4, -1], dtype=torch.int32)
    for level in range(3):
        q, k, v = random_kv(2, 2)
        keys.append(k[0])
        values.append(v[0])
        rows = torch.arange(2 * level, 2 * level + 2).expand(2, 2)
        mask = torch.zeros(2, 2, 2 * level + 2, dtype=torch.bool)
        mask[:, 0, ::2] = True
        mask[:, 1, 1::2] = True
        out = cache.step(slot, rows, mask).attend(1, q, k, v, SCALE)
        for lane in (0, 1):
            seen = torch.stack([x[lane] for x in keys]), torch.stack([x[lane] for x in values])
            torch.testing.assert_close(
                out[0, lane], plain_attention(q[0, lane], *seen), rtol=1e-5, atol=1e-5
            )
        assert not out[1].any()


def test_a_step_may_read_without_writing():
    cache = make_cache()
    assert cache.try_reserve(0, 4)
    cache.prefill(prefill_batch([0], [0], [2])).attend(0, *random_kv(2), SCALE)
    before = cache.k[:, :, : cache._sink].clone()
    mask = torch.ones(1, 1, 2, dtype=torch.bool)
    step = cache.step(torch.tensor([0]), torch.tensor([[-1]]), mask)
    assert step.attend(0, *random_kv(1, 1), SCALE).isfinite().all()
    assert torch.equal(cache.k[:, :, : cache._sink], before)


def test_bf16_is_computed_in_float32():
    cache = KvCache(1, 8, 4, 1, 8, torch.bfloat16, "cpu", 1, 32)
    assert cache.try_reserve(0, 8)
    q, k, v = (torch.randn(1, 5, 1, 8).bfloat16() for _ in range(3))
    out = cache.verify(tree_batch([[-1, 0, 1, 2, 3]], [0], [0])).attend(0, q, k, v, SCALE)
    expected = plain_attention(q[0, 4], k[0], v[0])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[0, 4], expected.bfloat16())


# ------------------------------------------------------------------------------ block accounts


def test_reserve_takes_all_or_nothing_and_free_gives_all_back():
    """CASES 27: running out of blocks is an answer, not a fault, and changes nothing."""
    cache = make_cache(num_blocks=5, num_slots=3, max_seq_len=32)
    assert cache.try_reserve(2, 9)  # 3 blocks
    assert (cache.free_blocks, cache.reserved(2)) == (2, 12)
    table = cache.block_table.clone()
    assert not cache.try_reserve(0, 12)
    assert not cache.try_reserve(2, 21)
    assert cache.free_blocks == 2
    assert torch.equal(cache.block_table, table)
    assert cache.try_reserve(2, 12)
    assert cache.try_reserve(0, 8)
    assert cache.free_blocks == 0
    cache.free(2)
    cache.free(2)
    assert (cache.free_blocks, cache.reserved(2)) == (3, 0)
    assert (cache.block_table[2] == cache.num_blocks).all(), "a stray write goes to the sink"
    assert sorted(cache._free) == sorted(set(range(5)) - set(cache._blocks[0]))


def test_new_blocks_are_zero():
    """CASES 8: a reused block holds nothing of its last owner."""
    cache = make_cache(num_blocks=2, num_slots=2, max_seq_len=8)
    assert cache.try_reserve(1, 8)
    cache.k.fill_(NAN)
    cache.v.fill_(NAN)
    cache.free(1)
    assert cache.try_reserve(0, 4)
    rows = cache.physical(torch.tensor([0]), torch.arange(4)[None])[0]
    assert not cache.k[:, :, rows].any()
    assert not cache.v[:, :, rows].any()


def test_shared_blocks_are_counted_and_the_last_one_is_copied():
    """CASES 8, 16: a sequence that starts from another's rows, and what is left when both end."""
    cache = make_cache(num_blocks=8, num_slots=3, max_seq_len=24)
    assert cache.try_reserve(1, 12)
    first = cache.blocks(1)
    cache.k.normal_()
    cache.v.normal_()
    for block in first[:2]:
        cache.hold(block)
    assert cache.try_share(0, first[:2], 14)
    assert cache.blocks(0)[0] == first[0]
    assert len(set(cache.blocks(0)) & set(first)) == 1
    assert [cache.refs(block) for block in first] == [3, 2, 1]
    rows = [cache.physical(torch.tensor([s]), torch.arange(8)[None])[0] for s in (0, 1)]
    assert torch.equal(cache.k[:, :, rows[0]], cache.k[:, :, rows[1]])
    assert torch.equal(cache.v[:, :, rows[0]], cache.v[:, :, rows[1]])
    cache.free(1)
    assert cache.free_blocks == 8 - 2 - 3
    assert not cache.try_share(2, first[:2], 24), "five more blocks are not there"
    assert (cache.blocks(2), cache.free_blocks) == ((), 3)
    cache.drop(first[1])
    cache.drop(first[1])
    assert cache.free_blocks == 4
    cache.free(0)
    assert (cache.free_blocks, cache.refs(first[0])) == (7, 1)
    cache._refs, cache._free = [9] * 8, []  # as an interrupt could leave them
    cache.recount()
    assert (cache.free_blocks, cache.refs(first[0])) == (7, 1)
    cache.drop_all()
    assert cache.free_blocks == 8


def test_refusals_of_sharing():
    cache = make_cache(num_blocks=8, num_slots=2, max_seq_len=16)
    assert cache.try_reserve(0, 4)
    (block,) = cache.blocks(0)
    with pytest.raises(ValueError, match="slot 0 holds blocks already"):
        cache.try_share(0, (), 4)
    cache.hold(block)
    for bad in (block, (block + 1) % 8):
        with pytest.raises(ValueError, match="is free or kept already"):
            cache.hold(bad)


def test_memory_figure():
    cache = make_cache(num_blocks=7)
    assert cache.bytes == 8 * BLOCK * 2 * LAYERS * KV_HEADS * DIM * 4  # the sink is a block too


def test_refusals_name_what_to_change():
    cache = make_cache(num_blocks=20, num_slots=2, max_seq_len=30)
    with pytest.raises(ValueError, match=r"slot must be in \[0, 2\), got 2"):
        cache.try_reserve(2, 1)
    with pytest.raises(ValueError, match=r"slot must be in \[0, 2\), got -1"):
        cache.free(-1)
    with pytest.raises(ValueError, match="lower max_tokens"):
        cache.try_reserve(0, 31)
    assert cache.try_reserve(0, 6)  # two blocks, 8 rows
    with pytest.raises(ValueError, match="row 8 of slot 0 is not reserved"):
        cache.verify(tree_batch([[-1, 0]], [0], [7]))
    with pytest.raises(ValueError, match="slot must be in"):
        cache.verify(tree_batch([[-1, 0]], [5], [7]))
    with pytest.raises(ValueError, match="row 9 of slot 0"):
        cache.prefill(prefill_batch([0], [5], [5]))
    with pytest.raises(ValueError, match="disagree"):
        cache.step(torch.tensor([0]), torch.zeros(1, 2), torch.ones(1, 3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_kv_heads"):
        KvCache(1, 1, 1, 0, 1, torch.float32, "cpu", 1, 1)
    # Padding beyond the reserved rows is no write.
    cache.verify(tree_batch([[-1]], [0], [7], pad_nodes_to=9)).attend(0, *random_kv(1, 9), SCALE)
