"""The command, on a pair that can be followed by hand (tests/infer/conftest.py)."""

import errno
import json
import os
import signal
import string

import numpy as np
import pytest

from dspark_jax import generation
from dspark_jax.io import cli
from dspark_jax.request import Completion
from infer import generate, requests, results
from infer.generate import InOrder
from tests.infer.conftest import (
    BLOCK,
    IDS,
    LIMIT,
    PROMPTS,
    SPECIAL,
    STOP,
    continuation,
    fails,
    rounds,
)

pytestmark = pytest.mark.usefixtures("quick_compile")


def expected(last, limit=LIMIT, stop=True):
    """Fields of a greedy result after the token `last`, without its id."""
    tokens = continuation(last, limit, stop)
    stopped = tokens[-1] == SPECIAL[STOP]
    return {
        "token_ids": [IDS[t] for t in tokens],
        "text": "".join(t for t in tokens if t not in SPECIAL),
        "finish_reason": "stop" if stopped and stop else "length",
        "completion_tokens": len(tokens),
        "accepted_lengths": [emitted for emitted, _, _ in rounds(tokens)],
    }


GOOD = {
    1: {"id": 1, "prompt_tokens": 3, **expected("c")},
    "short": {"id": "short", "prompt_tokens": 1, **expected("x")},
    4: {"id": 4, "prompt_tokens": 1, **expected("7", 9)},
    6: {"id": 6, "prompt_tokens": 5, **expected("!")},
}


def test_results_in_order_with_errors_between(command):
    assert command() == 0
    found = command.results()
    assert [x["id"] for x in found] == [1, "short", 3, 4, 5, 6]
    assert {x["id"]: x for x in found if x["finish_reason"] != "error"} == GOOD
    assert GOOD["short"]["finish_reason"] == "stop"
    assert GOOD["short"]["token_ids"][-1] == STOP
    assert GOOD[1]["accepted_lengths"] == [1, 4, 1, 4, 1]  # blind behind d and i, and then cut
    errors = [x["error"] for x in found if x["finish_reason"] == "error"]
    assert errors[0] == "line 3: the prompt is empty: expected some text"
    assert errors[1].startswith("line 5: not valid JSON (")
    slots, said = command.err.splitlines()
    assert slots.startswith("2 slots of 32 positions, ")
    assert said == f"2 of 6 prompts could not be decoded; the first is {errors[0]}"
    assert command.out.startswith(f"{command.output}: 4 completions, ")


def test_summary_and_trace_by_hand(command):
    options = ("--policy", "threshold", "--confidence-threshold", "0.5", "--trace")
    path = str(command.folder / "summary.json")
    assert command(*options, "--compare-baseline", "--summary", path) == 0
    done = [x for x in command.results() if x["finish_reason"] != "error"]
    lasts = [("c", LIMIT), ("x", LIMIT), ("7", 9), ("!", LIMIT)]
    log = [rounds(continuation(*args), gated=True) for args in lasts]
    assert [x["verified_lengths"] for x in done] == [[v for _, v, _ in r] for r in log]
    assert {x["id"]: x["token_ids"] for x in done} == {i: x["token_ids"] for i, x in GOOD.items()}
    high, low = 1 / (1 + np.exp(-4.0)), 1 / (1 + np.exp(4.0))
    for line in done:
        assert all(len(c) == BLOCK for c in line["confidences"])
        both = zip(line["confidences"], line["verified_lengths"], strict=True)
        for confidences, verified in both:
            seen = [high] * verified + [low] * (verified < BLOCK)
            np.testing.assert_allclose(confidences[: len(seen)], seen, rtol=1e-5)

    found, flat = command.summary(), [r for row in log for r in row]
    whole = [emitted for emitted, _, accepted in flat if emitted == accepted + 1]
    assert found["mean_accepted_length"] == pytest.approx(np.mean(whole))
    read = [1 + verified for _, verified, _ in flat]
    assert found["verified_tokens_per_request"] == pytest.approx(np.mean(read))
    # The drafter knows when it is wrong, so whatever was verified was accepted.
    assert found["conditional_acceptance"] == [1.0] * BLOCK
    tokens = sum(x["completion_tokens"] for x in done)
    exact = {
        "requests": 4,
        "errors": 2,
        "finished_before": 0,
        "prompt_tokens": 3 + 1 + 1 + 5,
        "completion_tokens": tokens,
        "rounds": len(flat),
        "policy": "threshold",
        "block_size": BLOCK,
        "slots": 2,
        "dtype": "float32",
        "device": "cpu",
        "baseline_mismatches": 0,
    }
    assert {name: found[name] for name in exact} == exact
    assert found["tokens_per_second"] == pytest.approx(tokens / found["wall_seconds"])
    speedup = found["tokens_per_second"] / found["baseline_tokens_per_second"]
    assert found["speedup"] == pytest.approx(speedup)
    assert found["compile_seconds"] > 0


