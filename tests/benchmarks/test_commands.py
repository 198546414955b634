"""Every benchmark says in a line what is wrong with its arguments, before it measures anything."""

import importlib
from pathlib import Path

import pytest

from dspark_jax.io import cli

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOT_COMMANDS = {"parts", "hf_generate"}
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - NOT_COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)  # they import one another, as they do when run
    benchmark = importlib.import_module(name)
    nowhere = tmp_path / "missing"
    figures = nowhere / "figures.json"
    bad = {
        ("--repeats", "0"): "--repeats 0: expected whole numbers above 0",
        ("--json", str(figures)): f"--json {figures}: no such folder as {nowhere}",
        ("--rounds-of-beer", "1"): "Unrecognized options: --rounds-of-beer",
    }
    if hasattr(benchmark.Settings, "target"):
        bad["--target", str(nowhere)] = f"{nowhere}: no such folder"
    if hasattr(benchmark.Settings, "hf_python"):
        bad["--hf-python", str(nowhere)] = f"--hf-python {nowhere}: no such file"
    for args, text in bad.items():
        assert cli.run(lambda: benchmark.main(args)) == 2  # noqa: B023
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert text in err
