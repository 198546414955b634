from types import SimpleNamespace

import pytest

from train.lookout import LAG, Diverged, Lookout


class FakeCheckpoints:
    latest = 8

    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


def report(in_a_row):
    return SimpleNamespace(skipped_in_a_row=in_a_row, loss=float("inf"), grad_norm=2.5)


def test_skipped_steps_are_told_when_they_are_over(caplog):
    lookout = Lookout(FakeCheckpoints(), 3)
    for step, in_a_row in enumerate([0, 1, 0, 0], start=1):
        lookout.add(step, report(in_a_row))
        assert len(caplog.records) == (step >= 2 + LAG)
    (record,) = caplog.records
    assert record.getMessage() == "step 2 was skipped: loss inf, gradient norm 2.5"


def test_too_many_in_a_row_end_the_run():
    checkpoints = FakeCheckpoints()
    lookout = Lookout(checkpoints, 2)
    for step, in_a_row in ((11, 1), (12, 2)):
        lookout.add(step, report(in_a_row))
    assert checkpoints.waited == 0
    with pytest.raises(Diverged) as error:
        lookout.settle()
    assert checkpoints.waited == 1
    assert str(error.value) == (
        "training stopped at step 12: 2 steps in a row were skipped, the last with loss inf and"
        " gradient norm 2.5 (max_skipped=2); checkpoints: the last is of step 8"
    )
