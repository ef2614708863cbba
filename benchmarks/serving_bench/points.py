"""What is measured: workloads, ways to decode, arrivals, and the law of acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_treewy.bench.load import MIN_LENGTH, SIGMA, LoadSpec
from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.llmapi import STATE_COMMITS, MTPDecodingConfig

from . import ucache

NONE = "none"
AUTO = "auto"
POLICIES = (NONE, *STATE_COMMITS)
# What is measured beside them where it is asked for: others' commits, by our executor.
PEERS = (ucache.NAME,)
# `auto` chooses among the chains up to this one. The law of acceptance goes by depth and would
# give all trees of one depth the same worth, so that there is nothing to choose among those.
AUTO_DEPTH = 7
# Mean acceptance lengths (bonus included) that stand in for a trained model's. Chain 3 and (3,3,3)
# are the TreeWY paper's on Qwen3.5-35B-A3B; (2,2,2) lies between them in the proportion in which
# the shipped model's does. Longer chains go on with chain 3's probability, which flatters them.
CHAIN_LENGTH, CHAIN_DEPTH = 3.24, 3
TREE_LENGTHS = {"2,2,2": 3.47, "3,3,3": 3.58}


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and outputs: log-normal of this spread about the means, or all equal (0).

    Attributes:
        name: how it is called.
        prompt, output: mean tokens.
        sigma: spread of the logarithm.
        max_len: most tokens of prompt and output.
    """

    name: str
    prompt: int
    output: int
    sigma: float
    max_len: int

    def scaled(self, factor: float) -> Workload:
        """The same with all lengths times `factor`, for small models."""
        prompt, output = (max(1, round(n * factor)) for n in (self.prompt, self.output))
        longest = max(2 * MIN_LENGTH, prompt + output, round(self.max_len * factor))
        return Workload(self.name, prompt, output, self.sigma, longest)

    @property
    def mean_len(self) -> int:
        """Tokens of a sequence at its end, on average."""
        return min(self.max_len, self.prompt + self.output)


WORKLOADS = {
    w.name: w
    for w in (
        # Conversations, about as in ShareGPT.
        Workload("chat", 220, 200, SIGMA, 4096),
        Workload("generation", 128, 1024, 0.5, 4096),
        Workload("summary", 2048, 160, 0.5, 6144),
        # What vLLM was measured with (`goals.py`).
        Workload("anchor", 512, 192, 0.0, 704),
    )
}


@dataclass(frozen=True)
class Setting:
    """A way to decode: a commit policy and a tree. Without speculation both are "none"."""

    policy: str
    tree: str

    @property
    def name(self) -> str:
        return self.policy if self.policy == NONE else f"{self.policy} {self.tree}"

    def speculation(self, laws: Mapping[str, Sequence[float]]) -> MTPDecodingConfig:
        """The engine's setting, with the law of its tree."""
        if self.policy == NONE:
            return MTPDecodingConfig(draft_tree_widths=())
        widths = widths_of(self.tree)
        law = tuple(laws.get(self.tree) or default_law(self.tree))
        law += law[-1:] * (len(widths) - len(law))
        if self.policy == ucache.NAME and self.tree not in ucache.TREES:
            raise ValueError(
                f"{self.policy}: expected a chain of {' or '.join(ucache.TREES)}, got {self.tree}"
            )
        return MTPDecodingConfig(
            draft_tree_widths=widths,
            # Its rings take what a history of as many tokens and the stash take.
            state_commit="deferred" if self.policy == ucache.NAME else self.policy,
            deferred_history=ucache.WINDOW,
            simulated_acceptance=law[: len(widths)],
            tree_policy=AUTO if self.tree == AUTO else None,
        )


def widths_of(tree: str) -> tuple[int, ...]:
    """Children by level: of the length of a chain, of the widths themselves, or of `auto`.

    Raises:
        ValueError: it is none of these.
    """
    if tree == AUTO:
        return (1,) * AUTO_DEPTH
    try:
        widths = (1,) * int(tree) if tree.isdigit() else tuple(int(w) for w in tree.split(","))
        TreeTopology.from_widths(widths)
    except ValueError as error:
        raise ValueError(
            f"tree {tree!r}: expected a chain's length, widths such as 2,2,2, or auto ({error})"
        ) from None
    if not widths:
        raise ValueError(f"tree {tree!r}: no drafts is the policy {NONE}")
    return widths


def default_law(tree: str) -> tuple[float, ...]:
    """Probability of acceptance by depth: one for all depths, by the mean length that is assumed.

    Trees of which nothing is known get that of a chain, which is the least they accept.
    """
    if tree in TREE_LENGTHS:
        return (probability_of(TREE_LENGTHS[tree], len(widths_of(tree))),) * len(widths_of(tree))
    return (probability_of(CHAIN_LENGTH, CHAIN_DEPTH),) * len(widths_of(tree))


