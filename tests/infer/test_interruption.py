"""Real processes that are ended in the middle, and started again."""

import json
import os
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMPTS = 600
OPTIONS = ("--slots", "4", "--max-new-tokens", "60")


@pytest.fixture
def whole(command):
    """Results of a run that nobody interrupted."""
    letters = string.ascii_lowercase + string.digits
    command.write([
        {"prompt": letters[n % 36] * (1 + n % 7), "max_new_tokens": 20 + n % 40}
        for n in range(PROMPTS)
    ])  # fmt: skip
    assert command(*OPTIONS) == 0
    found = command.results()
    command.output.unlink()
    assert [x["id"] for x in found] == list(range(1, PROMPTS + 1))
    return found


def start(command):
    source = str(command.folder / "prompts.jsonl")
    files = ("--prompts", source, "--output", str(command.output))
    args = [sys.executable, "-m", "infer.generate", *command.given, *files, *OPTIONS]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(command.folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        args, cwd=ROOT, env=os.environ | cache, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(command, number, lines):
    """Starts a process and sends it a signal when there are `lines` results; code and stderr."""
    with start(command) as process:
        while not command.output.exists() or command.output.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_terminated_and_started_again(command, whole):
    code, err = end(command, signal.SIGTERM, lines=1)
    assert code == 130, err
    assert err.splitlines()[1:] == [
        "interrupted; the same command goes on behind the results that are there"
    ]
    data = command.output.read_bytes()
    assert data.endswith(b"\n")
    done = command.results()
    assert done == whole[: len(done)]
    assert 0 < len(done) < PROMPTS
    assert command(*OPTIONS) == 0
    assert command.output.read_bytes().startswith(data)
    assert command.results() == whole


@pytest.mark.slow
def test_killed_three_times(command, whole):
    for lines in (1, 150, 400):
        code, err = end(command, signal.SIGKILL, lines)
        assert code == -signal.SIGKILL, err
        # As if the signal had come in the middle of a line, which cannot be hit by chance.
        with open(command.output, "ab") as file:
            file.write(json.dumps(whole[-1]).encode()[:40])
    with start(command) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.startswith(f"{command.output}: ")
    assert command.results() == whole
