"""Accepted lengths by hand, through the command, and what is refused."""

import json
import re
import shutil

import pytest

from dspark_jax.io import cli, files
from dspark_jax.io.calibration_file import Calibration, Entry
from infer import evaluate
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


def figures(tmp_path):
    return json.loads((tmp_path / "out" / "evaluate.json").read_text())


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


DIGITS, LETTERS = ("7", "0", "44"), ("abc", "x")


@pytest.fixture
def sources(tmp_path):
    return write(tmp_path / "gsm8k.jsonl", *DIGITS), write(tmp_path / "letters.jsonl", *LETTERS)


def test_lengths_by_hand(command, folders, tmp_path, sources):
    twin = tmp_path / "twin"
    shutil.copytree(folders.draft, twin)
    given = ("--datasets", "gsm8k", "--dataset-folder", tmp_path, "--prompts", sources[1])
    code, out, err = command("--draft", folders.draft, twin, *given)
    assert (code, err) == (0, "")
    found = figures(tmp_path)
    made = found["measurements"]
    names = [d["name"] for d in found["drafters"]]
    assert [d["path"] for d in found["drafters"]] == [str(folders.draft), str(twin)]
    assert [(m["draft"], m["dataset"], m["domain"]) for m in made] == [
        (name, *of) for name in names for of in (("gsm8k", "math"), ("letters", "other"))
    ]
    for m, prompts in zip(made, (DIGITS, LETTERS) * 2, strict=True):
        whole, accepted = by_hand(*prompts)
        assert m["requests"] == len(prompts)
        assert m["rounds"] == len(whole)
        length = m["accepted_length"]
        assert length["value"] == pytest.approx(sum(whole) / len(whole), rel=1e-12)
        assert length["low"] <= length["value"] <= length["high"]
        assert m["conditional_acceptance"]["value"] == pytest.approx(accepted, rel=1e-12)
    assert {d["to_first"]["value"] for d in found["domains"]} == {1}
    title, *rows = out.splitlines()
    assert title.split()[:4] == ["draft", "K", "prompts", "length"]
    for line, m in zip(rows, made, strict=False):
        assert line.split()[:4] == [
            *(m["draft"], "3", m["dataset"]),
            f"{m['accepted_length']['value']:.3f}",
        ]
    assert rows[4].startswith(f"math: {names[0]} (K=3) ")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"evaluate.json", "report.md", "positions.png", "positions-dark.png"} <= written
    assert found["command"].startswith("python -m infer.evaluate --target ")
    assert found["command"] in (tmp_path / "out" / "report.md").read_text()


def test_blocks_thresholds_and_the_page(command, folders, tmp_path, sources):
    """The confidence head knows where the drafter is wrong: behind a threshold of a half only what
    is accepted is verified. Shorter blocks are decoded, not cut from longer ones."""
    page = tmp_path / "page.html"
    code, _, _ = command(
        "--draft", folders.draft, "--prompts", *sources, "--block-sizes", 2, 3, "--thresholds",
        0.5, "--html", page, "--html-texts", 1,
    )  # fmt: skip
    assert code == 0
    found = figures(tmp_path)
    by_size = {}
    for m in found["measurements"]:
        by_size.setdefault(m["block_size"], []).append(m)
    for size, made in by_size.items():
        for m, prompts in zip(made, (DIGITS, LETTERS), strict=True):
            made_rounds = [r for p in prompts for r in rounds(continuation(p[-1], LIMIT), size)]
            whole = [emitted for emitted, _, accepted in made_rounds if emitted == accepted + 1]
            assert m["accepted_length"]["value"] == pytest.approx(sum(whole) / len(whole))
    gated = [r for p in DIGITS for r in rounds(continuation(p[-1], LIMIT), gated=True)]
    math = found["decoded"][0]
    verified = sum(v for _, v, _ in gated)
    assert math["verified"]["value"] == pytest.approx(verified / (BLOCK * len(gated)))
    assert math["accepted"]["value"] == 1
    # Greedily the drafts are the same, so that blocks begin at the same places, too.
    (sweep,) = [s for s in found["sweeps"] if s["domain"] == "math"]
    middle = sweep["thresholds"].index(0.5)
    assert sweep["verified"]["value"][middle] == pytest.approx(math["verified"]["value"])
    shown = page.read_text()
    titles = re.findall(r'<h2 id="text\d+">([^<]*)</h2>', shown)
    name = found["drafters"][0]["name"]
    assert titles == [
        f"{dataset} 1: {name}, {policy}"
        for policy in ("all verified", "threshold 0.5")
        for dataset in ("gsm8k", "letters")
    ]
    assert "draft never verified" in shown.split('<section aria-labelledby="text3">')[1]


