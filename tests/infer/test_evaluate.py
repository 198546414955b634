"""Accepted lengths by hand, their intervals, and what is refused."""

import json
import shutil

import pytest

from dspark_jax.io import cli
from infer import evaluate
from infer.evaluate import interval
from tests.infer.conftest import BLOCK, continuation, rounds

LIMIT = 12


@pytest.fixture
def command(folders, tmp_path, capsys):
    """Runs `infer.evaluate` greedily on the pair of these tests; gives code, output and error."""

    def run(*args):
        given = ("--target", str(folders.target), "--output", str(tmp_path / "out"))
        limits = (f"--max-new-tokens={LIMIT}", "--temperature=0", "--slots=2")
        code = cli.run(lambda: evaluate.main([*given, *limits, *map(str, args)]))
        return code, *capsys.readouterr()

    return run


def write(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return path


def measurements(tmp_path):
    return json.loads((tmp_path / "out" / "evaluation.json").read_text())["measurements"]


def by_hand(*prompts):
    """Rounds that were not cut, and acceptance by position."""
    made = [r for p in prompts for r in rounds(continuation(p[-1], LIMIT))]
    whole = [emitted for emitted, _, accepted in made if emitted == accepted + 1]
    tried, passed = [0] * BLOCK, [0] * BLOCK
    for emitted, verified, accepted in made:
        for k in range(min(verified, accepted + 1, emitted)):
            tried[k] += 1
            passed[k] += k < accepted
    return whole, [p / t for p, t in zip(passed, tried, strict=True)]


def test_lengths_by_hand(command, folders, tmp_path):
    digits, letters = ("7", "0", "44"), ("abc", "x")
    sources = write(tmp_path / "digits.jsonl", *digits), write(tmp_path / "letters.jsonl", *letters)
    twin = tmp_path / "twin"
    shutil.copytree(folders.draft, twin)
    code, out, err = command("--draft", folders.draft, twin, "--prompts", *sources)
    assert (code, err) == (0, "")
    found = measurements(tmp_path)
    names = [(str(d), str(s)) for d in (folders.draft, twin) for s in sources]
    assert [(m["draft"], m["prompts"]) for m in found] == names
    for made, prompts in zip(found, (digits, letters) * 2, strict=True):
        whole, accepted = by_hand(*prompts)
        assert made["requests"] == len(prompts)
        assert made["rounds"] == len(whole)
        assert made["accepted_length"] == pytest.approx(sum(whole) / len(whole), rel=1e-12)
        assert made["conditional_acceptance"] == pytest.approx(accepted, rel=1e-12)
        low, high = made["interval"]
        assert low <= made["accepted_length"] <= high
    title, *rows = out.splitlines()
    assert title.split() == ["draft", "prompts", "length", "95", "%", "rounds", "1", "2", "3"]
    for line, made in zip(rows, found, strict=True):
        draft, prompts, length, between, count, *chances = line.split()
        assert draft == made["draft"]
        assert made["prompts"].endswith(prompts)
        assert length == f"{made['accepted_length']:.3f}"
        assert between == "{:.3f}..{:.3f}".format(*made["interval"])
        assert int(count) == made["rounds"]
        assert chances == [f"{p:.3f}" for p in made["conditional_acceptance"]]


def test_nothing_to_measure(command, folders, tmp_path):
    """The only token is the prefill's."""
    source = write(tmp_path / "a.jsonl", "abc")
    code, out, _ = command("--draft", folders.draft, "--prompts", source, "--max-new-tokens=1")
    assert code == 0
    assert out.splitlines()[1].split()[1:] == ["a.jsonl", "-", "-", "0", "-", "-", "-"]
    (made,) = measurements(tmp_path)
    assert (made["rounds"], made["accepted_length"], made["interval"]) == (0, None, None)


def test_an_interval_is_over_prompts():
    """Of two prompts a resample has both, or one of them twice: means 5/3, 1 and 3, with chances
    of a half, a quarter and a quarter."""
    two = [[1, 1], [3], []]
    assert interval(two, seed=0) == (1, 3)
    assert interval(two, seed=1, part=0.4) == pytest.approx((5 / 3, 5 / 3))
    assert interval([[2, 4], [4, 2]], seed=0) == (3, 3)
    assert interval([[], []], seed=0) is None


def test_an_interval_narrows_with_prompts():
    """Its width is that of a normal distribution, 3.92 standard errors of the mean."""
    for size in (100, 400):
        low, high = interval([[1], [3]] * (size // 2), seed=0)
        assert high - low == pytest.approx(3.92 / size**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--prompts", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--prompts", "{good}", "{bad}"], "bad.jsonl line 2: the prompt is empty"),
        (["--prompts", "{good}", "{good}"], "--prompts: expected different ones"),
        (["--prompts", "{good}", "--draft", "{draft}", "{draft}"], "--draft: expected different"),
        (["--prompts", "{good}", "--draft", "{draft}", "nowhere"], "nowhere: no such folder"),
        (["--prompts", "{good}", "--slots=0"], "--slots 0: expected a whole number above 0"),
        (["--prompts", "{good}", "--temperature=-1"], "temperature=-1.0: expected a number 0 or"),
        (["--prompts", "{good}", "--block-size=4"], "--block-size 4: expected 1..3"),
        (["--prompts", "{good}", "--output", "{good}/x"], "no such folder as"),
        (["--prompts", "{good}", "--output", "{good}"], "is a file, expected a folder"),
        ([], "--prompts"),
    ],
)
def test_refused(command, folders, tmp_path, args, text):
    good, bad = write(tmp_path / "good.jsonl", "a"), write(tmp_path / "bad.jsonl", "a", "")
    names = {"good": good, "bad": bad, "draft": folders.draft}
    filled = [arg.format(**names) for arg in args]
    draft = [] if "--draft" in args else ["--draft", folders.draft]
    code, out, err = command(*draft, *filled)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert text in err
    assert good.read_text() == '{"prompt": "a"}\n'
    assert not (tmp_path / "out").exists()


def test_a_target_alone_is_refused(command, tmp_path):
    code, _, err = command("--prompts", write(tmp_path / "a.jsonl", "a"))
    assert (code, err) == (2, "error: --target without --draft: expected its drafters\n")
