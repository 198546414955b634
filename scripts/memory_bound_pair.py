"""Writes a target of SmolLM2-135M's shape with random weights, and a drafter of known acceptance.

    python scripts/memory_bound_pair.py --output runs/memory_bound

Decoding it a token at a time waits for 540 MB of float32 weights, as a real model does, so that to
verify a block costs little more than to make one token. All that the drafter knows is that there is
a vocabulary: it drafts uniformly. The target's logits are normal with standard deviation s, and a
uniform draft is accepted with probability 2 Phi(-s / 2) at temperature 1; the confidence head says
so. What the pair decodes is noise.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import scipy.special
import scipy.stats

from dspark_jax import params as parameters
from dspark_jax.config import DrafterConfig, Rope, TargetConfig, require
from dspark_jax.drafters import dspark
from dspark_jax.generation import EMBEDDED
from dspark_jax.io import cli, hf
from dspark_jax.targets import dense

SMOLLM2 = TargetConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope=Rope(theta=100000.0),
    max_position=8192,
)
"""SmolLM2-135M's shape, with an LM head of its own."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Writes OUTPUT/target and OUTPUT/drafter."""

    output: Path
    acceptance: float = 0.8
    """Chance that a draft is accepted at temperature 1 when all before it were, in 0..1."""
    block_size: int = 7
    draft_layers: int = 1
    seed: int = 0

    def __post_init__(self):
        require(
            0 < self.acceptance < 1,
            f"--acceptance {self.acceptance}: expected a chance between 0 and 1",
        )


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="memory_bound_pair", description=__doc__ or "")
    spread = -2 * scipy.stats.norm.ppf(settings.acceptance / 2)
    keys = jax.random.split(jax.random.key(settings.seed))
    target = parameters.init(keys[0], dense.specs(SMOLLM2))
    # Hidden states have a mean square of 1 behind the final norm.
    head = jax.random.normal(keys[1], (SMOLLM2.hidden_size, SMOLLM2.vocab_size))
    target = dataclasses.replace(target, lm_head=head * spread / SMOLLM2.hidden_size**0.5)
    hf.save_target(settings.output / "target", SMOLLM2, target, dtype=jnp.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "target" / name, settings.output / "target")

    drafter_config = DrafterConfig.for_target(
        SMOLLM2,
        num_layers=settings.draft_layers,
        block_size=settings.block_size,
        mask_token_id=0,
        target_layer_ids=(1, 14, 28),
        markov_rank=64,
        confidence_with_markov=False,
    )
    drafter = parameters.init(keys[1], dspark.specs(drafter_config))
    assert drafter.head is not None
    assert drafter.confidence is not None
    drafter = dataclasses.replace(
        drafter,
        norm=jnp.zeros_like(drafter.norm),
        head=dataclasses.replace(drafter.head, w1=jnp.zeros_like(drafter.head.w1)),
        confidence=dataclasses.replace(
            drafter.confidence, bias=jnp.float32(scipy.special.logit(settings.acceptance))
        ),
    )
    folder = settings.output / "drafter"
    hf.save_drafter(folder, drafter_config, drafter, target=(SMOLLM2, target), dtype=jnp.bfloat16)
    print(f"{settings.output}: drafts accepted with probability {settings.acceptance:g}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
