"""A command of the project in a process that is meant to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def start(module: str, options: Mapping[str, Any], folder: Path) -> subprocess.Popen[str]:
    """Runs `python -m module --name=value ..`; options that are None are left out.

    What it says goes to a file in the folder. What was compiled once is read again from there, so
    that most kills meet a process that works.
    """
    args = [f"--{name}={value}" for name, value in options.items() if value is not None]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with open(folder / "log.txt", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=ROOT,
            env=os.environ | cache,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def require_success(code: int, folder: Path) -> None:
    """Shows what a process said that ended with another code than 0, and ends this one too."""
    if code != 0:
        print(f"a process ended with code {code}:\n{(folder / 'log.txt').read_text()}")
        raise SystemExit(1)
