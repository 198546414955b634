"""What the pictures show, and that each is there for a light and for a dark page."""

import io

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from infer.evaluation import figures
from infer.evaluation.estimates import Estimate
from infer.evaluation.figures import drawings
from infer.evaluation.findings import find
from infer.pictures import DARK, DARK_ENDING, LIGHT, png, themes
from tests.infer.evaluation.conftest import completion, drafter, sample


def drawn(draw, *args):
    figure = Figure()
    draw(figure, *args)
    return figure.axes


def points(axis):
    """x and y of the lines that have points, by label."""
    return {
        bars.get_label(): np.array(bars.lines[0].get_data()).tolist() for bars in axis.containers
    }


def test_all_pictures_in_both_themes(findings):
    made = dict(made for named in drawings(findings) for made in themes(*named))
    names = {"accepted_length", "positions", "depth", "block_length", "thresholds"}
    names |= {"reliability_ours"}
    assert set(made) == names | {name + DARK_ENDING for name in names}
    for name, data in made.items():
        pixels = image.imread(io.BytesIO(data), format="png")
        theme = DARK if name.endswith(DARK_ENDING) else LIGHT
        corner = "#" + "".join(f"{round(255 * float(x)):02x}" for x in pixels[0, 0, :3])
        assert corner == theme["paper"]
        assert pixels[..., :3].std() > 0.02


def test_depth_is_drawn_where_layers_differ():
    deep, flat = drafter("deep", layers=3), drafter("flat", layers=1)
    made = {deep: [(4, 3, 3)], flat: [(2, 3, 1)]}
    found = find([sample(d, "gsm8k", [completion(r)]) for d, r in made.items()], [])
    assert "depth" in dict(drawings(found))
    (axis,) = drawn(figures.plot_depths, found)
    assert points(axis) == {"flat, deep": [[1, 3], [2, 4]]}
    assert axis.get_xlabel() == "draft layers"


def test_lengths(findings):
    (axis,) = drawn(figures.plot_lengths, findings)
    found = points(axis)
    assert found["ours, 3 drafts"][1] == [2.5] * 3
    assert found["theirs, 3 drafts"][1] == [4 / 3] * 3
    assert found["ours, 3 drafts"][0] == pytest.approx([-0.125, 0.875, 1.875])
    labels = [t.get_text() for t in axis.get_xticklabels()]
    assert labels == ["gsm8k\n(math)", "math500\n(math)", "mbpp\n(code)"]


def test_positions(findings):
    math, code = drawn(figures.plot_positions, findings)
    assert [math.get_title(), code.get_title()] == ["math", "code"]
    assert points(math)["ours, 3 drafts"] == [[1, 2, 3], [0.8, 0.75, 0.5]]
    assert math.get_xlabel() == "position in the block"


def test_blocks(findings):
    math, code = drawn(figures.plot_blocks, findings)
    found = points(math)
    assert found["ours"] == [[3], [2.5]]
    assert found["theirs"] == [[2, 3], [2, 4 / 3]]
    for axis in (math, code):  # which share a scale
        bottom, top = axis.get_ylim()
        assert bottom == 1
        assert top > max(y for _, ys in points(axis).values() for y in ys)


def test_thresholds(findings):
    axes = drawn(figures.plot_thresholds, findings)
    assert [axis.get_ylabel() for axis in axes[::2]] == [
        "verified, of the drafts made",
        "accepted, of the verified",
    ]
    verified = axes[0].lines[0].get_ydata()
    assert verified[0] == 1
    assert verified[-1] == 0
    (mark,) = axes[0].containers
    assert np.array(mark.lines[0].get_data()).tolist() == [[0.85], [1 / 6]]


def test_reliability(findings):
    (found,) = findings.reliabilities
    axes = drawn(figures.plot_reliability, found)
    assert [axis.get_title() for axis in axes] == [
        *(f"position {k}" for k in (1, 2, 3)),
        "calibration error",
    ]
    assert set(points(axes[0])) == {"raw", "after temperature scaling"}
    raw, scaled = axes[3].lines
    assert raw.get_ydata().tolist() == pytest.approx(100 * found.raw.error)
    assert scaled.get_ydata().tolist() == pytest.approx(100 * found.scaled.error)
    assert axes[3].get_ylabel() == "ECE (%)"


def test_bins_of_a_few_rounds_are_not_drawn():
    """Nine chances of .95 and ten of .45."""
    made = [completion([(2, 3, 1)] * 19, confidences=[[0.95] * 3] * 9 + [[0.45] * 3] * 10)]
    (found,) = find([sample(drafter(), "gsm8k", made)], []).reliabilities
    first = points(drawn(figures.plot_reliability, found)[0])["raw"]
    assert first == [[pytest.approx(0.45)], [1]]


def test_an_interval_beside_its_figure_is_drawn():
    """Of few prompts it may be."""

    def draw(figure):
        one = np.array([1.0])
        figures.bars(figure.subplots(), [0], Estimate(one, one + 1, one + 2), "a")

    assert png(draw, LIGHT).startswith(b"\x89PNG")
