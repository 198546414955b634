"""Hugging Face folders: exact round trips, precision, and saving whole or not at all."""

import dataclasses
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import DrafterConfig, Eagle3Config, InputError, MtpConfig
from dspark_jax.drafters import dspark, recurrent
from dspark_jax.drafters.kinds import kind_of
from dspark_jax.io import hf
from dspark_jax.targets import dense
from dspark_jax.vocabulary import with_vocabulary
from tests.dspark_jax.io.conftest import (
    DRAFTS,
    GEMMA4,
    GEMMA4_DRAFT,
    LLAMA,
    TARGET,
    edit_tensors,
    random_like,
    refused,
    same,
)


@pytest.mark.parametrize("cfg", [TARGET, LLAMA, GEMMA4], ids=["qwen3", "llama", "gemma4"])
def test_target_round_trip(cfg, tmp_path):
    params = random_like(dense.specs(cfg))
    hf.save_target(tmp_path / "t", cfg, params)
    found_cfg, found = hf.load_target(tmp_path / "t")
    assert found_cfg == cfg
    same(found, params)


@pytest.mark.parametrize("name", [*DRAFTS, "gemma4"])
def test_drafter_round_trip(name, saved):
    cfg, params = hf.load_drafter(saved / name)
    assert cfg == {**DRAFTS, "gemma4": GEMMA4_DRAFT}[name]
    same(params, random_like(dspark.specs(cfg)))


SIZES = {"num_layers": 1, "num_anchors": 8}
RECURRENT = {
    "eagle3": Eagle3Config.for_target(
        TARGET, block_size=3, target_layer_ids=(-1, 1), step_loss_decay=0.7, **SIZES
    ),
    "eagle3 with confidence": Eagle3Config.for_target(
        TARGET, block_size=3, target_layer_ids=(0, 1), confidence_head=True, **SIZES
    ),
    "mtp": MtpConfig.for_target(TARGET, confidence_head=True, **SIZES),
    "mtp of llama": MtpConfig.for_target(LLAMA, qk_norm=False, **SIZES),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_drafter_round_trip(name, tmp_path):
    cfg = RECURRENT[name]
    base = LLAMA if name.endswith("llama") else TARGET
    params = random_like(recurrent.specs(cfg))
    hf.save_drafter(tmp_path, cfg, params, target=(base, random_like(dense.specs(base))))
    found_cfg, found = hf.load_drafter(tmp_path)
    assert found_cfg == cfg
    same(found, params)
    tensors = load_file(tmp_path / "model.safetensors")
    inputs = 24 if name.startswith("eagle3") else 12
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (24, inputs)


IDS = np.array([3, 4, 9, 15, 19])


@pytest.fixture(scope="module")
def pruned_folders(tmp_path_factory):
    """A drafter of each kind that proposes five of twenty tokens; their folders by name."""
    root = tmp_path_factory.mktemp("pruned")
    for name, cfg in {"dspark": DRAFTS["vanilla"], **RECURRENT}.items():
        cfg = dataclasses.replace(cfg, draft_vocab_size=len(IDS))
        base = LLAMA if name.endswith("llama") else TARGET
        target = random_like(dense.specs(base))
        params = with_vocabulary(random_like(kind_of(cfg).specs(cfg)), target, IDS)
        hf.save_drafter(root / name, cfg, params, target=(base, target))
    return root


@pytest.mark.parametrize("name", ["dspark", *RECURRENT])
def test_pruned_vocabulary_round_trip(name, pruned_folders, tmp_path):
    """To the bit, and its tensors are as EAGLE-3 and speculators have them."""
    cfg, params = hf.load_drafter(pruned_folders / name)
    assert cfg.draft_vocab_size == 5
    base = LLAMA if name.endswith("llama") else TARGET
    hf.save_drafter(tmp_path, cfg, params, target=(base, random_like(dense.specs(base))))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (pruned_folders / name / file).read_bytes()
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64
    np.testing.assert_array_equal(tensors["d2t"], [3, 3, 7, 12, 15])
    assert tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), IDS)
    head = tensors["embed_tokens.weight" if base is LLAMA else "lm_head.weight"]
    assert tensors["lm_head.weight"].shape == (5, 12)
    if base is LLAMA:
        np.testing.assert_array_equal(tensors["lm_head.weight"], head[IDS])
    if name == "dspark":
        assert tensors["markov_head.markov_w1.weight"].shape == (20, 5)
        assert tensors["markov_head.markov_w2.weight"].shape == (5, 5)


