"""The check of a checkpoint: what it says, and what it finds."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.io import cli, model_config
from infer import check, engine
from tests.infer.conftest import BLOCK


@pytest.fixture
def run(capsys):
    def call(*args):
        code = cli.run(lambda: check.main([str(a) for a in args]))
        return code, *capsys.readouterr()

    return call


def altered(folder, place, change):
    """A copy of a drafter's folder in which `change` was made to its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    return place


def test_says_what_they_are(run, folders):
    code, out, err = run(folders.target, folders.draft, "--max-new-tokens", "9")
    assert code == 0
    assert err == ""
    for text in (
        "Qwen3ForCausalLM, 1 layers, width 64, MLP 8, 2 heads of 4 (1 for keys and values),"
        " vocabulary 260 (untied), 128 positions, stop tokens 2",
        f"block of {BLOCK}, vanilla head of rank 65, confidence head on hidden state and Markov"
        " embedding, taps target layers -1 of 1, mask token 3",
        "they fit",
        "embed_tokens.weight equals the target's",
        "lm_head.weight equals the target's",
        "27 tokens as in plain decoding; accepted length ",
        "passed",
    ):
        assert text in out
    # 2 arrays x 1 layer x 1 head x 4 x 4 bytes x 1000, in the target and in the drafter
    assert "caches 0.03 + 0.03 MB for 1000 tokens of a row" in out


def test_copies_of_another_target_fail(run, folders, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"][7, 3] += 0.5
        del tensors["embed_tokens.weight"]

    place = altered(folders.draft, tmp_path / "draft", change)
    code, out, _ = run(folders.target, place, "--max-new-tokens", "9")
    assert code == 1
    assert "embed_tokens.weight is not in the drafter; the target's is used" in out
    assert "lm_head.weight differs from the target's by up to 0.5" in out
    assert "FAILED" in out


def test_copies_are_compared_in_the_narrower_type(folders, tmp_path):
    def change(tensors):
        for name in ("embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name].astype(jnp.bfloat16)

    place = altered(folders.draft, tmp_path / "draft", change)
    cfg = model_config.load_target_config(folders.target)
    assert [ok for _, ok in check.compare_copies(folders.target, place, cfg)] == [True, True]


def test_a_difference_fails(run, folders, monkeypatch):
    decode = engine.Engine.decode

    def wrong(self, batch):
        made = decode(self, batch)
        if self.pair.models.drafter is not None:
            made.completions[1].token_ids[4] ^= 1
        return made

    monkeypatch.setattr(engine.Engine, "decode", wrong)
    code, out, _ = run(folders.target, folders.draft, "--max-new-tokens", "9")
    assert code == 1
    assert "prompt 1 differs from plain decoding at token 4, whose logit is " in out
    assert "near tie" not in out


def test_first_difference_and_its_regret(folders):
    pair = check.generation.load(folders.target, folders.draft)
    model = pair.models.target
    where, regret, best = check._first_difference(pair, [30, 71], [72, 73, 99], [72, 73, 74])
    hidden = np.asarray(model.embed)[73]
    logits = hidden / np.sqrt((hidden**2).mean() + 1e-6) @ np.asarray(model.lm_head)
    assert where == 2
    assert best == pytest.approx(logits.max(), rel=1e-4)
    assert regret == pytest.approx(logits.max() - logits[99], rel=1e-4)


@pytest.mark.slow
def test_bfloat16(run, folders):
    code, out, _ = run(folders.target, folders.draft, "--max-new-tokens", "9", "--dtype=bfloat16")
    assert code == 0, out


def test_bad_input(run, folders, tmp_path):
    other = json.loads((folders.draft / "config.json").read_text()) | {"num_target_layers": 2}
    for path in folders.draft.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(other))
    for args, text in (
        ((folders.target, tmp_path), "does not fit the target: num_target_layers is 2"),
        ((folders.target, tmp_path / "absent"), "absent: no such folder"),
        ((folders.draft, folders.draft), "architecture 'Qwen3DSparkModel' (model_type 'qwen3')"),
        ((folders.target,), "DRAFT"),
        ((folders.target, folders.draft, "--max-new-tokens", "0"), "--max-new-tokens 0: expected"),
        ((folders.target, folders.draft, "--dtype", "int4"), "invalid choice 'int4'"),
    ):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert text in err
        assert err.count("\n") == 1


def test_a_trained_pair(run, golden):
    args = (golden / "qwen3_target", golden / "dspark_qwen3_vanilla", "--max-new-tokens", "24")
    code, out, _ = run(*args)
    assert code == 0
    assert "target 1,443,840 parameters, 5.8 MB; drafter 508,961 parameters, 2.0 MB" in out
    assert "72 tokens as in plain decoding" in out
