import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sharding
from dspark_jax.config import InputError
from dspark_jax.losses import LossConfig
from train.checkpoint import Checkpoints, damage, load, newest_whole, steps
from train.guard import Guard
from train.settings import DrafterSettings, OptimizerSettings
from train.step import StepConfig, TrainState, abstract_state, init_state, state_shardings

PLACE = {"parent": {"next_index": 65, "none": None}, "window_index": [2, 0.1]}


def at(step: int) -> TrainState:
    """A state that says which step it is of."""
    params = {"w": jnp.arange(50_000.0) * step}
    return TrainState(jnp.int32(step), params, (jnp.int32(step),), Guard.start())


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def save(folder: Path, *numbers: int, scores=None, **keep) -> None:
    checkpoints = Checkpoints(folder, **{"keep": 2, **keep})
    for i, step in enumerate(numbers):
        score = None if scores is None else scores[i]
        checkpoints.save(step, at(step), {"step": step}, score=score)
    checkpoints.close()


def test_what_was_saved_comes_back_in_its_place(tmp_path, small_config):
    cfg = StepConfig(
        small_config,
        DrafterSettings(num_layers=1, target_layer_ids=(0, 1)).config(small_config),
        LossConfig(),
        OptimizerSettings(),
    )
    saved = init_state(cfg).replace(step=jnp.int32(7))
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest is None
    checkpoints.save(7, saved, PLACE)
    checkpoints.close()

    mesh = sharding.make_mesh(8, tensor_parallel=2)
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest == 7
    state, place = checkpoints.restore(abstract_state(cfg, mesh))
    checkpoints.close()
    equal(state, saved)
    assert place == PLACE
    places = state_shardings(cfg, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, places))
    assert len({s.device for s in state.params.fc.addressable_shards}) == 8

    part, _ = load(tmp_path / "c", 7, {"params": abstract_state(cfg, mesh).params})
    equal(part, {"params": saved.params})
    other = {"params": abstract(saved.params.replace(fc=jnp.zeros((3, 5))))}
    with pytest.raises(InputError, match=r"7: params.fc has shape \(64, 32\), expected \(3, 5\)"):
        load(tmp_path / "c", 7, other)


def test_the_last_ones_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3)
    assert steps(tmp_path) == [2, 3]


def test_the_best_ones_are_kept_too(tmp_path):
    scores = [3.0, 5.0, float("nan"), 4.0, None, 1.0]
    save(tmp_path, 1, 2, 3, 4, 5, 6, scores=scores, keep=1, keep_best=2)
    assert steps(tmp_path) == [2, 4, 6]
    save(tmp_path, 7, scores=[4.5], keep=1, keep_best=2)  # scores are remembered
    assert steps(tmp_path) == [2, 7]


def test_a_step_that_takes_the_state_over_may_follow_at_once(tmp_path):
    """The writer must have a copy, or hold on to what it writes."""
    advance = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    wide = jax.jit(lambda: {f"w{i}": jnp.full((1000, 1000), i, jnp.float32) for i in range(8)})
    state = TrainState(jnp.int32(0), wide(), (), Guard.start())
    expected = jax.device_get(state)
    shapes = abstract(state)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(0, state, {})
    for _ in range(30):
        state = advance(state)
    jax.block_until_ready(state)
    checkpoints.close()
    equal(load(tmp_path, 0, shapes)[0], expected)


# --- Damage ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folder with checkpoints 4 and 8."""
    folder = tmp_path_factory.mktemp("pair") / "checkpoints"
    save(folder, 4, 8)
    return folder


@pytest.fixture
def copy(pair, tmp_path):
    return Path(shutil.copytree(pair, tmp_path / "checkpoints"))


FILES = (
    "state/manifest.ocdbt",
    "state/_METADATA",
    "state/d/*",
    "state/ocdbt.process_0/d/*",
    "state/array_metadatas/process_0",
    "place/_METADATA",
    "place/_strings.json",
    "_CHECKPOINT_METADATA",
)


def harm(folder: Path, pattern: str, how: str) -> str:
    """Harms the largest of the files; returns its name."""
    path = max(folder.glob(pattern), key=lambda p: p.stat().st_size)
    data = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "garbled":
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    return path.relative_to(folder).as_posix()


