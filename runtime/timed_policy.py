"""A tree policy with the clock that it goes by: how long a step took, and whether all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_treewy.draft_tree import DraftTree

from .request import Request
from .tree_policy import StepReport, TreePolicy


@dataclass
class VerifiedRow:
    """A request's part in a step of decoding.

    Attributes:
        request: whose row it is.
        tree: as it was verified, None where the device did not tell.
        path: accepted nodes, the root first; None where the step failed, or the request had ended.
    """

    request: Request
    tree: DraftTree | None
    path: list[int] | None = None


class TimedPolicy:
    """Asks a policy for the limit of a step, and tells it what steps brought in which time.

    A step lasts from when the host heard of the one before until it hears of this one, as the
    device drafts this one's trees in between. Where the device has done anything else meanwhile the
    time runs from the step's own start, and is reported as that of a part.

    Args:
        policy: limits the trees of each step.
        clock: seconds.
    """

    def __init__(self, policy: TreePolicy, clock: Callable[[], float]) -> None:
        self._policy, self._clock = policy, clock
        # When the last step was heard of, as long as the device has done nothing else since.
        self._heard_at: float | None = None
        self._started_at = 0.0

    def limit(self, rows: int) -> int | None:
        """Nodes a tree may have in a step of so many rows; see `TreePolicy.limit`."""
        return self._policy.limit(rows)

    def start(self) -> None:
        """A step of decoding starts now."""
        self._started_at = self._clock()

    def interrupt(self) -> None:
        """The device does something else than decoding the same sequences on."""
        self._heard_at = None

    def observe(self, rows: Sequence[VerifiedRow]) -> None:
        """A step was heard of; the policy is told, unless a row failed or nobody had drafts."""
        if not rows:
            return
        heard, now = self._heard_at, self._clock()
        self._heard_at = now
        failed = any(row.request.error is not None for row in rows)
        if failed or any(row.path is None and not row.request.finished for row in rows):
            return
        drafting = [
            (row.tree, row.path)
            for row in rows
            if row.request.speculation and row.tree is not None and row.path is not None
        ]
        if not drafting:
            return
        self._policy.observe(
            StepReport(
                rows=len(rows),
                seconds=now - (self._started_at if heard is None else heard),
                trees=[tree for tree, _ in drafting],
                paths=[path for _, path in drafting],
                whole=heard is not None,
            )
        )