def test_two_devices_give_the_results_of_one(command):
    path = str(command.folder / "summary.json")
    assert command("--tensor-parallel", "2", "--summary", path) == 0
    for line in command.results():
        if line["finish_reason"] != "error":
            assert line["token_ids"] == GOOD[line["id"]]["token_ids"]
            assert line["accepted_lengths"] == GOOD[line["id"]]["accepted_lengths"]
    assert command.summary()["device"] == "2 x cpu"


def test_more_devices_than_there_are(command):
    fails(command, "--tensor-parallel 9: expected a number in 1..8", "--tensor-parallel", "9")


def test_plain_decoding(command, folders):
    command.given = ("--target", str(folders.target), "--draft", "none")
    path = str(command.folder / "summary.json")
    assert command("--trace", "--summary", path) == 0
    for line in command.results():
        if line["finish_reason"] != "error":
            assert line["token_ids"] == GOOD[line["id"]]["token_ids"]
            ones = [1] * (line["completion_tokens"] - 1)
            assert line["accepted_lengths"] == ones
            assert line["verified_lengths"] == [0] * len(ones)
            assert line["confidences"] is None
    found = command.summary()
    assert (found["policy"], found["block_size"]) == ("none", 0)
    assert found["conditional_acceptance"] == []
    assert found["mean_accepted_length"] == found["verified_tokens_per_request"] == 1.0


def test_goes_on_behind_a_stop_token_when_asked(command):
    command.write([{"prompt": "x"}, {"prompt": "say !"}])
    assert command("--ignore-eos") == 0
    first, second = command.results()
    assert first["token_ids"][:3] == [IDS["y"], IDS["z"], STOP]
    assert (first["completion_tokens"], first["finish_reason"]) == (LIMIT, "length")
    assert second["token_ids"] == GOOD[6]["token_ids"]


def test_sampling_by_seed_and_line(command):
    same = {"prompt": "!", "temperature": 3.0}
    command.write([same, same, same | {"seed": 5}, same | {"seed": 5}, {"prompt": "abc"}])
    assert command() == 0
    first, second, third, fourth, greedy = [x["token_ids"] for x in command.results()]
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert third == fourth
    assert greedy == GOOD[1]["token_ids"]
    for line in command.results():
        assert 1 + sum(line["accepted_lengths"]) == line["completion_tokens"]
    command.output.unlink()
    assert command("--seed", "1") == 0
    others = [x["token_ids"] for x in command.results()]
    assert others[0] != first
    assert others[2:] == [third, fourth, greedy]


def test_interrupted_and_started_again(command, monkeypatch):
    append, calls = results.append, []
    command.write([*PROMPTS, {"prompt": "abc"}, {"prompt": "x"}])
    good = GOOD | {7: GOOD[1] | {"id": 7}, 8: GOOD["short"] | {"id": 8}}

    def interrupted(output, lines, *, size):
        size = append(output, lines, size=size)
        calls.append(len(lines))
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return size

    monkeypatch.setattr(results, "append", interrupted)
    assert command() == 130
    assert command.err.splitlines()[1:] == [
        "interrupted; the same command goes on behind the results that are there"
    ]
    done = command.output.read_bytes()
    assert [x["id"] for x in command.results()] == [1, "short", 3, 4, 5]
    assert calls == [5]  # all that the others had to wait for
    with open(command.output, "ab") as file:
        file.write(b'{"id": 6, "token_ids": [')

    path = str(command.folder / "summary.json")
    assert command("--summary", path) == 0
    assert command.output.read_bytes().startswith(done)
    assert [x["id"] for x in command.results()] == [1, "short", 3, 4, 5, 6, 7, 8]
    assert {x["id"]: x for x in command.results() if x["finish_reason"] != "error"} == good
    assert sum(calls) == 8
    assert (command.summary()["requests"], command.summary()["finished_before"]) == (3, 5)

    calls.clear()
    whole, figures = command.output.read_bytes(), command.summary()
    assert command("--summary", path) == 0
    assert command.out == f"{command.output}: nothing was left to decode\n"
    assert command.output.read_bytes() == whole
    assert command.summary() == figures
    assert calls == []

    assert command("--temperature", "1") == 2
    assert "was begun with temperature=0.0, now it is 1.0" in command.err
    assert command.output.read_bytes() == whole


