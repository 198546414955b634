"""From prompts to text: the small Python API over `dspark_jax.decode`.

    pair = dspark_jax.load("path/to/target", "path/to/drafter")
    for completion in dspark_jax.generate(pair, ["def add(a, b):"], max_new_tokens=64):
        print(completion.text, completion.accepted_lengths)

Requests are decoded in batches of `slots` rows of one shape, so that everything compiles once.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import decode
from dspark_jax.calibration import sigmoid
from dspark_jax.config import InputError, TargetConfig, require
from dspark_jax.decode import DecodeConfig, DecodeState, Models, RoundLog
from dspark_jax.io import files, hf
from dspark_jax.io.tokenizer import Tokenizer, load_tokenizer
from dspark_jax.sampling import Sampling
from dspark_jax.scheduler import Policy

EMBEDDED = Path(__file__).parent / "embedded"
ROUNDS_PER_CALL = 64


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target, its drafter (or none) and the target's tokenizer."""

    models: Models
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Temperature 0 is greedy."""

    token_ids: Sequence[int]
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stream: int = 0
    """Requests with the same seed draw independently when their streams differ."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def check(self, *, vocab_size: int, max_position: int) -> None:
        """Raises `InputError` when this cannot be decoded."""
        ids, room = self.token_ids, max_position
        require(len(ids) > 0, "the prompt is empty: expected at least one token")
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        require(bad is None, f"token id {bad}: expected 0..{vocab_size - 1}")
        require(
            self.max_new_tokens >= 1,
            f"max_new_tokens={self.max_new_tokens}: expected a whole number above 0",
        )
        require(
            len(ids) < room,
            f"the prompt of {len(ids)} tokens leaves no room: the target holds {room} positions",
        )
        for name, valid, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "in 0..1"),
            ("seed", 0 <= self.seed < 2**32, "in 0..2^32-1"),
        ):
            require(valid, f"{name}={getattr(self, name)}: expected a number {expected}")


@dataclasses.dataclass
class Completion:
    """What came out for one request. The first token is the prefill's; rounds made the rest."""

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    accepted_lengths: list[int]
    """Tokens each round added, the target's own included; 1 + their sum is len(token_ids)."""
    verified_lengths: list[int]
    """Drafts that each round sent to the target."""
    accepted_drafts: list[int]
    """Drafts accepted in each round, before the last was cut at a stop token or the limit."""
    confidences: list[list[float]] | None
    """Confidences c_k of each round's block, with `trace`."""
    confidence_logits: list[list[float]] | None
    """What they are the sigmoids of."""

    @property
    def full_rounds(self) -> list[int]:
        """Accepted lengths of the rounds that were not cut."""
        rounds = zip(self.accepted_lengths, self.accepted_drafts, strict=True)
        return [n for n, drafts in rounds if n == drafts + 1]


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The shape that everything is compiled for."""

    rows: int
    length: int
    """Cache positions a row."""
    chunk: int
    """Prompt positions that one step of the prefill reads."""

    @property
    def prompt_length(self) -> int:
        return self.length // self.chunk * self.chunk


class Decoded(NamedTuple):
    """A batch that is being decoded; arrays are the host's."""

    first: np.ndarray  # [R] tokens that the prefill emitted
    logs: Iterator[RoundLog]


def load(
    target: str | Path = EMBEDDED / "target",
    draft: str | Path | None = EMBEDDED / "drafter",
    *,
    dtype: Any = jnp.float32,
    block_size: int | None = None,
) -> Pair:
    """Loads a target and its drafter; without arguments the small pair inside the package.

    Args:
      target: Hugging Face folder or repository id.
      draft: the same for a drafter in the DeepSpec layout; None for plain decoding.
      dtype: of parameters, activations and caches.
      block_size: drafts a round, at most what the drafter was trained for; default: all.
    """
    target_config, target_params = hf.load_target(target, dtype=dtype)
    tokenizer = load_tokenizer(files.resolve(target))
    if not target_config.stop_token_ids:
        target_config = dataclasses.replace(target_config, stop_token_ids=tokenizer.eos_ids)
    drafter_config = drafter_params = None
    if draft is not None:
        drafter_config, drafter_params = hf.load_drafter(draft, dtype=dtype)
        drafter_config.check_fits(target_config)
        if block_size is not None:
            trained = drafter_config.block_size
            require(
                1 <= block_size <= trained,
                f"block size {block_size}: expected 1..{trained}, the drafter's own",
            )
            drafter_config = dataclasses.replace(drafter_config, block_size=block_size)
    models = Models(target_params, drafter_params, target_config, drafter_config)
    return Pair(models, tokenizer)


