"""Layouts of other engines: the keys and tensors written down, exact round trips, refusals."""

import json
import shutil
from typing import get_args

import pytest
from safetensors.numpy import load_file

from dspark_jax.config import InputError
from dspark_jax.io import dialects, hf
from tests.dspark_jax.io.conftest import DRAFTS, GEMMA4_DRAFT, refused, same

OTHERS = ("speculators", "sglang")
LAYER_TENSORS = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def folders(saved, tmp_path_factory):
    """`folders(name, layout)`: a drafter as that layout has it."""
    root = tmp_path_factory.mktemp("dialects")

    def folder(name, layout):
        if layout == "deepspec":
            return saved / name
        path = root / f"{name}-{layout}"
        if not path.exists():
            target = hf.load_target(saved / ("gemma4_target" if name == "gemma4" else "target"))
            hf.save_drafter(
                path, *hf.load_drafter(saved / name), target=target, layout=layout,
                target_name="org/target",
            )  # fmt: skip
        return path

    return folder


def test_speculators_as_written_down(folders):
    found = config(folders("rnn", "speculators"))
    layers = found.pop("transformer_layer_config")
    assert found == {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "draft_vocab_size": 20,
        "target_hidden_size": 12,
        "aux_hidden_state_layer_ids": [0, 2],  # the embedding output, and layer 1
        "sample_from_anchor": True,
        "block_size": 4,
        "mask_token_id": 19,
        "num_anchors": 16,
        "num_target_layers": 3,
        "markov_rank": 5,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert layers["model_type"] == "qwen3"
    assert layers["layer_types"] == ["full_attention"] * 2
    assert (layers["num_hidden_layers"], layers["vocab_size"], layers["head_dim"]) == (2, 20, 6)
    assert layers.keys().isdisjoint({"architectures", "target_layer_ids", "block_size"})


def test_sglang_as_written_down(folders):
    found, plain = config(folders("vanilla", "sglang")), config(folders("vanilla", "deepspec"))
    assert found.pop("dflash_config") == {
        "projector_type": "dspark",
        "target_layer_ids": [-1, 1],
        "block_size": 4,
        "mask_token_id": 19,
        "num_target_layers": 3,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert found == plain
    assert found["architectures"] == ["Qwen3DSparkModel"]


@pytest.mark.parametrize("layout", get_args(dialects.Layout))
def test_tensors_as_written_down(folders, layout):
    shapes = {
        "vanilla": {},
        "gated": {"markov_head.gate_proj.weight": (5, 17), "markov_head.gate_proj.bias": (5,)},
        "rnn": {"markov_head.joint_proj.weight": (15, 22), "markov_head.joint_proj.bias": (15,)},
    }
    for name, own in shapes.items():
        tensors = load_file(folders(name, layout) / "model.safetensors")
        expected = {
            "embed_tokens.weight", "lm_head.weight", "fc.weight", "hidden_norm.weight",
            "norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
            "confidence_head.proj.weight", "confidence_head.proj.bias", *own,
        }  # fmt: skip
        expected |= {f"layers.{i}.{tensor}.weight" for i in (0, 1) for tensor in LAYER_TENSORS}
        assert tensors.keys() == expected
        assert {n: tensors[n].shape for n in own} == own
        assert tensors["markov_head.markov_w2.weight"].shape == (20, 5)
        assert tensors["fc.weight"].shape == (12, 24)
        width = 12 if name == "rnn" else 17
        assert tensors["confidence_head.proj.weight"].shape == (1, width)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(n, layout) for n in DRAFTS for layout in OTHERS if (n, layout) != ("none", "sglang")]
    + [("gemma4", "sglang")],
)
def test_there_and_back(folders, saved, name, layout, tmp_path):
    """Configuration, parameters, and the folder in the DeepSpec layout again, to the bit."""
    folder = folders(name, layout)
    cfg, params = hf.load_drafter(folder)
    assert cfg == {**DRAFTS, "gemma4": GEMMA4_DRAFT}[name]
    same(params, hf.load_drafter(saved / name)[1])
    target = hf.load_target(saved / ("gemma4_target" if name == "gemma4" else "target"))
    hf.save_drafter(tmp_path, cfg, params, target=target)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / file).read_bytes() == (saved / name / file).read_bytes()
    translated = dialects.to_deepspec(config(folder), "here")
    assert translated == config(saved / name)


@pytest.mark.parametrize("name", ["vanilla", "rnn", "gated", "dflash"])
def test_golden_drafters_there_and_back(golden, name, tmp_path):
    source, other = golden / f"dspark_qwen3_{name}", tmp_path / "speculators"
    target = hf.load_target(golden / "qwen3_target")
    hf.save_drafter(other, *hf.load_drafter(source), target=target, layout="speculators")
    hf.save_drafter(tmp_path / "again", *hf.load_drafter(other), target=target)
    expected, found = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "again")
    )
    assert found.keys() == expected.keys()
    assert all(found[n].tobytes() == tensor.tobytes() for n, tensor in expected.items())


