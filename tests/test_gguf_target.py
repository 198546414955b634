"""A GGUF file as the target of every command: trained for, checked, decoded."""

import json

import numpy as np
import pytest

import dspark_jax
from dspark_jax.io import cli, hf
from infer import check, generate
from tests.dspark_jax.io.gguf_writer import CONFIG, MASK, metadata, random_target, tensors, write
from train import main as train_main

pytestmark = pytest.mark.slow

SMALL = [
    *("--num-layers", "1"),
    *("--block-size", "2"),
    *("--markov-rank", "4"),
    *("--target-layer-ids", "0", "1"),
    *("--mask-token-id", str(MASK)),
    *("--num-anchors", "4"),
    *("--anchor-chunk", "4"),
    *("--max-length", "32"),
    *("--batch-size", "2"),
    *("--microbatches", "1"),
    *("--steps", "2"),
    *("--algorithm", "adamw"),
    *("--devices", "1"),
    *("--draft-vocab-size", "None"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "model.gguf"
    return write(path, metadata(), tensors(random_target()))


@pytest.fixture(scope="module")
def drafter(file, tmp_path_factory, quick_compile):
    """What two steps of the preset `smollm2`, made small, leave behind."""
    root = tmp_path_factory.mktemp("run")
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hell, hell!"}]
    (root / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 8)
    args = ["--target", str(file), "--files", str(root / "chats.jsonl")]
    args += ["--workdir", str(root / "run"), *SMALL]
    assert cli.run(lambda: train_main.main(["smollm2", *args])) == 0
    return root / "run" / "drafter"


def test_the_drafter_has_what_is_the_targets(file, drafter):
    cfg, params = hf.load_drafter(drafter)
    assert (cfg.block_size, cfg.mask_token_id, cfg.num_target_layers) == (2, MASK, 3)
    assert all(np.isfinite(x).all() for x in (params.fc, params.head.w1, params.layers[0].qkv))
    config = json.loads((drafter / "config.json").read_text())
    assert config["rope_theta"] == CONFIG.rope.theta
    assert config["rms_norm_eps"] == CONFIG.norm_eps
    assert config["eos_token_id"] == list(CONFIG.stop_token_ids)


def test_check(file, drafter, capsys):
    assert check.main([str(file), str(drafter), "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert f"target     {file}: LlamaForCausalLM, 3 layers" in out
    assert "embed_tokens.weight equals the target's" in out
    assert "lm_head.weight equals the target's" in out
    assert "passed" in out


def test_generate(file, drafter, tmp_path):
    """The same text with a drafter, without one, and from a folder with the same target."""
    folder = tmp_path / "folder"
    hf.save_target(folder, CONFIG, random_target())
    prompt = "hell"
    plain = dspark_jax.load(file, None)
    assert plain.models.target.lm_head.shape == (CONFIG.hidden_size, CONFIG.vocab_size)
    [expected] = dspark_jax.generate(plain, [prompt], slots=1, max_new_tokens=9)
    ids = plain.tokenizer.encode(prompt)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": ids}))
    for number, (target, draft) in enumerate([(file, "none"), (file, drafter)]):
        out = tmp_path / f"{number}.jsonl"
        args = ["--target", str(target), "--draft", str(draft), "--prompts", str(prompts)]
        args += ["--output", str(out), "--max-new-tokens", "9", "--slots", "1"]
        assert cli.run(lambda args=args: generate.main(args)) == 0
        assert json.loads(out.read_text())["token_ids"] == expected.token_ids


def test_names_are_of_files(tmp_path, monkeypatch, capsys):
    """`models/x.gguf` looks like a repository of the hub, and is none."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(lambda: generate.main(["--target", "models/x.gguf", "--draft", "none"])) == 2
    assert capsys.readouterr().err == "error: models/x.gguf: no such file\n"


def test_a_part_of_a_file(file, tmp_path, capsys):
    part = tmp_path / "part.gguf"
    part.write_bytes(file.read_bytes()[:5000])
    workdir = str(tmp_path / "run")
    for main, args in (
        (generate.main, ["--draft", "none"]),
        (train_main.main, ["smollm2", "--workdir", workdir]),
    ):
        given = [*args, "--target", str(part)]
        assert cli.run(lambda main=main, given=given: main(given)) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {part}: not a whole GGUF file")
        assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [part]
