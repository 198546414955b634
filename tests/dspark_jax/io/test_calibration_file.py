"""Calibration on disk: written, read back, and refused where it does not fit."""

import dataclasses
import json

import pytest

from dspark_jax.config import InputError
from dspark_jax.io import calibration_file
from dspark_jax.io.calibration_file import Calibration, Entry
from dspark_jax.io.files import fingerprint


def entry(temperature):
    return Entry(
        temperature=temperature,
        top_k=0,
        top_p=0.9,
        min_p=0.0,
        temperatures=(1.25, 0.5),
        ece_before=(0.1, 0.2),
        ece_after=(0.01, 0.02),
        rounds=40,
    )


@pytest.fixture
def made(saved):
    return Calibration(
        target=fingerprint(saved / "target"),
        draft=fingerprint(saved / "vanilla"),
        block_size=2,
        entries=(entry(0.0), entry(0.6), entry(1.0)),
    )


def test_round_trip(made, tmp_path):
    path = tmp_path / "calibration.json"
    made.save(path)
    assert calibration_file.load(path) == made
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_nearest_temperature_and_greedy_apart(made):
    for temperature, expected in ((0.0, 0.0), (0.1, 0.6), (0.7, 0.6), (0.9, 1.0), (5.0, 1.0)):
        assert made.entry(temperature).temperature == expected
    sampled = dataclasses.replace(made, entries=made.entries[1:])
    assert sampled.entry(0.0) is None
    greedy = dataclasses.replace(made, entries=made.entries[:1])
    assert greedy.entry(0.7) is None


def test_another_pair_or_block_is_refused(made, saved):
    made.check_fits(saved / "target", saved / "vanilla", 2)
    with pytest.raises(InputError, match="fitted for another drafter"):
        made.check_fits(saved / "target", saved / "rnn", 2)
    with pytest.raises(InputError, match="fitted for another target"):
        made.check_fits(saved / "vanilla", saved / "vanilla", 2)
    with pytest.raises(InputError, match="blocks of 2, not 3"):
        made.check_fits(saved / "target", saved / "vanilla", 3)


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_cannot_be(made, tmp_path, odd):
    entry = dataclasses.replace(made.entries[0], temperatures=(1.0, odd))
    dataclasses.replace(made, entries=(entry,)).save(tmp_path / "calibration.json")
    with pytest.raises(InputError, match=r"not a calibration \(expected 2 numbers above 0\)"):
        calibration_file.load(tmp_path / "calibration.json")


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"temperature": 10**400},
        {"temperatures": "12"},
        {"temperatures": [True, True]},
        {"ece_before": [10**400, 0]},
        {"top_k": float("inf")},
        {"rounds": "many"},
    ],
)
def test_entries_that_cannot_be(made, tmp_path, change):
    path = tmp_path / "calibration.json"
    made.save(path)
    values = json.loads(path.read_text())
    values["entries"][0] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"calibration\.json: not a calibration") as error:
        calibration_file.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": 3},
        {"entries": [{"temperature": 0}]},
        {"block_size": 3},
        {"block_size": None},
        {"block_size": float("inf")},
        {"target": 3},
        {"target": None, "draft": None, "entries": None},
    ],
)
def test_something_else_is_refused_in_one_line(made, tmp_path, change):
    path = tmp_path / "calibration.json"
    made.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=r"calibration\.json: not a calibration") as error:
        calibration_file.load(path)
    assert "\n" not in str(error.value)
