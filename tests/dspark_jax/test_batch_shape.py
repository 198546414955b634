"""Shapes of batches: large enough for every request, and what a row of them takes."""

import numpy as np
import pytest

from dspark_jax import batch_shape
from dspark_jax.batch_shape import BatchShape
from dspark_jax.request import Request
from dspark_jax.state import cache_length


def test_plan_holds_every_request(tiny_pair):
    models = tiny_pair("vanilla")
    requests = [Request([1] * 20, max_new_tokens=30), Request([1] * 5, max_new_tokens=60)]
    shape = batch_shape.plan(models, requests, slots=4)
    needed = max(cache_length(20, 30, 3), cache_length(5, 60, 3))
    assert shape.rows == 4
    assert needed <= shape.length < needed + 16
    assert shape.chunk == 32
    assert shape.prompt_length >= 20


def test_steps_of_few_rows_are_longer(tiny_pair):
    """One row reads 100 tokens in one step, four rows in four, and many rows no less."""
    models, asked = tiny_pair("vanilla"), [Request([1] * 100, max_new_tokens=1)]
    chunks = {n: batch_shape.plan(models, asked, n).chunk for n in (1, 2, 4, 16, 200)}
    assert chunks == {1: 128, 2: 64, 4: 32, 16: 32, 200: 32}
    assert batch_shape.plan(models, [Request([1] * 30, max_new_tokens=1)], 1).chunk == 32


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 63, 65, 300, 1500])
def test_a_prompt_is_read_in_at_most_four_steps_or_in_the_largest(tiny_pair, prompt):
    shape = batch_shape.plan(tiny_pair("vanilla"), [Request([1] * prompt, max_new_tokens=1)], 1)
    steps = -(-prompt // shape.chunk)
    assert steps <= 4 or shape.chunk == 256
    assert steps * shape.chunk <= shape.prompt_length <= shape.length
    assert shape.length >= cache_length(prompt, 1, 3)


def test_bytes_per_row_by_hand(tiny_pair):
    """A key and a value in float32 for each position, head dimension and layer, and the rest."""
    models = tiny_pair("vanilla")
    shape = BatchShape(rows=5, length=64, chunk=16)
    target, drafter = 2 * 2 * 64 * 8, 2 * (64 + 32) * 8
    state, backlog = 16, (64 + 32) * 2 * 16 + 1
    size = np.dtype(np.float32).itemsize
    found = batch_shape.bytes_per_row(models, shape, lazy=False)
    assert found == size * (target + drafter + state)
    assert batch_shape.bytes_per_row(models, shape, lazy=True) == found + size * backlog
    plain = models.replace(drafter=None, drafter_config=None)
    assert batch_shape.bytes_per_row(plain, shape, lazy=False) == size * (target + state)
