"""Every benchmark says in a line what is wrong with its arguments, before it measures anything."""

import importlib
from pathlib import Path

import pytest

from dspark_jax.io import cli

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("core", "engine", "laptop", "refilling", "sequential_head", "systems", "training")


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)  # they import one another, as they do when run
    main = importlib.import_module(name).main
    nowhere = tmp_path / "missing" / "figures.json"
    for args, text in (
        (["--repeats", "0"], "--repeats 0: expected whole numbers above 0"),
        (["--json", str(nowhere)], f"--json {nowhere}: no such folder as {nowhere.parent}"),
        (["--rounds-of-beer", "1"], "Unrecognized options: --rounds-of-beer"),
    ):
        assert cli.run(lambda: main(args)) == 2  # noqa: B023
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert text in err
