"""A Gemma4 pair by the documented commands: trained, exported, checked against plain decoding."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.config import Rope, SlidingLayers, TargetConfig
from dspark_jax.io import cli, hf
from dspark_jax.targets import dense
from infer import check
from tests.train.conftest import TEMPLATE, write_tokenizer
from train import export
from train import main as train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

CONFIG = TargetConfig(
    vocab_size=264, hidden_size=32, intermediate_size=48, num_layers=6, num_heads=4, num_kv_heads=1,
    head_dim=16, rope=Rope(1e4, "proportional", rotated_part=0.25), model_type="gemma4",
    key_is_value=True, tie_embeddings=True, stop_token_ids=(2, 0), logit_softcap=30.0,
    sliding=SlidingLayers((0, 1, 3, 4), 6, 2, 8, Rope(1e4)),
)  # fmt: skip
SMALL = (
    *("--num-layers", "2", "--block-size", "3", "--markov-rank", "8", "--num-anchors", "8"),
    *("--target-layer-ids", "2", "4", "--max-length", "48", "--batch-size", "4"),
    *("--steps", "30", "--log-every", "10", "--devices", "1", "--weight-decay", "0.1"),
)


def run(command, *args):
    assert cli.run(lambda: command.main([*map(str, args)])) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of random weights, and the run of a drafter that starts as layers of it."""
    folder = tmp_path_factory.mktemp("gemma4")
    rng = np.random.default_rng(0)

    def draw(spec):
        return rng.normal(len(spec.shape) < 2, 0.15, spec.shape).astype(np.float32)

    (folder / "target").mkdir()
    hf.save_target(folder / "target", CONFIG, jax.tree.map(draw, dense.specs(CONFIG)))
    write_tokenizer(folder / "target", TEMPLATE)
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(200)))
    run(
        train, "tiny", "--workdir", folder / "run", "--target", folder / "target", "--files", text,
        *SMALL, "--stack-layers", "on",
    )  # fmt: skip
    return folder


def test_training_lowers_the_loss_and_leaves_the_scalars(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    tensors = load_file(folder / "run" / "drafter" / "model.safetensors")
    theirs = load_file(folder / "target" / "model.safetensors")
    for mine, index in ((0, 2), (1, 5)):
        name = "layers.{}.layer_scalar"
        found, expected = tensors[name.format(mine)], theirs["model." + name.format(index)]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("layout", ["deepspec", "sglang"])
def test_it_decodes_what_the_target_alone_decodes(folder, layout, capsys):
    """Texts are far longer than the window."""
    output = folder / layout
    run(export, "--workdir", folder / "run", "--output", output, "--layout", layout)
    run(check, folder / "target", output, "--max-new-tokens", 40)
    said = capsys.readouterr().out
    assert "Gemma4DSparkModel, 2 layers" in said
    assert "4 layers that see 6 positions" in said
    assert "120 tokens as in plain decoding" in said
    # Keys and values, 4 layers of 2 heads of 8 and 2 of a head of 16, and 2 in the drafter.
    assert "caches 0.77 + 0.26 MB for 1000 tokens of a row" in said
