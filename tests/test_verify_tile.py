"""How tree verification is cut into blocks: a pure function, compiled and asked without a GPU."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS_64, ROWS_128, ROWS_128_WARPS_8 = 1, 2, 3
H200_MULTIPROCESSORS, H200_SHARED = 132, 233472  # of a multiprocessor; a block costs 1 KiB more

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Evaluates C++ expressions of namespace treewy, all integers."""
    folder = tmp_path_factory.mktemp("tile")

    def evaluate(*expressions):
        source, program = folder / "ask.cc", folder / "ask"
        prints = "".join(f'std::printf("%d\\n", int({e}));\n' for e in expressions)
        source.write_text(
            '#include <cstdio>\n#include "kernels/tree_verify_plan.h"\nusing namespace treewy;\n'
            f"int main() {{\n{prints}}}\n"
        )
        subprocess.run(
            ["g++", "-std=c++17", "-I", ROOT / "plugins", source, "-o", program], check=True
        )
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        return [int(line) for line in output.split()]

    return evaluate


def choice(batch, nodes, *, value_dim=128, state_bytes=2, terms=1, heads=32):
    sizes = f"{value_dim}, {state_bytes}, {terms}, {nodes}, {batch * heads}"
    return f"choose_tile({sizes}, {H200_MULTIPROCESSORS})"


def test_few_blocks_are_cut_small_and_many_large(ask):
    assert ask(choice(1, 16), choice(8, 16), choice(64, 16), choice(256, 16)) == [
        ROWS_64,
        ROWS_64,
        ROWS_128,
        ROWS_128,
    ]
    assert ask(choice(1, 40), choice(64, 40)) == [ROWS_64, ROWS_128_WARPS_8]


def test_what_has_no_wide_tile_takes_the_narrow_one(ask):
    wide = [
        choice(256, 16, state_bytes=4),
        choice(256, 16, terms=3),
        choice(256, 16, value_dim=64),
        choice(256, 16, value_dim=192),
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
                    asked.append(f"tile_exists({tile}, {value_dim}, {state_bytes}, {terms})")
    assert ask(*asked) == [1] * len(asked)


def test_blocks_fit_a_multiprocessor(ask):
    """As many as the design counts on: 5 of 16 nodes, 3 of 40, whatever the state's type."""
    bf16_16 = "verify_layout({128, 128, 16, 0, 2, 2, 2}, 128).total"
    fp32_16 = "verify_layout({128, 128, 16, 0, 2, 4, 3}, 64).total"
    bf16_40 = "verify_layout({128, 128, 40, 0, 2, 2, 2}, 128).total"
    fp32_40 = "verify_layout({128, 128, 40, 0, 2, 4, 3}, 64).total"
    fits = [H200_SHARED // (total + 1024) for total in ask(bf16_16, fp32_16, bf16_40, fp32_40)]
    assert fits == [5, 5, 3, 3]


def test_places_do_not_overlap(ask):
    order = (
        *("state", "keys", "queries", "weights", "known_u", "history_keys", "history_sum"),
        *("path_sum", "from_root", "beta", "key_norm", "query_norm", "ancestors"),
        *("not_finite", "total"),
    )
    layout = "verify_layout({128, 128, 128, 64, 4, 4, 3}, 64)"
    places = ask(*(f"{layout}.{name}" for name in order))
    assert places[0] == 0
    assert all(a < b for a, b in itertools.pairwise(places))
    assert all(place % 16 == 0 for place in places)
