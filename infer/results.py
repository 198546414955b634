"""The output file: one result a line, in the order of the prompts, and how to go on with it.

Results are appended as soon as all before them are there, and are on the disk before the next are
decoded. A run that finds results in its output goes on behind them; OUTPUT.meta.json tells it
whether they were made with the same settings, and from the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.config import InputError, require
from dspark_jax.io import files
from dspark_jax.request import Completion
from infer.requests import Id, Prompt

Key = tuple[Id, int | None]
"""Of a result: the id of its prompt and, where that has several, which of its samples it is."""

_SHARED = (
    "--output {}: was written to by another command since this one began; expected a file for each"
)


def result(
    prompt: Prompt,
    completion: Completion | None,
    *,
    trace: bool = False,
    logprobs: bool = False,
    prompt_ids: bool = False,
) -> dict[str, Any]:
    """One line of the output; without a completion it holds the prompt's error.

    `sample` is there where a prompt has several, `logprobs` (a number a token) and `prompt_ids`
    (what the target read) where asked for.
    `accepted_lengths` are the tokens that each round added: with the first token, which the prefill
    makes, they sum up to `completion_tokens`. With `trace` also `verified_lengths`, `confidences`
    and the `confidence_logits` behind them (null when the drafter has no confidence head).
    """
    line: dict[str, Any] = {
        "id": prompt.id,
        **({} if prompt.sample is None else {"sample": prompt.sample}),
        "token_ids": completion.token_ids if completion else [],
        "text": completion.text if completion else "",
        "finish_reason": completion.finish_reason if completion else "error",
        "prompt_tokens": completion.prompt_tokens if completion else 0,
        "completion_tokens": len(completion.token_ids) if completion else 0,
        "accepted_lengths": completion.accepted_lengths if completion else [],
    }
    if trace:
        line["verified_lengths"] = completion.verified_lengths if completion else []
        line["confidences"] = completion.confidences if completion else []
        line["confidence_logits"] = completion.confidence_logits if completion else []
    if logprobs:
        line["logprobs"] = completion.logprobs if completion else []
    if prompt_ids:
        line["prompt_ids"] = list(prompt.request.token_ids) if prompt.request else []
    return line if completion else line | {"error": prompt.error}


def check_place(path: Path, option: str) -> None:
    """Raises `InputError` when a file cannot be put at `path`."""
    require(path.parent.is_dir(), f"{option} {path}: no such folder as {path.parent}")
    require(not path.is_dir(), f"{option} {path}: is a folder, expected a file")


def meta_path(output: Path) -> Path:
    return output.with_name(output.name + ".meta.json")


def meta(settings: Mapping[str, Any], prompts: Path) -> dict[str, Any]:
    """What decides the results: settings, and the prompts."""
    data = prompts.read_bytes()
    return {"settings": dict(settings), "prompts": {"bytes": len(data), "sha256": _hash(data)}}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def finished(output: Path, settings: Mapping[str, Any], prompts: Path, keys: Sequence[Key]) -> int:
    """How many of the results that `keys` stand for are in `output` already; changes nothing.

    Lines may have been added behind the prompts of the earlier run.

    Raises:
      InputError: the file holds something else, or results of other settings or other prompts.
    """
    if not output.exists() or output.stat().st_size == 0:
        return 0
    require(output.is_file(), f"--output {output}: expected a file")
    path = meta_path(output)
    require(
        path.exists(),
        f"--output {output}: exists, and without {path.name} it cannot be continued; expected a"
        " new file",
    )
    _check_meta(output, files.read_json(path), settings, prompts)
    found = _keys(output)
    require(
        found == list(keys[: len(found)]),
        f"--output {output}: its {len(found)} results are not the first of those that {prompts}"
        " leads to; expected a new file",
    )
    return len(found)


def _check_meta(
    output: Path, made: Mapping[str, Any], settings: Mapping[str, Any], prompts: Path
) -> None:
    before, source = made.get("settings"), made.get("prompts")
    if not (isinstance(before, dict) and isinstance(source, dict)):
        raise InputError(f"{meta_path(output)}: not made by this command; expected a new --output")
    for name in sorted(before.keys() | settings.keys()):
        old, new = before.get(name), settings.get(name)
        require(
            old == new,
            f"--output {output}: was begun with {name}={old!r}, now it is {new!r}; expected the"
            " same settings or a new file",
        )
    data = prompts.read_bytes()[: source.get("bytes")]
    require(
        _hash(data) == source.get("sha256"),
        f"--output {output}: was begun with other prompts than those in {prompts}; expected the"
        " same lines (more may follow them) or a new file",
    )


def _keys(output: Path) -> list[Key]:
    """Those of the whole lines; the last line may be torn."""
    found = []
    for number, line in enumerate(output.read_bytes().split(b"\n")[:-1], start=1):
        try:
            fields = json.loads(line)
            found.append((fields["id"], fields.get("sample")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"--output {output} line {number}: not a result; expected a new file"
            ) from error
    return found


def begin(output: Path, made: Mapping[str, Any], done: int) -> int:
    """Makes `output` ready for `append`: its meta file is written, a torn last line dropped.

    Returns its size.

    Raises:
      InputError: it no longer holds just the `done` results that `finished` found.
    """
    data = output.read_bytes() if output.exists() else b""
    require(data.count(b"\n") == done, _SHARED.format(output))
    files.write_whole(meta_path(output), json.dumps(made, indent=2) + "\n")
    whole = data.rfind(b"\n") + 1
    with open(output, "ab") as file:
        file.truncate(whole)
    return whole


def append(output: Path, lines: Sequence[Mapping[str, Any]], *, size: int) -> int:
    """Adds results and waits until they are on the disk; returns the size of the file.

    Args:
      size: what `begin` or the last call returned.
    Raises:
      InputError: the file has another size: somebody else writes to it.
      OSError: with the name of the file; a line that is only half written is dropped by `begin`.
    """
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    try:
        with open(output, "ab") as file:
            require(file.tell() == size, _SHARED.format(output))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(output)) from error
    return size + len(data)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Raises `OSError` with the name of the file."""
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
