"""The comparison of systems: which questions are learnt from, and which commands are run."""

import importlib
import json

import pytest

from dspark_jax.config import InputError
from scripts import compare_systems


@pytest.fixture
def questions(tmp_path):
    folder = tmp_path / "questions"
    folder.mkdir()
    for name, count in (("easy", 6), ("hard", 5)):
        turns = [[f"{name} {'x' * (count - n)} {n}", "and then?"] for n in range(count)]
        lines = [json.dumps({"turns": each}) for each in turns]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    long = json.dumps({"turns": ["y" * (compare_systems.LONGEST + 1)]})
    with open(folder / "hard.jsonl", "a") as file:
        file.write(long + "\n")
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_fourth_question_is_kept_to_measure_on(questions, tmp_path):
    folder = tmp_path / "out"
    (folder / "measured").mkdir(parents=True)
    options = compare_systems.ask_smollm2(questions, folder)
    assert options[:2] == ["--target", compare_systems.SMOLLM2]
    for name, kept in (("easy", (0, 4)), ("hard", (0, 4))):
        every = read(questions / f"{name}.jsonl")
        assert read(folder / "measured" / f"{name}.jsonl") == [every[n] for n in kept]
    asked = read(folder / "asked.jsonl")
    # The shortest first, greedily, and then all of them once more; the one that is too long is out.
    numbers = ["easy/5", "hard/3", "easy/3", "hard/2", "easy/2", "hard/1", "easy/1"]
    assert [x["id"] for x in asked] == [f"{n}/{t}" for t in (0.0, 0.8) for n in numbers]
    assert [x["temperature"] for x in asked] == [0.0] * 7 + [0.8] * 7
    assert asked[0]["turns"] == ["easy x 5"]


@pytest.mark.parametrize("given", [None, "empty"])
def test_questions_that_are_not_there(tmp_path, given):
    folder = None if given is None else tmp_path / given
    with pytest.raises(InputError, match="expected"):
        compare_systems.ask_smollm2(folder, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts in it"),
        ("{", "line 1: not valid JSON"),
        ('{"turns": []}', "line 1: turns=[]: expected texts"),
        ('{"turns": "why?"}', "line 1: turns='why?': expected texts"),
        ('{"prompt": "why?"}', "line 1: turns=None: expected texts"),
    ],
)
def test_files_that_hold_no_questions(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    (tmp_path / "measured").mkdir()
    with pytest.raises(InputError) as error:
        compare_systems.ask_smollm2(tmp_path, tmp_path)
    assert f"{tmp_path / 'bad.jsonl'}" in str(error.value)
    assert message in str(error.value)


def test_settings_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for args in (
        ["--steps", "0"],
        ["--output", str(tmp_path / "file")],
        ["--questions", str(tmp_path)],  # the embedded target has its own
    ):
        with pytest.raises(InputError, match="expected"):
            compare_systems.main(["--output", str(tmp_path / "out"), *args])
    assert not (tmp_path / "out").exists()


def test_all_kinds_learn_alike_and_are_measured_together(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(compare_systems, "run", lambda *args: commands.append([*map(str, args)]))
    assert compare_systems.main(["--output", str(tmp_path), "--steps", "7", "--limit", "3"]) == 0
    folder = tmp_path / "tiny"
    trained = [command for command in commands if "train.main" in command]
    presets = [command[2] for command in trained]
    assert presets == ["tiny_mtp", "tiny_eagle3", "tiny_dflash", "tiny", "tiny_rnn"]
    for command, preset in zip(trained, presets, strict=True):
        importlib.import_module(f"configs.{preset}")
        own = command.index("--workdir")
        assert command[own + 1] == str(folder / preset)
        rest = command[3:own] + command[own + 2 :]
        assert rest == trained[0][5:]
        assert rest[:4] == ["--files", str(folder / "answers.jsonl"), "--steps", "7"]
    assert [command[1] for command in commands if command[0] == "-m"] == [
        "infer.generate", "train.cache", *["train.main"] * 5, "infer.evaluate",
    ]  # fmt: skip
    measured = commands[-1]
    drafts = measured[measured.index("--draft") + 1 : measured.index("--prompts")]
    assert drafts == [str(folder / preset / "drafter") for preset in presets]
    assert measured[-2:] == ["--limit", "3"]
