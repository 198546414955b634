"""Batches of a pair that can be followed by hand, and their clock."""

import dataclasses

import pytest

from dspark_jax import batch_shape, generation
from dspark_jax.request import Completion, Request
from infer.engine import Engine, Run
from tests.infer.conftest import IDS, continuation

LASTS = {"c": 9, "x": 9, "7": 4, "!": 7, "i": 9}  # last token of each prompt, and its limit
REQUESTS = [Request([IDS[last]], max_new_tokens=limit) for last, limit in LASTS.items()]


@pytest.fixture(scope="module")
def engine(folders, quick_compile):
    pair = generation.load(folders.target, folders.draft)
    cfg = generation.decode_config(pair.models, REQUESTS, policy="threshold", threshold=0.5)
    return Engine(pair, batch_shape.plan(pair.models, REQUESTS, 2), cfg)


def completion(*token_ids):
    return Completion(1, list(token_ids), "", "length", [], [], [], None, None)


def test_runs_add_up():
    a, b = Request((1,)), Request((2,))
    first = Run([a], [completion(4)], seconds=0.5, compile_seconds=3.0)
    second = Run((b, a), (completion(5, 6), completion(7)), seconds=1.5, compile_seconds=0.25)
    assert first + second == Run(
        [a, b, a], [completion(4), completion(5, 6), completion(7)], 2.0, 3.25
    )
    assert first + Run() == Run() + first == first


def test_tokens_and_their_rate():
    run = Run([Request((1,))] * 2, [completion(4), completion(5, 6)], seconds=1.5)
    assert run.tokens == 3
    assert run.tokens_per_second == 2.0


def test_nothing_has_no_rate():
    assert Run().tokens == 0
    assert Run().tokens_per_second is None
    assert Run(compile_seconds=3.0).tokens_per_second is None


def test_no_requests_are_no_run(engine):
    assert engine.decode([]) == Run()


def test_more_requests_than_rows(engine):
    run = engine.decode_all(REQUESTS)
    assert run.requests == REQUESTS
    assert run.completions == [engine.decode([x]).completions[0] for x in REQUESTS]
    for (last, limit), found in zip(LASTS.items(), run.completions, strict=True):
        assert found.token_ids == [IDS[token] for token in continuation(last, limit)]
    assert run.seconds > 0
    assert run.compile_seconds > 0


def test_samples_compile_before_they_are_decoded(engine, monkeypatch):
    """Fewer requests than rows, and yet they come in beside others: their prompt is read once."""
    asked = []
    monkeypatch.setattr(Engine, "warm_up", lambda self, refill: asked.append(refill) or Run())
    engine.decode_all([REQUESTS[0]] * 2)
    engine.decode_all(REQUESTS[:2])
    engine.decode_all(REQUESTS[:3])
    assert asked == [True, False, True]


def test_plain_has_no_drafter(engine):
    traced = dataclasses.replace(engine, cfg=dataclasses.replace(engine.cfg, trace=True))
    plain = traced.plain()
    models, cfg = plain.pair.models, plain.cfg
    assert (models.drafter, models.drafter_config) == (None, None)
    assert models.target is engine.pair.models.target
    assert plain.shape == engine.shape
    assert (cfg.policy, cfg.threshold, cfg.trace) == ("none", None, False)
    assert cfg.stop_token_ids == engine.cfg.stop_token_ids
    assert engine.pair.models.drafter is not None

    drafted, plainly = engine.decode(REQUESTS[:2]), plain.decode(REQUESTS[:2])
    for a, b in zip(drafted.completions, plainly.completions, strict=True):
        assert b.token_ids == a.token_ids
        assert b.accepted_lengths == [1] * (len(b.token_ids) - 1)
