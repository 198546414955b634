"""Text that every Python installation has: the sources of its standard library.

Used for the embedded target, and as the default data of `train.main`. Tests and IDLE are left out;
the files of `HELD_OUT` are never trained on, neither by the target nor by a drafter.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
HELD_OUT = (
    "base64.py",
    "calendar.py",
    "cmd.py",
    "configparser.py",
    "copy.py",
    "csv.py",
    "dataclasses.py",
    "fractions.py",
    "heapq.py",
    "json/decoder.py",
    "pprint.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)

REQUEST = "Complete this function:"


def stdlib_texts(*, held_out: bool = False) -> list[str]:
    """Sources of the standard library in order of path, or the held-out ones."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.isdisjoint(relative.parts) and (relative.as_posix() in HELD_OUT) == held_out:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def functions(text: str, max_chars: int = 1500) -> Iterator[tuple[str, str]]:
    """Question and answer for each short module-level function: its signature, and its body."""
    try:
        module = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines(keepends=True)
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            start, body, end = node.lineno - 1, node.body[0].lineno - 1, node.end_lineno
            head, tail = "".join(lines[start:body]), "".join(lines[body:end])
            if start < body and len(head) + len(tail) <= max_chars:
                yield f"{REQUEST}\n{head}", tail
