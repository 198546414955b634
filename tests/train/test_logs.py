import json
import sys
from types import SimpleNamespace

import pytest

from dspark_jax.config import InputError
from train.logs import Logs, check_logs, check_wandb
from train.settings import Settings, WatchSettings


def logs(folder, step=0, **watch) -> Logs:
    return Logs(Settings(workdir=folder, watch=WatchSettings(**watch)), step=step)


def steps(folder, kind="metrics"):
    return [json.loads(x)["step"] for x in (folder / f"{kind}.jsonl").read_text().splitlines()]


def test_lines_and_events_are_written(tmp_path):
    found = logs(tmp_path)
    found.write("metrics", 1, {"loss": 2.0, "expected_accepted_length": 1.5})
    found.write("evaluation", 1, {"loss": 3.0})
    found.advance()
    found.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": 2.0, "expected_accepted_length": 1.5}
    assert json.loads((tmp_path / "evaluation.jsonl").read_text()) == {"step": 1, "loss": 3.0}
    assert list((tmp_path / "tensorboard").iterdir())


def test_what_was_written_past_the_checkpoint_is_dropped(tmp_path):
    first = logs(tmp_path)
    for step in (1, 2, 3, 4):
        first.write("metrics", step, {"loss": float(step)})
        first.write("evaluation", step, {"loss": float(step)})
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # torn by a kill
    second = logs(tmp_path, step=2)
    second.write("metrics", 3, {"loss": 0.5})
    second.close()
    assert steps(tmp_path) == [1, 2, 3]
    assert steps(tmp_path, "evaluation") == [1, 2]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    found = logs(tmp_path)
    found.write("metrics", 1, {"loss": float("nan")})
    found.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"step": 1}\nstep 2\n', "metrics.jsonl: line 2: not valid JSON"),
        (b"[1]\n", "line 1: expected a JSON object with a whole number `step`"),
        (b'{"loss": 1}\n', "line 1: expected a JSON object with a whole number `step`"),
        (b'{"step": "1"}\n', "line 1: expected a JSON object with a whole number `step`"),
        (b"\n", "line 1: not valid JSON"),
        (b"\xff\xfe\n", "metrics.jsonl: not UTF-8 text"),
    ],
)
def test_a_file_that_is_none_of_ours(tmp_path, data, message):
    (tmp_path / "metrics.jsonl").write_bytes(data)
    with pytest.raises(InputError, match=message):
        check_logs(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == data


class FakeRun:
    def __init__(self, **given):
        self.given, self.lines, self.axes, self.finished = given, [], [], False

    def define_metric(self, name, *, step_metric):
        self.axes.append((name, step_metric))

    def log(self, values):
        self.lines.append(values)

    def finish(self):
        self.finished = True


def test_a_project_gets_what_the_files_get(tmp_path, monkeypatch):
    runs = []

    def init(**given):
        runs.append(FakeRun(**given))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (0, 1):
        found = logs(tmp_path, step, wandb="drafts")
        found.write("metrics", step + 1, {"loss": 2.0, "mfu": float("nan")})
        found.write("evaluation", step + 1, {"loss": 3.0})
        found.close()
    first, second = runs
    assert first.given["project"] == "drafts"
    assert first.given["id"] == second.given["id"]  # the same run goes on
    assert first.given["config"]["learning_rate"] == 2e-3
    assert first.axes == [("*", "step")]
    assert first.lines == [{"step": 1, "loss": 2.0}, {"step": 1, "evaluation/loss": 3.0}]
    assert first.finished


def test_a_project_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb(Settings())
    with pytest.raises(InputError, match=r"wandb: not installed; expected dspark_jax\[wandb\]"):
        check_wandb(Settings(watch=WatchSettings(wandb="drafts")))
