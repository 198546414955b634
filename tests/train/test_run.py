"""Runs that meet with something: bad numbers, other devices, held-out rows, another drafter."""

import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.io import cli, hf
from train import run as train_run
from train.export import main as export
from train.main import main

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
    *("--log-every", "1"),
    *("--save-every", "2"),
    *("--devices", "1"),
]

pytestmark = pytest.mark.usefixtures("compilation_cache", "quick_compile")


@pytest.fixture(scope="module")
def command(small_target, text_file):
    def run(workdir, *args) -> int:
        given = ["--workdir", workdir, "--target", small_target, "--files", text_file, *SMALL]
        return cli.run(lambda: main([str(x) for x in (*given, *args)]))

    return run


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory, compilation_cache, quick_compile):
    """Workdir of a run with evaluations that nothing interrupted."""
    folder = tmp_path_factory.mktemp("run")
    held_out = folder / "held_out.txt"
    held_out.write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(60)))
    options = ("--held-out-files", held_out, "--evaluate-every", 3, "--evaluate-batches", 2)
    assert command(folder / "run", *options, "--decode-every", 6, "--decode-tokens", 8) == 0
    return folder / "run"


def records(workdir, kind="metrics"):
    return [json.loads(line) for line in (workdir / f"{kind}.jsonl").read_text().splitlines()]


def test_held_out_rows_are_evaluated_and_the_best_checkpoint_is_kept(finished):
    first, last = records(finished, "evaluation")
    assert (first["step"], last["step"]) == (3, 6)
    for record in (first, last):
        length = 1 + record["survival_1"] + record["survival_2"]
        assert record["expected_accepted_length"] == pytest.approx(length, rel=1e-6)
        assert 0 <= record["confidence_ece"] <= 1
    assert "decoding_rounds" not in first
    assert last["decoding_rounds"] > 0
    assert first["loss"] != last["loss"]
    kept = {p.name for p in (finished / "checkpoints").iterdir()}
    assert kept == {"4", "6"}  # the last two; only 6 has a score


# --- Skipped steps ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(small_target, tmp_path_factory):
    """A target that gives no numbers for a text with a Q in it."""
    folder = shutil.copytree(small_target, tmp_path_factory.mktemp("poisoned") / "target")
    tensors = load_file(folder / "model.safetensors")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    embed = tensors["model.embed_tokens.weight"].copy()
    embed[vocabulary["Q"]] = np.nan
    save_file({**tensors, "model.embed_tokens.weight": embed}, folder / "model.safetensors")
    return folder


def test_steps_without_numbers_are_skipped_and_told(command, poisoned, tmp_path, caplog):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {'Q' * (i % 9 == 0)}{i * i}\n" for i in range(200)))
    assert command(tmp_path / "run", "--target", poisoned, "--files", text) == 0
    found = records(tmp_path / "run")
    skipped = [r["step"] for r in found if r["skipped_steps"]]
    assert 0 < len(skipped) < 6
    told = [r.getMessage() for r in caplog.records if r.name == "train.lookout"]
    assert told == [f"step {n} was skipped: loss nan, gradient norm nan" for n in skipped]
    for record in found:
        assert (record["loss"] is None) == (record["step"] in skipped)
    _, drafter = hf.load_drafter(tmp_path / "run" / "drafter")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(drafter))


def test_too_many_in_a_row_stop_the_run(command, finished, poisoned, tmp_path, capsys):
    """Started on good data, gone on with on a target that has gone bad under it."""
    workdir = tmp_path / "run"
    target = shutil.copytree(poisoned.parent / "target", tmp_path / "target")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times Q{i} is {i * i}\n" for i in range(200)))
    options = ("--target", target, "--files", text, "--max-skipped", 2, "--spike-after", 50)
    assert command(workdir, *options) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == (
        "error: training stopped at step 2: 2 steps in a row were skipped, the last with loss nan"
        " and gradient norm nan (max_skipped=2); checkpoints: there is none"
    )
    assert not (workdir / "drafter").exists()


# --- Going on --------------------------------------------------------------------------------


def stopped(monkeypatch, command, workdir, step, *args):
    """Runs to a step, where it is told to stop."""
    done = []

    def advance(self):
        done.append(1)
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(train_run.Logs, "advance", advance)
        assert command(workdir, *args) == 0


