"""Lossless sampling on draft trees.

Read `counter_rng` (numbers without state), `sequence` and `rows` (settings), `processors` (logits
to distribution), `sampler` (one token), `tree_walk` (a tree), `rejection` and `draft` (drawn
drafts), `mtp_drafters` (who draws them).
"""

from .draft import DraftChildren, DraftRecord, NodeDrafts, draft_children
from .logprobs import Logprob, TokenLogprobs
from .mtp_drafters import Proposal, SamplingDynamicDrafter, SamplingStaticDrafter
from .processors import FAULT_REASONS, Fault
from .rows import SamplingRows
from .sampler import NextTokens, sample
from .sequence import AcceptanceRule, SequenceSampling, check_vocabulary
from .tree_walk import SampledTree, sample_tree

__all__ = [
    "SequenceSampling",
    "SamplingRows",
    "sample",
    "NextTokens",
    "sample_tree",
    "SampledTree",
    "AcceptanceRule",
    "Fault",
    "FAULT_REASONS",
    "Logprob",
    "TokenLogprobs",
    "draft_children",
    "DraftChildren",
    "DraftRecord",
    "NodeDrafts",
    "Proposal",
    "SamplingStaticDrafter",
    "SamplingDynamicDrafter",
    "check_vocabulary",
]
