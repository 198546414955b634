"""Pictures have the colours of the page that they are for."""

import io

import pytest
from matplotlib import image

from infer.pictures import DARK, DARK_ENDING, LIGHT, below, themes


def draw(figure):
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], label="up")
    axis.plot([0, 1], [1, 0], label="down")
    below(figure, axis)


def colours(data):
    pixels = image.imread(io.BytesIO(data), format="png")[..., :3]
    return pixels[0, 0], {tuple((255 * p).round().astype(int)) for p in pixels.reshape(-1, 3)}


def rgb(name):
    return tuple(int(name[at : at + 2], 16) for at in (1, 3, 5))


def test_one_picture_for_each_page():
    made = dict(themes("lines", draw))
    assert list(made) == ["lines", "lines" + DARK_ENDING]


@pytest.mark.parametrize(("ending", "theme"), [("", LIGHT), (DARK_ENDING, DARK)])
def test_paper_ink_and_lines_are_the_themes(ending, theme):
    corner, found = colours(dict(themes("lines", draw))["lines" + ending])
    assert tuple((255 * corner).round().astype(int)) == rgb(theme["paper"])
    first, second = theme["lines"][:2]
    assert {rgb(first), rgb(second), rgb(theme["ink"])} <= found
