"""Names and orientation of tensors, as other engines have them."""

import numpy as np
from safetensors.numpy import load_file

from dspark_jax.io import hf


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
