"""Random numbers that are a pure function of what they are for: no generator, no state.

A number is named by (seed, sequence, position, purpose, index), so a request draws the same ones
whatever shares its batch, in whatever order, however often a step is repeated, on any device.
Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes a
64-bit word of the name; SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), started there, gives one
number for every token of a vocabulary at a tenth of the cost.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What numbers are drawn for; different purposes are independent of each other."""

    TARGET = 0
    """The token at a position, from the target's distribution or a residual of it."""
    ACCEPT = 1
    """Whether a drafted child is accepted; the index is its rank among its siblings."""
    DRAFT = 2
    """The children of a draft node; the index is the node's number in its draft."""


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10.

    Args:
        counter: four int64 tensors that broadcast, values in [0, 2^32).
        key: two more.

    Returns:
        Four int64 tensors, values in [0, 2^32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit numbers; in halves, as int64 is signed."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def random_word(
    seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor | int = 0
) -> Tensor:
    """64 random bits for each name.

    Args:
        seed: int64 [..., 3], low and high half of the seed and the sequence's number.
        position: int64 [...], in [0, 2^32).
        purpose: what the bits are for.
        index: int64 [...] or one for all.

    Returns:
        int64 [...], all 64 bits random.
    """
    if isinstance(index, int):
        index = torch.full_like(position, index)
    kind = torch.full_like(position, int(purpose))
    high, low, _, _ = philox((position, index, kind, seed[..., 2]), (seed[..., 0], seed[..., 1]))
    return (high << 32) | low


def uniform(word: Tensor) -> Tensor:
    """float64 in [0, 1) from 53 of the bits of `word`, int64."""
    return ((word >> 11) & (2**53 - 1)).double() * 2.0**-53


def gumbel(word: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for tokens: `argmax(log p + noise)` is a draw from p.

    The noise of a token does not depend on which other tokens are asked for.

    Args:
        word: int64 [...], from `random_word`.
        token_ids: int64 [..., n] or [n].

    Returns:
        float32 [..., n], finite.
    """
    bits = _mix(word[..., None] + (token_ids + 1) * _signed(0x9E3779B97F4A7C15))
    # -log of a uniform number, exact in relative terms where it is small: the largest noise, which
    # decides, comes from there, and ties between tokens do not occur.
    unit = ((bits & (2**63 - 1)).float() * 2.0**-63).clamp_(2.0**-64, 1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-unit))


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function; int64 products wrap, as unsigned ones do."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; that of int64 keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def seed_words(seed: int, sequence: int = 0) -> tuple[int, int, int]:
    """Low and high half of a seed in [0, 2^64), and the sequence's number: a row of `seed`."""
    return seed & _MASK32, seed >> 32, sequence & _MASK32
