"""Load on a pair that can be followed by hand (tests/infer/conftest.py)."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
from matplotlib.figure import Figure

from dspark_jax import batch_shape, batching, decode, generation, prefill
from dspark_jax.costs import CostTable
from dspark_jax.io import cli
from dspark_jax.plans import Plan
from dspark_jax.request import Completion, Request
from infer import load, load_report, loadtest, stages
from infer.engine import Engine
from infer.load import Rounds
from infer.load_report import Result
from infer.pictures import DARK_ENDING, LIGHT, png
from infer.stages import Stages
from tests.infer.conftest import BLOCK, IDS, continuation

pytestmark = pytest.mark.usefixtures("quick_compile")

POLICIES = ("none", "fixed", "threshold", "causal", "delayed")


@pytest.fixture
def run(folders, tmp_path, capsys):
    """Runs the command with this pair; its exit code, what it printed, and its folder."""

    def run(*args):
        place = tmp_path / "load"
        given = ("--target", str(folders.target), "--draft", str(folders.draft))
        short = ("--max-new-tokens", "12", "--requests-per-slot", "2", "--requests", "1")
        sizes = ("--concurrencies", "1", "2", "--repeats", "2")
        code = cli.run(
            lambda: loadtest.main((*given, "--output", str(place), *short, *sizes, *args))
        )
        return code, *capsys.readouterr(), place

    return run


def test_the_interval_by_hand():
    """Ratios 2, 3, 4: mean 3, deviation 1, and 4.3027 is Student's t for two degrees."""
    found = load.paired_ratio([2.0, 6.0, 4.0], [1.0, 2.0, 1.0])
    assert (found.mean, found.by_repeat) == (3, (2, 3, 4))
    assert found.low == pytest.approx(3 - 4.302653 / 3**0.5)
    assert found.high == pytest.approx(3 + 4.302653 / 3**0.5)
    assert load.paired_ratio([3.0], [2.0]) == load.Ratio(1.5, None, None, (1.5,))


def completion(drafted, verified):
    return Completion(1, [0], "", "length", [], verified, [], None, None, drafted_lengths=drafted)


def test_rounds_by_drafts():
    fixed = load.rounds_by_drafts([completion([3, 3], [3, 1]), completion([3], [2])])
    assert fixed == {3: Rounds(3, 3.0)}
    assert load.mean_drafts(fixed) == 3
    delayed = load.rounds_by_drafts([completion([0, 1], [0, 1]), completion([3, 3], [3, 1])])
    assert delayed == {0: Rounds(1, 1.0), 1: Rounds(1, 2.0), 3: Rounds(2, 3.0)}
    assert load.mean_drafts(delayed) == 7 / 4
    assert load.mean_drafts({}) is None


def test_stages_by_hand():
    """Two rows: 3 rounds without drafts of 2 s, and one that reads 5 tokens, in 6 s, between."""
    table = CostTable(2, {Plan(0, 2): 2.0, Plan(3, 4): 5.0, Plan(3, 8): 9.0})
    rounds = {0: Rounds(3, 1.0), 3: Rounds(1, 2.5)}
    mean = stages.seconds(rounds, table, {0: 0.0, 3: 3.0}, {0: 0.1, 3: 0.3})
    assert dataclasses.astuple(mean) == pytest.approx((3 / 4, 0.6 / 4, 8.4 / 4))
    found = stages.shares(mean)
    assert found.draft == pytest.approx(3 / 12)
    assert found.schedule == pytest.approx(0.6 / 12)
    assert found.verify == pytest.approx(8.4 / 12)
    noise = stages.seconds({0: Rounds(1, 1.0)}, table, {0: 3.0}, {0: 1.0})
    assert noise == Stages(3.0, 1.0, 0.0)
    assert stages.shares(noise) == Stages(0.75, 0.25, 0.0)
    nothing = Stages(0.0, 0.0, 0.0)
    assert stages.seconds({}, table, {}, {}) == stages.shares(nothing) == nothing


def result(concurrency, policy, *speeds):
    median = statistics.median(speeds)
    each = median / concurrency
    return Result(
        concurrency, policy, median, speeds, each, 1, None, None, None, Stages(0.0, 0.0, 1.0)
    )


