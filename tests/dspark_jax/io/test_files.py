"""Folders, JSON files and repositories: a line for what is not there or is no JSON."""

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest

from dspark_jax.config import InputError
from dspark_jax.io import files, hf
from tests.dspark_jax.io.conftest import LOADERS, refused


@LOADERS
def test_no_folder(load, tmp_path):
    assert refused(load, tmp_path / "absent").endswith("absent: no such folder")


@LOADERS
def test_a_file_is_no_folder(load, tmp_path):
    (tmp_path / "file").write_text("")
    assert "a file, expected a folder" in refused(load, tmp_path / "file")


def test_room_for_a_folder(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "new" / "deep", Path("new")):
        files.require_room(folder)
    for folder in (file, file / "new", file / "new" / "deep"):
        with pytest.raises(InputError) as error:
            files.require_room(folder)
        assert str(error.value) == f"{folder}: expected a folder, {file} is a file"
    with pytest.raises(InputError, match=r"^file/new: expected a folder, /.*/file is a file$"):
        files.require_room(Path("file/new"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@LOADERS
@pytest.mark.parametrize("text", ["{", "", "[1]", "null", '{"a": 1,}', "9" * 5000, "[" * 10**5])
def test_malformed_config(load, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "JSON" in refused(load, tmp_path)


def test_config_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not valid JSON" in refused(hf.load_target, tmp_path)


def test_hub_repository_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"^some/model: .*install dspark_jax\[hub\]$"):
        hf.load_target("some/model")


def test_hub_that_does_not_answer(tmp_path, monkeypatch):
    def unreachable(name, **_):
        raise ConnectionError("unreachable\nsecond line")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(InputError) as error:
        files.resolve("some/model")
    assert str(error.value) == "some/model: no such folder, and the hub said: unreachable"


def test_fingerprint_is_of_configuration_and_shapes(saved, tmp_path):
    fingerprint = files.fingerprint
    copy = shutil.copytree(saved / "vanilla", tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(saved / "vanilla") != fingerprint(saved / "gated")
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | {"mask_token_id": 1}))
    assert fingerprint(copy) != fingerprint(saved / "vanilla")
