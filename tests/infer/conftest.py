"""A pair small enough to follow by hand, and the command run on it.

The target says what comes next from the last token alone: a, b, .. z and then its stop token, or
0, 1, .. 9, 0, .. for ever; after a space, a line break or ! comes a. The drafter knows that, except
for what comes after `BLIND`, where it is wrong, and its confidence head knows where that is.
"""

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.io import cli, hf
from dspark_jax.targets import dense
from infer import generate

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
STOP, MASK = 2, 3
BLOCK = 3
BLIND = "di5"
STARTS = "ĠĊ!"  # a space and a line break as the tokenizer writes them
WIDTH = 64
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}"
    "{% if enable_thinking %}{{'0'}}{% endif %}{% endif %}"
)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
IDS = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}

LIMIT = 12
PROMPTS = [
    {"prompt": "abc"},
    {"prompt": "x", "id": "short"},
    {"prompt": ""},
    {"token_ids": [IDS["7"]], "max_new_tokens": 9},
    b"nonsense",
    {"prompt": "say !"},
]


def follower(token: str) -> str:
    """What the target says after `token`."""
    if token == "z":
        return SPECIAL[STOP]
    if token in string.ascii_lowercase:
        return chr(ord(token) + 1)
    if token in string.digits:
        return str((int(token) + 1) % 10)
    return "a"  # of `STARTS`; the rest is left to chance


def continuation(last: str, limit: int, stop: bool = True) -> list[str]:
    """Tokens after `last`, the stop token included."""
    tokens = []
    while len(tokens) < limit and not (stop and tokens and tokens[-1] == SPECIAL[STOP]):
        tokens.append(follower(tokens[-1] if tokens else last))
    return tokens


def rounds(tokens: list[str], size: int = BLOCK, gated: bool = False) -> list[tuple[int, int, int]]:
    """Emitted, verified, accepted of each round that makes `tokens`; the prefill made the first.

    `gated`: nothing is verified from the first draft on that the drafter has no confidence in.
    """
    made, found = 1, []
    while made < len(tokens):
        chain = continuation(tokens[made - 1], size, stop=False)
        known = [token not in BLIND for token in [tokens[made - 1], *chain[:-1]]]
        accepted = known.index(False) if False in known else size
        emitted = min(accepted + 1, len(tokens) - made)
        found.append((emitted, accepted if gated else size, accepted))
        made += emitted
    return found


def zeros(specs: Any) -> Any:
    return jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs)


def write_target(folder: Path) -> tuple[TargetConfig, dense.Target]:
    cfg = TargetConfig(
        vocab_size=len(IDS),
        hidden_size=WIDTH,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=128,
        stop_token_ids=(STOP,),
    )
    embed = np.random.default_rng(0).normal(size=(len(IDS), WIDTH)).astype(np.float32)
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    head = np.zeros((WIDTH, len(IDS)), np.float32)
    for token, i in IDS.items():
        if token in string.ascii_lowercase + string.digits + STARTS:
            head[:, IDS[follower(token)]] += embed[i]
    specs = dense.specs(cfg)
    params = dense.Target(embed, zeros(specs.layers), np.ones(WIDTH, np.float32), head)
    hf.save_target(folder, cfg, params)
    return cfg, params


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_drafter(folder: Path, target: tuple[TargetConfig, dense.Target]) -> None:
    """Base logits of zero, and a Markov head that is the target itself, but for `BLIND`."""
    target_config, target_params = target
    cfg = DrafterConfig.for_target(
        target_config,
        num_layers=1,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=(-1,),
        head="vanilla",
        markov_rank=WIDTH + 1,
    )
    params = zeros(dspark.specs(cfg))
    w1 = np.concatenate([8 * np.asarray(target_params.embed), np.ones((len(IDS), 1))], axis=1)
    for token in BLIND:
        w1[IDS[token]] = [*w1[IDS["!"], :-1], -1]  # drafts a, and says that it does not know
    w2 = np.concatenate([np.asarray(target_params.lm_head), np.zeros((1, len(IDS)))])
    weight = np.zeros(2 * WIDTH + 1)
    weight[-1] = 4
    params = dataclasses.replace(
        params,
        head=dataclasses.replace(params.head, w1=np.float32(w1), w2=np.float32(w2)),
        confidence=dataclasses.replace(params.confidence, weight=np.float32(weight)),
    )
    hf.save_drafter(folder, cfg, params, target=target)


@dataclasses.dataclass(frozen=True)
class Folders:
    target: Path
    draft: Path


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Folders:
    root = tmp_path_factory.mktemp("pair")
    target = write_target(root / "target")
    write_tokenizer(root / "target")
    write_drafter(root / "draft", target)
    return Folders(root / "target", root / "draft")


@dataclasses.dataclass
class Command:
    """Runs `infer.generate` on the pair of this folder in this process."""

    folder: object
    given: tuple[str, ...]
    capsys: pytest.CaptureFixture

    @property
    def output(self):
        return self.folder / "out.jsonl"

    def write(self, lines):
        raw = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        (self.folder / "prompts.jsonl").write_bytes(b"\n".join(raw) + b"\n")

    def __call__(self, *args):
        files = ("--prompts", str(self.folder / "prompts.jsonl"), "--output", str(self.output))
        return self.bare(*self.given, *files, "--slots", "2", f"--max-new-tokens={LIMIT}", *args)

    def bare(self, *args):
        self.code = cli.run(lambda: generate.main(args))
        self.out, self.err = self.capsys.readouterr()
        return self.code

    def results(self):
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def command(folders, tmp_path, capsys):
    given = ("--target", str(folders.target), "--draft", str(folders.draft))
    made = Command(tmp_path, given, capsys)
    made.write(PROMPTS)
    return made


def fails(command, text, *args):
    """The command ends with exit code 2, one line that holds `text`, and no files of its own."""
    before = sorted(command.folder.iterdir())
    assert command(*args) == 2
    assert command.out == ""
    assert command.err.startswith("error: ")
    assert command.err.count("\n") == 1
    assert text in command.err
    assert sorted(command.folder.iterdir()) == before
