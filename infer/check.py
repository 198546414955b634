"""What to run first on a checkpoint: says what target and drafter are, and whether they work.

python -m infer.check TARGET DRAFT

Loads both, compares the drafter's copies of embedding and LM head with the target's, and decodes a
few tokens greedily, which must give what plain decoding gives. Exit code 0: all is well; 1: it is
not; 2: a folder that cannot be read, or a drafter that does not fit.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tyro

from dspark_jax import batch_shape, generation
from dspark_jax.config import (
    DrafterConfig,
    DraftingConfig,
    TargetConfig,
    TransformerConfig,
    require,
)
from dspark_jax.generation import Pair
from dspark_jax.io import cli, files, hf, model_config
from dspark_jax.io.config_json import architecture
from dspark_jax.io.model_config import TARGETS
from dspark_jax.io.tensors import Tensors, open_tensors
from dspark_jax.request import Request
from dspark_jax.state import Models
from dspark_jax.targets import dense
from dspark_jax.vocabulary import from_offsets
from infer.engine import Engine
from infer.summary import mean_accepted_length

TEXTS = (
    "def fibonacci(n):\n",
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
)
NEAR_TIE = 0.05
"""In bfloat16 a token may lie this part of the largest logit below the best one."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `infer.check`."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Hugging Face folder or repository id, or GGUF file, of the target."""
    draft: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DRAFT")]
    """Folder or repository id of the drafter."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, activations and caches."""
    max_new_tokens: int = 64
    """Tokens of the greedy check, for each of its prompts."""


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="infer.check", description=__doc__ or "")
    limit = settings.max_new_tokens
    require(limit >= 1, f"--max-new-tokens {limit}: expected a whole number above 0")
    target, draft = files.resolve(settings.target), files.resolve(settings.draft)
    pair = generation.load(target, draft, dtype=jnp.dtype(settings.dtype))
    models = pair.models
    assert models.drafter_config is not None
    print(f"target     {target}: {describe_target(models.target_config)}")
    print(f"drafter    {draft}: {describe_drafter(models.drafter_config)}")
    print("           they fit: the same width, vocabulary and number of target layers")
    print(f"memory     {describe_memory(models, settings.dtype)}")
    copies = compare_copies(target, draft, models.target_config)
    for line, _ in copies:
        print(f"copies     {line}")
    line, same = compare_greedy(pair, limit)
    print(f"greedy     {line}")
    good = same and all(ok for _, ok in copies)
    print("check      passed" if good else "check      FAILED")
    return 0 if good else 1


def _sizes(cfg: TransformerConfig) -> str:
    return (
        f"{cfg.num_layers} layers, width {cfg.hidden_size}, MLP {cfg.intermediate_size},"
        f" {cfg.num_heads} heads of {cfg.head_dim} ({cfg.num_kv_heads} for keys and values)"
    )


def describe_target(cfg: TargetConfig) -> str:
    tied = "tied" if cfg.tie_embeddings else "untied"
    stops = ", ".join(map(str, cfg.stop_token_ids)) or "none"
    near = ""
    if cfg.sliding is not None:
        near = f", {len(cfg.sliding.layers)} layers that see {cfg.sliding.window} positions"
    return (
        f"{TARGETS[cfg.model_type]}, {_sizes(cfg)}{near}, vocabulary {cfg.vocab_size} ({tied}),"
        f" {cfg.max_position} positions, stop tokens {stops}"
    )


def describe_drafter(cfg: DraftingConfig) -> str:
    parts = [architecture(cfg), _sizes(cfg), f"block of {cfg.block_size}"]
    reads = "hidden state"
    if isinstance(cfg, DrafterConfig):
        rank = cfg.markov_rank
        parts.append(f"{cfg.head} head of rank {rank}" if rank else "no sequential head")
        reads = "hidden state and Markov embedding" if cfg.confidence_with_markov else reads
    if cfg.draft_vocab_size is not None:
        parts.append(f"drafts {cfg.draft_vocab_size} of {cfg.vocab_size} tokens")
    parts.append(f"confidence head on {reads}" if cfg.confidence_head else "no confidence head")
    if cfg.target_layer_ids:
        taps = ", ".join(map(str, cfg.target_layer_ids))
        parts.append(f"taps target layers {taps} of {cfg.num_target_layers}")
    else:
        parts.append(f"reads the last of {cfg.num_target_layers} target layers")
    if isinstance(cfg, DrafterConfig):
        parts.append(f"mask token {cfg.mask_token_id}")
    return ", ".join(parts)


