import json

from train.logs import Logs


def steps(folder):
    return [json.loads(x)["step"] for x in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_and_events_are_written(tmp_path):
    logs = Logs(tmp_path, step=0, steps=3)
    logs.write(1, {"loss": 2.0, "expected_accepted_length": 1.5})
    logs.advance()
    logs.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": 2.0, "expected_accepted_length": 1.5}
    assert list((tmp_path / "tensorboard").iterdir())


def test_what_was_written_past_the_checkpoint_is_dropped(tmp_path):
    logs = Logs(tmp_path, step=0, steps=9)
    for step in (1, 2, 3, 4):
        logs.write(step, {"loss": float(step)})
    logs.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # torn by a kill
    logs = Logs(tmp_path, step=2, steps=9)
    logs.write(3, {"loss": 0.5})
    logs.close()
    assert steps(tmp_path) == [1, 2, 3]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    logs = Logs(tmp_path, step=0, steps=1)
    logs.write(1, {"loss": float("nan")})
    logs.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
