"""What training uses of the machine: memory, and arithmetic as a part of what there is."""

from __future__ import annotations

import math
import resource
import sys
from typing import Any

import jax

from dspark_jax.config import TransformerConfig
from dspark_jax.drafters import dspark
from dspark_jax.targets import dense
from train.step import StepConfig

PEAK_FLOPS = {
    # Dense bfloat16 operations a second of a device, from the makers' data sheets:
    # cloud.google.com/tpu/docs (v4, v5e, v5p, v6e) and nvidia.com (A100, H100, H200, L4).
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
}


def peak_flops(devices: list[jax.Device], given: float | None) -> float | None:
    """Operations a second of these devices: `given` or the table's for each; None if unknown."""
    each = PEAK_FLOPS.get(devices[0].device_kind) if given is None else given
    return None if each is None else each * len(devices)


def peak_memory() -> int:
    """Most bytes in use so far: of the fullest local device, or of this process on a CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if used:
        return max(used)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def step_flops(cfg: StepConfig, batch: int, length: int) -> float:
    """Operations of the matrix products that a step must make; what is made again is not counted.

    A multiplication and an addition are two. The target runs forwards over B rows of S tokens,
    unless its states are stored, and its LM head on their slots: A * K for each of the documents
    that a row has room for, which are taken to be there, and equally long. The drafter makes
    context of every token, and runs its layers and heads on the slots, which see half a document on
    average and their block. What is trained counts three times: forwards, and the gradients of its
    inputs and of its weights. The tapped states need no gradient, and neither does the LM head.
    """
    target, drafter = cfg.target, cfg.drafter
    width, vocab, block = target.hidden_size, target.vocab_size, drafter.block_size
    slots = cfg.documents_per_row * drafter.num_anchors * block
    document = length / cfg.documents_per_row
    causal = length * (document + 1) / 2
    frozen = slots * width * vocab
    if cfg.features == "online":
        frozen += length * _matrices(dense.specs(target).layers)
        frozen += causal * target.num_layers * _attended(target)
    specs = dspark.specs(drafter)
    keys_values = 2 * width * drafter.num_kv_heads * drafter.head_dim * drafter.num_layers
    seen = document / 2 + block
    sequential = 0 if specs.head is None else _matrices(specs.head) - vocab * drafter.markov_rank
    trained = (
        length * (2 * _matrices(specs.fc) + 3 * keys_values)
        + slots * 3 * (_matrices(specs.layers) + seen * drafter.num_layers * _attended(drafter))
        + slots * (2 * width * vocab + 3 * sequential)
    )
    return 2.0 * batch * (frozen + trained)


def _matrices(specs: Any) -> int:
    """Elements of the matrices among parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs) if len(s.shape) > 1)


def _attended(cfg: TransformerConfig) -> int:
    """Multiplications of a query's scores with one key and of their sum over one value."""
    return 2 * cfg.num_heads * cfg.head_dim