def test_delayed_is_compared_with_the_best_other_of_its_concurrency():
    results = [
        result(1, "none", 1.0, 2.0, 4.0),
        result(1, "fixed", 9.0, 1.0, 1.0),
        result(1, "delayed", 3.0, 2.0, 2.0),
        result(2, "delayed", 3.0, 3.0, 3.0),
        result(4, "none", 3.0, 3.0, 3.0),
    ]
    (found,) = load_report.compare(results)
    assert (found.concurrency, found.best_other) == (1, "none")
    assert found.ratio.by_repeat == (3, 1, 0.5)


def test_pictures_of_what_there_is():
    """A line a policy, its points in the order of users; no round verified anything."""
    results = [result(2, "none", 6.0), result(1, "none", 5.0), result(1, "fixed", 3.0)]
    figure = Figure()
    load_report.plot_throughput(figure, results)
    (axis,) = figure.axes
    lines = {line.get_label(): np.array(line.get_data()).tolist() for line in axis.lines}
    assert lines == {"none": [[5, 3], [5, 6]], "fixed": [[3], [3]]}
    assert [text.get_text() for text in axis.texts] == ["1", "2", "1"]
    figure = Figure()
    load_report.plot_concurrency(figure, results)
    left, right = figure.axes
    assert left.lines[0].get_xdata().tolist() == [1, 2]
    assert np.isnan(right.lines[0].get_ydata()).all()
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["1", "2"]
    for _, draw in load_report.drawings(results):
        assert png(draw, LIGHT).startswith(b"\x89PNG")


def test_the_loop_ends_when_a_slot_stays_empty(folders):
    """Two rows and six requests: when four are done there is one left for a slot, not begun."""
    pair = generation.load(folders.target, folders.draft)
    limits = (5, 9, 5, 30, 5, 5)
    asked = [
        Request([IDS["1"], IDS[str(n)]], max_new_tokens=limit) for n, limit in enumerate(limits)
    ]
    cfg = generation.decode_config(pair.models, asked, policy="fixed")
    engine = Engine(pair, batch_shape.plan(pair.models, asked, 2), cfg)
    engine.warm_up(refill=True)
    programs = (decode.decode_rounds, prefill.prefill, prefill.read, batching._seat)
    compiled = [program._cache_size() for program in programs]
    (made,) = load.closed_loops([engine], asked)
    assert [program._cache_size() for program in programs] == compiled
    assert made.requests == asked[:5]
    lengths = [len(c.token_ids) for c in made.completions]
    assert [lengths[n] for n in (0, 1, 2, 4)] == [5, 9, 5, 5]
    assert 1 <= lengths[3] < 30
    assert made.seconds > 0
    for n, found in enumerate(made.completions):
        tokens = continuation(str(n), len(found.token_ids))
        assert found.token_ids == [IDS[token] for token in tokens]


def test_loops_take_turns_and_end_together(folders, monkeypatch):
    """A step each: the second is not further than the first when that is done."""
    monkeypatch.setattr(load, "TURN", 0.0)
    pair = generation.load(folders.target, folders.draft)
    asked = [Request([IDS["1"], IDS[str(n)]], max_new_tokens=9) for n in range(8)]
    cfg = generation.decode_config(pair.models, asked, policy="fixed")
    engine = Engine(pair, batch_shape.plan(pair.models, asked, 2), cfg)
    runs = load.closed_loops([engine, engine.plain()], asked)
    ended = [sum(len(c.token_ids) == 9 for c in run.completions) for run in runs]
    assert max(ended) == 6  # the last two would be begun
    assert min(ended) >= 4
    for run in runs:
        assert run.requests == asked[: len(run.requests)]
        assert run.seconds > 0
        for n, found in enumerate(run.completions):
            tokens = continuation(str(n), len(found.token_ids))
            assert found.token_ids == [IDS[token] for token in tokens]


