"""Makes prompt files for `infer.generate` and `infer.evaluate` from data sets of the hub.

    python scripts/prepare_prompts.py open-perfectblend --output prompts.jsonl [--prompts 100000]
    python scripts/prepare_prompts.py gsm8k --output gsm8k.jsonl
    python scripts/prepare_prompts.py gsm8k --output gsm8k.jsonl --from test-00000-of-00001.parquet

open-perfectblend is what the drafters of the paper were trained on: its first questions, to which
the target gives its own answers. The others are the paper's benchmarks (section 5), asked as is
usual there. Files come from the hub, or from --from when they are here already. Records that hold
no prompt are passed over and counted.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from dspark_jax.config import InputError, require
from dspark_jax.io import cli

Record = Mapping[str, Any]

ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant"}
MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
# The benchmark's own prompt.
LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and"
    " will generate a correct Python program that matches the specification and passes all tests."
    " You will NOT return anything except for the program\n\n### Question:\n{}\n\n### Format: {}\n"
    "```python\n{}\n```\n\n### Answer: (use the provided format with backticks)"
)


def field(record: Record, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name}: expected a text that is not empty")
    return value


def asked(name: str, form: str = "{}") -> Callable[[Record], dict[str, Any]]:
    """One turn: a field of the record, in a form of words."""
    return lambda record: {"turns": [form.format(field(record, name))]}


def first_question(record: Record) -> dict[str, Any]:
    """What stands before the first answer, with the system prompt if there is one."""
    turns = record.get("conversations")
    require(isinstance(turns, list), "conversations: expected a list of turns")
    messages: list[dict[str, str]] = []
    for turn in turns or []:
        require(isinstance(turn, dict), "conversations: expected turns with from and value")
        role = ROLES.get(turn.get("from", ""))
        if role is None or role == "assistant":
            break
        messages.append({"role": role, "content": field(turn, "value")})
    require(
        bool(messages) and messages[-1]["role"] == "user",
        "conversations: expected a turn of human (or user) before the first answer",
    )
    return {"messages": messages}


def instruction(record: Record) -> dict[str, Any]:
    text, more = field(record, "instruction"), record.get("input")
    return {"turns": [f"{text}\n\nInput:\n{more}" if more else text]}


def both_turns(record: Record) -> dict[str, Any]:
    turns = record.get("prompt")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise InputError("prompt: expected a list of texts")
    return {"turns": turns}


def programming_task(record: Record) -> dict[str, Any]:
    question, starter = field(record, "question_content"), record.get("starter_code")
    form = "Use the following code structure:" if starter else None
    form = form or "Write your code in the following format:"
    return {"turns": [LIVECODEBENCH.format(question, form, starter or "# YOUR CODE HERE")]}


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Where a data set is, and what of a record is the prompt."""

    repository: str
    files: str
    """Pattern of their paths in the repository."""
    prompt: Callable[[Record], dict[str, Any]]


