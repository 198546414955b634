"""From prompts to text: the small Python API over `dspark_jax.decode`.

    pair = dspark_jax.load("path/to/target", "path/to/drafter")
    for completion in dspark_jax.generate(pair, ["def add(a, b):"], max_new_tokens=64):
        print(completion.text, completion.accepted_lengths)

Requests share `slots` rows of one shape, so that everything compiles once; see `batching`.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax import batch_shape, batching, sharding
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import NO_FACTS, Facts
from dspark_jax.calibration import sigmoid
from dspark_jax.config import InputError, TargetConfig, require
from dspark_jax.io import files, hf
from dspark_jax.io.tokenizer import Tokenizer, load_tokenizer
from dspark_jax.request import Completion, Request
from dspark_jax.row import Row
from dspark_jax.scheduler import Policy
from dspark_jax.state import DecodeConfig, Models, logs_confidences
from dspark_jax.targets import dense

EMBEDDED = Path(__file__).parent / "embedded"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target, its drafter (or none) and the target's tokenizer."""

    models: Models
    tokenizer: Tokenizer


def load(
    target: str | Path = EMBEDDED / "target",
    draft: str | Path | None = EMBEDDED / "drafter",
    *,
    dtype: Any = jnp.float32,
    block_size: int | None = None,
    mesh: Mesh | None = None,
) -> Pair:
    """Loads a target and its drafter; without arguments the small pair inside the package.

    Args:
      target: Hugging Face folder or repository id, or GGUF file.
      draft: folder or repository id of a drafter in the DeepSpec layout; None for plain decoding.
      dtype: of parameters, activations and caches.
      block_size: drafts a round, at most what the drafter was trained for; default: all.
      mesh: from `sharding.make_mesh`, over whose devices the models are split; default: all on the
        first device.
    """
    place = None
    if mesh is not None:
        place = functools.partial(sharding.parameters, mesh=mesh, rules=sharding.DECODING)
    target_config, target_params = hf.load_target(target, dtype=dtype, place=place)
    tokenizer = load_tokenizer(files.resolve(target))
    if not target_config.stop_token_ids:
        target_config = dataclasses.replace(target_config, stop_token_ids=tokenizer.eos_ids)
    drafter_config = drafter_params = None
    if draft is not None:
        drafter_config, drafter_params = hf.load_drafter(
            draft, target=target_params, dtype=dtype, place=place
        )
        drafter_config.check_fits(target_config)
        if block_size is not None:
            trained = drafter_config.block_size
            require(
                1 <= block_size <= trained,
                f"block size {block_size}: expected 1..{trained}, the drafter's own",
            )
    if jax.default_backend() == "cpu":
        target_params = dense.untie(target_params)
    models = Models(target_params, drafter_params, target_config, drafter_config, mesh)
    pair = Pair(models, tokenizer)
    return pair if block_size is None else with_block_size(pair, block_size)


def with_block_size(pair: Pair, size: int) -> Pair:
    """The pair, drafting so many tokens a round if it has a drafter."""
    models = pair.models
    if models.drafter_config is not None:
        cfg = dataclasses.replace(models.drafter_config, block_size=size)
        models = dataclasses.replace(models, drafter_config=cfg)
    return dataclasses.replace(pair, models=models)


def decode_config(
    models: Models,
    requests: Sequence[Request],
    *,
    policy: Policy | None = None,
    threshold: float | None = None,
    ignore_stop: bool = False,
    trace: bool = False,
    logprobs: bool = False,
) -> DecodeConfig:
    """What must be compiled for these requests; the policy defaults to `fixed`, or `none`."""
    cfg = DecodeConfig(
        policy=policy or ("none" if models.drafter is None else "fixed"),
        threshold=threshold,
        stop_token_ids=() if ignore_stop else models.target_config.stop_token_ids,
        greedy=all(r.greedy for r in requests),
        truncate=any(r.truncates and not r.greedy for r in requests),
        trace=trace,
        logprobs=logprobs,
    )
    cfg.check(models)
    return cfg


