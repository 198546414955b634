import json
import os
import signal
import sys

import jax
import numpy as np
import pytest

from dspark_jax import sharding
from dspark_jax.io import cli, hf, model_config
from train import run as train_run
from train.checkpoint import Checkpoints, SaveError
from train.main import main
from train.prepare import step_config
from train.presets import parse_arguments
from train.step import abstract_state

SMALL = [
    *("--num-layers", "1"),
    *("--block-size", "2"),
    *("--markov-rank", "4"),
    *("--target-layer-ids", "0", "2"),
    *("--num-anchors", "4"),
    *("--max-length", "32"),
    *("--batch-size", "2"),
    *("--steps", "6"),
    *("--algorithm", "adamw"),
    *("--learning-rate", "0.002"),
    *("--log-every", "2"),
    *("--save-every", "4"),
    *("--devices", "1"),
]


pytestmark = pytest.mark.usefixtures("compilation_cache", "quick_compile")


@pytest.fixture
def command(small_target, text_file, tmp_path):
    """Runs the command in a workdir of that name, with small settings unless others are given."""

    def run(name: str, *args: str) -> int:
        given = ["--workdir", str(tmp_path / name), "--target", str(small_target)]
        return cli.run(lambda: main([*given, "--files", str(text_file), *SMALL, *args]))

    return run


@pytest.fixture(scope="module")
def finished(small_target, text_file, tmp_path_factory, compilation_cache, quick_compile):
    """Workdir of a run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    args = ["--workdir", str(workdir), "--target", str(small_target), "--files", str(text_file)]
    assert main([*args, *SMALL]) == 0
    return workdir


def records(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises(finished):
    assert {p.name for p in finished.iterdir()} == {
        "checkpoints", "config.json", "data.json", "drafter", "metrics.jsonl", "tensorboard",
    }  # fmt: skip
    assert json.loads((finished / "config.json").read_text())["block_size"] == 2
    assert any((finished / "tensorboard").iterdir())
    found = records(finished)
    assert [r["step"] for r in found] == [2, 4, 6]
    for record in found:
        assert record.pop("mfu") is None  # unknown of a CPU
        assert all(np.isfinite(v) for v in record.values())
        assert record["skipped_steps"] == 0
        assert 1 <= record["expected_accepted_length"] <= 3
        assert record["tokens_per_second"] > 0
    wanted = "loss ce_loss tv_loss confidence_loss acceptance_1 acceptance_2 confidence_bias"
    assert {*wanted.split(), "confidence_error", "grad_norm", "learning_rate"} <= found[0].keys()
    assert found[-1]["loss"] < found[0]["loss"]


def learnt(workdir):
    """The metrics that do not depend on the clock."""
    timed = {"tokens_per_second", "input_wait", "first_step_seconds", "peak_memory_bytes"}
    return [{n: v for n, v in r.items() if n not in timed} for r in records(workdir)]


def test_the_exported_drafter_is_the_last_checkpoint(finished, small_target):
    cfg, params = hf.load_drafter(finished / "drafter")
    assert (cfg.block_size, cfg.target_layer_ids, cfg.num_target_layers) == (2, (0, 2), 4)
    cfg.check_fits(model_config.load_target_config(small_target))
    checkpoints = Checkpoints(finished / "checkpoints", keep=2)
    assert checkpoints.latest == 6
    settings = parse_arguments(["--workdir", str(finished), *SMALL], prog="", description="")
    state, _ = checkpoints.restore(abstract(settings, small_target))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def abstract(settings, folder):
    target = model_config.load_target_config(folder)
    cfg = step_config(settings, target, settings.drafter.config(target))
    return abstract_state(cfg, sharding.make_mesh(1))


def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    command, finished, tmp_path, monkeypatch, capsys
):
    steps = []

    def advance(self):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(train_run.Logs, "advance", advance)
        assert command("run") == 0
    assert len(steps) == 3
    message = "stopped at step 3 of 6; the same command goes on from there\n"
    assert capsys.readouterr().err == message
    workdir = tmp_path / "run"
    assert not (workdir / "drafter").exists()
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"ste')  # as if it had been killed later
    assert command("run") == 0
    assert learnt(workdir) == learnt(finished)
    _, expected = hf.load_drafter(finished / "drafter")
    _, found = hf.load_drafter(workdir / "drafter")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_workdir_with_other_settings_is_left_alone(finished, small_target, text_file, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    args = ["--workdir", str(finished), "--target", str(small_target), "--files", str(text_file)]
    assert cli.run(lambda: main([*args, *SMALL, "--learning-rate", "0.5"])) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "config.json: learning_rate is 0.002 there and 0.5 now" in message
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--learning-rate", "fast"], "--learning-rate"),
        (["--learning-rate", "-1"], "learning_rate=-1.0: expected"),
        (["--lerning-rate", "1"], "--lerning-rate"),
        (["--head", "big"], "--head"),
        (["--steps"], "--steps"),
        (["--loss-decay", "0"], "loss_decay=0.0: expected"),
        (["--block-size", "0"], "block_size=0: expected"),
        (["--mask-token-id", "264"], "mask_token_id=264: expected an id in 0..263"),
        (["--target-layer-ids", "0", "3"], "the last layer, 3, cannot be tapped"),
        (["--markov-rank", "0"], "markov_rank=0"),
        (["--confidence-weight", "0"], "confidence_weight=0.0"),
        (["--microbatches", "3"], "microbatches=3: expected a divisor"),
        (["--devices", "8"], "expected a multiple of 8 in each"),
        (["--devices", "999"], "devices=999"),
        (["--files", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--target", "nowhere"], "nowhere: no such folder"),
        (["--held-out-files", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--evaluate-every", "0"], "evaluate_every=0: expected"),
        (["--evaluate-batches", "0"], "evaluate_batches=0: expected"),
        (["--decode-every", "-1"], "decode_every=-1: expected"),
        (["--decode-tokens", "0"], "decode_tokens=0: expected"),
        (["--keep", "0"], "keep=0: expected"),
        (["--keep-best", "-1"], "keep_best=-1: expected"),
        (["--spike-factor", "1"], "spike_factor=1.0: expected above 1"),
        (["--spike-after", "0"], "spike_after=0: expected"),
        (["--max-skipped", "0"], "max_skipped=0: expected"),
        (["--peak-flops", "0"], "peak_flops=0.0: expected"),
        (["--profile", "3", "2"], "profile=3 2: expected 1 <= first <= last"),
        (["--profile", "3"], "--profile"),
        (["--wandb", "drafts"], "wandb: not installed"),
        (["--init-from", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_bad_settings_are_one_line_and_write_nothing(
    command, tmp_path, capsys, monkeypatch, args, expected
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert command("run", *args) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert expected in message
    assert not (tmp_path / "run").exists()


def test_an_unknown_preset_lists_those_there_are(capsys):
    assert cli.run(lambda: main(["huge"])) == 2
    message = capsys.readouterr().err
    assert "preset 'huge'" in message
    assert "qwen3_4b, qwen3_4b_dflash, qwen3_4b_eagle3, qwen3_4b_rnn" in message


def test_help_lists_settings_and_presets(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["qwen3_8b_rnn", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--learning-rate" in shown
    assert "0.0006" in shown
    assert "qwen3_14b_dflash" in shown


def test_a_full_disk_is_exit_code_1(command, monkeypatch, capsys):
    def save(self, step, state, place, *, score):
        raise SaveError(f"no room for step {step}")

    monkeypatch.setattr(Checkpoints, "save", save)
    assert command("run") == 1
    assert capsys.readouterr().err == "error: no room for step 4\n"
