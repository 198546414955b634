"""What training uses of the machine: memory, and arithmetic as a part of what there is."""

from __future__ import annotations

import math
import resource
import sys
from typing import Any

import jax

from dspark_jax.config import DraftingConfig, TransformerConfig
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.drafters.kinds import kind_of
from dspark_jax.drafters.recurrent import Eagle3
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

    def attention(layer: int) -> float:
        window = min(target.window(layer) or document, document)
        # A position sees itself and what is before, up to `window` of them.
        pairs = length * (window - window * (window - 1) / 2 / document)
        return pairs * _attended(target.layer(layer))

    frozen = slots * width * vocab
    if cfg.features == "online":
        frozen += length * _matrices(dense.specs(target).layers)
        frozen += sum(attention(i) for i in range(target.num_layers))
    seen = document / 2 + block
    projection, context, slot = _drafter_products(drafter)
    trained = (
        length * (2 * projection + 3 * context)
        + slots * 3 * (slot + seen * drafter.num_layers * _attended(drafter))
        + slots * 2 * width * drafter.output_size
    )
    return 2.0 * batch * (frozen + trained)


def _drafter_products(cfg: DraftingConfig) -> tuple[int, int, int]:
    """Multiplications of a drafter's matrices: with the target's states and with what is made of
    them, a token, and a slot; without LM head and scores."""
    specs = kind_of(cfg).specs(cfg)
    matrices = 1 if cfg.key_is_value else 2
    keys_values = matrices * cfg.hidden_size * cfg.num_kv_heads * cfg.head_dim * cfg.num_layers
    match specs:
        case Drafter():
            head = 0
            if specs.head is not None:
                head = _matrices(specs.head) - math.prod(specs.head.w1.shape)  # a look-up
            return _matrices(specs.fc), keys_values, _matrices(specs.layers) + head
        case Eagle3():
            return _matrices(specs.fc), 2 * keys_values, _matrices(specs.layer)
        case _:
            join = _matrices(specs.join)
            return 0, join + keys_values, join + _matrices(specs.layer)


def _matrices(specs: Any) -> int:
    """Elements of the matrices among parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs) if len(s.shape) > 1)


def _attended(cfg: TransformerConfig) -> int:
    """Multiplications of a query's scores with one key and of their sum over one value."""
    return 2 * cfg.num_heads * cfg.head_dim
