"""Checksums of the files in a folder, kept beside them: what has changed since."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from dspark_jax.config import InputError
from dspark_jax.io import files

NAME = "checksums.json"
SMALL = 1 << 20
"""Bytes up to which a file is always read."""


def write(folder: Path) -> None:
    """Adds the file of sizes and checksums, whole or not at all."""
    found = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    files.write_whole(folder / NAME, json.dumps(found, indent=1) + "\n")


def difference(folder: Path, *, thorough: bool) -> str | None:
    """The first file that is not as it was, and how; None without any, or without checksums.

    Args:
      thorough: whether large files are read too; otherwise only their sizes are compared.
    """
    if not (folder / NAME).exists():
        return None
    try:
        expected = files.read_json(folder / NAME)
    except InputError as error:
        return str(error)
    if not expected:
        return f"{NAME} tells of no file"
    for name, entry in expected.items():
        match entry:
            case {"size": int(wanted), "crc32": int(checksum)}:
                path = folder / name
            case _:
                return f"{NAME} does not tell of {name}"
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != wanted:
            return f"{name} has {size} bytes, expected {wanted}"
        if (thorough or size <= SMALL) and crc32(path) != checksum:
            return f"{name} has another checksum than when it was written"
    return None


def crc32(path: Path) -> int:
    """Checksum of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(SMALL):
            total = zlib.crc32(block, total)
    return total
