"""How tree verification is cut into blocks: a pure function, compiled and asked without a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS_64, ROWS_128 = 1, 2
H200_MULTIPROCESSORS, H200_SHARED = 132, 233472  # of a multiprocessor; a block costs 1 KiB more
H200_BLOCK = H200_SHARED - 1024  # the most of a block


@pytest.fixture(scope="module")
def ask(ask_header):
    return ask_header("kernels/tree_verify_plan.h")


def choice(batch, nodes, *, value_dim=128, state_bytes=2, terms=1, heads=32, stream=False):
    shape = f"{{128, {value_dim}, {nodes}, 0, 2, {state_bytes}, 2}}"
    sizes = f"{shape}, {terms}, {str(stream).lower()}, {batch * heads}"
    return f"choose_tile({sizes}, {H200_MULTIPROCESSORS})"


def test_few_blocks_are_cut_small_and_many_large(ask):
    assert ask(choice(1, 16), choice(4, 16), choice(8, 16), choice(256, 128)) == [
        ROWS_64,
        ROWS_64,
        ROWS_128,
        ROWS_128,
    ]


def short(nodes, capacity, *, state_bytes, u_bytes=None):
    """The layout after a history with raw keys of 16 bits, by the tile that is chosen for it."""
    u_bytes, terms = u_bytes or state_bytes, 3 if state_bytes == 4 else 2
    tile = ROWS_128 if state_bytes == 2 else ROWS_64
    shape = f"VerifyShape{{128, 128, {nodes}, {capacity}, 2, {state_bytes}, {terms}, {u_bytes}, 2}}"
    return f"choose_layout({shape}, {tile}, false, true, {H200_BLOCK})"


def test_short_histories_leave_room_for_four_blocks(ask):
    """All of 16 entries, and those of 32 whose u is no wider than the state."""
    layouts = [
        short(nodes, capacity, state_bytes=state_bytes, u_bytes=u_bytes)
        for nodes in (8, 16)
        for capacity, state_bytes, u_bytes in ((16, 2, 4), (32, 2, 2), (16, 4, 4), (32, 4, 4))
    ]
    assert all(ask(*(f"{layout}.short_history" for layout in layouts)))
    totals = ask(*(f"{layout}.total" for layout in layouts))
    assert all(4 * (total + 1024) <= H200_SHARED for total in totals)


def test_which_histories_are_short(ask):
    left = (
        "{128, 128, 17, 32, 2, 2, 2, 2, 2}, 2",  # two node blocks
        "{128, 128, 16, 33, 2, 2, 2, 2, 2}, 2",  # a long history
        "{128, 128, 16, 32, 2, 2, 2, 2, 4}, 2",  # keys in float32
        "{64, 128, 16, 32, 2, 2, 2, 2, 2}, 2",
        "{128, 128, 16, 32, 2, 4, 3, 4, 2}, 2",  # a float32 state, wide
        "{128, 128, 16, 0, 2, 2, 2, 2, 2}, 2",
    )
    assert not any(ask(*(f"has_short_history(VerifyShape{x})" for x in left)))


@pytest.mark.parametrize("rows", [8, 16])
def test_the_layout_of_small_trees_begins_alike_for_all_capacities(ask, rows):
    """The kernel knows it at compile time, but for what comes last."""
    layouts = [
        f"small_layout({{128, 128, {rows}, {n}, 2, 4, 3, 4, 2}}, 64, {rows})" for n in (1, 32)
    ]
    names = ("keys", "weights", "queries", "values", "dense", "beta", "not_finite")
    names += ("history_weights", "history_sum", "history_count", "history_u")
    first, second = (ask(*(f"{layout}.{name}" for name in names)) for layout in layouts)
    assert first == second


@pytest.mark.parametrize("rows", [8, 16])
def test_weights_of_a_short_history_lie_on_keys_and_queries(ask, rows):
    for terms, state_bytes in ((2, 2), (3, 4)):
        shape = f"{{128, 128, {rows}, 32, 2, {state_bytes}, {terms}, {state_bytes}, 2}}"
        layout = f"small_layout({shape}, 64, {rows})"
        keys, weights, end = ask(*(f"{layout}.{x}" for x in ("keys", "history_weights", "values")))
        assert weights == keys
        assert end - keys >= 2 * rows // 8 * terms * 512  # blocks of 16 entries, units of 16 rows


def test_a_float32_state_is_wide_for_few_nodes_alone(ask):
    many = [choice(64, nodes, state_bytes=4) for nodes in (1, 8, 9, 40)]
    assert ask(*many) == [ROWS_128, ROWS_128, ROWS_64, ROWS_64]


def test_a_float32_state_whose_matrix_is_inverted_at_once_is_wide(ask):
    asked = [choice(batch, 40, state_bytes=4, stream=True) for batch in (1, 4, 8, 64)]
    assert ask(*asked) == [ROWS_64, ROWS_64, ROWS_128, ROWS_128]


def stream(nodes, *, state_bytes=4, input_bytes=2, history=0, key_dim=128, value_dim=128):
    terms = 3 if 4 in (state_bytes, input_bytes) else 2
    return f"{{{key_dim}, {value_dim}, {nodes}, {history}, {input_bytes}, {state_bytes}, {terms}}}"


def test_which_trees_are_for_blocks_that_stay(ask):
    taken = [stream(17), stream(48), stream(48, value_dim=256)]
    taken += [stream(17, state_bytes=2), stream(48, state_bytes=2)]
    more = [stream(n, state_bytes=x) for n in (49, 56, 64) for x in (2, 4)]
    more += [stream(n, state_bytes=x) for n in (9, 16) for x in (2, 4)]
    left = [stream(n, state_bytes=x) for n in (8, 65) for x in (2, 4)]
    left += [stream(40, input_bytes=4)]
    left += [stream(40, history=8), stream(40, key_dim=64), stream(40, value_dim=64)]
    for warpgroups in (0, 1):
        shapes = (*taken, *more, *left)
        answers = ask(*(f"streams(VerifyShape{x}, {H200_BLOCK}, {warpgroups})" for x in shapes))
        assert answers == [1] * len(taken) + [warpgroups] * len(more) + [0] * len(left)
    small = 101376  # of a block of sm_89
    assert not any(ask(*(f"streams(VerifyShape{x}, {small}, false)" for x in taken)))


def test_blocks_stay_where_each_has_some_heads(ask):
    counts = (131, 132, 527, 528)
    late = [0, 0, 0, 1]
    for state_bytes, nodes, enough in ((4, 40, [0, 1, 1, 1]), (4, 16, late), (2, 40, late)):
        shape = f"VerifyShape{stream(nodes, state_bytes=state_bytes)}"
        asked = (f"enough_turns({shape}, {n}, {H200_MULTIPROCESSORS})" for n in counts)
        assert ask(*asked) == enough


def test_which_stages_are_filled_ahead(ask):
    """Of few nodes, where there are products of warpgroups."""
    cases = [((9, 2), 1), ((32, 2), 1), ((33, 2), 0), ((9, 4), 1), ((16, 4), 1), ((17, 4), 0)]
    for (nodes, state_bytes), ahead in cases:
        shape = f"VerifyShape{stream(nodes, state_bytes=state_bytes)}"
        assert ask(f"fills_ahead({shape}, true)", f"fills_ahead({shape}, false)") == [ahead, 0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("state_bytes", [2, 4])
@pytest.mark.parametrize("nodes", [9, 17, 32, 33, 48, 56, 64])
def test_the_memory_of_blocks_that_stay(ask, nodes, state_bytes, ahead):
    """A state, a stage for either group at least, and no more than a block has."""
    shape, flag = f"VerifyShape{stream(nodes, state_bytes=state_bytes)}", str(ahead).lower()
    names = ("stages", "first_stage", "stage_bytes", "total")
    layout = f"stream_layout({shape}, {flag})"
    stages, first, size, total = ask(*(f"{layout}.{x}" for x in names))
    assert stages in ((2, 4) if ahead else (2, 3))
    assert first == 128 * 128 * state_bytes
    assert total == first + stages * size <= H200_BLOCK
    chosen = f"choose_layout({shape}, {ROWS_128}, true, true, {H200_BLOCK}, {flag})"
    assert ask(f"{chosen}.total", f"{chosen}.ahead") == [total, int(ahead)]


def test_what_has_no_wide_tile_takes_the_narrow_one(ask):
    wide = [
        choice(256, 16, terms=3),
        choice(256, 16, value_dim=64),
        choice(256, 16, value_dim=192),
        choice(256, 16, state_bytes=4, value_dim=64),
    ]
    assert ask(*wide) == [ROWS_64] * 4


def test_a_choice_exists(ask):
    """Whatever AUTO picks was compiled."""
    asked = []
    for value_dim in (64, 128, 192, 256):
        for state_bytes in (2, 4):
            for terms in (1, 2, 3):
                for batch, nodes in ((1, 1), (8, 16), (256, 16), (256, 128)):
                    tile = choice(
                        batch, nodes, value_dim=value_dim, state_bytes=state_bytes, terms=terms
                    )
                    asked.append(f"tile_exists({tile}, {value_dim}, {terms})")
    assert ask(*asked) == [1] * len(asked)


def best(nodes, state_bytes, rows, *, history=0, input_bytes=2):
    terms = 3 if 4 in (state_bytes, input_bytes) else 2
    shape = f"{{128, 128, {nodes}, {history}, {input_bytes}, {state_bytes}, {terms}}}"
    return f"best_layout({shape}, {rows}, {H200_BLOCK})"


def test_blocks_fit_a_multiprocessor(ask):
    """As many as the design counts on."""
    layouts = [best(16, 2, 128), best(16, 4, 128), best(40, 2, 128), best(40, 4, 64)]
    layouts += [best(64, 2, 128), best(64, 4, 64)]
    fits = [H200_SHARED // (total + 1024) for total in ask(*(f"{x}.total" for x in layouts))]
    assert fits == [4, 2, 2, 2, 2, 2]


def test_every_tree_fits_the_narrow_tile(ask):
    asked = []
    for nodes in range(1, 129):
        for state_bytes in (2, 4):
            for history in (0, 64):
                asked.append(f"{best(nodes, state_bytes, 64, history=history)}.total")
    assert max(ask(*asked)) <= H200_BLOCK


def test_a_larger_group_never_costs_a_block(ask):
    for nodes, state_bytes, rows in ((40, 2, 128), (64, 2, 128), (100, 2, 64), (64, 4, 64)):
        layout = best(nodes, state_bytes, rows)
        terms = 3 if state_bytes == 4 else 2
        shape = f"{{128, 128, {nodes}, 0, 2, {state_bytes}, {terms}}}"
        total, single = ask(f"{layout}.total", f"verify_layout({shape}, {rows}, 1).total")
        assert H200_SHARED // (total + 1024) == H200_SHARED // (single + 1024)


PLACES = (
    *("state", "keys", "queries", "values", "weights", "dense", "known_u", "history_keys"),
    *("history_sum", "path_sum", "factors", "beta", "key_norm", "query_norm", "ancestors"),
    *("related", "not_finite", "total"),
)


def test_places_do_not_overlap(ask):
    layout = "verify_layout({128, 128, 128, 64, 4, 4, 3}, 64, 2)"
    places = ask(*(f"{layout}.{name}" for name in PLACES))
    assert places[0] == 0
    assert all(a < b for a, b in itertools.pairwise(places))
    assert all(place % 16 == 0 for place in places)


def test_weights_of_one_node_block_take_the_place_of_its_queries(ask):
    layout = "verify_layout({128, 128, 16, 0, 2, 2, 2}, 128, 1)"
    queries, values, weights = ask(*(f"{layout}.{x}" for x in ("queries", "values", "weights")))
    assert weights == queries
    assert values - queries >= 2 * 2 * 512