@pytest.mark.slow
@pytest.mark.parametrize(("policies", "block"), [(("none", "delayed"), 1), (POLICIES, BLOCK)])
def test_results_add_up(run, policies, block):
    code, out, err, place = run("--policies", *policies, "--block-size", str(block))
    assert code == 0, err
    pictures = {f"{n}{e}.png" for n in ("concurrency", "throughput") for e in ("", DARK_ENDING)}
    assert {p.name for p in place.iterdir()} == {"loadtest.json"} | pictures
    for name in pictures:
        assert (place / name).read_bytes().startswith(b"\x89PNG")
    made = json.loads((place / "loadtest.json").read_text())
    assert {"device", "jax", "date"} < made.keys()
    assert made["settings"]["concurrencies"] == [1, 2]
    found = {(r["concurrency"], r["policy"]): r for r in made["results"]}
    assert list(found) == [(rows, policy) for rows in (1, 2) for policy in policies]
    for (rows, policy), r in found.items():
        speeds = r["tokens_per_second_by_repeat"]
        assert len(speeds) == 2
        assert min(speeds) > 0
        assert r["tokens_per_second"] == statistics.median(speeds)
        assert r["tokens_per_second_per_user"] == r["tokens_per_second"] / rows
        shares = r["time_shares"]
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) >= 0
        drafts, verified = r["drafts_per_round"], r["verified_tokens_per_request"]
        assert 1 <= verified <= 1 + drafts
        assert 1 <= r["mean_accepted_length"] <= 1 + block
        if policy == "none":
            assert (drafts, shares["draft"], shares["schedule"]) == (0, 0, 0)
        elif policy == "fixed":
            assert (drafts, verified, shares["schedule"]) == (block, 1 + block, 0)
            assert shares["draft"] > 0
        elif policy != "delayed":
            assert drafts == block
    for ratio in made["delayed_to_best_other"]:
        rows = ratio["concurrency"]
        ours = found[rows, "delayed"]["tokens_per_second_by_repeat"]
        theirs = found[rows, ratio["best_other"]]["tokens_per_second_by_repeat"]
        expected = [a / b for a, b in zip(ours, theirs, strict=True)]
        assert ratio["ratio"]["by_repeat"] == expected
        assert ratio["ratio"]["low"] <= statistics.fmean(expected) <= ratio["ratio"]["high"]
    assert len(made["delayed_to_best_other"]) == 2
    assert {cost["concurrency"] for cost in made["costs"]} == {1, 2}
    assert len(out.splitlines()) == 1 + 2 * len(policies) + 2 + 1


def test_requests_of_a_load(folders, tmp_path):
    """Prompts in turn, limits from half of the most to the most, all draws of their own."""
    pair = generation.load(folders.target, folders.draft)
    settings = loadtest.Settings(
        tmp_path, concurrencies=(1, 3), requests=1, max_new_tokens=20, repeats=2
    )
    lines = loadtest.demo_pieces()
    assert len({line.fields["prompt"] for line in lines}) == len(lines) > 4
    asked = loadtest.build_requests(settings, lines, pair)
    assert len(asked) == 3 * 4 * 2
    assert asked[0].token_ids == asked[len(lines)].token_ids != asked[1].token_ids
    limits = [request.max_new_tokens for request in asked]
    assert 10 <= min(limits) < max(limits) <= 20
    assert len({request.stream for request in asked}) == len(asked)
    assert asked == loadtest.build_requests(settings, lines, pair)


def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path):
    def fails(text, *args):
        code, out, err, place = run(*args)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert text in err
        assert not place.exists()

    fails("--concurrencies 0: expected", "--concurrencies", "0", "2")
    fails("--concurrencies: expected one or more different", "--concurrencies", "2", "2")
    fails("--policies: expected one or more different", "--policies", "none", "none")
    fails("invalid choice", "--policies", "best")
    fails("--requests-per-slot 1: expected 2 or more", "--requests-per-slot", "1")
    fails("--repeats 0: expected", "--repeats", "0")
    fails("temperature=-1.0: expected", "--temperature", "-1")
    fails("--confidence-threshold 2.0: expected", "--confidence-threshold", "2")
    fails("block size 9", "--block-size", "9")
    fails("no such folder as", "--output", str(tmp_path / "a" / "b"))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n{"prompt": ""}\n')
    fails("expected a folder", "--output", str(file))
    fails("prompts.jsonl line 2: the prompt is empty", "--prompts", str(file))
    fails("cannot be read", "--prompts", str(tmp_path / "absent"))
    fails("cannot be read", "--calibration", str(tmp_path / "absent"))


def test_interrupted_it_writes_nothing(run, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(loadtest, "measure", interrupt)
    monkeypatch.setattr(loadtest.facts, "measure_costs", lambda *args: None)
    code, _, err, place = run()
    assert code == 130
    assert err.endswith("interrupted; nothing was written\n")
    assert not place.exists()
