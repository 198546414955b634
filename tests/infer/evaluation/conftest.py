"""Completions and samples made by hand."""

import dataclasses
import math
from pathlib import Path

import pytest

from dspark_jax.config import DrafterConfig
from dspark_jax.request import Completion
from infer.evaluation.datasets import Dataset, domain_of
from infer.evaluation.findings import find
from infer.evaluation.sample import Drafter, Sample

CONFIG = DrafterConfig(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=3,
    mask_token_id=0,
    target_layer_ids=(0,),
    num_target_layers=2,
    markov_rank=4,
)


def logit(p):
    return 40.0 if p == 1 else math.log(p / (1 - p))


def completion(rounds, *, confidences=None, drafts=None, token_ids=None):
    """Of rounds (emitted, verified, accepted), with the confidences of each."""
    size = 1 + sum(emitted for emitted, _, _ in rounds)
    blocks = confidences or [[0.5] * 3 for _ in rounds]
    return Completion(
        prompt_tokens=2,
        token_ids=list(range(size)) if token_ids is None else token_ids,
        text="",
        finish_reason="length",
        accepted_lengths=[emitted for emitted, _, _ in rounds],
        verified_lengths=[verified for _, verified, _ in rounds],
        accepted_drafts=[accepted for _, _, accepted in rounds],
        confidences=blocks,
        confidence_logits=[[logit(p) for p in block] for block in blocks],
        drafts=drafts,
    )


ROUNDS = [(3, 3, 2), (1, 3, 0), (2, 3, 3)]  # the last was cut behind its second token
CONFIDENCES = [[0.9, 0.8, 0.3], [0.5, 0.9, 0.9], [0.7, 0.6, 0.6]]


def dataset(name):
    return Dataset(name, domain_of(name), Path(f"{name}.jsonl"), ())


def drafter(name="ours", **changes):
    layers, rank = changes.pop("layers", 2), changes.pop("rank", 4)
    config = dataclasses.replace(CONFIG, num_layers=layers, markov_rank=rank)
    return Drafter(name, name, config, 3, **{"confidence_head": True, **changes})


def sample(of, name, completions, *, size=3, threshold=None):
    return Sample(of, size, threshold, dataset(name), completions, 0)


@pytest.fixture
def findings():
    """Two drafters on two domains, one of them with fewer layers, no head and also shorter blocks;
    the other decoded with a threshold too, and calibrated."""
    ours = drafter(temperatures=(1.0, 2.0, 1.0))
    theirs = drafter("theirs", layers=1, confidence_head=False)
    good = [completion(ROUNDS, confidences=CONFIDENCES), completion([(4, 3, 3), (2, 3, 1)])]
    bad = [completion([(1, 3, 0), (2, 3, 1)]), completion([(1, 3, 0)])]
    names = ("gsm8k", "math500", "mbpp")
    whole = [sample(ours, name, good) for name in names]
    whole += [sample(theirs, name, bad) for name in names]
    short = [completion([(2, 2, 1), (3, 2, 2)]), completion([(1, 2, 0)])]
    whole += [sample(theirs, name, short, size=2) for name in names]
    cut = [
        sample(ours, name, [completion([(2, 1, 1), (1, 0, 0)])] * 2, threshold=0.85)
        for name in names
    ]
    return find(whole, cut)