SETS = {
    "open-perfectblend": PromptSet(
        "mlabonne/open-perfectblend", "data/train-*.parquet", first_question
    ),
    "gsm8k": PromptSet("openai/gsm8k", "main/test-*.parquet", asked("question", MATH)),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test.jsonl", asked("problem", MATH)),
    "aime25": PromptSet("math-ai/aime25", "test.jsonl", asked("problem", MATH)),
    "mbpp": PromptSet("google-research-datasets/mbpp", "sanitized/test-*.parquet", asked("prompt")),
    "humaneval": PromptSet(
        "openai/openai_humaneval", "openai_humaneval/test-*.parquet", asked("prompt", HUMANEVAL)
    ),
    "livecodebench": PromptSet(
        "livecodebench/code_generation_lite", "test*.jsonl", programming_task
    ),
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", both_turns),
    "alpaca": PromptSet("tatsu-lab/alpaca", "data/train-*.parquet", instruction),
    "arena-hard-v2": PromptSet(
        "lmarena-ai/arena-hard-auto", "data/arena-hard-v2.0/question.jsonl", asked("prompt")
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Makes a file of prompts."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Of the data set."""
    output: Path
    """JSONL file to write."""
    source: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")] = ()
    """JSONL or Parquet files of the data set, in place of those of the hub."""
    prompts: int | None = None
    """How many to draw at random; default: all."""
    seed: int = 0

    def check(self) -> PromptSet:
        """The data set; raises `InputError` for what is wrong."""
        require(self.name in SETS, f"{self.name}: expected one of {', '.join(SETS)}")
        require(
            self.prompts is None or self.prompts > 0,
            f"--prompts {self.prompts}: expected a number above 0",
        )
        folder = self.output.parent
        require(folder.is_dir(), f"--output {self.output}: no such folder as {folder}")
        require(not self.output.is_dir(), f"--output {self.output}: is a folder, expected a file")
        for path in self.source:
            require(path.is_file(), f"--from {path}: no such file")
            require(
                path.resolve() != self.output.resolve(), "--from and --output: expected two files"
            )
        return SETS[self.name]


def main(args: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    settings = cli.parse(Settings, args, prog="prepare_prompts", description=__doc__ or "")
    found = settings.check()
    skipped: list[str] = []
    made = prompts(settings.source or fetch(found), found, skipped)
    if settings.prompts is not None:
        made = draw(made, settings.prompts, settings.seed)
    count = write(settings.output, made, skipped)
    if skipped:
        print(f"{len(skipped)} records passed over; the first is {skipped[0]}", file=sys.stderr)
    print(f"{settings.output}: {count:,} prompts of {settings.name}")
    return 0


def fetch(found: PromptSet) -> list[Path]:
    """The files of a data set, from the hub or its cache."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise InputError("to fetch data sets install dspark_jax[hub]") from error
    try:
        folder = huggingface_hub.snapshot_download(
            found.repository, repo_type="dataset", allow_patterns=found.files
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{found.repository}: {str(error).splitlines()[0]}") from error
    paths = sorted(Path(folder).glob(found.files))
    require(len(paths) > 0, f"{found.repository}: no files like {found.files} in it")
    return paths


def prompts(
    paths: Sequence[Path], found: PromptSet, skipped: list[str]
) -> Iterator[dict[str, Any]]:
    """Lines of a prompt file, numbered by record; why others are none is added to `skipped`."""
    number = 0
    for path in paths:
        for place, record in enumerate(records(path), start=1):
            number += 1
            try:
                require(isinstance(record, dict), "expected an object")
                yield {"id": number, **found.prompt(record)}
            except InputError as error:
                skipped.append(f"{path} record {place}: {error}")


def records(path: Path) -> Iterator[Any]:
    """Those of a JSONL or Parquet file."""
    if path.suffix == ".parquet":
        yield from parquet_records(path)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig")
                if text.strip():
                    yield json.loads(text)
            except UnicodeDecodeError as error:
                raise InputError(f"{path} line {number}: not UTF-8 text") from error
            except json.JSONDecodeError as error:
                raise InputError(f"{path} line {number}: not valid JSON ({error.msg})") from error


def parquet_records(path: Path) -> Iterator[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InputError(f"{path}: to read Parquet files install dspark_jax[hub]") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ValueError as error:  # those of pyarrow are
        raise InputError(f"{path}: not a Parquet file ({error})") from error


def draw(made: Iterator[dict[str, Any]], size: int, seed: int) -> Iterator[dict[str, Any]]:
    """A random sample in order, of which no more is held than comes out (reservoir sampling)."""
    rng = random.Random(seed)
    kept: list[dict[str, Any]] = []
    for count, line in enumerate(made):
        place = rng.randrange(count + 1)
        if count < size:
            kept.append(line)
        elif place < size:
            kept[place] = line
    return iter(sorted(kept, key=lambda line: line["id"]))


def write(output: Path, made: Iterator[dict[str, Any]], skipped: list[str]) -> int:
    """Writes `output`, whole or not at all; returns the number of lines."""
    temporary, count = output.with_name(output.name + ".tmp"), 0
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for line in made:
                print(json.dumps(line), file=file)
                count += 1
        require(count > 0, f"no prompts found: {skipped[0] if skipped else 'the files are empty'}")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return count


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
