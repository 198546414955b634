"""Drafters of every kind: trained by the command, exported, and served losslessly."""

import json

import pytest

from dspark_jax import generation
from dspark_jax.config import Eagle3Config, InputError, MtpConfig
from dspark_jax.request import Request
from train import draft_tokens
from train.export import main as export
from train.main import main
from train.settings import DrafterSettings

pytestmark = pytest.mark.usefixtures("compilation_cache", "quick_compile")

PLAIN = ["--head", "none", "--markov-rank", "0", "--no-confidence-with-markov"]
KINDS = {
    "eagle3": (
        [*("--kind", "eagle3", "--block-size", "3", "--target-layer-ids", "0", "2"), *PLAIN],
        ["--confidence-head", "--confidence-weight", "1", "--tv-weight", "0", "--soft-targets"],
    ),
    "mtp": (
        [*("--kind", "mtp", "--block-size", "1", "--target-layer-ids"), *PLAIN],
        ["--no-confidence-head", "--confidence-weight", "0", "--tv-weight", "0"],
    ),
}


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_run_learns_and_what_it_exports_is_lossless(
    kind, small_target, text_file, tmp_path, capsys
):
    drafter, loss = KINDS[kind]
    workdir = tmp_path / "run"
    args = [
        *("--workdir", str(workdir), "--target", str(small_target), "--files", str(text_file)),
        *("--num-layers", "1", "--num-anchors", "8", "--max-length", "32", "--batch-size", "4"),
        *("--steps", "30", "--learning-rate", "0.01", "--log-every", "10", "--devices", "1"),
        *("--documents-per-row", "2", "--ce-weight", "1", "--loss-decay", "4.48142"),
    ]
    assert main(["tiny", *args, *drafter, *loss]) == 0
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["ce_loss"] for line in lines]
    assert losses[-1] < losses[0]

    pair = generation.load(small_target, workdir / "drafter")
    cfg = pair.models.drafter_config
    assert cfg.num_anchors == 8
    if kind == "eagle3":
        assert isinstance(cfg, Eagle3Config)
        assert (cfg.block_size, cfg.target_layer_ids, cfg.confidence_head) == (3, (0, 2), True)
        assert cfg.step_loss_decay == 0.8
    else:
        assert isinstance(cfg, MtpConfig)
        assert (cfg.block_size, cfg.confidence_head) == (1, False)
    asked = [Request(pair.tokenizer.encode(t), max_new_tokens=24) for t in ("7 times", "12 ti")]
    found = generation.generate(pair, asked, slots=2, ignore_stop=True)
    alone = generation.load(small_target, None)
    plain = generation.generate(alone, asked, slots=2, ignore_stop=True)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]


@pytest.mark.slow
def test_a_pruned_vocabulary(small_target, text_file, tmp_path, monkeypatch):
    """Counted once, kept with the run, exported by either command, and lossless."""
    monkeypatch.setattr(draft_tokens, "COUNTED", 2000)
    workdir = tmp_path / "run"
    args = [
        *("--workdir", str(workdir), "--target", str(small_target), "--files", str(text_file)),
        *("--num-layers", "1", "--num-anchors", "8", "--max-length", "32", "--batch-size", "4"),
        *("--block-size", "2", "--markov-rank", "4", "--target-layer-ids", "0", "2"),
        *("--learning-rate", "0.01", "--log-every", "10", "--devices", "1", "--steps", "20"),
        *("--draft-vocab-size", "12", "--decode-every", "20", "--decode-tokens", "8"),
        *("--held-out-files", str(text_file), "--evaluate-every", "20"),
    ]
    assert main(["tiny", *args]) == 0
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    ids = json.loads((workdir / draft_tokens.FILE).read_text())["ids"]
    pair = generation.load(small_target, workdir / "drafter")
    assert pair.models.drafter.vocabulary.ids.tolist() == ids
    # Lines are "i times i is n".
    assert set(" is1") <= {pair.tokenizer.decode([i]) for i in ids}
    assert export(["--workdir", str(workdir), "--output", str(tmp_path / "again")]) == 0
    first, second = (
        (folder / "model.safetensors").read_bytes()
        for folder in (workdir / "drafter", tmp_path / "again")
    )
    assert first == second
    asked = [Request(pair.tokenizer.encode("7 times"), max_new_tokens=24)]
    alone = generation.load(small_target, None)
    found, plain = (
        generation.generate(p, asked, slots=1, ignore_stop=True)[0] for p in (pair, alone)
    )
    assert found.token_ids == plain.token_ids
    # A run goes on with the tokens that it began with, and can be the start of another, lean too.
    assert export(["--workdir", str(workdir), "--output", str(tmp_path / "lean"), "--lean"]) == 0
    further = [a if a != str(workdir) else str(tmp_path / "further") for a in args]
    assert main(["tiny", *further, "--init-from", str(tmp_path / "lean")]) == 0
    there = (tmp_path / "further" / draft_tokens.FILE).read_text()
    assert there == (workdir / draft_tokens.FILE).read_text()
    (workdir / draft_tokens.FILE).write_text('{"ids": [1, 1, 2]}')
    with pytest.raises(InputError, match=r"expected 12 different ids in 0\.\.263"):
        main(["tiny", *args])


def test_a_sequential_head_belongs_to_dspark():
    with pytest.raises(InputError, match="kind='mtp' with head='vanilla', markov_rank=32"):
        DrafterSettings(kind="mtp")
