import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.losses import LossConfig, Sums
from train.meter import Meter, Pool
from train.settings import DrafterSettings, OptimizerSettings
from train.step import Report, StepConfig

K = 2


@pytest.fixture(scope="module")
def cfg(small_config) -> StepConfig:
    drafter = DrafterSettings(block_size=K, target_layer_ids=(0, 1)).config(small_config)
    return StepConfig(small_config, drafter, LossConfig(1.0, 0, 0), OptimizerSettings())


def report(seed: int, *, skipped: int = 0) -> Report:
    rng = np.random.default_rng(seed)

    def draw(x):
        return jnp.asarray(rng.uniform(0.1, 1, x.shape), jnp.float32)

    zeros = Sums.zeros(K)
    sums = zeros if skipped else Sums(**{name: draw(x) for name, x in vars(zeros).items()})
    norm = float("nan") if skipped else seed + 1.0
    numbers = (jnp.float32(x) for x in (0.5, norm, 0.1 * seed))
    return Report(sums, *numbers, jnp.int32(skipped))


def meter(cfg, pool=None) -> Meter:
    return Meter(cfg, pool or Pool.start(K), step_flops=1e6, peak_flops=None)


def test_means_are_over_all_that_was_counted(cfg):
    reports, found = [report(i) for i in range(3)], meter(cfg)
    for i, r in enumerate([reports[0], report(7, skipped=1), *reports[1:]]):
        found.add(r, tokens=i)
    values = found.read()
    ce, weight = (sum(float(getattr(r.sums, n)) for r in reports) for n in ("ce", "weight"))
    np.testing.assert_allclose(values["loss"], ce / weight, rtol=1e-6)
    assert values["grad_norm"] == 2.0
    assert values["skipped_steps"] == 1
    assert values["learning_rate"] == pytest.approx(0.2)
    assert values["tokens_per_second"] > 0
    assert 0 <= values["input_wait"] < 1
    assert np.isnan(values["mfu"])  # a CPU


def test_nothing_but_skipped_steps_has_no_means(cfg):
    found = meter(cfg)
    found.add(report(0, skipped=1), 5)
    values = found.read()
    assert values["skipped_steps"] == 1
    assert all(np.isnan(values[n]) for n in ("loss", "grad_norm", "acceptance_1"))


def test_a_line_is_the_same_whether_or_not_it_was_interrupted(cfg):
    reports, whole = [report(i) for i in range(5)], meter(cfg)
    for r in reports:
        whole.add(r, 1)
    first = meter(cfg)
    for r in reports[:2]:
        first.add(r, 1)
    place = json.loads(json.dumps(first.place()))
    second = meter(cfg, Pool.of(place))
    for r in reports[2:]:
        second.add(r, 1)
    timed = {"tokens_per_second", "input_wait", "first_step_seconds", "mfu", "peak_memory_bytes"}
    one, two = whole.read(), second.read()
    assert {n: v for n, v in one.items() if n not in timed} == {
        n: v for n, v in two.items() if n not in timed
    }
    assert one["loss"] != first.read()["loss"]


def test_what_is_aside_takes_no_time(cfg, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("train.meter.time.monotonic", lambda: float(next(clock)))
    found = Meter(cfg, Pool.start(K), step_flops=1e6, peak_flops=1e6)  # started at 0
    found.add(report(0), 100)  # the first step took 10; the clock starts at 20
    with found.waiting():  # 30 to 40
        pass
    found.add(report(1), 100)
    with found.aside():  # 50 to 60
        pass
    values = found.read()  # at 70, so that 40 seconds count
    assert values["first_step_seconds"] == 10
    assert values["tokens_per_second"] == 100 / 40
    assert values["input_wait"] == 10 / 40
    assert values["mfu"] == 1 / 40


class UnderWay:
    """A number that a device is still at work on."""

    def __init__(self, value):
        self.value, self.ready = value, False

    def is_ready(self):
        return self.ready

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


def test_waits_count_when_the_devices_are_through(cfg, monkeypatch):
    """A batch that comes while the step before is under way has kept nothing waiting."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("train.meter.time.monotonic", lambda: float(next(clock)))
    found = meter(cfg)  # at 0
    found.add(report(0), 100)  # to 20
    loss = UnderWay(jnp.float32(0.5))
    found.add(dataclasses.replace(report(1), loss=loss), 100)
    with found.waiting():  # from 30 on
        pass
    loss.ready = True
    with found.waiting():  # 40 to 50
        pass
    assert found.read()["input_wait"] == 10 / 40
