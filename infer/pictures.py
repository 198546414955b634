"""Pictures, each for a light and for a dark page."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dspark_jax.config import require
from dspark_jax.io import files
from infer import results

MARKERS = ("o", "s", "^", "D", "v", "P")
"""Beside colours, which not everybody can tell apart, and of which there is one more."""
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#d0d7de",
    "lines": ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#5a3fa0", "#555555"),
}
DARK = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "faint": "#3d444d",
    "lines": ("#56b4e9", "#ff9e64", "#2dc59a", "#f0a0d0", "#f0e442", "#b9a3ff", "#bbbbbb"),
}
DARK_ENDING = "-dark"
CURVE_BINS = 10
"""Of a reliability curve."""
FEW = 10
"""Rounds below which a bin of it is not drawn."""
EDGES = (-0.03, 1.03)
"""Of shares, with room for points at 0 and 1."""
Draw = Callable[[Any], None]


def themes(name: str, draw: Draw) -> Iterator[tuple[str, bytes]]:
    """Names without ending, and PNGs; that of the dark page has a name with `DARK_ENDING`."""
    for theme, ending in ((LIGHT, ""), (DARK, DARK_ENDING)):
        yield name + ending, png(draw, theme)


def paths(path: Path) -> tuple[Path, Path]:
    """Of the picture for a light page, and of that for a dark one beside it."""
    return path, path.with_name(path.stem + DARK_ENDING + path.suffix)


def check(path: Path, option: str) -> None:
    """Raises `InputError` where `save` could not put its pictures."""
    require(path.suffix == ".png", f"{option} {path}: expected a .png file")
    require_matplotlib()
    for each in paths(path):
        results.check_place(each, option)


def require_matplotlib() -> None:
    """Raises `InputError` where nothing can be drawn."""
    require(
        importlib.util.find_spec("matplotlib") is not None,
        "the pictures need matplotlib; install dspark_jax[plots]",
    )


def save(path: Path, draw: Draw) -> None:
    """Writes both of `paths`, each whole or not at all."""
    for each, (_, data) in zip(paths(path), themes(path.stem, draw), strict=True):
        files.write_whole(each, data)


def png(draw: Draw, theme: dict[str, Any]) -> bytes:
    """What `draw` puts on a figure."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    lines, ink, paper = theme["lines"], theme["ink"], theme["paper"]
    marked = cycler(color=lines * len(MARKERS)) + cycler(marker=MARKERS * len(lines))
    style = {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "savefig.facecolor": paper,
        "legend.facecolor": paper,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), ink),
        **dict.fromkeys(("xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("grid.color", "legend.edgecolor"), theme["faint"]),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": marked,
        "lines.markersize": 5,
    }
    data = io.BytesIO()
    with matplotlib.rc_context(style):
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def below(figure: Any, axis: Any) -> None:
    """The legend of an axis, under all of them."""
    handles, labels = axis.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / 2.6))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