def test_samples_of_a_prompt(command):
    hot = {"prompt": "!", "temperature": 3.0, "max_new_tokens": 6}
    command.write([hot | {"n": 3}, hot, {"prompt": "", "n": 2}, {"prompt": "abc", "n": 1}])
    assert command() == 0
    first = command.results()
    keys = [(1, 0), (1, 1), (1, 2), (2, None), (3, 0), (3, 1), (4, None)]
    assert [(x["id"], x.get("sample")) for x in first] == keys
    assert len({tuple(x["token_ids"]) for x in first[:4]}) == 4
    assert [x["finish_reason"] for x in first[4:6]] == ["error"] * 2
    assert first[6]["token_ids"] == GOOD[1]["token_ids"]
    assert "1 of 4 prompts could not be decoded" in command.err


@pytest.mark.slow
def test_goes_on_between_samples(command):
    hot = {"temperature": 3.0}
    command.write([{"prompt": "!", **hot}, {"prompt": ""}, {"prompt": "a", "n": 2, **hot}])
    assert command("--samples", "4") == 0
    whole = command.output.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 4 + 4 + 2
    for count in (1, 6, 9):
        command.output.write_bytes(b"".join(lines[:count]) + lines[count][:20])
        assert command("--samples", "4") == 0
        assert command.output.read_bytes() == whole
    assert command("--samples", "3") == 2
    assert "was begun with samples=4, now it is 3" in command.err


def test_stop_strings_by_hand(command):
    command.write([
        {"prompt": "abc"},
        {"prompt": "abc", "stop": "gh"},
        {"prompt": "abc", "stop": ["no", "fgh", "g"]},  # g is complete first
        {"prompt": "abc", "stop": []},
        {"prompt": "x"},
    ])  # fmt: skip
    for draft in ((), ("--draft", "none")):
        assert command("--stop", "hij", "zz", *draft) == 0
        found = command.results()
        assert [x["text"] for x in found] == ["defg", "def", "def", GOOD[1]["text"], "yz"]
        assert [x["token_ids"] for x in found[:3]] == [
            [IDS[t] for t in text] for text in ("defghij", "defgh", "defg")
        ]
        assert [x["finish_reason"] for x in found] == ["stop", "stop", "stop", "length", "stop"]
        for line in found:
            assert 1 + sum(line["accepted_lengths"]) == line["completion_tokens"]
            assert all(line["accepted_lengths"])
        command.output.unlink()


def test_logprobs_by_hand(command, folders):
    command.write([{"prompt": "abc"}, {"prompt": ""}, {"prompt": "abc", "stop": "gh"}])
    assert command("--logprobs") == 0
    first, error, cut = command.results()
    pair = generation.load(folders.target, None)
    embed, head = (np.asarray(x, np.float64) for x in (pair.models.target.embed,
                                                       pair.models.target.lm_head))  # fmt: skip
    hidden = embed[[IDS["c"], *first["token_ids"][:-1]]]
    logits = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6) @ head
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logits[np.arange(LIMIT), first["token_ids"]]
    np.testing.assert_allclose(first["logprobs"], expected, atol=1e-4)
    assert error["logprobs"] == []
    assert len(cut["logprobs"]) == cut["completion_tokens"] == 5
    np.testing.assert_allclose(cut["logprobs"], expected[:5], atol=1e-4)
    assert first.keys() - {"logprobs"} == GOOD[1].keys()


