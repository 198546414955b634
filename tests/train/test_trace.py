from pathlib import Path

import jax
import pytest

from train.trace import Trace


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: found.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def steps(trace, calls, last):
    seen = []
    for step in range(1, last + 1):
        trace.before(step)
        seen.append(len(calls) % 2 == 1)
        trace.after(step, 0)
    trace.close()
    return seen


def test_the_steps_between_are_traced(calls):
    seen = steps(Trace(Path("x"), (2, 4)), calls, 6)
    assert seen == [False, True, True, True, False, False]
    assert calls == [Path("x"), "stop"]


def test_a_trace_ends_with_the_run(calls):
    assert steps(Trace(Path("x"), (2, 9)), calls, 3) == [False, True, True]
    assert calls == [Path("x"), "stop"]


def test_nothing_is_traced_unless_asked_for(calls):
    assert not any(steps(Trace(Path("x"), None), calls, 3))
    assert calls == []
