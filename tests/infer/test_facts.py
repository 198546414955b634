"""Memory, costs and calibration of a pair of this folder's conftest."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

from dspark_jax import batch_shape, batching, costs, generation
from dspark_jax.config import InputError
from dspark_jax.costs import CostTable
from dspark_jax.io import files
from dspark_jax.io.calibration_file import Calibration, Entry
from dspark_jax.io.cost_file import CostFile
from dspark_jax.request import Request
from dspark_jax.state import plans_of
from infer import facts
from infer.settings import Settings
from tests.infer.conftest import BLOCK

SLOTS = 2
REQUEST = Request([1, 2, 3], max_new_tokens=4)


@pytest.fixture
def known(folders, tmp_path):
    """A pair, its batch, and settings with the files of facts about it."""
    pair = generation.load(folders.target, folders.draft)
    shape = batch_shape.plan(pair.models, [REQUEST], SLOTS)
    cfg = generation.decode_config(pair.models, [REQUEST], policy="delayed")
    plans = plans_of(pair.models, cfg, SLOTS)
    names = {
        "target": files.fingerprint(folders.target),
        "draft": files.fingerprint(folders.draft),
        "block_size": BLOCK,
    }
    costs = CostFile(
        **names,
        slots=SLOTS,
        device=jax.devices()[0].device_kind,
        dtype="float32",
        greedy=True,
        context=8,
        date="2026-01-31",
        table=CostTable(SLOTS, {plan: 1.0 + i for i, plan in enumerate(plans)}),
    )
    calibration = Calibration(**names, entries=(entry(0.5, 2.0), entry(1.0, 3.0)))
    costs.save(tmp_path / "costs.json")
    calibration.save(tmp_path / "calibration.json")
    settings = Settings(
        target=str(folders.target),
        draft=str(folders.draft),
        policy="delayed",
        cost_table=tmp_path / "costs.json",
        calibration=tmp_path / "calibration.json",
    )
    return settings, pair, shape, cfg, costs, calibration


def entry(temperature, divisor):
    zeros = (0.0,) * BLOCK
    return Entry(temperature, 0, 1.0, 0.0, (divisor,) * BLOCK, zeros, zeros, 1)


def test_read(known, capsys):
    settings, pair, shape, cfg, costs, _ = known
    found = facts.gather(settings, pair, shape, cfg)
    assert found.costs == costs.table
    each = facts.megabytes(batch_shape.bytes_per_row(pair.models, shape, lazy=True))
    kinds = len(plans_of(pair.models, cfg, shape.rows))
    assert capsys.readouterr().err.splitlines() == [
        f"2 slots of {shape.length} positions, {each} each",
        f"compiling {kinds} kinds of rounds",
    ]


def test_nothing_is_measured_for_a_policy_that_does_not_weigh(known, monkeypatch):
    settings, pair, shape, cfg, *_ = known
    monkeypatch.delattr(costs, "measure")
    settings = dataclasses.replace(settings, policy="fixed", cost_table=None, calibration=None)
    cfg = dataclasses.replace(cfg, policy="fixed")
    assert facts.gather(settings, pair, shape, cfg) == batching.NO_FACTS


def test_measured_without_a_file(known, monkeypatch, capsys):
    """With rows half full, in which a block has room."""
    settings, pair, shape, cfg, made, _ = known
    asked = []
    monkeypatch.setattr(costs, "measure", lambda *a, **given: asked.append(given) or made.table)
    settings = dataclasses.replace(settings, cost_table=None)
    assert facts.gather(settings, pair, shape, cfg).costs == made.table
    assert (asked[0]["rows"], asked[0]["length"]) == (SLOTS, shape.length)
    assert asked[0]["context"] == shape.length // 2
    assert "infer.profile does that once" in capsys.readouterr().err
    short = dataclasses.replace(shape, length=5)
    facts.measure_costs(pair.models, short, cfg, plans_of(pair.models, cfg, short.rows))
    assert asked[1]["context"] == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slots": 3}, "slots=3, not 2"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16, not float32"),
        ({"block_size": 2}, "block_size=2, not 3"),
        ({"greedy": False}, "greedy=False, not True"),
        ({"device": "abacus"}, "device=abacus, not "),
        ({"target": "0"}, "another target"),
        ({"draft": "0"}, "another draft"),
    ],
)
def test_costs_of_another_setting_are_refused(known, change, text):
    settings, pair, shape, cfg, made, _ = known
    dataclasses.replace(made, **change).save(settings.cost_table)
    with pytest.raises(InputError, match=r"costs\.json: the costs were measured for ") as error:
        facts.gather(settings, pair, shape, cfg)
    assert text in str(error.value)
    assert str(error.value).endswith(": profile again")
    assert "\n" not in str(error.value)


def test_costs_that_lack_a_round_are_refused(known):
    settings, pair, shape, cfg, made, _ = known
    seconds = dict(list(made.table.seconds.items())[1:])
    dataclasses.replace(made, table=CostTable(SLOTS, seconds)).save(settings.cost_table)
    with pytest.raises(InputError, match=r"costs\.json: .* 0 drafts a row in a pass of 2 tokens"):
        facts.gather(settings, pair, shape, cfg)


def test_temperatures_of_the_nearest_entry(known):
    settings, pair, shape, cfg, *_ = known
    scale = facts.gather(settings, pair, shape, cfg).scale
    for temperature, divisor in ((0.1, 2), (0.7, 2), (0.8, 3), (4.0, 3)):
        found = scale(dataclasses.replace(REQUEST, temperature=temperature))
        np.testing.assert_array_equal(found, [divisor] * BLOCK)


def test_rows_without_an_entry_keep_their_confidences_and_that_is_said_once(known):
    settings, pair, shape, cfg, *_ = known
    scale = facts.gather(settings, pair, shape, cfg).scale
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        for _ in range(3):
            assert scale(REQUEST) == [1.0] * BLOCK
    assert [str(w.message) for w in said] == [
        "the calibration has no entry for greedy rows: raw confidences"
    ]


def test_a_calibration_of_something_else_is_refused(known):
    settings, pair, shape, cfg, _, made = known
    dataclasses.replace(made, target="0").save(settings.calibration)
    with pytest.raises(InputError, match="another target"):
        facts.gather(settings, pair, shape, cfg)
    with pytest.raises(InputError, match="with a drafter only"):
        facts.read_scale(settings.calibration, settings.folders[0], None, pair.models)


def test_rows_that_do_not_fit_are_refused(known, monkeypatch):
    """A newcomer's row is beside those of the slots."""
    settings, pair, shape, cfg, *_ = known
    needed = (SLOTS + 1) * batch_shape.bytes_per_row(pair.models, shape, lazy=True)
    for free in (needed, None):
        monkeypatch.setattr(facts, "free_bytes", lambda free=free: free)
        facts.gather(settings, pair, shape, cfg)
    monkeypatch.setattr(facts, "free_bytes", lambda: needed - 1)
    with pytest.raises(InputError, match="fewer slots or a smaller --max-new-tokens") as error:
        facts.gather(settings, pair, shape, cfg)
    assert facts.megabytes(needed) in str(error.value)


def test_memory_that_is_free(monkeypatch, tmp_path):
    """What only caches files counts as free."""
    path = tmp_path / "meminfo"
    monkeypatch.setattr(facts, "MEMORY_FILE", path)
    assert facts.free_bytes() is None
    path.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  2000 kB\n")
    assert facts.free_bytes() == 2000 * 1024
    path.write_text("MemTotal:  9000 kB\n")
    assert facts.free_bytes() is None


def test_sizes_in_words():
    assert facts.megabytes(1_500_000) == "1.5 MB"
    assert facts.megabytes(2_500_000_000) == "2.5 GB"