def plan(models: Models, requests: Sequence[Request], slots: int) -> BatchShape:
    """The smallest shape that holds every request: cache lengths in steps of 16 positions."""
    prompt = max(len(r.token_ids) for r in requests)
    block = models.drafter_config.block_size if models.drafter_config else 0
    most = max(decode.cache_length(len(r.token_ids), r.max_new_tokens, block) for r in requests)
    chunk = min(256, max(16, 1 << (prompt - 1).bit_length()))
    length = max(-(-most // 16) * 16, -(-prompt // chunk) * chunk)
    return BatchShape(rows=slots, length=length, chunk=chunk)


def decode_config(
    models: Models,
    requests: Sequence[Request],
    *,
    policy: Policy | None = None,
    threshold: float | None = None,
    ignore_stop: bool = False,
    trace: bool = False,
) -> DecodeConfig:
    """What must be compiled for these requests; the policy defaults to `fixed`, or `none`."""
    cfg = DecodeConfig(
        policy=policy or ("none" if models.drafter is None else "fixed"),
        threshold=threshold,
        stop_token_ids=() if ignore_stop else models.target_config.stop_token_ids,
        greedy=all(r.greedy for r in requests),
        truncate=any(r.truncates and not r.greedy for r in requests),
        trace=trace,
    )
    cfg.check(models)
    return cfg


def warm_up(models: Models, shape: BatchShape, cfg: DecodeConfig) -> float:
    """Compiles what `decode_batch` runs, by running it on rows that are idle; takes seconds."""
    start = time.monotonic()
    state, _ = _start(models, [], shape, cfg)
    out = decode.decode_rounds(models, state, np.int32(0), cfg=cfg, length=ROUNDS_PER_CALL)
    jax.block_until_ready(out)
    return time.monotonic() - start


def decode_batch(
    models: Models,
    requests: Sequence[Request],
    shape: BatchShape,
    cfg: DecodeConfig,
    *,
    rounds: int = ROUNDS_PER_CALL,
) -> Decoded:
    """Decodes at most `shape.rows` requests; each log that is asked for runs `rounds` rounds."""
    state, first = _start(models, requests, shape, cfg)

    def logs(state: DecodeState) -> Iterator[RoundLog]:
        while np.asarray(state.active).any():
            state, log, done = decode.decode_rounds(
                models, state, np.int32(rounds), cfg=cfg, length=ROUNDS_PER_CALL
            )
            yield jax.tree.map(lambda x, n=int(done): x[:n], jax.device_get(log))

    return Decoded(np.asarray(first), logs(state))


def _start(
    models: Models, requests: Sequence[Request], shape: BatchShape, cfg: DecodeConfig
) -> tuple[DecodeState, jax.Array]:
    """Rows behind the prefill, and their first tokens; surplus rows are idle."""
    idle = Request(token_ids=[0], max_new_tokens=1)
    rows = [*requests, *[idle] * (shape.rows - len(requests))]
    tokens = np.zeros((shape.rows, shape.prompt_length), np.int32)
    for row, request in zip(tokens, rows, strict=True):
        row[: len(request.token_ids)] = request.token_ids

    def column(name, dtype):
        return np.array([getattr(r, name) for r in rows], dtype)

    sampling = Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
    )
    return _read_prompts(
        models,
        sampling,
        (column("seed", np.uint32), column("stream", np.uint32)),
        column("max_new_tokens", np.int32),
        tokens,
        np.array([len(r.token_ids) for r in rows], np.int32),
        shape=shape,
        cfg=cfg,
    )


@functools.partial(jax.jit, static_argnames=("shape", "cfg"))
def _read_prompts(models, sampling, seeds, limit, tokens, lengths, *, shape, cfg):
    """The empty state and the prefill as one program: to start a batch is one call."""
    row_key = jax.vmap(lambda seed, stream: jax.random.fold_in(jax.random.key(seed), stream))
    state = decode.create_state(
        models, length=shape.length, sampling=sampling, key=row_key(*seeds), limit=limit
    )
    return decode.prefill(models, state, tokens, lengths, cfg=cfg, chunk=shape.chunk)


def generate(
    pair: Pair,
    prompts: Sequence[str | Request],
    *,
    slots: int = 8,
    policy: Policy | None = None,
    threshold: float | None = None,
    trace: bool = False,
    ignore_stop: bool = False,
    **settings: Any,
) -> list[Completion]:
    """Continues every prompt, in order.

    Args:
      prompts: strings, tokenised as they stand, or `Request`s.
      slots: rows decoded together.
      policy: `none`, `fixed` or `threshold`; default `fixed`, or `none` without a drafter.
      threshold: least confidence of a verified draft, for `threshold`.
      settings: fields of `Request` for the prompts that are strings.
    Raises:
      InputError: a prompt or setting that cannot be decoded, with its number.
    """
    requests = _requests(pair, prompts, settings)
    cfg = decode_config(
        pair.models,
        requests,
        policy=policy,
        threshold=threshold,
        ignore_stop=ignore_stop,
        trace=trace,
    )
    shape = plan(pair.models, requests, min(slots, len(requests)))
    completions = []
    for start in range(0, len(requests), shape.rows):
        batch = requests[start : start + shape.rows]
        completions += collect(pair, batch, decode_batch(pair.models, batch, shape, cfg), cfg)
    return completions


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
    shape = plan(pair.models, requests, len(requests))
    decoded = decode_batch(pair.models, requests, shape, cfg, rounds=1)
    for row, token in enumerate(decoded.first):
        yield row, [int(token)]
    for log in decoded.logs:
        for tokens, emitted in zip(log.tokens, log.emitted, strict=True):
            for row, count in enumerate(emitted):
                if count:
                    yield row, tokens[row, :count].tolist()


def _requests(
    pair: Pair, prompts: Sequence[str | Request], settings: dict[str, Any]
) -> list[Request]:
    cfg = pair.models.target_config
    requests = []
    require(not isinstance(prompts, str), "prompts: expected a list of them, not a string")
    require(len(prompts) > 0, "no prompts: expected at least one")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = pair.tokenizer.encode(prompt)
            prompt = Request(token_ids=ids, **{"stream": number, **settings})
        try:
            requests.append(fit(prompt, cfg))
        except InputError as error:
            raise InputError(f"prompt {number}: {error}") from error
    return requests


def fit(request: Request, cfg: TargetConfig) -> Request:
    """The request, checked, with its limit cut to the positions that the target holds."""
    request.check(vocab_size=cfg.vocab_size, max_position=cfg.max_position)
    room = cfg.max_position - len(request.token_ids)
    return dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, room))