def test_prompt_ids_are_what_was_read(command):
    assert command("--prompt-ids") == 0
    found = command.results()
    read = [[IDS[t] for t in text] for text in ("abc", "x", "", "7", "", "sayĠ!")]
    assert [x["prompt_ids"] for x in found] == read
    assert [len(ids) for ids in read] == [x["prompt_tokens"] for x in found]
    assert found[0].keys() - {"prompt_ids"} == GOOD[1].keys()


def test_through_slots_every_row_gets_what_it_gets_alone(command):
    rng = np.random.default_rng(0)
    letters = list(string.ascii_lowercase + string.digits)
    command.write([
        {
            "prompt": "".join(rng.choice(letters, rng.integers(1, 40))),
            "temperature": float(rng.choice([0, 0, 0.5, 1.5])),
            "max_new_tokens": int(rng.integers(1, 50)),
        }
        for _ in range(60)
    ])  # fmt: skip
    source = command.folder / "prompts.jsonl"
    assert command("--slots", "4") == 0
    args = [*command.given, "--prompts", str(source), "--slots", "1"]
    settings = cli.parse(generate.Settings, args, prog="x", description="")
    pair = settings.load()
    prompts = generate.build_prompts(settings, requests.read_lines(source), pair)
    asked = [p.request for p in prompts if p.request]
    engine = generate.make_engine(settings, pair, asked)
    assert engine.shape.rows == 1
    alone = [engine.decode([request]).completions[0] for request in asked]
    found = command.results()
    assert [x["id"] for x in found] == list(range(1, 61))
    assert sum(request.greedy for request in asked) >= 20
    # Draws depend on the row alone under this policy, so that sampled rows are the same as well.
    assert [x["token_ids"] for x in found] == [c.token_ids for c in alone]
    assert [x["accepted_lengths"] for x in found] == [c.accepted_lengths for c in alone]


@pytest.mark.slow
def test_thousands_of_prompts_in_order(command):
    lasts = [string.ascii_lowercase[n % 25] for n in range(2000)]
    command.write([{"token_ids": [IDS[last]]} for last in lasts])
    assert command("--max-new-tokens", "1", "--slots", "16") == 0
    found = command.results()
    assert [x["id"] for x in found] == list(range(1, 2001))
    assert [x["text"] for x in found] == [chr(ord(last) + 1) for last in lasts]


def test_a_full_disk(command, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert command() == 1
    assert command.err.splitlines()[1:] == [f"error: {command.output}: No space left on device"]


def test_a_full_disk_for_the_summary(command):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    assert command("--summary", "/dev/full") == 1
    assert command.err.splitlines()[-1] == "error: /dev/full: No space left on device"
    assert len(command.results()) == len(PROMPTS)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--policy", "threshold", "--confidence-threshold", "2"], "confidence threshold 2.0"),
        (["--block-size", "0"], f"block size 0: expected 1..{BLOCK}"),
        (["--block-size", str(BLOCK + 1)], f"block size {BLOCK + 1}: expected 1..{BLOCK}"),
        (["--draft", "none", "--policy", "fixed"], "policy 'fixed' needs a drafter"),
        (["--prompts", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--target", "./absent"], "./absent: no such folder"),
        (["--draft", "./absent"], "./absent: no such folder"),
    ],
)
def test_bad_arguments(command, args, text):
    fails(command, text, *args)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([{"prompt": "a", "id": 2}, {"prompt": "b"}], "line 2: id 2 is that of line 1"),
        ([b"nonsense"], "prompts.jsonl line 1: not valid JSON (Expecting value, column 1)"),
        ([b"{}", {"token_ids": [999]}], "prompts.jsonl line 1: expected one of prompt, messages"),
        ([{"token_ids": [999]}], "line 1: token id 999: expected 0..259"),
        ([{"prompt": "a" * 128}], "leaves no room: the target holds 128 positions"),
        ([{"prompt": "a", "temperature": -1}], "line 1: temperature=-1.0: expected"),
        ([b""], "no prompts in it"),
    ],
)
def test_bad_prompts(command, lines, text):
    command.write(lines)
    fails(command, text)


def test_an_output_of_something_else(command):
    command.output.write_text("my notes\n")
    fails(command, "out.jsonl: exists, and without out.jsonl.meta.json it cannot be continued")
    assert command.output.read_text() == "my notes\n"


