"""Drafters and the block sizes that each is measured at, before any weights are read."""

import json
import shutil

import pytest

from dspark_jax.config import InputError
from infer.evaluation.measure import open_drafters
from tests.infer.conftest import BLOCK


@pytest.fixture
def short(folders, tmp_path):
    """A drafter that was trained for one draft a round."""
    folder = tmp_path / "short"
    shutil.copytree(folders.draft, folder)
    (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_size": 1}))
    return str(folder)


def test_each_at_its_own_size_or_at_those_it_can(folders, short):
    long = str(folders.draft)

    def sizes(*asked):
        found = open_drafters(folders.target, (long, short), asked, (), 0.0)
        return [(d.path, d.block_size, own) for d, own in found.items()]

    assert sizes() == [(long, BLOCK, [BLOCK]), (short, 1, [1])]
    assert sizes(2, 1) == [(long, 2, [1, 2]), (short, 1, [1])]


def test_a_size_that_one_of_them_cannot(folders, short):
    with pytest.raises(InputError, match=r"--block-sizes 2, 3: expected one in 1..1, which .*sho"):
        open_drafters(folders.target, (str(folders.draft), short), (2, 3), (), 0.0)
    with pytest.raises(InputError, match=r"--block-sizes 9: expected numbers in 1..3, which a dr"):
        open_drafters(folders.target, (str(folders.draft), short), (1, 9), (), 0.0)


def test_a_calibration_without_a_confidence_head(folders, short, tmp_path):
    path = tmp_path / "short" / "config.json"
    values = json.loads(path.read_text()) | {"enable_confidence_head": False}
    del values["confidence_head_with_markov"]
    path.write_text(json.dumps(values))
    (drafter,) = open_drafters(folders.target, (short,), (), ("none",), 0.0)
    assert not drafter.confidence_head
    with pytest.raises(InputError, match=r"--calibration x.json: .*short has no confidence head"):
        open_drafters(folders.target, (short,), (), ("x.json",), 0.0)
