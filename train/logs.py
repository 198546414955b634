"""What a run reports: metrics.jsonl, TensorBoard events, and a progress bar on a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter
from tqdm import tqdm


class Logs:
    """Writes metrics under a folder; what an interrupted run wrote past `step` is dropped."""

    def __init__(self, folder: Path, *, step: int, steps: int):
        self._path = folder / "metrics.jsonl"
        if self._path.exists():
            _drop_after(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")
        purge = step + 1 if step else None
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._bar = tqdm(
            total=steps, initial=step, file=sys.stderr, disable=not sys.stderr.isatty()
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics, which hold for the updates up to number `step`."""
        values = {n: v if math.isfinite(v) else None for n, v in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        shown = {n: metrics[n] for n in ("loss", "expected_accepted_length") if n in metrics}
        self._bar.set_postfix({n: f"{v:.3f}" for n, v in shown.items()}, refresh=False)

    def advance(self) -> None:
        """One more step on the progress bar."""
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
        self._board.close()
        self._file.close()


def _drop_after(path: Path, step: int) -> None:
    """Keeps the whole lines of steps up to `step`."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
