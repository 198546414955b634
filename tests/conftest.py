"""Settings that must precede JAX, and the reference vectors that only some machines have."""

import functools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tolerances are those of float32 on a CPU
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", "")]
).strip()

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DrafterConfig, HeadKind, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.layers import ones
from dspark_jax.state import Models
from dspark_jax.targets import dense

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"


MOST_MAPPINGS = 20_000
"""XLA maps memory for every executable, and Linux allows a process 65,530 mappings."""


@pytest.fixture(scope="module", autouse=True)
def few_executables():
    """Forgets what was compiled, between files, when that is much."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of models and vectors made by the reference implementation.

    It does not come with the project: `DSPARK_GOLDEN` names it, or it lies at
    `../shared/golden`; tests that need it are skipped where it is absent.
    """
    folder = Path(os.environ.get("DSPARK_GOLDEN", GOLDEN))
    if not folder.is_dir():
        pytest.skip(f"no reference vectors at {folder} (set DSPARK_GOLDEN)")
    return folder


@pytest.fixture(scope="module")
def quick_compile():
    """Compiles with few optimisations: most of what a test of tiny models waits for."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny_pair():
    """`tiny_pair(head, vocab=32, block_size=3, kv_heads=1)`: a random target and its drafter.

    The drafter's sequential head is made of the target's embedding and LM head, so that between
    none and all of its drafts are accepted, greedily and when sampled.
    """
    return functools.cache(_tiny_pair)


def _tiny_pair(
    head: HeadKind, *, vocab: int = 32, block_size: int = 3, kv_heads: int = 1
) -> Models:
    rank = 0 if head == "none" else 16
    cfg = TargetConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=kv_heads,
        head_dim=8,
    )
    drafter_cfg = DrafterConfig.for_target(
        cfg,
        num_layers=1,
        block_size=block_size,
        mask_token_id=vocab - 1,
        target_layer_ids=(-1, 0),
        head=head,
        markov_rank=rank,
        confidence_with_markov=rank > 0,
    )
    rng = np.random.default_rng(0)

    def draw(spec):
        if spec.initializer is ones:
            return jnp.ones(spec.shape)
        fan_in = spec.shape[0] if spec.shape else 1
        return jnp.asarray(rng.normal(size=spec.shape) * fan_in**-0.5, jnp.float32)

    target = jax.tree.map(draw, dense.specs(cfg))
    embed = jnp.asarray(rng.normal(size=target.embed.shape), jnp.float32)
    target = target.replace(embed=embed, lm_head=2.5 * target.lm_head)
    drafter = jax.tree.map(draw, dspark.specs(drafter_cfg))
    if head != "none":
        own = drafter.head.replace(w1=embed, w2=target.lm_head)
        if head == "gated":  # gates are about a half
            own = own.replace(w2=2 * own.w2)
        if head == "rnn":  # the token's embedding goes to the output
            joint = (0.5 * own.joint).at[rank : 2 * rank, 2 * rank :].set(jnp.eye(rank))
            own = own.replace(joint=joint, w2=1.5 * own.w2)
        drafter = drafter.replace(head=own, norm=0.3 * drafter.norm)
    return Models(target, drafter, cfg, drafter_cfg)
