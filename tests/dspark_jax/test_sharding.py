import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax import sharding
from dspark_jax.config import InputError
from dspark_jax.params import ParamSpec

zeros = jax.nn.initializers.zeros


def test_rules_give_each_dimension_its_axis():
    mesh = sharding.make_mesh(8, model=2)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    cases = [
        (ParamSpec((8, 6), ("embed", "mlp"), zeros), P("data", "model")),
        (ParamSpec((6, 6), ("embed", "mlp"), zeros), P(None, "model")),  # 4 does not divide 6
        (
            ParamSpec((8, 2, 3, 4), ("embed", "heads", None, None), zeros),
            P("data", "model", None, None),
        ),
        (ParamSpec((8, 8), ("embed", "embed"), zeros), P("data", None)),  # an axis splits only once
        (ParamSpec((), (), zeros), P()),
    ]
    for spec, expected in cases:
        assert sharding.parameter(spec, mesh, sharding.TRAINING).spec == expected
    tree = sharding.parameters({"a": cases[0][0]}, mesh)
    assert tree["a"].spec == P("data", "model")


def test_parameters_lie_where_the_rules_say():
    mesh = sharding.make_mesh(8, model=2)
    place = sharding.parameter(ParamSpec((8, 6), ("embed", "mlp"), zeros), mesh, sharding.TRAINING)
    x = jax.device_put(np.arange(48.0).reshape(8, 6), place)
    assert {s.data.shape for s in x.addressable_shards} == {(2, 3)}
    batch = jax.device_put(np.zeros((8, 5)), sharding.batch(mesh))
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 5)}
    whole = jax.device_put(np.zeros(3), sharding.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(3,)}


@pytest.mark.parametrize(
    ("devices", "model", "named"), [(0, 1, "devices"), (99, 1, "devices"), (8, 3, "model_parallel")]
)
def test_impossible_meshes(devices, model, named):
    with pytest.raises(InputError, match=named):
        sharding.make_mesh(devices, model)