@pytest.mark.slow
def test_on_another_mesh_the_losses_are_those_of_one(command, finished, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    stopped(monkeypatch, command, workdir, 3)
    assert command(workdir, "--devices", 2) == 0
    losses = [[r["loss"] for r in records(folder)] for folder in (workdir, finished)]
    assert losses[0][:3] == losses[1][:3]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    command, finished, tmp_path, caplog
):
    workdir = shutil.copytree(finished, tmp_path / "run")
    (workdir / "checkpoints" / "6" / "state" / "_METADATA").write_text("{}")
    assert command(workdir) == 0
    assert [r.name for r in caplog.records if r.levelname == "WARNING"].count(
        "train.checkpoint"
    ) == 1
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"4", "6", "damaged-6"}
    assert [r["loss"] for r in records(workdir)] == [r["loss"] for r in records(finished)]


def harmed(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()) if path.exists() else change(b""))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda b: b"{", "config.json: not valid JSON"),
        ("config.json", lambda b: b"[]", "config.json: expected a JSON object"),
        ("config.json", lambda b: b.replace(b'"seed": 0', b'"seed": 1'), "seed is 1 there and 0"),
        ("config.json", lambda b: b"{}", "is null there and"),
        ("metrics.jsonl", lambda b: b"loss\n" + b, "metrics.jsonl: line 1: not valid JSON"),
        ("metrics.jsonl", lambda b: b"[]\n" + b, "metrics.jsonl: line 1: expected a JSON object"),
        ("evaluation.jsonl", lambda b: b + b"\xff\n", "evaluation.jsonl: not UTF-8 text"),
    ],
)
def test_a_workdir_that_is_damaged_is_left_alone(
    command, finished, tmp_path, capsys, name, change, message
):
    workdir = shutil.copytree(finished, tmp_path / "run")
    harmed(workdir, name, change)
    refused(command, workdir, message, capsys)


def refused(command, workdir, message, capsys, *args):
    """Exit code 2, one line, and nothing changed."""
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    assert command(workdir, *args) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert message in printed
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


def test_checkpoints_that_are_all_damaged(command, finished, tmp_path, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    for step in ("4", "6"):
        shutil.rmtree(workdir / "checkpoints" / step / "state")
    message = "no checkpoint is whole (6: state is missing; 4: state is missing)"
    refused(command, workdir, message, capsys)


def test_checkpoints_without_settings(command, finished, tmp_path, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    (workdir / "config.json").unlink()
    refused(command, workdir, "checkpoints without config.json", capsys)


def test_a_workdir_that_is_a_file(command, tmp_path, capsys):
    (tmp_path / "run").write_text("text")
    for workdir in (tmp_path / "run", tmp_path / "run" / "deep" / "er"):
        assert command(workdir) == 2
        message = f"error: {workdir}: expected a folder, {tmp_path / 'run'} is a file\n"
        assert capsys.readouterr().err == message
    assert (tmp_path / "run").read_text() == "text"


# --- Drafters in and out ---------------------------------------------------------------------


def test_a_drafter_can_be_trained_further(command, finished, tmp_path, monkeypatch):
    begun = []
    loop = train_run.Run.loop

    def watched(self, stopped):
        begun.append(jax.device_get(self.state))
        return loop(self, stopped)

    monkeypatch.setattr(train_run.Run, "loop", watched)
    assert command(tmp_path / "run", "--init-from", finished / "drafter") == 0
    _, expected = hf.load_drafter(finished / "drafter")
    jax.tree.map(np.testing.assert_array_equal, begun[0].params, expected)
    assert begun[0].step == 0
    # The same batch and the same anchors, for a drafter that has seen them.
    assert records(tmp_path / "run")[0]["loss"] < records(finished)[0]["loss"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-layers", 2], "num_layers is 1 in the drafter and 2 by the settings"),
        (["--block-size", 3], "block_size is 2 in the drafter and 3 by the settings"),
        (["--markov-rank", 5], "markov_rank is 4 in the drafter and 5 by the settings"),
        (["--head", "rnn"], "head is vanilla in the drafter and rnn by the settings"),
        (["--mask-token-id", 2], "mask_token_id is 3 in the drafter and 2 by the settings"),
        (["--target-layer-ids", 0, 1], "target_layer_ids is (0, 2) in the drafter and (0, 1)"),
        (["--no-confidence-with-markov"], "confidence_with_markov is True in the drafter"),
    ],
)
def test_a_drafter_that_does_not_fit(command, finished, tmp_path, capsys, args, message):
    workdir = tmp_path / "run"
    refused(command, workdir, message, capsys, "--init-from", finished / "drafter", *args)
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda b: b"{", "config.json: not valid JSON"),
        ("config.json", lambda b: b"{}", "config.json"),
        ("config.json", lambda b: b.replace(b'"block_size"', b'"size"'), "block_size"),
        ("config.json", lambda b: b.replace(b'"vanilla"', b'"big"'), "big"),
        ("model.safetensors", lambda b: b[: len(b) // 2], "model.safetensors"),
        ("model.safetensors", lambda b: b"", "model.safetensors"),
    ],
)
def test_a_drafter_that_is_damaged(command, finished, tmp_path, capsys, name, change, message):
    drafter = shutil.copytree(finished / "drafter", tmp_path / "drafter")
    harmed(drafter, name, change)
    workdir = tmp_path / "run"
    refused(command, workdir, message, capsys, "--init-from", drafter)
    assert not workdir.exists()