def describe_memory(models: Models, dtype: str) -> str:
    """Parameters, and what a row of 1000 tokens holds in the caches of both."""
    drafter = models.drafter_config
    assert drafter is not None
    item = jnp.dtype(dtype).itemsize

    def size(params) -> str:
        leaves = jax.tree.leaves(params)
        count = sum(x.size for x in leaves)
        return f"{count:,} parameters, {sum(x.nbytes for x in leaves) / 1e6:,.1f} MB"

    def cache(layers: Sequence[TransformerConfig]) -> float:
        return sum(2 * c.num_kv_heads * c.head_dim for c in layers) * item * 1000 / 1e6

    target = models.target_config
    both = (
        cache([target.layer(i) for i in range(target.num_layers)]),
        cache([drafter] * drafter.num_layers),
    )
    return (
        f"{dtype}: target {size(models.target)}; drafter {size(models.drafter)} of its own; caches"
        f" {both[0]:,.2f} + {both[1]:,.2f} MB for 1000 tokens of a row"
    )


def compare_copies(target: Path, draft: Path, cfg: TargetConfig) -> list[tuple[str, bool]]:
    """The drafter's embedding and LM head against the target's, which are used in their place.

    Copies that differ mean that the drafter was made for another target. They are compared in the
    narrower dtype of the two, one tensor at a time.

    Returns:
      What to say and whether it is good, for each.
    """
    theirs, ours = open_tensors(target), Tensors(draft)
    shape = (cfg.vocab_size, cfg.hidden_size)
    size = model_config.load_drafter_config(draft).draft_vocab_size
    embed = f"{hf.text_prefix(theirs)}embed_tokens.weight"
    found = []
    for mine, other in (
        ("embed_tokens.weight", embed),
        ("lm_head.weight", embed if cfg.tie_embeddings else "lm_head.weight"),
    ):
        if mine not in ours:
            found.append((f"{mine} is not in the drafter; the target's is used", True))
            continue
        b = theirs.read(other, shape)
        if mine == "lm_head.weight" and size is not None:
            d2t = ours.read("d2t", (size,))
            b = b[from_offsets(d2t, cfg.vocab_size, str(draft))]
        a = ours.read(mine, b.shape)
        narrow = min(a.dtype, b.dtype, key=lambda d: (ml_dtypes.finfo(d).bits, d.name))
        a, b = a.astype(narrow), b.astype(narrow)
        if np.array_equal(a, b):
            found.append((f"{mine} equals the target's", True))
        else:
            far = np.abs(a.astype(np.float32) - b.astype(np.float32)).max()
            text = f"{mine} differs from the target's by up to {far:.3g}: the drafter was made for"
            found.append((f"{text} another target", False))
    return found


def compare_greedy(pair: Pair, limit: int) -> tuple[str, bool]:
    """Greedy decoding with and without the drafter, behind stop tokens as well.

    In float32 the tokens must be the same. In bfloat16 the two passes round differently: the first
    token that differs must nearly tie with the best.
    """
    cfg = pair.models.target_config
    asked = [
        generation.fit(Request(pair.tokenizer.encode(text), max_new_tokens=limit), cfg)
        for text in TEXTS
    ]
    shape = batch_shape.plan(pair.models, asked, len(asked))
    engine = Engine(pair, shape, generation.decode_config(pair.models, asked, ignore_stop=True))
    # Accelerators multiply float32 in fewer bits unless told not to.
    with jax.default_matmul_precision("highest"):
        run, plain = engine.decode(asked).completions, engine.plain().decode(asked).completions
        length = mean_accepted_length(run)
        accepted = "no whole round" if length is None else f"accepted length {length:.2f}"
        rounds = sum(len(c.accepted_lengths) for c in run)
        end = f"{accepted} over {rounds} rounds of {len(asked)} prompts"
        for number, (request, a, b) in enumerate(zip(asked, run, plain, strict=True)):
            if a.token_ids != b.token_ids:
                where, regret, largest = _first_difference(
                    pair, request.token_ids, a.token_ids, b.token_ids
                )
                text = (
                    f"prompt {number} differs from plain decoding at token {where}, whose logit is"
                    f" {regret:.3g} below the best of {largest:.3g}"
                )
                near = pair.models.target.embed.dtype != jnp.float32 and (
                    regret <= NEAR_TIE * abs(largest)
                )
                return f"{text}{' (a near tie)' if near else ''}; {end}", near
    return f"{sum(len(c.token_ids) for c in run)} tokens as in plain decoding; {end}", True


def _first_difference(
    pair: Pair, prompt: Sequence[int], tokens: Sequence[int], plain: Sequence[int]
) -> tuple[int, float, float]:
    """Place of the first token that differs, its regret in logits, and the best logit there."""
    models = pair.models
    pairs = enumerate(zip(tokens, plain, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(plain)))
    before = jnp.array([[*prompt, *plain[:where]]])
    forward = jax.jit(functools.partial(dense.forward, cfg=models.target_config))
    hidden = forward(models.target, before)
    logits = dense.logits(models.target, hidden.final[0, -1]).astype(jnp.float32)
    best = float(logits.max())
    return where, best - float(logits[tokens[where]]), best


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
