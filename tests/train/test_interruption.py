"""A real process that is killed, and started again."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_at_random_in_an_epoch_and_at_its_edge(tmp_path):
    script = ROOT / "scripts" / "kill_and_resume_training.py"
    options = ["--times", "3", "--steps", "36", "--workdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("3 kills (1 edge, 1 middle, 1 random): ")
    assert last.endswith("each with all 36 steps once and equal to the bit, and the same drafter")