def probability_of(length: float, depth: int) -> float:
    """The p for which 1 + p + p^2 + ... + p^depth is `length`.

    Raises:
        ValueError: no probability gives that length.
    """
    if not 1 <= length <= depth + 1:
        raise ValueError(f"length is {length}, expected 1 to {depth + 1} for a depth of {depth}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**level for level in range(depth + 1)) < length:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 6)


@dataclass(frozen=True)
class Arrivals:
    """How requests come: so many at a time, or at a rate with a burstiness (see `LoadSpec`)."""

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    @property
    def name(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} at once"
        kind = "" if self.burstiness == 1 else f" in bursts ({self.burstiness:g})"
        return f"{self.rate:g}/s{kind}"


@dataclass(frozen=True)
class Site:
    """What an engine is built for: a workload in a fraction of the memory, decoded in one way."""

    workload: Workload
    fraction: float
    setting: Setting


@dataclass(frozen=True)
class Point:
    """A site under a load."""

    site: Site
    arrivals: Arrivals

    def load(self, requests: int, seed: int) -> LoadSpec:
        """What `plan_load` makes of it; the same for every setting."""
        workload = self.site.workload
        return LoadSpec(
            num_requests=requests,
            mean_input_len=workload.prompt,
            mean_output_len=workload.output,
            max_len=workload.max_len,
            request_rate=self.arrivals.rate,
            concurrency=self.arrivals.concurrency or 1,
            seed=seed,
            sigma=workload.sigma,
            burstiness=self.arrivals.burstiness,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what tells this point from others."""
        return {
            "workload": self.site.workload.name,
            "lengths": {k: v for k, v in asdict(self.site.workload).items() if k != "name"},
            "fraction": self.site.fraction,
            "policy": self.site.setting.policy,
            "tree": self.site.setting.tree,
            "load": self.arrivals.name,
            **asdict(self.arrivals),
        }


def settings(policies: Sequence[str], trees: Sequence[str]) -> list[Setting]:
    """Every policy with every tree; no speculation once."""
    found = [Setting(NONE, NONE)] if NONE in policies else []
    return found + [Setting(p, tree) for p in policies if p != NONE for tree in trees]


Plan = dict[Site, list[Arrivals]]


def product(
    workloads: Sequence[Workload],
    fractions: Sequence[float],
    ways: Sequence[Setting],
    loads: Sequence[Arrivals],
) -> Plan:
    """Every load on all sites, those that are compared with each other in a row."""
    return {
        Site(workload, fraction, setting): list(loads)
        for workload in workloads
        for fraction in fractions
        for setting in ways
    }


def chosen(items: Sequence[str], scale: float = 1.0) -> Plan:
    """The points that `items` name: sites in the order of their first mention, loads likewise.

    Args:
        items: WORKLOAD:FRACTION:POLICY:TREE:LOAD, several of each joined by +, the tree of `none`
            being whatever it is: `chat+summary:0.65:none+snapshot:3:64+256`. A load is a number of
            requests at once, or a rate `8/s`, or one with a burstiness, `8/s@0.25`.
        scale: factor on the lengths of workloads.

    Raises:
        ValueError: an item that is none.
    """
    plan: Plan = {}
    for item in items:
        try:
            parts = [part.split("+") for part in item.split(":")]
            names, fractions, policies, trees, loads = parts
            if unknown := [name for name in names if name not in WORKLOADS]:
                raise ValueError(f"no workload {unknown[0]!r}")
            if unknown := [p for p in policies if p not in (*POLICIES, *PEERS)]:
                raise ValueError(f"no policy {unknown[0]!r}")
            found = product(
                [WORKLOADS[name].scaled(scale) for name in names],
                [_positive(fraction, most=1.0) for fraction in fractions],
                settings(policies, trees),
                [_arrivals(load) for load in loads],
            )
        except ValueError as error:
            raise ValueError(
                f"point {item!r}: expected WORKLOAD:FRACTION:POLICY:TREE:LOAD ({error})"
            ) from None
        for site, arrivals in found.items():
            known = plan.setdefault(site, [])
            known += [load for load in arrivals if load not in known]
    return plan


def _arrivals(text: str) -> Arrivals:
    rate, mark, burstiness = text.partition("/s")
    if not mark:
        return Arrivals(concurrency=int(_positive(str(int(text)))))
    if burstiness and not burstiness.startswith("@"):
        raise ValueError(f"load {text!r}")
    return Arrivals(None, _positive(rate), _positive(burstiness[1:] or "1"))


def _positive(text: str, most: float = math.inf) -> float:
    value = float(text)
    if not 0 < value <= most:
        raise ValueError(f"{text} is not above 0" + (f" and at most {most:g}" * (most < math.inf)))
    return value