def collect(
    pair: Pair,
    requests: Sequence[Request],
    decoded: Decoded,
    cfg: DecodeConfig,
) -> list[Completion]:
    """Completions of the requests of one batch that `decode_batch` decodes."""
    logs = list(decoded.logs)
    completions = []
    for row, request in enumerate(requests):
        ids, lengths, verified, accepted = [int(decoded.first[row])], [], [], []
        logits: list[list[float]] = []
        for log in logs:
            for t in np.flatnonzero(log.emitted[:, row]):
                count = int(log.emitted[t, row])
                ids += log.tokens[t, row, :count].tolist()
                lengths.append(count)
                verified.append(int(log.verified[t, row]))
                accepted.append(int(log.accepted[t, row]))
                if log.confidence_logits is not None:
                    logits.append(log.confidence_logits[t, row].tolist())
        stopped = ids[-1] in cfg.stop_token_ids
        completions.append(
            Completion(
                prompt_tokens=len(request.token_ids),
                token_ids=ids,
                text=pair.tokenizer.decode(ids),
                finish_reason="stop" if stopped else "length",
                accepted_lengths=lengths,
                verified_lengths=verified,
                accepted_drafts=accepted,
                confidences=sigmoid(np.array(logits)).tolist() if cfg.trace else None,
                confidence_logits=logits if cfg.trace else None,
            )
        )
    return completions
