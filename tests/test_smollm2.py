"""SmolLM2-135M-Instruct out of its GGUF file, against transformers on the same weights."""

import functools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import dspark_jax
from configs import smollm2, smollm2_small
from dspark_jax.generation import EMBEDDED
from dspark_jax.request import Request
from dspark_jax.targets import dense

FILE = Path(os.environ.get("DSPARK_SMOLLM2", smollm2.SETTINGS.target))
HIDDEN_STATES = (0, 1, 8, 16, 24)
"""Those of the reference, by the numbers of transformers; 30 is behind the final norm."""


@pytest.fixture(scope="module")
def expected(golden):
    folder = golden / "smollm2"
    texts = json.loads((folder / "expected.json").read_text())
    return load_file(folder / "expected.safetensors"), texts["runs"]


@pytest.fixture(scope="module")
def pair():
    if not FILE.exists():
        pytest.skip(f"no SmolLM2 at {FILE} (scripts/fetch_smollm2.py, or set DSPARK_SMOLLM2)")
    return dspark_jax.load(FILE, None)


def close(found, expected):
    """Absolute plus relative to the largest value of the tensor."""
    assert found.shape == expected.shape
    bound = 2e-4 * (1 + np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def test_sizes_and_tokenizer(pair, expected):
    cfg = pair.models.target_config
    assert (cfg.num_layers, cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads) == (30, 576, 9, 3)
    assert (cfg.rope.theta, cfg.norm_eps, cfg.max_position) == (100_000, 1e-5, 8192)
    assert cfg.stop_token_ids == (2,)
    for run in expected[1]:
        chat = [{"role": "user", "content": run["user"]}]
        assert pair.tokenizer.chat(chat) == run["token_ids"]
        assert pair.tokenizer.decode(run["greedy_continuation"], special=True) == run["text"]


def test_the_mask_token_was_never_trained(pair):
    """Its embedding is that of other unused tokens, but for what quantisation changes."""
    embed = np.asarray(pair.models.target.embed)
    far = np.abs(embed - embed[smollm2.SETTINGS.drafter.mask_token_id]).max(axis=1)
    assert np.flatnonzero(far < 0.01)[:11].tolist() == [5, *range(7, 17)]
    assert np.median(far) > 0.5


@pytest.mark.slow
def test_hidden_states_and_logits(pair, expected):
    models, (tensors, _) = pair.models, expected
    taps = tuple(i - 1 for i in HIDDEN_STATES)
    forward = jax.jit(functools.partial(dense.forward, cfg=models.target_config, taps=taps))
    hidden = forward(dense.stack_layers(models.target, models.target_config), tensors["input_ids"])
    states = np.split(np.asarray(hidden.features[0]), len(taps), axis=-1)
    for i, state in zip(HIDDEN_STATES, states, strict=True):
        close(state, tensors[f"hf_hidden_states.{i}"])
    close(np.asarray(hidden.final[0]), tensors["hf_hidden_states.30"])
    close(dense.logits(models.target, hidden.final[0, -1]), tensors["last_logits"])


@pytest.mark.slow
def test_greedy_text(pair, expected):
    runs = expected[1]
    prompts = [Request(run["token_ids"], max_new_tokens=48) for run in runs]
    for run, completion in zip(runs, dspark_jax.generate(pair, prompts, slots=3), strict=True):
        assert completion.token_ids == run["greedy_continuation"]


DRAFTER = EMBEDDED / "smollm2"


def test_the_drafter_in_the_package_is_small():
    assert sum(file.stat().st_size for file in DRAFTER.iterdir()) < 13e6


def test_the_drafter_in_the_package_gives_the_same_text_in_fewer_rounds(pair):
    drafted = dspark_jax.load(FILE, DRAFTER)
    cfg = pair.models.target_config
    assert drafted.models.drafter_config == smollm2_small.SETTINGS.drafter_config(cfg)
    question = "Write a Python function that returns the larger of two numbers."
    ids = pair.tokenizer.chat([{"role": "user", "content": question}])
    (plain,), (found,) = (
        dspark_jax.generate(each, [Request(ids, max_new_tokens=64)], slots=1)
        for each in (pair, drafted)
    )
    assert found.token_ids == plain.token_ids
    assert "def " in found.text
    assert len(found.accepted_lengths) < len(plain.accepted_lengths) / 1.75