def copy_of(folder, place, **changes):
    """A copy of a model's folder in which some of config.json is changed, or gone (None)."""
    place.mkdir()
    for path in folder.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    values = json.loads((place / "config.json").read_text()) | changes
    text = json.dumps({name: x for name, x in values.items() if x is not None})
    (place / "config.json").write_text(text)
    return place


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["Mystery"]}, "architecture 'Mystery' is not known"),
        ({"hidden_size": 32}, "has shape"),
        ({"num_target_layers": 2}, "num_target_layers is 2 in the drafter and 1 in the target"),
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
        ({"target_layer_ids": [0]}, "the last layer, 0, cannot be tapped"),
        ({"target_layer_ids": [5]}, "target_layer_ids=[5]: expected different layers in -1..-1"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "markov_rank=0 with a conf"),
        ({"block_size": 0}, "block_size=0: expected a whole number above 0"),
        ({"mask_token_id": 999}, "mask_token_id=999: expected an id in 0..259"),
    ],
)
def test_bad_drafters(command, folders, tmp_path_factory, changes, text):
    place = copy_of(folders.draft, tmp_path_factory.mktemp("bad") / "draft", **changes)
    fails(command, text, "--draft", str(place))


def test_bad_model_files(command, folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    truncated = copy_of(folders.target, root / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[:-10])
    fails(command, "not a whole safetensors file", "--target", str(truncated))
    (truncated / "model.safetensors").unlink()
    fails(command, "expected model.safetensors or", "--target", str(truncated))
    (truncated / "config.json").unlink()
    fails(command, "no config.json in this folder", "--target", str(truncated))
    silent = copy_of(folders.target, root / "silent")
    (silent / "tokenizer.json").unlink()
    fails(command, "no tokenizer.json in this folder", "--target", str(silent))


def test_a_drafter_without_confidence(command, folders, tmp_path_factory):
    place = tmp_path_factory.mktemp("plain") / "draft"
    place = copy_of(folders.draft, place, enable_confidence_head=False)
    options = ("--policy", "threshold", "--confidence-threshold", "0.5")
    fails(command, "needs a drafter with a confidence head", "--draft", str(place), *options)


def test_results_are_written_in_order(tmp_path):
    rng = np.random.default_rng(0)
    output = tmp_path / "out.jsonl"
    for pattern in ("", "g", "b", "ggb", "gggbb", "bgbgbgb", "bbbb", "gggggggggg"):
        output.write_bytes(b"")
        prompts = [
            generate.Prompt(n, generate.Request((1,)) if letter == "g" else None)
            for n, letter in enumerate(pattern)
        ]
        ordered, count = InOrder(prompts, output, 0), pattern.count("g")
        waiting, appended = set(range(count)), ordered.write({})
        for number in rng.permutation(count).tolist():
            waiting.remove(number)
            made = Completion(1, [number], "", "length", [], [], [], None, None)
            appended += ordered.write({number: made})
            found = [json.loads(line) for line in output.read_text().splitlines()]
            assert [x["id"] for x in found] == list(range(appended))
            tokens = [x["token_ids"] for x in found if x["finish_reason"] != "error"]
            assert tokens == [[n] for n in range(min(waiting, default=count))]
        assert appended == len(pattern)
        assert not ordered.left


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for name in ("target", "draft", "prompts", "output", "temperature", "top-p", "top-k", "min-p",
                 "max-new-tokens", "stop", "samples", "slots", "policy", "block-size",
                 "confidence-threshold", "logprobs", "prompt-ids", "cost-table", "calibration",
                 "dtype", "summary", "trace", "compare-baseline",
                 "ignore-eos", "thinking", "seed"):  # fmt: skip
        assert f"--{name}" in shown


def test_the_pair_is_what_these_tests_take_it_for():
    assert continuation("x", 9) == ["y", "z", SPECIAL[STOP]]
    assert rounds(list(string.ascii_lowercase[:6])) == [(4, 3, 3), (1, 3, 3)]
    assert rounds(list(string.ascii_lowercase[2:8])) == [(2, 3, 1), (3, 3, 3)]
    assert rounds(list(string.ascii_lowercase[2:8]), gated=True)[0] == (2, 1, 1)
