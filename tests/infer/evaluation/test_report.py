"""Tables of findings that were made by hand."""

import re

import pytest

from infer.evaluation import figures, report
from infer.evaluation.estimates import Estimate
from infer.evaluation.report import Circumstances, between, markdown, table
from infer.pictures import DARK_ENDING


@pytest.fixture
def about():
    return Circumstances(
        command="python -m infer.evaluate --output 'my dir'",
        target="some/target",
        dtype="float32",
        sampling={"temperature": 1.0, "seed": 0},
        thinking=False,
        device="cpu",
        jax="1.2.3",
        date="2026-01-02",
        sources={"ours": "runs/ours"},
    )


def test_how_it_was_made(findings, about):
    text = markdown(findings, about)
    assert "```sh\npython -m infer.evaluate --output 'my dir'\n```" in text
    assert "- 2026-01-02, cpu, jax 1.2.3\n" in text
    assert "- target some/target in float32; temperature 1, seed 0\n" in text
    assert "- drafter ours: runs/ours\n" in text
    assert "95 % intervals over prompts" in text


def test_tables(findings, about):
    rows = markdown(findings, about).splitlines()
    for row in (
        "| drafter | K | gsm8k (math) | math500 (math) | mbpp (code) |",
        "| :-- | --: | --: | --: | --: |",
        "| ours | 3 | 2.50 [2.00, 3.00] | 2.50 [2.00, 3.00] | 2.50 [2.00, 3.00] |",
        "| theirs | 2 | 2.00 [1.00, 2.50] | 2.00 [1.00, 2.50] | 2.00 [1.00, 2.50] |",
        "| drafter | domain | 1 | 2 | 3 |",
        "| drafter | K | domain | accepted length | over the first |",
        "| ours | math | 0.85 | decoded | 0.17 [0.17, 0.17] | 1.00 [1.00, 1.00] |"
        " 1.50 [1.50, 1.50] |",
    ):
        assert row in rows


def test_every_picture_that_is_drawn_is_shown(findings, about):
    pattern = r'srcset="([^"]+)"><img src="([^"]+)" alt="[^"]+">'
    shown = re.findall(pattern, markdown(findings, about))
    drawn = [name for name, _ in figures.drawings(findings)]
    assert shown == [(f"{name}{DARK_ENDING}.png", f"{name}.png") for name in drawn]


def test_cells():
    assert between(Estimate(1.234, 1, 2)) == "1.23 [1.00, 2.00]"
    assert between(Estimate(*[float("nan")] * 3)) == "-"
    assert table(["a", "b"], [["x|y", "2"]]) == "| a | b |\n| :-- | --: |\n| x\\|y | 2 |"


def test_the_terminal(findings):
    first = findings.measurements[0]
    title, row = report.header(5, 7, 3), report.row(first, 5, 7)
    assert title.split() == ["draft", "K", "prompts", "length", "95", "%", "rounds", "1", "2", "3"]
    cells = row.split()
    assert cells == [
        *("ours", "3", "gsm8k", "2.500", "2.000..3.000", "4"),
        *("0.800", "0.750", "0.500"),
    ]
    assert title.index("rounds") + len("rounds") == row.index(" 4 ") + 2
    code = [d for d in findings.domains if d.domain == "code"]  # of one set of prompts
    assert report.domain_lines(code)[0] == (
        "code: ours (K=3) 2.500 [2.000, 3.000], 1.000 [1.000, 1.000] times the first"
    )
