"""Presets, and what a command line makes of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

import configs
from dspark_jax.config import require
from dspark_jax.io import cli
from train.settings import Settings


def parse_arguments(args: Sequence[str], *, prog: str, description: str) -> Settings:
    """The settings that `[PRESET] [--setting value ...]` asks for; `tiny` without a preset."""
    presets = sorted(m.name for m in pkgutil.iter_modules(configs.__path__))
    given = bool(args) and not args[0].startswith("-")
    preset = args[0] if given else "tiny"
    require(preset in presets, f"preset {preset!r}: expected one of {', '.join(presets)}")
    return cli.parse(
        Settings,
        args[1:] if given else args,
        default=importlib.import_module(f"configs.{preset}").SETTINGS,
        prog=f"{prog} {preset}",
        description=f"{description}\nPresets: {', '.join(presets)}.",
    )
