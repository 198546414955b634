"""From prompts to a drafter, by the documented commands, on the embedded target."""

import json

import pytest

from dspark_jax.generation import EMBEDDED
from dspark_jax.io import cli, files, model_config
from infer import evaluate, generate
from scripts import stdlib_prompts
from train import main as train
from train.data import make_batches, open_documents
from train.encoding import make_encoder
from train.settings import DataSettings

pytestmark = pytest.mark.slow

ANSWER = 48
SAMPLING = ("--temperature", "1", "--top-p", "0.95", "--max-new-tokens", str(ANSWER))
SMALL = (
    *("--num-layers", "2", "--num-anchors", "16", "--max-length", "80", "--batch-size", "8"),
    *("--documents-per-row", "1", "--devices", "1", "--log-every", "10"),
)


def run(command, *args):
    assert cli.run(lambda: command.main([*map(str, args)])) == 0


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quick_compile):
    """With the answers to 64 prompts, and one that cannot be answered."""
    folder = tmp_path_factory.mktemp("flow")
    for part, number in (("training", 64), ("held_out", 16)):
        output = folder / f"{part}.jsonl"
        stdlib_prompts.main(
            [
                "--output",
                str(output),
                "--part",
                part,
                "--prompts",
                str(number),
                "--characters",
                "48",
            ]
        )
    with open(folder / "training.jsonl", "a") as file:
        print(json.dumps({"id": "empty", "prompt": ""}), file=file)
    prompts, answers = folder / "training.jsonl", folder / "answers.jsonl"
    given = ("--draft", "none", "--prompts", prompts, "--output", answers, "--prompt-ids")
    run(generate, *given, *SAMPLING, "--slots", "16")
    return folder


def test_training_reads_what_was_read_and_generated(folder):
    """Token by token, and what cannot be learnt from is left out."""
    *answers, error = lines(folder / "answers.jsonl")
    assert (error["id"], error["finish_reason"]) == ("empty", "error")
    target = EMBEDDED / "target"
    settings = DataSettings(
        files=(str(folder / "answers.jsonl"),), max_length=200, batch_size=8, documents_per_row=1
    )
    encoder = make_encoder(settings, target, model_config.load_target_config(target))
    documents = open_documents(settings, encoder)
    assert len(documents) == len(answers)
    expected = {
        (tuple(x["prompt_ids"]), tuple(x["token_ids"]))
        for x in answers
        if len(x["token_ids"]) > 1  # of one token no block can be made
    }
    batches = make_batches(settings, documents, encoder, seed=0)
    found = set()
    for _ in range(1024 // settings.batch_size):  # rows that are mixed, and so all there are
        batch = next(batches)
        for tokens, mask, length in zip(
            batch["tokens"], batch["loss_mask"], batch["length"], strict=True
        ):
            learnt = mask.nonzero()[0]
            assert learnt.tolist() == list(range(learnt[0], length))
            found.add((tuple(tokens[: learnt[0]].tolist()), tuple(tokens[mask].tolist())))
    assert found == expected


def test_a_trained_drafter_is_accepted_more(folder):
    """Two steps and sixty, on answers; both measured on prompts of other files."""
    for steps in (2, 60):
        run(
            train, "tiny", "--workdir", folder / f"run{steps}", "--files",
            folder / "answers.jsonl", "--steps", steps, *SMALL,
        )  # fmt: skip
    drafters = [folder / f"run{steps}" / "drafter" for steps in (2, 60)]
    run(
        evaluate, "--draft", *drafters, "--prompts", folder / "held_out.jsonl", "--output",
        folder / "evaluation", "--max-new-tokens", ANSWER,
    )  # fmt: skip
    few, many = files.read_json(folder / "evaluation" / "evaluate.json")["measurements"]
    assert few["requests"] == many["requests"] == 16
    assert few["accepted_length"]["high"] < many["accepted_length"]["low"]
    first = [m["conditional_acceptance"]["value"][0] for m in (few, many)]
    assert first[0] < first[1]