def exported(*args) -> int:
    return cli.run(lambda: export([str(x) for x in args]))


def test_any_checkpoint_can_be_exported(finished, tmp_path, capsys):
    assert exported("--workdir", finished, "--output", tmp_path / "last") == 0
    assert capsys.readouterr().out == f"drafter of 6 steps: {tmp_path / 'last'}\n"
    for name in ("config.json", "model.safetensors"):
        ours, theirs = (f / name for f in (tmp_path / "last", finished / "drafter"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert exported("--workdir", finished, "--output", tmp_path / "first", "--step", 4) == 0
    _, first = hf.load_drafter(tmp_path / "first")
    _, last = hf.load_drafter(tmp_path / "last")
    assert 0 < np.abs(first.fc - last.fc).max() < 0.01


def test_the_newest_whole_checkpoint_is_exported(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    (workdir / "checkpoints" / "6" / "state" / "_METADATA").unlink()
    assert exported("--workdir", workdir, "--output", tmp_path / "out") == 0
    printed = capsys.readouterr()
    assert printed.out == f"drafter of 4 steps: {tmp_path / 'out'}\n"
    message = "step 6 is damaged (state/_METADATA is missing); step 4 is taken\n"
    assert printed.err == message
    assert (workdir / "checkpoints" / "6").is_dir()


@pytest.mark.parametrize("layout", ["speculators", "sglang"])
def test_layouts_of_other_engines(finished, tmp_path, layout):
    assert exported("--workdir", finished, "--output", tmp_path / "plain") == 0
    assert exported("--workdir", finished, "--output", tmp_path / "out", "--layout", layout) == 0
    cfg, params = hf.load_drafter(tmp_path / "out")
    plain_cfg, plain = hf.load_drafter(tmp_path / "plain")
    assert cfg == plain_cfg
    jax.tree.map(np.testing.assert_array_equal, params, plain)


def test_a_lean_drafter_of_half_the_bytes(finished, tmp_path):
    assert exported("--workdir", finished, "--output", tmp_path / "plain") == 0
    lean = ["--output", tmp_path / "lean", "--lean", "--dtype", "bfloat16"]
    assert exported("--workdir", finished, *lean) == 0
    assert "embed_tokens.weight" not in load_file(tmp_path / "lean" / "model.safetensors")
    cfg, params = hf.load_drafter(tmp_path / "lean")
    plain_cfg, plain = hf.load_drafter(tmp_path / "plain", dtype=jnp.bfloat16)
    assert cfg == plain_cfg
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), plain)
    jax.tree.map(np.testing.assert_array_equal, params, wide)


@pytest.mark.parametrize(
    ("harm", "args", "message"),
    [
        (lambda run: None, ["--step", 5], "no checkpoint of step 5; expected one of 4, 6"),
        (lambda run: None, ["--step", "x"], "--step"),
        (lambda run: None, ["--layout", "x"], "--layout"),
        (lambda run: None, ["--layout", "sglang", "--lean"], "expected one that is not lean"),
        (shutil.rmtree, [], "config.json: no such file, expected the workdir of a run"),
        (lambda run: (run / "config.json").write_text("[]"), [], "expected a JSON object"),
        (lambda run: (run / "config.json").write_text("{}"), [], "config.json: target is missing"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "checkpoints: no checkpoints in it"),
        (
            lambda run: shutil.rmtree(run / "checkpoints" / "4" / "state"),
            ["--step", 4],
            "4: the checkpoint is damaged (state is missing)",
        ),
        (
            lambda run: [shutil.rmtree(p / "place") for p in (run / "checkpoints").iterdir()],
            [],
            "no checkpoint is whole (6: place is missing; 4: place is missing)",
        ),
        (lambda run: (run.parent / "out").write_text("x"), [], "out: expected a new or empty"),
        (
            lambda run: shutil.copytree(run / "drafter", run.parent / "out"),
            [],
            "out: expected a new or empty folder",
        ),
    ],
)
def test_what_cannot_be_exported(finished, tmp_path, capsys, harm, args, message):
    workdir, output = tmp_path / "run", tmp_path / "out"
    shutil.copytree(finished, workdir)
    harm(workdir)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert exported("--workdir", workdir, "--output", output, *args) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert message in printed
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
