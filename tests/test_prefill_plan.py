"""Which kernel a prefill gets, and how it is cut: pure functions, asked without a GPU."""

from __future__ import annotations

import pytest

H200 = (132, 233472 - 1024)  # multiprocessors, bytes of shared memory of a block
SMALL = (188, 99 * 1024)  # a GPU with little shared memory
BF16, F16, F32 = 1, 2, 3  # terms


@pytest.fixture(scope="module")
def plan(ask_header):
    """(tokens of a chunk, warps of rows) for each choice."""
    ask = ask_header("kernels/prefill_plan.h")

    def evaluate(*choices):
        found = ask(*(f"{c}.{field}" for c in choices for field in ("tokens", "row_warps")))
        return list(zip(found[::2], found[1::2], strict=True))

    return evaluate


def choice(
    heads=32, *, length=512, key_dim=128, value_dim=128, terms=BF16, state=4, aligned=True, gpu=H200
):  # fmt: skip
    shape = f"{{{key_dim}, {value_dim}, {terms}, {state}, {heads}, {length}}}"
    return f"choose_prefill({shape}, {str(aligned).lower()}, {gpu[0]}, {gpu[1]})"


def test_one_prompt_is_cut_small_and_many_are_not(plan):
    cut = plan(*(choice(32 * batch) for batch in (1, 2, 4, 8, 16)))
    assert cut == [(64, 2), (64, 4), (32, 8), (32, 8), (32, 8)]


def test_short_prompts_have_short_chunks(plan):
    assert plan(choice(length=32), choice(length=33)) == [(32, 2), (64, 2)]


def test_tiles_divide_the_value_dim(plan):
    dims = (16, 48, 64, 96, 192, 256)
    cut = plan(*(choice(3200, value_dim=dim) for dim in dims))
    assert [warps for _, warps in cut] == [1, 1, 4, 2, 4, 8]


def test_what_cannot_use_tensor_cores_gets_the_general_kernel(plan):
    general = [
        choice(terms=F32),
        choice(aligned=False),
        choice(key_dim=256),
        choice(key_dim=96),
        choice(value_dim=24),
    ]
    assert plan(*general) == [(0, 0)] * len(general)


def test_every_gpu_has_chunks_that_fit(plan, ask_header):
    choices = [
        choice(heads, key_dim=key_dim, terms=terms, gpu=SMALL)
        for heads in (32, 4096)
        for key_dim in (64, 128)
        for terms in (BF16, F16)
    ]
    assert {tokens for tokens, _ in plan(*choices)} == {32}
    ask = ask_header("kernels/prefill_plan.h")
    largest = ask("chunk_layout(128, 32, 8).total", "chunk_layout(128, 64, 4).total")
    assert largest[0] <= SMALL[1]
    assert largest[1] <= H200[1]
