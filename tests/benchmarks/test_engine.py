"""What is realised of a saving, by hand."""

import importlib
from pathlib import Path

import pytest

from dspark_jax.plans import Plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WHOLE, PRUNED = Plan(3, 16), Plan(3, 8)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("engine")


def repeats(*savings):
    """One window a repeat."""
    return [[{WHOLE: 10.0, PRUNED: 10.0 - saving}] for saving in savings]


def test_part_of_the_medians(engine):
    table, realised = repeats(4, 5, 6), repeats(3, 4, 5)
    assert engine.saved(table, WHOLE, PRUNED) == 5
    found = engine.part_saved(realised, table, WHOLE, PRUNED)
    assert found["part"] == pytest.approx(0.8)
    assert found["low"] == pytest.approx(3 / 4)
    assert found["high"] == pytest.approx(5 / 6)


def test_no_part_of_a_saving_that_may_be_none(engine):
    found = engine.part_saved(repeats(1, 1, 1), repeats(-2, 1, 4), WHOLE, PRUNED)
    assert set(found.values()) == {None}
