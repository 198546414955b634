"""Cost tables by hand, and one that is measured."""

import numpy as np
import pytest

from dspark_jax import batching, costs, decode, generation
from dspark_jax.batch_shape import BatchShape
from dspark_jax.batching import Facts
from dspark_jax.config import InputError
from dspark_jax.costs import CostTable
from dspark_jax.plans import Plan
from dspark_jax.request import Request
from dspark_jax.state import plans_of

TABLE = CostTable(2, {Plan(0, 2): 0.5, Plan(2, 3): 1.0, Plan(2, 4): 2.0, Plan(2, 6): 4.0})


def test_rates():
    np.testing.assert_array_equal(TABLE.rates((Plan(2, 4), Plan(0, 2))), np.float32([0.5, 2]))
    with pytest.raises(InputError, match="1 drafts a row in a pass of 4 tokens"):
        TABLE.rates((Plan(1, 4),))


def test_steps_a_second_are_a_staircase():
    """Indexed by tokens 0..6; none of 0..3 has a smaller pass than 3."""
    np.testing.assert_array_equal(TABLE.sps(2), np.float32([1, 1, 1, 1, 0.5, 0.25, 0.25]))
    np.testing.assert_array_equal(TABLE.sps(0), np.float32([2, 2, 2]))
    for drafts in (1, 3):
        with pytest.raises(InputError, match=f"with {drafts} drafts a row"):
            TABLE.sps(drafts)
    with pytest.raises(InputError, match="no pass of 6 tokens"):
        CostTable(2, {Plan(2, 4): 1.0}).sps(2)


def test_a_larger_pass_is_never_faster():
    noisy = CostTable(
        1, {Plan(0, 1): 5.0, Plan(3, 2): 3.0, Plan(3, 3): 2.0, Plan(3, 4): 2.5, Plan(2, 3): 1.0}
    )
    assert costs.monotone(noisy).seconds == {
        **{Plan(0, 1): 5.0, Plan(3, 2): 2.0, Plan(3, 3): 2.0, Plan(3, 4): 2.5, Plan(2, 3): 1.0}
    }


def test_measured(tiny_pair, quick_compile):
    """Every round that decoding may run, with executables that decoding finds compiled."""
    models = tiny_pair("vanilla", block_size=1)
    cfg = generation.decode_config(models, [Request([1], temperature=1.0)], policy="delayed")
    table = costs.measure(
        models, cfg, plans_of(models, cfg, 2), rows=2, length=64, context=16, repeats=2
    )
    assert set(table.seconds) == set(plans_of(models, cfg, 2))
    assert min(table.seconds.values()) > 0
    assert costs.monotone(table) == table
    compiled = decode.decode_rounds._cache_size()
    batching.warm_up(models, BatchShape(2, 64, 16), cfg, refill=False, facts=Facts(table))
    assert decode.decode_rounds._cache_size() == compiled
    lines = list(costs.describe(table))
    assert len(lines) == 1 + len(table.seconds)
    with pytest.raises(InputError, match="no room"):
        costs.measure(models, cfg, plans_of(models, cfg, 2), rows=2, length=64, context=63)
