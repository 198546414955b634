import json
from pathlib import Path

import pytest

from dspark_jax.config import InputError
from train.settings import DataSettings, EvaluationSettings, Settings, WatchSettings
from train.workdir import FREE, check_data, check_workdir, read_workdir, write_workdir

DIGESTS = {"a.txt": "one", "b.txt": "two"}


@pytest.fixture
def settings(tmp_path) -> Settings:
    found = Settings(
        workdir=tmp_path / "run",
        data=DataSettings(files=("a.txt", "b.txt")),
        evaluation=EvaluationSettings(held_out_files=("c.txt",)),
        watch=WatchSettings(profile=(2, 3), peak_flops=1e12),
    )
    write_workdir(found, DIGESTS)
    return found


def test_settings_come_back(settings):
    assert read_workdir(settings.workdir) == settings
    default = Settings(workdir=settings.workdir / "other")
    write_workdir(default, DIGESTS)
    assert read_workdir(default.workdir) == default


def test_a_run_may_go_on_elsewhere_but_not_learn_otherwise(settings):
    bound = settings.flat().keys() - FREE
    assert {"learning_rate", "files", "dtype", "spike_factor", "steps", "target"} <= bound
    assert {"devices", "save_every", "log_every", "microbatches", "profile", "wandb"} <= FREE
    path = settings.workdir / "config.json"
    for name in settings.flat().keys() - {"workdir"}:
        values = json.loads(path.read_text())
        there = Path(settings.workdir.with_name(name))
        there.mkdir()
        (there / "config.json").write_text(json.dumps({**values, name: "other"}))
        here = Settings(**{**vars(settings), "workdir": there})
        if name in FREE:
            check_workdir(here)
            continue
        with pytest.raises(InputError, match=f'config.json: {name} is "other" there and'):
            check_workdir(here)


def test_data_that_has_changed(settings):
    check_data(settings, DIGESTS)
    with pytest.raises(InputError, match=r"^b.txt: changed since the run in .* began; expected"):
        check_data(settings, {**DIGESTS, "b.txt": "other"})
    (settings.workdir / "data.json").unlink()
    check_data(settings, {"a.txt": "other"})  # of a run that has not begun


def change(**values):
    """A config.json with other values, or without them where they are `...`."""

    def write(path: Path) -> None:
        found = {**json.loads((path / "config.json").read_text()), **values}
        kept = {n: v for n, v in found.items() if v is not ...}
        (path / "config.json").write_text(json.dumps(kept))

    return write


def text(content: bytes):
    return lambda path: (path / "config.json").write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json: no such file, expected"),
        (text(b""), "config.json: not valid JSON"),
        (text(b"{"), "config.json: not valid JSON"),
        (text(b"[]"), "config.json: expected a JSON object"),
        (text(b"\xff"), "config.json: not valid JSON"),
        (change(seed=...), "config.json: seed is missing"),
        (change(seed="0"), 'config.json: seed is "0": expected'),
        (change(seed=0.5), "config.json: seed is 0.5: expected"),
        (change(seed=True), "config.json: seed is true: expected"),
        (change(seed=-1), "seed=-1: expected a number in"),
        (change(target=None), "config.json: target is null: expected"),
        (change(head="big"), 'config.json: head is "big": expected'),
        (change(confidence_head=1), "config.json: confidence_head is 1: expected"),
        (change(target_layer_ids=3), "config.json: target_layer_ids is 3: expected"),
        (change(target_layer_ids=[0, "1"]), "config.json: target_layer_ids is"),
        (change(profile=[1]), "config.json: profile is"),
        (change(profile=[3, 2]), "profile=3 2: expected 1 <= first <= last"),
        (change(learning_rate="high"), "config.json: learning_rate is"),
        (change(files="a.txt"), "config.json: files is"),
        (change(block_size=None), "config.json: block_size is null"),
    ],
)
def test_a_config_that_is_none(settings, harm, message):
    harm(settings.workdir)
    before = {p: p.read_bytes() for p in settings.workdir.rglob("*")}
    with pytest.raises(InputError, match=message):
        read_workdir(settings.workdir)
    assert before == {p: p.read_bytes() for p in settings.workdir.rglob("*")}
