"""Cost tables on disk: written, read back, and refused where they do not fit."""

import json
from pathlib import Path

import pytest

from dspark_jax.config import InputError
from dspark_jax.costs import CostTable
from dspark_jax.io import cost_file
from dspark_jax.io.cost_file import CostFile
from dspark_jax.plans import Plan

MADE = CostFile(
    target="12",
    draft="34",
    block_size=2,
    slots=2,
    device="abacus",
    dtype="float32",
    greedy=False,
    context=16,
    date="2026-01-31",
    table=CostTable(2, {Plan(0, 2): 0.25, Plan(2, 4): 1 / 3, Plan(2, 6): 1.5}),
)


def test_round_trip(tmp_path):
    path = tmp_path / "costs.json"
    MADE.save(path)
    assert cost_file.load(path) == MADE
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_another_setting_is_refused():
    MADE.check_fits(Path("costs.json"), target="12", slots=2, dtype="float32")
    for now, text in (
        ({"target": "13"}, "costs.json: the costs were measured for another target: profile again"),
        ({"draft": ""}, "costs.json: the costs were measured for another draft: profile again"),
        (
            {"target": "12", "slots": 3},
            "costs.json: the costs were measured for slots=2, not 3: profile again",
        ),
    ):
        with pytest.raises(InputError) as error:
            MADE.check_fits(Path("costs.json"), **now)
        assert str(error.value) == text


def row(**change):
    return {"table": [{"drafts": 0, "capacity": 2, "seconds": 1.0} | change]}


@pytest.mark.parametrize(
    "change",
    [
        {"table": []},
        {"table": 3},
        {"table": ["x"]},
        {"table": [{"drafts": 0}]},
        row(seconds=0),
        row(seconds=-1.0),
        row(seconds=float("nan")),
        row(seconds=float("inf")),
        row(seconds=None),
        row(drafts="many"),
        row(capacity=float("inf")),
        row(seconds=True),
        row(seconds="1"),
        row(seconds=10**400),
        row(drafts=0.9),
        {"table": 2 * row()["table"]},
        {"slots": None},
        {"slots": 3.0},
        {"block_size": "x"},
        {"greedy": "false"},
        {"device": 5},
    ],
)
def test_something_else_is_refused_in_one_line(tmp_path, change):
    path = tmp_path / "costs.json"
    MADE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=r"costs\.json: not a cost table") as error:
        cost_file.load(path)
    assert "\n" not in str(error.value)


def test_a_field_that_is_missing_and_a_file_that_is(tmp_path):
    path = tmp_path / "costs.json"
    MADE.save(path)
    values = json.loads(path.read_text())
    del values["device"]
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"not a cost table \('device' is missing\)"):
        cost_file.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        cost_file.load(path)
    with pytest.raises(InputError, match="cannot be read"):
        cost_file.load(tmp_path / "absent.json")
