"""config.json: what is read from one, what is written, and a line for what is wrong."""

import json
import math
import shutil

import pytest

from dspark_jax.config import Rope
from dspark_jax.io import hf, model_config
from tests.dspark_jax.io.conftest import LLAMA, LOADERS, TARGET, edit_config, refused


def test_drafter_config_has_the_target_in_it(saved):
    values = json.loads((saved / "rnn" / "config.json").read_text())
    assert values["architectures"] == ["Qwen3DSparkModel"]
    assert values["num_hidden_layers"] == 2
    assert values["num_target_layers"] == 3
    assert values["layer_types"] == ["full_attention"] * 2
    assert values["max_position_embeddings"] == 128
    assert values["eos_token_id"] == [1, 7]
    assert values["tie_word_embeddings"] is False
    assert values["confidence_head_with_markov"] is False
    dflash = json.loads((saved / "none" / "config.json").read_text())
    assert dflash["markov_rank"] == 0
    assert "markov_head_type" not in dflash
    assert "confidence_head_with_markov" not in dflash


def test_theta_beside_the_other_parameters_of_rope(target_folder):
    edit_config(target_folder, rope_parameters={"rope_type": "default"}, rope_theta=7.0)
    assert model_config.load_target_config(target_folder).rope == Rope(theta=7.0)
    edit_config(target_folder, rope_parameters={"rope_theta": 8.0})
    said = refused(model_config.load_target_config, target_folder)
    assert "rope_theta is 7.0, and 8.0 in rope_parameters: expected one value" in said
    edit_config(target_folder, rope_theta=None)
    assert model_config.load_target_config(target_folder).rope == Rope(theta=8.0)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (TARGET.rope, {}),
        (
            LLAMA.rope,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
    ids=["default", "llama3"],
)
def test_rope_of_older_files(target_folder, rope, scaling):
    edit_config(target_folder, drop=["rope_parameters"], rope_scaling=scaling or None)
    assert model_config.load_target_config(target_folder).rope == rope


def test_stop_tokens(target_folder):
    assert model_config.load_target_config(target_folder).stop_token_ids == (1, 7)
    edit_config(target_folder, eos_token_id=3)
    assert model_config.load_target_config(target_folder).stop_token_ids == (3,)
    (target_folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert model_config.load_target_config(target_folder).stop_token_ids == (4, 5)
    (target_folder / "generation_config.json").write_text('{"eos_token_id": 20}')
    message = refused(hf.load_target, target_folder)
    assert "generation_config.json: eos_token_id=20, expected an id in 0..19" in message
    edit_config(target_folder, drop=["eos_token_id"])
    (target_folder / "generation_config.json").unlink()
    assert model_config.load_target_config(target_folder).stop_token_ids == ()


def test_defaults_of_a_sparse_config(target_folder):
    drop = ["tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta"]
    edit_config(target_folder, drop=drop, rms_norm_eps=1e-6)
    cfg = model_config.load_target_config(target_folder)
    assert not cfg.tie_embeddings
    assert cfg.rope == Rope()


@LOADERS
def test_no_config(load, tmp_path):
    assert "no config.json" in refused(load, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["LlamaForCausalLM"]},  # with model_type qwen3
        {"architectures": []},
        {"model_type": ["qwen3"]},
    ],
)
def test_unknown_target_architecture(target_folder, changes):
    edit_config(target_folder, **changes)
    message = refused(hf.load_target, target_folder)
    assert "expected one of Qwen3ForCausalLM, LlamaForCausalLM" in message


