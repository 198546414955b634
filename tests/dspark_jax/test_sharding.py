import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax import sharding
from dspark_jax.config import InputError
from dspark_jax.params import ParamSpec
from dspark_jax.sharding import DECODING, TRAINING

zeros = jax.nn.initializers.zeros


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(data_parallel=2, fsdp=2, tensor_parallel=2)


def test_rules_give_each_dimension_its_axes(mesh):
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    cases = [
        ((8, 6), ("embed", "mlp"), P(("fsdp",), ("tensor",)), P(None, ("tensor",))),
        ((5, 6), ("embed", "mlp"), P(None, ("tensor",)), P(None, ("tensor",))),  # 2 divides no 5
        (
            (8, 2, 3),
            ("embed", "heads", None),
            P(("fsdp",), ("tensor",), None),
            P(None, ("tensor",), None),
        ),
        ((8, 8), ("embed", "embed"), P(("fsdp",), None), P(None, None)),  # an axis splits once
        ((8, 4), ("batch", "embed"), P(("data", "fsdp"), None), P(("data", "fsdp"), None)),
        ((6, 4), ("batch", "embed"), P(None, ("fsdp",)), P(None, None)),  # 4 divides no 6
        ((), (), P(), P()),
    ]
    for shape, axes, training, decoding in cases:
        assert sharding.partition(shape, axes, mesh, TRAINING) == training
        assert sharding.partition(shape, axes, mesh, DECODING) == decoding
    tree = {"a": ParamSpec((8, 6), ("embed", "mlp"), zeros)}
    assert sharding.parameters(tree, mesh)["a"].spec == cases[0][2]
    assert sharding.parameters(tree, mesh, DECODING)["a"].spec == cases[0][3]


def test_arrays_lie_where_the_rules_say(mesh):
    place = sharding.parameters(ParamSpec((8, 6), ("embed", "mlp"), zeros), mesh)
    x = jax.device_put(np.arange(48.0).reshape(8, 6), place)
    assert {s.data.shape for s in x.addressable_shards} == {(4, 3)}
    assert sharding.batch_parts(mesh) == 4
    batch = jax.device_put(np.zeros((8, 5)), sharding.batch(mesh))
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 5)}
    whole = jax.device_put(np.zeros(3), sharding.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(3,)}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((1, -1, 1), (1, 8, 1)),
        ((-1, 1, 2), (4, 1, 2)),
        ((2, 2, -1), (2, 2, 2)),
        ((8, 1, 1), (8, 1, 1)),
    ],
)
def test_one_size_is_what_the_others_leave(asked, expected):
    assert sharding.mesh_sizes(8, *asked) == expected


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((-1, -1, 1), "one of which may be -1"),
        ((0, 1, 8), "data_parallel=0, fsdp=1, tensor_parallel=8: expected numbers of at least 1"),
        ((1, -1, 3), "their product is 3, expected a divisor of 8, the number of devices"),
        ((2, 2, 1), "their product is 4, expected 8, the number of devices"),
    ],
)
def test_impossible_sizes(asked, said):
    with pytest.raises(InputError, match=said):
        sharding.mesh_sizes(8, *asked)


@pytest.mark.parametrize("devices", [0, 99])
def test_devices_that_are_not_there(devices):
    with pytest.raises(InputError, match=rf"devices={devices}: expected a number in 1..8"):
        sharding.make_mesh(devices)