@pytest.mark.parametrize("name", ["dspark", *RECURRENT])
def test_a_lean_drafter_has_its_head_from_the_target(name, pruned_folders, tmp_path):
    """Nothing that is the target's lies in its folder, and it is the same drafter all the same."""
    cfg, params = hf.load_drafter(pruned_folders / name)
    base = LLAMA if name.endswith("llama") else TARGET
    target = random_like(dense.specs(base))
    hf.save_drafter(tmp_path, cfg, params, target=(base, target), lean=True)
    kept = load_file(pruned_folders / name / "model.safetensors").keys()
    assert load_file(tmp_path / "model.safetensors").keys() == kept - {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    again, loaded = hf.load_drafter(tmp_path, target=target)
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    said = refused(hf.load_drafter, tmp_path)
    assert "no lm_head.weight in it, expected a drafter that is not lean" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"d2t": [3, 2, 7, 12, 15]}, "d2t gives token 3 to several draft ids"),
        ({"d2t": [3, 3, 7, 12, 16]}, "d2t gives draft id 4 the token 20, expected one in 0..19"),
        ({"d2t": [3, 3, 7, 12, 14]}, "t2d names other tokens than d2t"),
        ({"d2t": [3, 3]}, "tensor d2t has shape [2], expected [5]"),
        ({"d2t": None}, "tensor d2t is missing"),
    ],
)
def test_pruned_vocabularies_that_are_refused(pruned_folders, tmp_path, changes, said):
    folder = shutil.copytree(pruned_folders / "dspark", tmp_path / "d")

    def change(tensors):
        tensors |= {n: np.array(v, np.int64) for n, v in changes.items() if v is not None}
        return {n: v for n, v in tensors.items() if changes.get(n, 0) is not None}

    edit_tensors(folder, change)
    assert said in refused(hf.load_drafter, folder)