def test_unknown_drafter_architecture(draft_folder, target_folder):
    edit_config(draft_folder, architectures=["DSparkDraftModel"])
    message = refused(hf.load_drafter, draft_folder)
    assert "'DSparkDraftModel'" in message
    assert "expected one of Qwen3DSparkModel, Gemma4DSparkModel, Qwen3Eagle3Model" in message
    assert "'Qwen3ForCausalLM'" in refused(hf.load_drafter, target_folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM', expected list"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "12"}, "hidden_size='12', expected int"),
        ({"hidden_size": True}, "hidden_size=True, expected int"),
        ({"num_hidden_layers": 0}, "num_layers=0: expected a whole number above 0"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
        ({"num_attention_heads": 0}, "num_heads=0"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope type 'yarn', expected default, llama3",
        ),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0, expected a number above 0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0, expected a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4', expected a number above 0"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta=inf, expected a number above"),
        ({"rope_parameters": [1]}, "rope_parameters=[1], expected dict"),
        ({"rope_parameters": None, "rope_scaling": "x"}, "rope_scaling='x', expected dict"),
        ({"eos_token_id": ["a"]}, "config.json: eos_token_id=['a'], expected an id in 0..19 or a"),
        ({"eos_token_id": 1.0}, "eos_token_id=1.0, expected an id"),
        ({"eos_token_id": True}, "eos_token_id=True, expected an id"),
        ({"eos_token_id": [1, 20]}, "eos_token_id=[1, 20], expected an id in 0..19 or a list"),
        ({"eos_token_id": -1}, "eos_token_id=-1, expected an id in 0..19"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', expected bool"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x', expected float or int"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0, expected a number above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06, expected a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan, expected a number above 0"),
        ({"max_position_embeddings": -4}, "max_position_embeddings=-4, expected a number above 0"),
    ],
)
def test_bad_target_config(target_folder, changes, said):
    edit_config(target_folder, **changes)
    assert said in refused(hf.load_target, target_folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": None}, "layer_types is missing"),
        ({"layer_types": ["full_attention"] * 2}, "expected full_attention or sliding_attention"),
        ({"layer_types": ["full_attention"] * 2 + ["linear"]}, "for each layer"),
        ({"global_head_dim": None}, "global_head_dim is missing"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding window 0: expected a number above 0"),
        ({"head_dim": 7}, "head_dim=7: expected an even number"),
        ({"attention_k_eq_v": False}, "k_proj.weight has shape [8, 12], expected [16, 12]"),
        ({"enable_moe_block": True}, "enable_moe_block=True is not supported"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8 is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 is not supported"),
        ({"use_bidirectional_attention": "all"}, "='all' is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "sliding_attention is missing in it"),
        ({"rope_parameters": {"sliding_attention": {}}}, "full_attention is missing in it"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping='x', expected float or int"),
        ({"final_logit_softcapping": 0}, "logit_softcap=0: expected a number above 0"),
    ],
)
def test_bad_gemma4_config(saved, tmp_path, changes, said):
    folder = shutil.copytree(saved / "gemma4_target", tmp_path / "target")
    edit_config(folder, **changes)
    assert said in refused(hf.load_target, folder)


def test_stop_tokens_of_a_nested_gemma4(saved, tmp_path):
    """What the whole model says goes before what its text model says."""
    folder = shutil.copytree(saved / "gemma4_target", tmp_path / "target")
    edit_config(folder, eos_token_id=[1, 4], text_config={"eos_token_id": 1})
    assert model_config.load_target_config(folder).stop_token_ids == (1, 4)
    edit_config(folder, drop=["eos_token_id"])
    assert model_config.load_target_config(folder).stop_token_ids == (1,)


def test_gemma4_drafters_have_full_layers_alone(saved, tmp_path):
    folder = shutil.copytree(saved / "gemma4", tmp_path / "draft")
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["Gemma4DSparkModel"]
    assert values["layer_types"] == ["full_attention"] * 2
    assert (values["head_dim"], values["global_head_dim"], values["sliding_window"]) == (6, 8, 4)
    edit_config(folder, layer_types=["full_attention", "sliding_attention"])
    message = refused(hf.load_drafter, folder)
    assert "layer_types: sliding_attention is not supported in a drafter" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [0, 2]}, "the last layer, 2, cannot be tapped"),
        ({"target_layer_ids": [0, 9]}, "target_layer_ids=[0, 9]: expected different layers"),
        ({"target_layer_ids": [-2, 0]}, "target_layer_ids=[-2, 0]"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids=[1, 1]"),
        ({"target_layer_ids": [0, "1"]}, "expected a list of whole numbers"),
        ({"target_layer_ids": 1}, "target_layer_ids=1, expected list"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"markov_rank": 0}, "markov_rank=0 with a confidence head"),
        ({"markov_rank": -2}, "markov_rank=-2"),
        ({"markov_head_type": "lstm"}, "head='lstm': expected one of none, vanilla, gated, rnn"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": -1}, "block_size=-1"),
        ({"block_size": None}, "block_size is missing"),
        ({"mask_token_id": 20}, "mask_token_id=20: expected an id in 0..19"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"num_anchors": 0}, "num_anchors=0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1, expected a number above 0"),
        ({"rope_theta": 0}, "rope_theta=0, expected a number above 0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "is not supported in a drafter"),
    ],
)
def test_bad_drafter_config(draft_folder, changes, said):
    edit_config(draft_folder, **changes)
    message = refused(hf.load_drafter, draft_folder)
    assert said in message
    assert str(draft_folder / "config.json") in message