def test_what_an_engine_does_not_know_is_not_written(saved, tmp_path):
    for name, target, layout, said in (
        ("gemma4", "gemma4_target", "speculators", "this is a Gemma4DSparkModel"),
        ("none", "target", "sglang", "expected a drafter with a sequential head"),
    ):
        with pytest.raises(InputError, match=said):
            hf.save_drafter(
                tmp_path / name, *hf.load_drafter(saved / name),
                target=hf.load_target(saved / target), layout=layout,
            )  # fmt: skip
        assert not (tmp_path / name).exists()


def test_a_drafter_that_says_it_all_in_dflash_config(folders, tmp_path):
    folder = shutil.copytree(folders("vanilla", "sglang"), tmp_path / "draft")
    values = config(folder)
    for name in dialects.INNER_KEYS:
        del values[name]
    values["architectures"] = ["DSparkDraftModel"]
    (folder / "config.json").write_text(json.dumps(values))
    cfg, params = hf.load_drafter(folder)
    assert cfg == DRAFTS["vanilla"]
    same(params, hf.load_drafter(folders("vanilla", "deepspec"))[1])


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("speculators", {"speculators_model_type": "eagle3"}, "='eagle3', expected 'dspark'"),
        ("speculators", {"transformer_layer_config": None}, "with model_type 'qwen3'"),
        ("speculators", {"transformer_layer_config": {"model_type": "llama"}}, "'qwen3'"),
        ("speculators", {"sample_from_anchor": False}, "sample_from_anchor=False, expected true"),
        ("speculators", {"draft_vocab_size": 8}, "tensor d2t is missing"),
        ("speculators", {"target_hidden_size": 8}, "target_hidden_size=8, expected 12"),
        ("speculators", {"markov_rank": None}, "markov_rank is missing"),
        ("speculators", {"enable_confidence_head": None}, "enable_confidence_head is missing"),
        ("speculators", {"num_target_layers": None}, "num_target_layers is missing"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "=None, expected a list"),
        ("speculators", {"aux_hidden_state_layer_ids": [1, "2"]}, "expected a list of whole"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 3]}, "layer, 2, cannot be tapped"),
        ("speculators", {"mask_token_id": None}, "mask_token_id is missing"),
        ("sglang", {"dflash_config": [1]}, "dflash_config=[1], expected dict"),
        ("sglang", {"dflash_config": {"projector_type": "domino"}}, "'domino', expected 'dspark'"),
        ("sglang", {"block_size": 3}, "block_size is 3, and 4 in dflash_config: expected one"),
        ("sglang", {"architectures": ["DFlashDraftModel"]}, "'DFlashDraftModel' is not known"),
        ("sglang", {"model_type": "deepseek_v4", "architectures": ["DSparkDraftModel"]},
         "'DSparkDraftModel' is not known"),
    ],
)  # fmt: skip
def test_wrong_folders(folders, tmp_path, layout, changes, said):
    folder = shutil.copytree(folders("vanilla", layout), tmp_path / "draft")
    (folder / "config.json").write_text(json.dumps({**config(folder), **changes}))
    assert said in refused(hf.load_drafter, folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "eagle3"}, "speculators_config: algorithm='eagle3', expected 'dspark'"),
        ({"proposal_methods": {}}, "proposal_methods={}, expected a list of dicts"),
        ({"default_proposal_method": "tree"}, "='tree', expected one of the proposal_methods, ['"),
        ({"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]},
         "speculative_tokens=5, expected a number in 1..4, as of block_size"),
        ({"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": "4"}]},
         "speculative_tokens='4', expected a number in 1..4"),
        ({"verifier": "org/target"}, "verifier='org/target', expected dict"),
        ({"verifier": {"architectures": ["Gemma4ForCausalLM"]}},
         "verifier: architectures=['Gemma4ForCausalLM'], expected Qwen3ForCausalLM or Llama"),
        ({"verifier": {"hidden_size": 16}}, "hidden_size=16, expected 12, as of the layers"),
    ],
)  # fmt: skip
def test_speculators_config_contradicts_the_rest(folders, tmp_path, changes, said):
    folder = shutil.copytree(folders("vanilla", "speculators"), tmp_path / "draft")
    values = config(folder)
    values["speculators_config"] |= changes
    (folder / "config.json").write_text(json.dumps(values))
    assert said in refused(hf.load_drafter, folder)


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None}},
    ],
)
def test_speculators_config_that_says_less(folders, tmp_path, said):
    folder = shutil.copytree(folders("vanilla", "speculators"), tmp_path / "draft")
    (folder / "config.json").write_text(json.dumps({**config(folder), "speculators_config": said}))
    assert hf.load_drafter(folder)[0] == DRAFTS["vanilla"]