def generate(
    pair: Pair,
    prompts: Sequence[str | Request],
    *,
    slots: int = 8,
    policy: Policy | None = None,
    threshold: float | None = None,
    trace: bool = False,
    logprobs: bool = False,
    ignore_stop: bool = False,
    **settings: Any,
) -> list[Completion]:
    """Continues every prompt, in order.

    Args:
      prompts: strings, tokenised as they stand, or `Request`s.
      slots: rows decoded together.
      policy: `none`, `fixed` or `threshold`; default `fixed`, or `none` without a drafter.
      threshold: least confidence of a verified draft, for `threshold`.
      trace: whether completions have the drafts of their rounds and, where the drafter has a head
        for them, their confidences.
      logprobs: whether they have the target's log probability of each token.
      ignore_stop: go on behind stop tokens.
      settings: fields of `Request` (temperature, stop, ...) for the prompts that are strings.
    Raises:
      InputError: a prompt or setting that cannot be decoded, with its number.
    """
    require(slots >= 1, f"slots={slots}: expected a whole number above 0")
    requests = _requests(pair, prompts, settings)
    cfg = decode_config(
        pair.models,
        requests,
        policy=policy,
        threshold=threshold,
        ignore_stop=ignore_stop,
        trace=trace,
        logprobs=logprobs,
    )
    shape = batch_shape.plan(pair.models, requests, min(slots, len(requests)))
    found: dict[int, Completion] = {}
    for completions in complete(pair, requests, shape, cfg):
        found |= completions
    return [found[number] for number in range(len(requests))]


def complete(
    pair: Pair,
    requests: Sequence[Request],
    shape: BatchShape,
    cfg: DecodeConfig,
    facts: Facts = NO_FACTS,
) -> Iterator[dict[int, Completion]]:
    """Decodes requests; yields after each step the completions it brought, by their numbers."""
    decode = pair.tokenizer.decode
    for rows in batching.serve(pair.models, requests, shape, cfg, decode, facts=facts):
        done = [row for row in rows if row.finish_reason is not None]
        yield {row.number: completion(row, pair, cfg, facts) for row in done}


def stream(
    pair: Pair,
    prompts: Sequence[str | Request],
    *,
    policy: Policy | None = None,
    threshold: float | None = None,
    ignore_stop: bool = False,
    **settings: Any,
) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of the prompt, tokens) as rounds commit them; arguments as for `generate`."""
    requests = _requests(pair, prompts, settings)
    cfg = decode_config(
        pair.models, requests, policy=policy, threshold=threshold, ignore_stop=ignore_stop
    )
    shape = batch_shape.plan(pair.models, requests, len(requests))
    yielded = [0] * len(requests)
    for rows in batching.serve(pair.models, requests, shape, cfg, pair.tokenizer.decode, rounds=1):
        for row in rows:
            if len(row.token_ids) > yielded[row.number]:
                yield row.number, row.token_ids[yielded[row.number] :]
                yielded[row.number] = len(row.token_ids)


def _requests(
    pair: Pair, prompts: Sequence[str | Request], settings: dict[str, Any]
) -> list[Request]:
    cfg = pair.models.target_config
    requests = []
    require(not isinstance(prompts, str), "prompts: expected a list of them, not a string")
    require(len(prompts) > 0, "no prompts: expected at least one")
    for number, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, str):
                ids = pair.tokenizer.encode(prompt)
                prompt = Request(token_ids=ids, **{"stream": number, **settings})
            requests.append(fit(prompt, cfg))
        except InputError as error:
            raise InputError(f"prompt {number}: {error}") from error
    return requests


def fit(request: Request, cfg: TargetConfig) -> Request:
    """The request, checked, with its limit cut to the positions that the target holds.

    Token ids that came as an array are a list afterwards.
    """
    given = request.token_ids
    ids = given.tolist() if isinstance(given, np.ndarray | jax.Array) else list(given)
    require(
        all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids),
        f"token_ids={reprlib.repr(ids)}: expected whole numbers",
    )
    request = dataclasses.replace(request, token_ids=ids)
    request.check(vocab_size=cfg.vocab_size, max_position=cfg.max_position)
    room = cfg.max_position - len(ids)
    return dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, room))


def completion(row: Row, pair: Pair, cfg: DecodeConfig, facts: Facts = NO_FACTS) -> Completion:
    """The completion of a row that is done."""
    text = pair.tokenizer.decode(row.token_ids)
    if row.stopped_at is not None:
        text = text[: text.index(row.stopped_at)]
    logits = row.confidence_logits if logs_confidences(pair.models, cfg) else None
    scale = facts.scale(row.request) if facts.scale else None
    return Completion(
        prompt_tokens=len(row.request.token_ids),
        token_ids=row.token_ids,
        text=text,
        finish_reason=row.finish_reason or "length",
        accepted_lengths=row.accepted_lengths,
        verified_lengths=row.verified_lengths,
        accepted_drafts=row.accepted_drafts,
        confidences=None if logits is None else [_confidences(z, scale) for z in logits],
        confidence_logits=logits,
        logprobs=row.logprobs if cfg.logprobs else None,
        drafts=row.drafts if cfg.trace else None,
        drafted_lengths=row.drafted_lengths,
    )


def _confidences(logits: list[float], scale: Sequence[float] | None) -> list[float]:
    """What the scheduler saw: probabilities of the drafts of one round."""
    z = np.array(logits)
    return sigmoid(z if scale is None else z / np.array(scale[: len(z)])).tolist()