def test_a_calibration_by_its_drafter(command, folders, tmp_path, sources):
    """Temperatures are those of the entry for greedy rows; .1 makes sure chances surer."""
    known = Calibration(
        target=files.fingerprint(folders.target),
        draft=files.fingerprint(folders.draft),
        block_size=BLOCK,
        entries=(Entry(0.0, 0, 1.0, 0.0, (0.1,) * 3, (0.5,) * 3, (0.5,) * 3, 9),),
    )
    known.save(tmp_path / "calibration.json")
    twin = tmp_path / "twin"
    shutil.copytree(folders.draft, twin)
    given = ("--calibration", tmp_path / "calibration.json", "none")
    code, _, _ = command("--draft", folders.draft, twin, "--prompts", sources[0], *given)
    assert code == 0
    first, second = figures(tmp_path)["reliabilities"]
    assert first["raw"] == second["raw"]
    assert second["scaled"] is None
    assert max(first["scaled"]["error"]) < 1e-6 < 0.01 < min(first["raw"]["error"])


def test_nothing_to_measure(command, folders, tmp_path):
    """The only token is the prefill's."""
    source = write(tmp_path / "a.jsonl", "abc")
    code, out, _ = command("--draft", folders.draft, "--prompts", source, "--max-new-tokens=1")
    assert code == 0
    assert out.splitlines()[1].split()[1:] == ["3", "a", "-", "-", "0", "-", "-", "-"]
    (made,) = figures(tmp_path)["measurements"]
    assert made["rounds"] == 0
    assert made["accepted_length"] == {"value": None, "low": None, "high": None}


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
        (["--prompts", "{good}", "--block-sizes=4"], "--block-sizes 4: expected one in 1..3"),
        (["--prompts", "{good}", "--output", "{good}/x"], "no such folder as"),
        (["--prompts", "{good}", "--output", "{good}"], "is a file, expected a folder"),
        (
            ["--prompts", "{good}", "--block-sizes", "2", "9"],
            "--block-sizes 9: expected numbers in",
        ),
        (
            ["--prompts", "{good}", "--thresholds", "2"],
            "--thresholds 2.0: expected numbers in 0..1",
        ),
        (["--prompts", "{good}", "--calibration", "a", "b"], "for each of 1 drafters"),
        (["--prompts", "{good}", "--calibration", "a"], "a: cannot be read"),
        (["--prompts", "{good}", "--limit", "0"], "--limit 0: expected a whole number above 0"),
        (["--prompts", "{good}", "--html", "{good}/x"], "--html {good}/x: no such folder as"),
        (["--datasets", "gsm8k"], "eval_datasets/gsm8k.jsonl: no such file; python scripts/prep"),
        (["--datasets", "gsm9k"], "gsm8k"),
        ([], "--datasets and --prompts: expected at least one set of prompts"),
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
    assert text.format(**names) in err
    assert good.read_text() == '{"prompt": "a"}\n'
    assert not (tmp_path / "out").exists()


def test_a_target_alone_is_refused(command, tmp_path):
    code, _, err = command("--prompts", write(tmp_path / "a.jsonl", "a"))
    assert (code, err) == (2, "error: --target without --draft: expected its drafters\n")