EXPECTED = {"missing": "is missing", "truncated": "bytes, expected", "garbled": "checksum"}


@pytest.mark.parametrize("how", EXPECTED)
@pytest.mark.parametrize("pattern", FILES)
def test_a_damaged_file_is_named(copy, pattern, how):
    name = harm(copy / "8", pattern, how)
    reason = damage(copy / "8", thorough=True)
    assert reason.startswith(f"{name} ")
    assert EXPECTED[how] in reason
    assert newest_whole(copy) == (4, {8: reason})


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(copy, caplog):
    harm(copy / "8", "state/ocdbt.process_0/d/*", "garbled")
    checkpoints = Checkpoints(copy, keep=2)
    (record,) = [r for r in caplog.records if r.name == "train.checkpoint"]
    message = record.getMessage()
    assert "\n" not in message
    assert "the checkpoint of step 8 is damaged (state/ocdbt.process_0/d/" in message
    assert message.endswith("and now lies in damaged-8; that of step 4 is taken")
    state, place = checkpoints.restore(abstract(at(0)))
    equal(state, at(4))
    assert place == {"step": 4}
    for step in (6, 8):
        checkpoints.save(step, at(step), {"step": step})
    checkpoints.close()
    assert sorted(p.name for p in copy.iterdir()) == ["6", "8", "damaged-8"]
    harm(copy / "8", "state/_METADATA", "missing")
    Checkpoints(copy, keep=2).close()
    assert sorted(p.name for p in copy.iterdir()) == ["6", "damaged-8", "damaged-8-2"]


@pytest.mark.parametrize("how", EXPECTED)
def test_nothing_is_touched_when_all_are_damaged(copy, how):
    names = [harm(copy / step, "state/d/*", how) for step in ("8", "4")]
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    with pytest.raises(InputError) as error:
        Checkpoints(copy, keep=2)
    message = str(error.value)
    assert f"no checkpoint is whole (8: {names[0]} " in message
    assert f"; 4: {names[1]} " in message
    assert before == {p: p.stat().st_mtime_ns for p in copy.rglob("*")}


def test_a_checkpoint_that_was_killed_before_its_checksums_is_whole(copy):
    (copy / "8" / "checksums.json").unlink()
    assert newest_whole(copy) == (8, {})
    (copy / "8" / "checksums.json").write_text("{")
    assert "not valid JSON" in damage(copy / "8", thorough=True)
    (copy / "8" / "checksums.json").write_text("{}")
    assert newest_whole(copy) == (4, {8: "checksums.json tells of no file"})


@pytest.mark.parametrize("pattern", ["state/_METADATA", "state/ocdbt.process_0/d/*", "place/*"])
def test_a_damaged_checkpoint_without_checksums_is_one_line(copy, pattern):
    (copy / "8" / "checksums.json").unlink()
    harm(copy / "8", pattern, "missing")
    with pytest.raises(InputError) as error:
        load(copy, 8, abstract(at(0)))
    message = str(error.value)
    assert message.startswith(f"{copy / '8'}: the checkpoint cannot be read (")
    assert message.endswith("or moved away to go on from that before it")
    assert "\n" not in message


def test_what_a_kill_left_half_written_is_gone(copy):
    half = copy / "12.orbax-checkpoint-tmp"
    shutil.copytree(copy / "8", half)
    assert steps(copy) == [4, 8]
    save(copy, 13)
    assert not half.exists()
    assert steps(copy) == [8, 13]


WITHOUT_ROOM = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from train.checkpoint import Checkpoints, SaveError
from train.guard import Guard
from train.step import TrainState

checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
for step in (1, 2):
    params = {"w": jnp.arange(50_000.0) * step}
    state = TrainState(jnp.int32(step), params, (jnp.int32(step),), Guard.start())
    try:
        checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
    except SaveError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
checkpoints.close()
"""


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    pytest.importorskip("resource", reason="limits of file sizes are Unix's")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (message,) = done.stdout.splitlines()
    assert "step 2 could not be written" in message
    assert "(File too large); that of 1 is intact" in message

    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest == 1
    state, place = checkpoints.restore(abstract(at(0)))
    checkpoints.close()
    equal(state, at(1))
    assert place == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["1"]  # what was half written is gone
