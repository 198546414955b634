"""Calibration of a pair that can be followed by hand (tests/infer/conftest.py)."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from dspark_jax.config import InputError
from dspark_jax.io import calibration_file, cli
from dspark_jax.request import Completion, Request
from infer import calibrate
from infer.calibrate import Rounds
from tests.infer.conftest import BLOCK


@pytest.fixture
def run(command, capsys):
    """Runs the command on prompts that lead to drafts both right and wrong."""
    command.write([{"prompt": letter, "id": letter} for letter in "abcefgjk"])
    files = {name: command.folder / name for name in ("calibration.json", "curve.png")}

    def run(*args, draft=()):
        given = (*command.given, *draft)
        where = ("--prompts", str(command.folder / "prompts.jsonl"))
        where += ("--output", str(files["calibration.json"]), "--max-new-tokens", "10")
        code = cli.run(lambda: calibrate.main((*given, *where, "--slots", "4", *args)))
        out, err = capsys.readouterr()
        return code, out, err

    run.files = files
    run.command = command
    return run


def completion(logits, accepted):
    ids = [0] * (1 + sum(a + 1 for a in accepted))
    lengths = [a + 1 for a in accepted]
    verified = [len(z) for z in logits]
    return Completion(1, ids, "", "length", lengths, verified, accepted, None, logits)


def test_rounds_by_hand():
    found = Rounds.of(
        [completion([[1.0, 2.0], [3.0, 4.0]], [0, 2]), completion([[5.0, 6.0]], [1])], 2
    )
    np.testing.assert_array_equal(found.logits, [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(found.accepted, [[0, 0], [1, 1], [1, 0]])
    assert Rounds.of([], 2).logits.shape == (0, 2)


def test_a_head_that_is_too_sure_gets_temperatures_above_one():
    rng = np.random.default_rng(0)

    def rounds():
        z = rng.normal(1, 3, (40000, 3))
        each = rng.random(z.shape) < 1 / (1 + np.exp(-z / 2))
        return Rounds(z, np.cumprod(each, axis=1).astype(bool))

    entry, before, after = calibrate.fit_entry(rounds(), rounds(), Request((0,), temperature=0.5))
    assert (entry.temperature, entry.rounds) == (0.5, 40000)
    np.testing.assert_allclose(entry.temperatures, 2, rtol=0.2)
    assert np.mean(entry.ece_after) < np.mean(entry.ece_before) / 3
    np.testing.assert_array_equal(entry.ece_before, before.ece)
    lines = calibrate.table(entry, before, after).splitlines()
    assert [line.split()[0] for line in lines] == ["position", "1", "2", "3", "mean"]
    assert float(lines[1].split()[2]) == pytest.approx(before.ece[0], abs=1e-4)
    assert float(lines[-1].split()[2]) == pytest.approx(after.ece.mean(), abs=1e-4)


def test_the_picture_leaves_out_what_few_rounds_say():
    """19 rounds: 9 and 10 in two bins of the first position, all in one of the second."""
    logits = np.tile([2.0, 2.0], (19, 1))
    logits[:9, 0] = -2.0
    logits[:, 1] = -9.0
    accepted = np.zeros((19, 2), bool)
    accepted[9:, 0] = True
    entry, *_ = calibrate.fit_entry(
        Rounds(logits, accepted), Rounds(logits, accepted), Request((0,), temperature=0.5)
    )
    figure = Figure()
    calibrate.plot(figure, {0.5: (Rounds(logits, accepted), entry)})
    raw, scaled = figure.axes
    assert (raw.get_title(), scaled.get_title()) == (
        *("raw, temperature 0.5", "scaled, temperature 0.5"),
    )
    diagonal, first, second = (np.array(line.get_data()) for line in raw.lines)
    np.testing.assert_array_equal(diagonal, [[0, 1], [0, 1]])
    np.testing.assert_allclose(first, [[1 / (1 + np.exp(-2))], [1]])  # 10 rounds; the 9 are few
    np.testing.assert_allclose(second[1], [0])


@pytest.mark.parametrize(
    ("output", "plot"), [("x-dark.png", "x.png"), ("a.json", "prompts.png"), ("a.json", "y.png")]
)
def test_a_dark_picture_is_put_over_nothing(tmp_path, output, plot):
    prompts = tmp_path / "prompts-dark.png"
    (tmp_path / "y-dark.png").mkdir()
    with pytest.raises(InputError, match=r"expected different files|is a folder"):
        calibrate.Settings(prompts, tmp_path / output, plot=tmp_path / plot).check()


def test_writes_a_calibration_and_a_picture(run, folders):
    code, out, err = run("--plot", str(run.files["curve.png"]), "--temperatures", "0")
    assert code == 0
    assert err.startswith("only ")
    assert err.endswith(" rounds at temperature 0: too few to trust, 1,000 and more are better\n")
    made = calibration_file.load(run.files["calibration.json"])
    made.check_fits(folders.target, folders.draft, BLOCK)
    (entry,) = made.entries
    assert entry.temperature == 0
    # The head knows exactly where the drafter is wrong.
    assert max(entry.ece_after) <= max(entry.ece_before) < 0.1
    assert "temperature 0: " in out
    for name in ("curve.png", "curve-dark.png"):
        assert (run.files["curve.png"].parent / name).read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_line_and_writes_nothing(run):
    def fails(text, *args, **given):
        code, _, err = run(*args, **given)
        assert (code, err.count("\n")) == (2, 1)
        assert text in err
        assert not run.files["calibration.json"].exists()

    fails("temperature=-1.0: expected a number 0 or above", "--temperatures", "-1")
    fails("--slots 0: expected", "--slots", "0")
    fails("block size 9", "--block-size", "9")
    fails("expected different ones", "--temperatures", "1", "1")
    fails("expected a .png file", "--plot", str(run.command.folder / "curve.xyz"))
    prompts = run.command.folder / "prompts.jsonl"
    before = prompts.read_bytes()
    fails("expected different files", "--output", str(prompts))
    assert prompts.read_bytes() == before
    run.command.write([{"prompt": "a"}])
    fails("too few rounds", "--temperatures", "0")
    run.command.write([{"prompt": "a"}, {"prompt": ""}])
    fails("prompts.jsonl line 2: the prompt is empty")


def test_a_drafter_without_confidence_cannot_be_calibrated(run, folders, tmp_path):
    place = tmp_path / "draft"
    place.mkdir()
    for path in folders.draft.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    values = json.loads((place / "config.json").read_text()) | {"enable_confidence_head": False}
    (place / "config.json").write_text(json.dumps(values))
    code, _, err = run("--draft", str(place))
    assert code == 2
    assert "has no confidence head" in err
