"""Costs of a pair that can be followed by hand (tests/infer/conftest.py)."""

import pytest

from dspark_jax.io import cli, cost_file, files
from dspark_jax.plans import ladder
from infer import facts, profile
from tests.infer.conftest import BLOCK

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def run(folders, tmp_path, capsys):
    def run(*args):
        path = tmp_path / "costs.json"
        given = ("--target", str(folders.target), "--draft", str(folders.draft))
        sizes = ("--slots", "2", "--context", "8", "--repeats", "1", "--block-size", "1")
        code = cli.run(lambda: profile.main((*given, "--output", str(path), *sizes, *args)))
        return code, *capsys.readouterr(), path

    return run


def test_writes_the_costs_of_every_round(run, folders):
    code, out, err, path = run()
    assert code == 0, err
    made = cost_file.load(path)
    assert (made.slots, made.block_size, made.context, made.dtype) == (2, 1, 8, "float32")
    assert made.target == files.fingerprint(folders.target)
    assert made.draft == files.fingerprint(folders.draft)
    plans = ladder(2, 1)
    assert set(made.table.seconds) == set(plans)
    assert min(made.table.seconds.values()) > 0
    lines = out.splitlines()
    assert len(lines) == 1 + len(plans) + 1
    assert lines[-1] == f"{path}: {len(plans)} kinds of rounds of 2 slots"


def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path, monkeypatch):
    def fails(text, *args):
        code, out, err, path = run(*args)
        assert (code, out) == (2, "")
        assert text in err.splitlines()[-1]
        assert not path.exists()

    fails("--slots 0: expected", "--slots", "0")
    fails("--context 0: expected", "--context", "0")
    fails("--repeats 0: expected", "--repeats", "0")
    fails("temperature=-1.0: expected", "--temperature", "-1")
    fails(f"block size 9: expected 1..{BLOCK}", "--block-size", "9")
    fails("no such folder", "--output", str(tmp_path / "a" / "costs.json"))
    fails("the target holds 128", "--context", "100")
    monkeypatch.setattr(facts, "free_bytes", lambda: 10)
    fails("fewer slots or a smaller --context")


def test_interrupted_it_writes_nothing(run, monkeypatch):
    def interrupt(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(profile.costs, "measure", interrupt)
    code, _, err, path = run()
    assert code == 130
    assert err.endswith("interrupted; nothing was written\n")
    assert not path.exists()
