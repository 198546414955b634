"""Decoding on a mesh gives the tokens of one device, refilled rows and all policies included."""

import functools
import math
import re

import jax
import numpy as np
import pytest

from dspark_jax import batching, decode, generation, sharding
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import NO_FACTS, Facts
from dspark_jax.costs import CostTable
from dspark_jax.drafters import dspark
from dspark_jax.plans import whole
from dspark_jax.request import Request
from dspark_jax.sharding import DECODING
from dspark_jax.state import plans_of
from dspark_jax.targets import dense

pytestmark = pytest.mark.usefixtures("quick_compile")

SHAPE = BatchShape(rows=4, length=64, chunk=16)


def requests(**settings):
    rng = np.random.default_rng(1)
    sizes = zip(rng.integers(1, 30, 9), rng.integers(1, 25, 9), strict=True)
    return [
        Request(rng.integers(0, 32, prompt).tolist(), max_new_tokens=int(limit), **settings)
        for prompt, limit in sizes
    ]


def on_mesh(models, mesh):
    specs = dense.specs(models.target_config), dspark.specs(models.drafter_config)
    places = sharding.parameters(specs, mesh, DECODING)
    target, drafter = jax.device_put((models.target, models.drafter), places)
    return models.replace(target=target, drafter=drafter, mesh=mesh)


@pytest.fixture(scope="module")
def alone(tiny_pair):
    return tiny_pair("vanilla", kv_heads=2)


@pytest.fixture(scope="module")
def split(alone):
    """The same models over 2 x 2 devices: two rows and one key/value head on each."""
    mesh = sharding.make_mesh(4, data_parallel=2, fsdp=1, tensor_parallel=2)
    return on_mesh(alone, mesh)


def facts_of(models, cfg):
    """A pass costs little more for more tokens, so that drafts pay."""
    if cfg.policy not in ("causal", "delayed"):
        return NO_FACTS
    plans = plans_of(models, cfg, SHAPE.rows)
    seconds = {plan: 1 + 0.03 * plan.capacity + 0.02 * plan.drafts for plan in plans}
    return Facts(CostTable(SHAPE.rows, seconds))


def decoded(models, asked, policy):
    threshold = 0.4 if policy == "threshold" else None
    cfg = generation.decode_config(models, asked, policy=policy, threshold=threshold)
    facts, done = facts_of(models, cfg), {}
    for rows in batching.serve(models, asked, SHAPE, cfg, lambda ids: "", facts=facts):
        done |= {row.number: row for row in rows if row.finish_reason is not None}
    return [done[number] for number in range(len(asked))]


OTHERS = ("none", "threshold", "causal", "delayed")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.parametrize("policy", ["fixed", *SLOW])
def test_greedy_tokens_are_those_of_one_device(alone, split, policy):
    asked = requests()
    expected, found = decoded(alone, asked, policy), decoded(split, asked, policy)
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert [row.verified_lengths for row in found] == [row.verified_lengths for row in expected]
    if policy != "none":
        accepted = [n for row in found for n in row.accepted_lengths]
        assert min(accepted) == 1 < max(accepted)


@pytest.mark.slow
def test_heads_that_cannot_be_split_are_whole_on_every_device(alone):
    """Two key/value heads over four devices: the vocabulary and the MLP are split all the same."""
    mesh = sharding.make_mesh(8, data_parallel=2, fsdp=1, tensor_parallel=4)
    split, asked = on_mesh(alone, mesh), requests()
    assert split.target.layers[0].qkv.sharding.is_fully_replicated
    assert not split.target.lm_head.sharding.is_fully_replicated
    expected, found = decoded(alone, asked, "fixed"), decoded(split, asked, "fixed")
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]


@pytest.mark.slow
def test_sampled_tokens_are_those_of_one_device(alone, split):
    """The noise is the same, and probabilities differ in the last bits at most."""
    asked = requests(temperature=0.8, top_k=9, seed=4)
    expected, found = decoded(alone, asked, "fixed"), decoded(split, asked, "fixed")
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]


def test_caches_stay_split_and_nothing_of_their_size_is_exchanged(split):
    cfg = generation.decode_config(split, requests(), policy="fixed")
    state = batching.Batch(split, SHAPE, cfg, lambda ids: "", [])._state
    run = functools.partial(decode.decode_rounds, cfg=cfg, plan=whole(SHAPE.rows, 3))
    cache = state.target_cache[0].k
    assert {s.data.shape for s in cache.addressable_shards} == {(2, 1, 64, 8)}

    lowered = decode.decode_rounds.lower(split, state, 8, 1, cfg=cfg, plan=whole(SHAPE.rows, 3))
    text = lowered.compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    exchanged = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    dims = [d for shapes in exchanged for d in re.findall(r"\[([\d,]*)\]", shapes)]
    sizes = [math.prod(int(n) for n in d.split(",") if n) for d in dims]
    assert 0 < max(sizes) < cache.size / 4

    before = jax.tree.map(lambda x: x.sharding, state)
    after, *_ = run(split, state, np.int32(8), np.int32(1))
    assert jax.tree.map(lambda x: x.sharding, after) == before


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(split):
    asked = requests()
    cfg = generation.decode_config(split, asked, policy="fixed")
    batching.warm_up(split, SHAPE, cfg, refill=True)
    compiled = []

    def listen(event, _, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        decoded(split, asked, "fixed")
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_agreed_is_what_the_first_device_has():
    mesh = sharding.make_mesh(data_parallel=2, fsdp=2, tensor_parallel=2)
    place = sharding.replicated(mesh)
    copies = [jax.device_put(np.float32([d.id, 7]), d) for d in mesh.devices.flat]
    differ = jax.make_array_from_single_device_arrays((2,), place, copies)
    found = jax.jit(lambda x: sharding.agreed({"a": x, "b": None}, mesh))(differ)["a"]
    for shard in found.addressable_shards:
        assert shard.data.tolist() == [mesh.devices.flat[0].id, 7]
