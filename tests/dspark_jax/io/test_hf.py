"""Hugging Face folders: exact round trips, every way of storing, and a line for what is wrong."""

import dataclasses
import json
import logging
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import DrafterConfig, InputError, Rope, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.io import files, hf, model_config
from dspark_jax.targets import dense

TARGET = TargetConfig(
    vocab_size=20,
    hidden_size=12,
    intermediate_size=10,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope=Rope(theta=5e5),
    max_position=128,
    stop_token_ids=(1, 7),
)
LLAMA = dataclasses.replace(
    TARGET,
    model_type="llama",
    tie_embeddings=True,
    rope=Rope(5e5, "llama3", 8.0, 1.0, 4.0, original_max_position=32),
    norm_eps=1e-5,
)
DRAFT = DrafterConfig.for_target(
    TARGET,
    num_layers=2,
    block_size=4,
    mask_token_id=19,
    target_layer_ids=(-1, 1),
    markov_rank=5,
    num_anchors=16,
)
NO_CONFIDENCE = {"confidence_head": False, "confidence_with_markov": False}
DRAFTS = {
    "vanilla": DRAFT,
    "gated": dataclasses.replace(DRAFT, head="gated"),
    "rnn": dataclasses.replace(DRAFT, head="rnn", confidence_with_markov=False),
    "none": dataclasses.replace(DRAFT, head="none", markov_rank=0, **NO_CONFIDENCE),
}


