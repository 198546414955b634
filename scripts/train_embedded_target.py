"""Trains the small target that ships inside the package, with its tokenizer.

    python scripts/train_embedded_target.py --workdir runs/target --minutes 60

A byte-level BPE of 512 tokens and a Qwen3-shaped decoder of 1.1 M parameters, on the standard
library's sources (train/corpus.py names the held-out files) and on its functions as chat turns:
signature asked, body answered. Writes WORKDIR/target, a Hugging Face folder in bfloat16, every few
minutes, and WORKDIR/log.jsonl. With --start-from it goes on from such a folder, tokenizer included.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark_jax import params as parameters
from dspark_jax.config import TargetConfig
from dspark_jax.io import cli, hf
from dspark_jax.targets import dense
from train import corpus
from train.optimizer import muon_matrices

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Trains the embedded target."""

    workdir: Path
    """Folder for the target and the log."""
    minutes: float = 60.0
    """Wall time of training; the learning rate falls to zero at its end."""
    learning_rate: float = 3e-3
    start_from: Path | None = None
    """Folder of a target to go on from."""
    batch: int = 8
    length: int = 256
    seed: int = 0


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str], rng: np.random.Generator) -> np.ndarray:
    """All documents in random order: files, and functions as chat turns.

    An answer is encoded apart from its prompt, as it is when the target is asked: a line break at
    the end of the generation prompt never merges with the answer's indentation.
    """
    documents = [(text + "<|endoftext|>",) for text in texts]
    documents += [
        (
            f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n",
            f"{answer}<|im_end|>\n",
        )
        for text in texts
        for asked, answer in corpus.functions(text)
    ]
    encoded = [[i for part in parts for i in tokenizer.encode(part).ids] for parts in documents]
    return np.concatenate([np.array(encoded[i], np.int32) for i in rng.permutation(len(encoded))])


def loss_fn(params: dense.Target, tokens: jax.Array, cfg: TargetConfig) -> jax.Array:
    """Mean cross-entropy of tokens [B, S + 1], in nats."""
    hidden = dense.forward(params, tokens[:, :-1], cfg=cfg)
    logits = dense.logits(params, hidden.final)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def save(workdir: Path, cfg: TargetConfig, params: dense.Target, tokenizer: Tokenizer) -> None:
    hf.save_target(workdir / "target", cfg, params, dtype=jnp.bfloat16)
    tokenizer.save(str(workdir / "target" / "tokenizer.json"))
    names = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (workdir / "target" / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="train_embedded_target", description=__doc__ or "")
    settings.workdir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(settings.seed)
    texts = corpus.stdlib_texts()
    cfg = TargetConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position=4096,
        stop_token_ids=(SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")),
    )
    if settings.start_from:
        _, params = hf.load_target(settings.start_from)
        tokenizer = Tokenizer.from_file(str(settings.start_from / "tokenizer.json"))
    else:
        params = parameters.init(jax.random.key(settings.seed), dense.specs(cfg))
        tokenizer = train_tokenizer(texts, cfg.vocab_size)
    stream = token_stream(tokenizer, texts, rng)
    held_out = token_stream(tokenizer, corpus.stdlib_texts(held_out=True), rng)
    width = settings.length + 1
    held_out = held_out[: len(held_out) // width * width].reshape(-1, width)
    print(f"{len(stream):,} tokens, {parameters.count(params):,} parameters", flush=True)

    def done(started: float) -> float:
        return (time.monotonic() - started) / (60 * settings.minutes)

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.contrib.muon)(
            0.0,
            muon_weight_dimension_numbers=muon_matrices(dense.specs(cfg)),
            adam_b2=0.98,
            weight_decay=0.05,
            consistent_rms=0.2,
        ),
    )

    @jax.jit
    def step(params, state, tokens, rate):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, cfg)
        state[1].hyperparams["learning_rate"] = rate
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    evaluate = jax.jit(lambda params, tokens: loss_fn(params, tokens, cfg))
    state, losses, number = optimizer.init(params), [], 0
    started = time.monotonic()
    with open(settings.workdir / "log.jsonl", "w") as log:
        while (progress := done(started)) < 1:
            starts = rng.integers(0, len(stream) - width, settings.batch)
            tokens = np.stack([stream[s : s + width] for s in starts])
            # Warm-up by steps, decay by time: the run ends when it was asked to.
            rate = settings.learning_rate * min(1.0, (number + 1) / 100, 1.5 * (1 - progress))
            params, state, loss = step(params, state, tokens, rate)
            losses.append(loss)
            number += 1
            if number % 250 == 0 or done(started) >= 1:
                batches = np.array_split(held_out, max(1, len(held_out) // 16))
                record = {
                    "step": number,
                    "tokens": number * settings.batch * settings.length,
                    "loss": float(np.mean(losses)),
                    "held_out": float(np.mean([evaluate(params, b) for b in batches])),
                    "minutes": round((time.monotonic() - started) / 60, 1),
                }
                print(json.dumps(record), file=log, flush=True)
                print(json.dumps(record), flush=True)
                losses.clear()
                save(settings.workdir, cfg, params, tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
