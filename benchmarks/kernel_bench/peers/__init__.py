"""Kernels of others that verify drafts, each in a file of its own, and this project's baseline.

A peer that cannot be imported is absent, with the reason; one whose output differs from the
reference is reported and not timed.
"""

from .flash_linear_attention import FlashLinearAttention
from .flashinfer import FlashInferOutputOnly, FlashInferSnapshots
from .peer import Peer
from .sglang import SGLang
from .snapshots import Snapshots


def all_peers() -> list[Peer]:
    """One of each."""
    return [
        FlashInferOutputOnly(),
        FlashInferSnapshots(),
        SGLang(),
        FlashLinearAttention(),
        Snapshots(),
    ]
