"""Pictures have the colours of the page that they are for."""

import io

import pytest
from matplotlib import image

from dspark_jax.config import InputError
from infer import pictures
from infer.pictures import DARK, DARK_ENDING, LIGHT, below, png, themes


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


def test_many_lines_have_a_look_of_their_own():
    looks = []

    def draw(figure):
        axis = figure.subplots()
        for n in range(20):
            (line,) = axis.plot([0, 1], [n, n], label=str(n))
            looks.append((line.get_color(), line.get_marker()))
        below(figure, axis)
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [str(n) for n in range(20)]

    png(draw, LIGHT)
    assert len(set(looks)) == 20


def test_both_pictures_are_put_side_by_side(tmp_path):
    pictures.save(tmp_path / "a.b.png", draw)
    assert {p.name for p in tmp_path.iterdir()} == {"a.b.png", f"a.b{DARK_ENDING}.png"}


def test_places_where_they_cannot_be(tmp_path):
    (tmp_path / f"x{DARK_ENDING}.png").mkdir()
    for path, text in (
        (tmp_path / "a.pdf", "expected a .png file"),
        (tmp_path / "missing" / "a.png", "no such folder"),
        (tmp_path / "x.png", f"x{DARK_ENDING}.png: is a folder"),
    ):
        with pytest.raises(InputError, match=text):
            pictures.check(path, "--plot")
