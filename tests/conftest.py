"""Settings that must precede JAX, and the reference vectors that only some machines have."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tolerances are those of float32 on a CPU
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", "")]
).strip()

import pytest

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of models and vectors made by the reference implementation.

    It does not come with the project: `DSPARK_GOLDEN` names it, or it lies at
    `../shared/golden`; tests that need it are skipped where it is absent.
    """
    folder = Path(os.environ.get("DSPARK_GOLDEN", GOLDEN))
    if not folder.is_dir():
        pytest.skip(f"no reference vectors at {folder} (set DSPARK_GOLDEN)")
    return folder