def random_like(specs, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), dtype), specs)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)

    def check(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    jax.tree.map(check, a, b)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Folders with a target and one drafter of each head."""
    root = tmp_path_factory.mktemp("hf")
    target = TARGET, random_like(dense.specs(TARGET))
    hf.save_target(root / "target", *target)
    for name, cfg in DRAFTS.items():
        hf.save_drafter(root / name, cfg, random_like(dspark.specs(cfg)), target=target)
    return root


@pytest.fixture
def target_folder(saved, tmp_path):
    return shutil.copytree(saved / "target", tmp_path / "target")


@pytest.fixture
def draft_folder(saved, tmp_path):
    return shutil.copytree(saved / "vanilla", tmp_path / "draft")


def edit_config(folder, *, drop=(), **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in drop}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def shard(folder, parts=3):
    """The folder's one file as several with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = {n: t for j, (n, t) in enumerate(sorted(tensors.items())) if j % parts == i}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def refused(load, folder) -> str:
    """The message of the `InputError` that loading raises: one line that names the folder."""
    with pytest.raises(InputError) as error:
        load(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


# --- Round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [TARGET, LLAMA], ids=["qwen3", "llama"])
def test_target_round_trip(cfg, tmp_path):
    params = random_like(dense.specs(cfg))
    hf.save_target(tmp_path / "t", cfg, params)
    found_cfg, found = hf.load_target(tmp_path / "t")
    assert found_cfg == cfg
    same(found, params)


@pytest.mark.parametrize("name", DRAFTS)
def test_drafter_round_trip(name, saved):
    cfg, params = hf.load_drafter(saved / name)
    assert cfg == DRAFTS[name]
    same(params, random_like(dspark.specs(cfg)))


@pytest.mark.parametrize("name", ["qwen3_target", "llama_target_tied", "llama_target_llama3rope"])
def test_golden_target_round_trip(golden, name, tmp_path):
    hf.save_target(tmp_path, *hf.load_target(golden / name))
    compare_folders(golden / name, tmp_path)


@pytest.mark.parametrize("name", ["vanilla", "rnn", "gated", "dflash"])
def test_golden_drafter_round_trip(golden, name, tmp_path):
    source = golden / f"dspark_qwen3_{name}"
    target = hf.load_target(golden / "qwen3_target")
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
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
    for key in expected.keys() - unused:
        value = [expected[key]] if key == "eos_token_id" else expected[key]
        assert found[key] == value, key
    if "layer_types" in found:
        assert found["layer_types"] == expected["layer_types"]


def test_layout_of_the_tensors(saved):
    """Names and orientation, out by in, of what other engines read."""
    tensors = load_file(saved / "gated" / "model.safetensors")
    shapes = {name: list(t.shape) for name, t in tensors.items() if not name.startswith("layers.1")}
    assert shapes == {
        "embed_tokens.weight": [20, 12],
        "lm_head.weight": [20, 12],
        "fc.weight": [12, 24],
        "hidden_norm.weight": [12],
        "norm.weight": [12],
        "layers.0.input_layernorm.weight": [12],
        "layers.0.post_attention_layernorm.weight": [12],
        "layers.0.self_attn.q_proj.weight": [24, 12],
        "layers.0.self_attn.k_proj.weight": [12, 12],
        "layers.0.self_attn.v_proj.weight": [12, 12],
        "layers.0.self_attn.o_proj.weight": [12, 24],
        "layers.0.self_attn.q_norm.weight": [6],
        "layers.0.self_attn.k_norm.weight": [6],
        "layers.0.mlp.gate_proj.weight": [10, 12],
        "layers.0.mlp.up_proj.weight": [10, 12],
        "layers.0.mlp.down_proj.weight": [12, 10],
        "markov_head.markov_w1.weight": [20, 5],
        "markov_head.markov_w2.weight": [20, 5],
        "markov_head.gate_proj.weight": [5, 17],
        "markov_head.gate_proj.bias": [5],
        "confidence_head.proj.weight": [1, 17],
        "confidence_head.proj.bias": [1],
    }


def test_query_heads_keep_their_place(saved):
    """Head g * M + m of q_proj is query m of key/value head g."""
    tensors = load_file(saved / "target" / "model.safetensors")
    _, params = hf.load_target(saved / "target")
    q = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(2, 2, 6, 12)
    k = tensors["model.layers.1.self_attn.k_proj.weight"].reshape(2, 6, 12)
    v = tensors["model.layers.1.self_attn.v_proj.weight"].reshape(2, 6, 12)
    qkv = np.asarray(params.layers[1].qkv)  # [D, G, M + 2, H]
    for g in range(2):
        for m in range(2):
            np.testing.assert_array_equal(qkv[:, g, m], q[g, m].T)
        np.testing.assert_array_equal(qkv[:, g, 2], k[g].T)
        np.testing.assert_array_equal(qkv[:, g, 3], v[g].T)


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


# --- Ways of storing -------------------------------------------------------------------------


def test_shards(target_folder, saved):
    shard(target_folder)
    cfg, params = hf.load_target(target_folder)
    expected_cfg, expected = hf.load_target(saved / "target")
    assert cfg == expected_cfg
    same(params, expected)


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


def test_shardings(saved):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    places = jax.tree.map(lambda s: split if s.shape == (20, 12) else whole, dense.specs(TARGET))
    _, params = hf.load_target(saved / "target", shardings=places)
    assert params.embed.sharding == split
    assert params.embed.addressable_shards[0].data.shape == (20, 6)
    assert params.norm.sharding == whole
    expected = hf.load_target(saved / "target")[1]
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_tied_checkpoint_may_hold_its_head_all_the_same(tmp_path, caplog):
    hf.save_target(tmp_path, LLAMA, random_like(dense.specs(LLAMA)))
    embed = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda t: {**t, "lm_head.weight": t[embed].copy()})
    cfg, params = hf.load_target(tmp_path)
    assert cfg.tie_embeddings
    assert params.lm_head is None
    assert not caplog.records


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
    edit_config(target_folder, drop=["eos_token_id"])
    (target_folder / "generation_config.json").unlink()
    assert model_config.load_target_config(target_folder).stop_token_ids == ()


def test_defaults_of_a_sparse_config(target_folder):
    drop = ["tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta"]
    edit_config(target_folder, drop=drop, rms_norm_eps=1e-6)
    cfg = model_config.load_target_config(target_folder)
    assert not cfg.tie_embeddings
    assert cfg.rope == Rope()


# --- Saving ----------------------------------------------------------------------------------


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
    with pytest.raises(InputError, match="layout='gguf': expected 'deepspec'"):
        hf.save_drafter(tmp_path, cfg, params, target=target, layout="gguf")


# --- Bad folders -----------------------------------------------------------------------------

LOADERS = pytest.mark.parametrize("load", [hf.load_target, hf.load_drafter])


@LOADERS
def test_no_folder(load, tmp_path):
    assert refused(load, tmp_path / "absent").endswith("absent: no such folder")


@LOADERS
def test_a_file_is_no_folder(load, tmp_path):
    (tmp_path / "file").write_text("")
    assert "no such folder" in refused(load, tmp_path / "file")


@LOADERS
def test_no_config(load, tmp_path):
    assert "no config.json" in refused(load, tmp_path)


@LOADERS
@pytest.mark.parametrize("text", ["{", "", "[1]", "null", '{"a": 1,}'])
def test_malformed_config(load, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "JSON" in refused(load, tmp_path)


def test_config_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not valid JSON" in refused(hf.load_target, tmp_path)


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
    assert "expected Qwen3DSparkModel" in message
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
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn', expected default or"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope theta=0, expected a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters=[1], expected dict"),
        ({"rope_parameters": None, "rope_scaling": "x"}, "rope_scaling='x', expected dict"),
        ({"eos_token_id": ["a"]}, "eos_token_id=['a'], expected ids"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', expected bool"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x', expected float or int"),
    ],
)
def test_bad_target_config(target_folder, changes, said):
    edit_config(target_folder, **changes)
    assert said in refused(hf.load_target, target_folder)


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
    ],
)
def test_bad_drafter_config(draft_folder, changes, said):
    edit_config(draft_folder, **changes)
    message = refused(hf.load_drafter, draft_folder)
    assert said in message
    assert str(draft_folder / "config.json") in message


