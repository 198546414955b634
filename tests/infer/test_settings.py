"""Options: what is refused whatever the models are, and what the results depend on."""

import dataclasses
import json

import pytest

from dspark_jax.io import cli
from infer import results
from infer.settings import Settings
from tests.infer.conftest import fails


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--cost-table", "t.json"], "--cost-table: expected with --policy causal or delayed"),
        (["--calibration", "c.json"], "--calibration: expected with --policy threshold, causal"),
        (["--samples", "0"], "--samples 0: expected a whole number in 1..65536"),
        (["--samples", "65537"], "--samples 65537: expected a whole number in 1..65536"),
        (["--stop", "a", ""], "stop=('a', ''): expected texts that are not empty"),
        (["--policy", "best"], "invalid choice 'best' for argument '--policy'"),
        (["--policy", "threshold"], "expected --confidence-threshold, a number in 0..1"),
        (["--confidence-threshold", "0.5"], "expected with --policy threshold only"),
        (["--temperature", "-1"], "temperature=-1.0: expected a number 0 or above"),
        (["--temperature", "nan"], "temperature=nan: expected a number 0 or above"),
        (["--temperature", "hot"], "could not convert string to float: 'hot'"),
        (["--temperature"], "Missing value for argument '--temperature'"),
        (["--top-p", "0"], "top_p=0.0: expected a number above 0, at most 1"),
        (["--top-p", "1.1"], "top_p=1.1: expected a number above 0, at most 1"),
        (["--top-k", "-3"], "top_k=-3: expected a number 0 (off) or above"),
        (["--min-p", "1.1"], "min_p=1.1: expected a number in 0..1"),
        (["--seed", "-1"], "seed=-1: expected a number in 0..2^32-1"),
        (["--max-new-tokens", "0"], "max_new_tokens=0: expected a whole number above 0"),
        (["--slots", "0"], "--slots 0: expected a whole number above 0"),
        (["--draft", "none", "--block-size", "2"], "--block-size: expected with a drafter only"),
        (["--dtype", "float64"], "Expected one of ('float32', 'bfloat16')"),
        (["--tmperature", "1"], "perhaps you meant --temperature FLOAT"),
        (["--output", "absent/out.jsonl"], "--output absent/out.jsonl: no such folder as absent"),
        (["--summary", "absent/s.json"], "--summary absent/s.json: no such folder as absent"),
    ],
)
def test_bad_arguments(command, args, text):
    fails(command, text, *args)


def test_files_that_are_the_same(command):
    prompts = str(command.folder / "prompts.jsonl")
    before = (command.folder / "prompts.jsonl").read_bytes()
    for option in ("--summary", "--output"):
        fails(command, "expected different files", option, prompts)
    fails(command, "expected different files", "--summary", str(command.output))
    assert (command.folder / "prompts.jsonl").read_bytes() == before


def test_arguments_that_belong_together(command):
    for args, text in (
        (["--prompts", "p.jsonl"], "--prompts and --output: expected both"),
        (["--output", "o.jsonl"], "--prompts and --output: expected both"),
        (["--summary", "s.json"], "--summary: expected with --prompts only"),
        (["--samples", "2"], "--samples: expected with --prompts only"),
        (["--logprobs"], "--logprobs: expected with --prompts only"),
        (["--prompt-ids"], "--prompt-ids: expected with --prompts only"),
        (["--target", "t"], "--target without --draft: expected a drafter, or --draft none"),
    ):
        assert command.bare(*args) == 2
        assert command.err.startswith(f"error: {text}")
        assert command.err.count("\n") == 1


def test_meta_holds_what_decides_the_results(command):
    args = [*command.given, "--stop", "a", "b"]
    settings = cli.parse(Settings, args, prog="x", description="")
    files = {"prompts", "output", "summary", "cost_table"}
    decisive = settings.decisive()
    assert json.loads(json.dumps(decisive)) == decisive
    names = {f.name for f in dataclasses.fields(settings)}
    others = {"slots", "compare_baseline", "tensor_parallel"}
    assert names - decisive.keys() == files | others
    assert results.meta_path(command.output).name == "out.jsonl.meta.json"
