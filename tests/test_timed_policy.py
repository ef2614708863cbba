"""What a tree policy is told of steps: time since the last one, or from the step's own start."""

from __future__ import annotations

from engine_world import make_request

from trtllm_treewy.draft_tree import DraftTree
from trtllm_treewy.runtime.timed_policy import TimedPolicy, VerifiedRow

TREE = DraftTree((1, 2), (-1, 0), (0.0, -0.5))


class Told:
    """A policy that keeps what it is told, and the clock that it goes by."""

    def __init__(self) -> None:
        self.reports, self.now = [], 0.0

    def limit(self, rows):
        return 10 * rows

    def observe(self, report):
        self.reports.append(report)

    def seconds(self):
        return [(report.seconds, report.whole) for report in self.reports]


def make() -> tuple[Told, TimedPolicy]:
    told = Told()
    return told, TimedPolicy(told, lambda: told.now)


def row(number=0, path=(0, 1), tree=TREE, **fields) -> VerifiedRow:
    request = make_request(number, [1], 8, **fields)
    return VerifiedRow(request, tree, None if path is None else [*path])


def test_from_step_to_step_unless_the_device_did_something_else():
    told, policy = make()
    assert policy.limit(3) == 30
    for now, heard, interrupted in [(1, 3, False), (6, 7, False), (8, 9, True), (10, 15, False)]:
        told.now = now
        policy.start()
        told.now = heard
        policy.observe([row()])
        if interrupted:
            policy.interrupt()
    assert told.seconds() == [(2, False), (4, True), (2, True), (5, False)]


def test_a_step_of_no_rows_is_no_end_of_one():
    """Nothing was decoded, or the drafter failed for all: the next step begins by itself."""
    told, policy = make()
    told.now = 5
    policy.observe([])
    told.now = 7
    policy.start()
    told.now = 8
    policy.observe([row()])
    assert told.seconds() == [(1, False)]


def test_only_what_went_well_is_told():
    told, policy = make()
    policy.observe([row(0), row(1, path=None)])  # its batch failed
    broken = row(1)
    broken.request.fail("not finite")
    policy.observe([row(0), broken])
    policy.observe([row(0, speculation=False)])
    policy.observe([row(0, tree=None)])
    assert not told.reports
    ended = row(1, path=None)
    ended.request.finish_reason = "cancelled"
    policy.observe([row(0), ended, row(2, path=[0]), row(3, speculation=False)])
    (report,) = told.reports
    assert (report.rows, report.paths) == (4, [[0, 1], [0]])
    assert report.trees == [TREE, TREE]