def test_gemma4_as_a_part_of_a_model_that_sees(saved, tmp_path, caplog):
    """Its configuration and tensors lie a level deeper, beside others that are left."""
    tensors = load_file(saved / "gemma4_target" / "model.safetensors")
    config = json.loads((saved / "gemma4_target" / "config.json").read_text())
    nested = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    nested["model.vision_tower.patch.weight"] = np.ones((2, 3), np.float32)
    save_file(nested, tmp_path / "model.safetensors")
    text = {k: v for k, v in config.items() if k not in ("architectures", "eos_token_id")}
    whole = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "eos_token_id": [1, 7],
        "hidden_size": 99,
        "text_config": {**text, "use_bidirectional_attention": "vision"},
        "vision_config": {"hidden_size": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    cfg, params = hf.load_target(tmp_path)
    assert cfg == GEMMA4
    same(params, random_like(dense.specs(GEMMA4)))
    assert not caplog.records


GOLDEN_TARGETS = [
    "qwen3_target",
    "llama_target_tied",
    "llama_target_llama3rope",
    "gemma4_target",
]


@pytest.mark.parametrize("name", GOLDEN_TARGETS)
def test_golden_target_round_trip(golden, name, tmp_path):
    hf.save_target(tmp_path, *hf.load_target(golden / name))
    compare_folders(golden / name, tmp_path)


GOLDEN_DRAFTERS = {
    "dspark_qwen3_vanilla": "qwen3_target",
    "dspark_qwen3_rnn": "qwen3_target",
    "dspark_qwen3_gated": "qwen3_target",
    "dspark_qwen3_dflash": "qwen3_target",
    "eagle3_qwen3": "qwen3_target",
    "dspark_gemma4_vanilla": "gemma4_target",
}


@pytest.mark.parametrize("name", GOLDEN_DRAFTERS)
def test_golden_drafter_round_trip(golden, name, tmp_path):
    source = golden / name
    target = hf.load_target(golden / GOLDEN_DRAFTERS[name])
    hf.save_drafter(tmp_path, *hf.load_drafter(source), target=target)
    compare_folders(source, tmp_path)


def compare_folders(source, copy):
    """Every tensor to the bit, and every configuration key that is not about transformers."""
    expected, found = (load_file(f / "model.safetensors") for f in (source, copy))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tobytes() == tensor.tobytes(), name
    expected, found = (json.loads((f / "config.json").read_text()) for f in (source, copy))
    # What is left out has no bearing on inference with the released engines' readers.
    unused = {
        "attention_dropout",
        "bos_token_id",
        "initializer_range",
        "layer_types",
        "max_window_layers",
        "mlp_bias",
        "pad_token_id",
        "pretraining_tp",
        "sliding_window",
        "target_model_name_or_path",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
        "vocab_size_per_layer_input",
    }
    for key in expected.keys() - unused:
        value = [expected[key]] if key == "eos_token_id" else expected[key]
        if key == "rope_parameters":  # of Gemma4 drafters the reference writes defaults beside them
            value = {k: v for k, v in value.items() if k in found[key]}
        assert found.get(key) == value, key
    if "layer_types" in found:
        assert found["layer_types"] == expected["layer_types"]


def test_a_tied_target_gives_a_drafter_its_head(tmp_path):
    target = LLAMA, random_like(dense.specs(LLAMA))
    cfg = DrafterConfig.for_target(
        LLAMA,
        num_layers=1,
        block_size=2,
        mask_token_id=0,
        target_layer_ids=(0,),
        markov_rank=2,
    )
    hf.save_drafter(tmp_path, cfg, random_like(dspark.specs(cfg)), target=target)
    tensors = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
    assert hf.load_drafter(tmp_path)[0] == cfg
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_low_precision_files(stored, tmp_path):
    params = random_like(dense.specs(TARGET), stored)
    hf.save_target(tmp_path, TARGET, params)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == jnp.dtype(stored).name
    same(hf.load_target(tmp_path, dtype=stored)[1], params)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    same(hf.load_target(tmp_path)[1], wide)


def test_cast_at_loading_and_at_saving(saved, tmp_path):
    cfg, params = hf.load_target(saved / "target", dtype=jnp.bfloat16)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    wide = hf.load_target(saved / "target")[1]
    hf.save_target(tmp_path, cfg, wide, dtype=jnp.bfloat16)
    same(hf.load_target(tmp_path, dtype=jnp.bfloat16)[1], params)


def test_a_tied_checkpoint_may_hold_its_head_all_the_same(tmp_path, caplog):
    hf.save_target(tmp_path, LLAMA, random_like(dense.specs(LLAMA)))
    embed = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda t: {**t, "lm_head.weight": t[embed].copy()})
    cfg, params = hf.load_target(tmp_path)
    assert cfg.tie_embeddings
    assert params.lm_head is None
    assert not caplog.records


def test_saving_replaces_and_leaves_nothing_behind(saved, tmp_path):
    cfg, params = hf.load_target(saved / "target")
    hf.save_target(tmp_path, cfg, params)
    changed = dataclasses.replace(params, norm=params.norm + 1)
    hf.save_target(tmp_path, cfg, changed)
    same(hf.load_target(tmp_path)[1], changed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_drafter_that_does_not_fit_is_not_written(saved, tmp_path):
    cfg, params = hf.load_drafter(saved / "vanilla")
    other = dataclasses.replace(TARGET, hidden_size=16)
    with pytest.raises(InputError, match="does not fit the target: hidden_size is 12"):
        hf.save_drafter(tmp_path / "d", cfg, params, target=(other, None))
    assert not (tmp_path / "d").exists()


def test_unknown_layout(saved, tmp_path):
    cfg, params = hf.load_drafter(saved / "vanilla")
    target = hf.load_target(saved / "target")
    with pytest.raises(InputError, match="layout='gguf': expected one of deepspec, speculators"):
        hf.save_drafter(tmp_path, cfg, params, target=target, layout="gguf")


def test_confidence_head_without_weights_is_switched_off(draft_folder, caplog):
    def without(tensors):
        return {n: v for n, v in tensors.items() if not n.startswith("confidence_head")}

    edit_tensors(draft_folder, without)
    with caplog.at_level(logging.WARNING):
        cfg, params = hf.load_drafter(draft_folder)
    assert not cfg.confidence_head
    assert params.confidence is None
    (record,) = caplog.records
    assert "the confidence head is off" in record.getMessage()