@LOADERS
def test_no_weights(load, target_folder, draft_folder):
    folder = target_folder if load is hf.load_target else draft_folder
    (folder / "model.safetensors").unlink()
    assert "expected model.safetensors or model.safetensors.index.json" in refused(load, folder)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_file(target_folder, size):
    path = target_folder / "model.safetensors"
    assert path.stat().st_size > size
    path.write_bytes(path.read_bytes()[:size])
    message = refused(hf.load_target, target_folder)
    assert f"{path}: not a whole safetensors file" in message


def test_truncated_shard(target_folder):
    file = sorted(set(shard(target_folder).values()))[1]
    path = target_folder / file
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: not a whole safetensors file" in refused(hf.load_target, target_folder)


def test_missing_shard(target_folder):
    file = sorted(set(shard(target_folder).values()))[2]
    (target_folder / file).unlink()
    message = refused(hf.load_target, target_folder)
    assert message == f"{target_folder / file}: shard is missing, but the index names it"


def test_index_that_names_a_tensor_its_shard_lacks(target_folder):
    weight_map = shard(target_folder)
    other = next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    write_index(target_folder, {**weight_map, "model.norm.weight": other})
    message = refused(hf.load_target, target_folder)
    assert "tensor model.norm.weight is missing, but the index names it" in message


@pytest.mark.parametrize("text", ["{}", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_bad_index(target_folder, text):
    (target_folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(hf.load_target, target_folder)


def test_index_that_points_elsewhere(target_folder):
    write_index(target_folder, {"model.norm.weight": "../secret.safetensors"})
    assert "files beside it" in refused(hf.load_target, target_folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.k_norm.weight"])
def test_missing_tensor(target_folder, name):
    edit_tensors(target_folder, lambda t: {n: v for n, v in t.items() if n != name})
    assert refused(hf.load_target, target_folder).endswith(f": tensor {name} is missing")


def test_missing_tensor_of_a_drafter(draft_folder):
    name = "markov_head.markov_w2.weight"
    edit_tensors(draft_folder, lambda t: {n: v for n, v in t.items() if n != name})
    assert refused(hf.load_drafter, draft_folder).endswith(f": tensor {name} is missing")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (12, 12)),
        ("layers.1.self_attn.q_proj.weight", (12, 24)),
        ("norm.weight", (1, 12)),
        ("confidence_head.proj.weight", (1, 12)),
    ],
)
def test_wrong_shape(draft_folder, name, shape):
    right = list(load_file(draft_folder / "model.safetensors")[name].shape)
    edit_tensors(draft_folder, lambda t: {**t, name: np.zeros(shape, np.float32)})
    message = refused(hf.load_drafter, draft_folder)
    assert message.endswith(f"tensor {name} has shape {list(shape)}, expected {right}")


def test_extra_tensors_are_named_once_and_ignored(draft_folder, saved, caplog):
    extra = {name: np.zeros(2, np.float32) for name in ("new.b", "new.a")}
    inverse = {"layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    edit_tensors(draft_folder, lambda t: {**t, **extra, **inverse})
    with caplog.at_level(logging.WARNING):
        _, params = hf.load_drafter(draft_folder)
    same(params, hf.load_drafter(saved / "vanilla")[1])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{draft_folder}: ignoring unknown tensors new.a, new.b"]


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


def test_hub_repository_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"^some/model: .*install dspark_jax\[hub\]$"):
        hf.load_target("some/model")


def test_hub_that_does_not_answer(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(name, **_):
        raise ConnectionError("unreachable\nsecond line")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(InputError) as error:
        files.resolve("some/model")
    assert str(error.value) == "some/model: no such folder, and the hub said: unreachable"
