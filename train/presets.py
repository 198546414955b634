"""Presets, and what a command line makes of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TypeVar

import configs
from dspark_jax.config import require
from dspark_jax.io import cli
from train.settings import Settings

T = TypeVar("T")


def parse_arguments(args: Sequence[str], *, prog: str, description: str) -> Settings:
    """The settings that `[PRESET] [--setting value ...]` asks for; `tiny` without a preset."""
    return parse_around(args, _alone, prog=prog, description=description)


def _alone(settings: Settings) -> Settings:
    return settings


def parse_around(
    args: Sequence[str], around: Callable[[Settings], T], *, prog: str, description: str
) -> T:
    """As `parse_arguments`, for a command with settings of its own.

    Args:
      around: these settings, with their defaults and those of a training run in one field.
    """
    presets = sorted(m.name for m in pkgutil.iter_modules(configs.__path__))
    given = bool(args) and not args[0].startswith("-")
    preset = args[0] if given else "tiny"
    require(preset in presets, f"preset {preset!r}: expected one of {', '.join(presets)}")
    default = around(importlib.import_module(f"configs.{preset}").SETTINGS)
    return cli.parse(
        type(default),
        args[1:] if given else args,
        default=default,
        prog=f"{prog} {preset}",
        description=f"{description}\nPresets: {', '.join(presets)}.",
    )
