"""Caches of hidden states: what is in them, how they are begun again, and what is refused."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import InputError
from dspark_jax.io import cli, hf, model_config
from dspark_jax.targets import dense
from tests.train.conftest import assert_same, joined, take
from train import cache as train_cache
from train import data, manifest, stored
from train import run as train_run
from train.cache import main as cache
from train.data import open_documents
from train.encoding import make_encoder
from train.main import main as train
from train.manifest import Manifest, read_manifest
from train.prepare import make_mesh, step_config
from train.presets import parse_arguments
from train.rows import open_rows

STEPS, BATCH, LENGTH, WIDTH, TAPS = 6, 4, 32, 32, (0, 2)
SMALL = [
    *("--num-layers", "1"),
    *("--block-size", "2"),
    *("--markov-rank", "4"),
    *("--target-layer-ids", *map(str, TAPS)),
    *("--num-anchors", "3"),
    *("--max-length", str(LENGTH)),
    *("--documents-per-row", "3"),
    *("--batch-size", str(BATCH)),
    *("--microbatches", "2"),
    *("--steps", str(STEPS)),
    *("--algorithm", "adamw"),
    *("--learning-rate", "0.002"),
    *("--evaluate-every", "3"),
    *("--evaluate-batches", "2"),
    *("--log-every", "1"),
    *("--save-every", "2"),
    *("--devices", "1"),
    *("--start", "random"),
]

pytestmark = pytest.mark.usefixtures("compilation_cache", "quick_compile")


def write_documents(path, numbers):
    """Short ones, several of which fit a row."""
    texts = (f"{i} times {i} is {i * i}"[: 8 + i % 13] for i in numbers)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def given(small_target, tmp_path_factory):
    """Arguments that the commands have in common."""
    folder = tmp_path_factory.mktemp("data")
    training = write_documents(folder / "training.jsonl", range(90))
    held_out = write_documents(folder / "held_out.jsonl", range(500, 540))
    files = ("--files", training, "--held-out-files", held_out)
    return [str(x) for x in ("--target", small_target, *files, *SMALL)]


@pytest.fixture(scope="module")
def many_shards():
    """Shards of four rows in float32, and rows that are packed a few at a time."""
    before = manifest.SHARD_BYTES, data.MIXED
    manifest.SHARD_BYTES, data.MIXED = 4 * LENGTH * (3 * WIDTH * 4 + 12), 8
    yield
    manifest.SHARD_BYTES, data.MIXED = before


@pytest.fixture(scope="module")
def whole(given, many_shards, tmp_path_factory, compilation_cache, quick_compile):
    """A cache in float32 of all batches of a run."""
    folder = tmp_path_factory.mktemp("caches") / "whole"
    assert cache([*given, "--storage", "float32", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def online(given, many_shards, tmp_path_factory, compilation_cache, quick_compile):
    """Workdir of a run whose target reads in the steps."""
    folder = tmp_path_factory.mktemp("online") / "run"
    assert train([*given, "--workdir", str(folder)]) == 0
    return folder


@pytest.fixture
def command(given, many_shards):
    """Exit code of a command of these settings, unless others are given."""

    def run(main, *args) -> int:
        return cli.run(lambda: main([*given, *map(str, args)]))

    return run


def records(workdir, kind="metrics"):
    return [json.loads(line) for line in (workdir / f"{kind}.jsonl").read_text().splitlines()]


def losses(workdir):
    return [r["loss"] for kind in ("metrics", "evaluation") for r in records(workdir, kind)]


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def settings_of(given):
    return parse_arguments(given, prog="", description="")


def open_part(given, folder, part):
    row = stored.row_type(
        length=LENGTH, width=WIDTH, taps=len(TAPS), packed=True, storage="float32"
    )
    return stored.open_rows(folder, read_manifest(folder), part, row)


def open_settings(given):
    settings = settings_of(given)
    folder = Path(settings.target)
    config = model_config.load_target_config(folder)
    cfg = step_config(settings, config, settings.drafter_config(config))
    encoder = make_encoder(settings.data, folder, config)
    return open_rows(settings, cfg, folder, encoder, make_mesh(settings))


# --- What is stored --------------------------------------------------------------------------


def test_rows_are_those_of_the_data_and_states_those_of_the_target(given, whole, small_target):
    settings = settings_of(given)
    config, target = hf.load_target(small_target)
    encoder = make_encoder(settings.data, small_target, config)
    batches = data.make_batches(
        settings.data, open_documents(settings.data, encoder), encoder, seed=settings.seed
    )
    rows = open_part(given, whole, "training")
    assert len(rows) == STEPS * BATCH
    alone = jax.jit(lambda tokens: dense.forward(target, tokens, cfg=config, taps=TAPS))
    shared = 0
    for number, batch in enumerate(itertools.islice(batches, STEPS)):
        for place in range(BATCH):
            row = rows[number * BATCH + place]
            for name, expected in batch.items():
                np.testing.assert_array_equal(row[name], expected[place])
            # Each document is read as if it were alone, and what is behind it were not there.
            documents = [row["segments"] == n + 1 for n in range(row["segments"].max())]
            tokens = np.zeros((LENGTH, LENGTH), np.int32)
            for n, inside in enumerate(documents):
                tokens[n, : inside.sum()] = row["tokens"][inside]
            hidden = jax.device_get(alone(tokens))
            for n, inside in enumerate(documents):
                for name in ("final", "features"):
                    expected = getattr(hidden, name)[n, : inside.sum()]
                    np.testing.assert_allclose(row[name][inside], expected, atol=1e-5)
            shared += row["segments"].max() > 1
    assert shared > BATCH


def test_the_manifest_says_what_it_is(given, whole):
    values = json.loads((whole / "manifest.json").read_text())
    # 32 tokens of (2 + 1) states of 32 float32 numbers, token, segment, mask; number and length.
    assert values["row_bytes"] == 32 * (3 * 32 * 4 + 4 + 4 + 1) + 8 + 4
    assert values["rows"] == {"training": 24, "held_out": 8}
    assert values["order"] == {"seed": 0, "batch_size": 4}
    assert values["made_for"]["target_layer_ids"] == [0, 2]
    assert {p.name for p in whole.iterdir()} == {"manifest.json", *values["shards"]}
    sizes = {name: entry["rows"] for name, entry in values["shards"].items()}
    assert sizes == {
        **{f"held_out-{i:05}.array_record": 4 for i in range(2)},
        **{f"training-{i:05}.array_record": 4 for i in range(6)},
    }
    found = read_manifest(whole)
    nothing_yet = Manifest(**{**vars(found), "shards": {}})
    written = sum(shard.bytes for shard in found.shards.values())
    assert 0 < nothing_yet.missing_bytes() - written < 2 * manifest.FOOTER * len(found.shards)


def test_a_size_is_estimated_and_shards_are_few_for_a_large_model():
    """Qwen3-4B: five taps and the last state of 2,560 bfloat16 numbers a token."""
    row = stored.row_type(length=4096, width=2560, taps=5, packed=True, storage="bfloat16")
    assert row.itemsize == 4096 * (6 * 2560 * 2 + 9) + 12
    rows = {"training": 300_000, "held_out": 0}
    plan = Manifest.planned({}, {}, "bfloat16", row.itemsize, rows)
    assert plan.missing_bytes() == pytest.approx(300_000 * row.itemsize, rel=2e-3)
    assert len(plan.places("training")) <= 512
    assert sum(len(span) for span in plan.places("training").values()) == 300_000


# --- The same training -----------------------------------------------------------------------


def test_training_on_stored_states_is_training_online(
    command, whole, online, tmp_path, monkeypatch
):
    loaded, load = [], hf.load_target

    def watched(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(hf, "load_target", watched)
    options = ("--features", whole, "--workdir", tmp_path / "run")
    assert command(train, *options) == 0
    assert [target.layers for _, target in loaded] == [()]
    found, expected = losses(tmp_path / "run"), losses(online)
    assert len(found) == STEPS + 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    trained = [hf.load_drafter(folder / "drafter")[1] for folder in (tmp_path / "run", online)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *trained)


def test_a_drafter_may_tap_some_of_the_layers(given, whole):
    rows = open_part(given, whole, "training")
    for taps, wanted in (((2,), np.s_[WIDTH:]), ((2, 0), np.r_[WIDTH : 2 * WIDTH, :WIDTH])):
        options = ("--target-layer-ids", *map(str, taps), "--features", str(whole))
        opened = open_settings([*given, *options])
        for number, batch in enumerate(itertools.islice(opened.batches, 2)):
            expected = rows.batch(number, BATCH)
            found = batch.batch.hidden
            np.testing.assert_array_equal(found.features, expected["features"][..., wanted])
            np.testing.assert_array_equal(found.final, expected["final"])


@pytest.mark.slow
def test_a_drafter_may_tap_none_of_the_layers(command, whole, tmp_path):
    options = ("--kind", "mtp", "--block-size", 1, "--target-layer-ids", "--markov-rank", 0)
    options += ("--head", "none", "--no-confidence-head", "--no-confidence-with-markov")
    options += ("--confidence-weight", 0)
    assert command(train, *options, "--features", whole, "--workdir", tmp_path / "run") == 0
    assert command(train, *options, "--workdir", tmp_path / "online") == 0
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "online")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_drafter_may_start_from_layers_of_the_target(command, whole, tmp_path):
    """They are let go when it has."""
    options = ("--start", "target", "--steps", 2)
    assert command(train, *options, "--features", whole, "--workdir", tmp_path / "run") == 0
    assert command(train, *options, "--workdir", tmp_path / "online") == 0
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "online")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_states_in_bfloat16_train_alike(command, online, tmp_path):
    """The rounding of a state is 1 part in 512 at most; steps on it must not let it grow."""
    assert command(cache, "--output", tmp_path / "low") == 0
    assert command(train, "--features", tmp_path / "low", "--workdir", tmp_path / "run") == 0
    found, expected = losses(tmp_path / "run"), losses(online)
    np.testing.assert_allclose(found, expected, rtol=1 / 512)
    assert found != expected


def test_a_stopped_run_goes_on_to_the_bit(command, whole, tmp_path, monkeypatch):
    done = []

    def advance(self):
        done.append(1)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    assert command(train, "--features", whole, "--workdir", tmp_path / "whole") == 0
    with monkeypatch.context() as patched:
        patched.setattr(train_run.Logs, "advance", advance)
        assert command(train, "--features", whole, "--workdir", tmp_path / "run") == 0
    assert len(records(tmp_path / "run")) == 3
    assert command(train, "--features", whole, "--workdir", tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


# --- Order, places and hosts -----------------------------------------------------------------


@pytest.fixture
def make(given, whole):
    rows = open_part(given, whole, "training")

    def make(batch_size=8, seed=0, part=0, parts=1):
        return stored.make_batches(rows, batch_size=batch_size, seed=seed, part=part, parts=parts)

    return make


def test_passes_are_whole_and_each_has_an_order_of_its_own(given, whole, make):
    rows = open_part(given, whole, "training")
    expected = [rows[i]["tokens"].tobytes() for i in range(24)]
    found = [row.tobytes() for batch in take(make(), 9) for row in batch["tokens"]]
    passes = [found[i : i + 24] for i in (0, 24, 48)]
    assert passes[0] == expected
    assert sorted(passes[1]) == sorted(passes[2]) == sorted(expected)
    assert len({tuple(p) for p in passes}) == 3
    other = [row.tobytes() for batch in take(make(seed=1), 6) for row in batch["tokens"]]
    assert other[:24] == expected
    assert other[24:] != passes[1]


@pytest.mark.parametrize("consumed", [0, 1, 3, 7])
def test_a_saved_place_is_found_again(make, consumed):
    iterator = make()
    take(iterator, consumed)
    place = json.loads(json.dumps(iterator.get_state()))
    rest = take(iterator, 5)
    restored = make()
    restored.set_state(place)
    assert_same(take(restored, 5), rest)
    restored.set_state(place)
    assert_same(take(restored, 5), rest)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (8, 1)])
def test_hosts_share_the_batches_of_one_whatever_their_number(make, before, after):
    whole = take(make(), 8)
    readers = [make(part=i, parts=before) for i in range(before)]
    assert_same(map(joined, zip(*(take(r, 4) for r in readers), strict=True)), whole[:4])
    lanes = data.join_places([(i, reader.get_state()) for i, reader in enumerate(readers)])
    parts = []
    for i in range(after):
        reader = make(part=i, parts=after)
        reader.set_state(data.own_place(json.loads(json.dumps(lanes)), i, after))
        parts.append(take(reader, 4))
    assert_same(map(joined, zip(*parts, strict=True)), whole[4:])


# --- Begun again -----------------------------------------------------------------------------


def interrupted_at(monkeypatch, shard):
    """Writing is cut off in the middle of a shard of that number."""
    write, calls = train_cache.write_shard, []

    def torn(path, rows, row, written):
        calls.append(path)
        if len(calls) <= shard:
            return write(path, rows, row, written)
        write(path, itertools.islice(rows, 1), row, written)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_cache, "write_shard", torn)


@pytest.mark.parametrize("shard", [0, 1, 4, 7])
def test_an_interrupted_cache_goes_on(command, whole, tmp_path, monkeypatch, shard):
    """What is finished is kept, what is torn written again, and nothing differs in the end."""
    output, options = tmp_path / "cache", ("--storage", "float32", "--output", tmp_path / "cache")
    with monkeypatch.context() as patched:
        interrupted_at(patched, shard)
        assert command(cache, *options) == 130
    assert len(read_manifest(output).shards) == shard
    assert len(list(output.glob("*.tmp"))) == 1
    kept = {p.name: p.stat().st_mtime_ns for p in output.glob("*.array_record")}
    assert len(kept) == shard
    assert command(cache, *options) == 0
    assert contents(output) == contents(whole)
    assert all((output / name).stat().st_mtime_ns == at for name, at in kept.items())


def test_a_signal_ends_it_and_the_same_command_goes_on(
    command, whole, tmp_path, monkeypatch, capsys
):
    output, options = tmp_path / "cache", ("--storage", "float32", "--output", tmp_path / "cache")
    write = train_cache.write_shard

    def signalled(path, rows, row, written):
        if path.name == "training-00002.array_record":
            os.kill(os.getpid(), signal.SIGTERM)
        return write(path, rows, row, written)

    with monkeypatch.context() as patched:
        patched.setattr(train_cache, "write_shard", signalled)
        assert command(cache, *options) == 0
    assert capsys.readouterr().err == "stopped; the same command goes on from there\n"
    assert 3 <= len(read_manifest(output).shards) <= 6
    assert not list(output.glob("*.tmp"))
    assert command(cache, *options) == 0
    assert contents(output) == contents(whole)


def flip(path: Path) -> None:
    """Changes a bit: of a shard, in its third row."""
    found = bytearray(path.read_bytes())
    found[30_000] ^= 1
    path.write_bytes(found)


def test_a_damaged_shard_is_written_again(command, whole, tmp_path, capsys):
    output = shutil.copytree(whole, tmp_path / "cache")
    options = ("--storage", "float32", "--output", output)
    os.truncate(output / "training-00001.array_record", 1000)
    (output / "held_out-00000.array_record").unlink()
    assert command(cache, *options) == 0
    assert "8 of 32 rows" in capsys.readouterr().out
    assert contents(output) == contents(whole)
    flip(output / "training-00005.array_record")
    assert command(cache, *options, "--verify") == 0
    printed = capsys.readouterr()
    assert "training-00005.array_record: it has another checksum" in printed.err
    assert "4 of 32 rows" in printed.out
    assert contents(output) == contents(whole)


def test_a_manifest_that_was_torn_is_written_again(command, whole, tmp_path):
    output = tmp_path / "cache"
    output.mkdir()
    (output / "manifest.json.tmp").write_text('{"format": 1')
    assert command(cache, "--storage", "float32", "--output", output) == 0
    assert contents(output) == contents(whole)


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(given, whole, many_shards, tmp_path, command):
    output = tmp_path / "cache"
    args = [*given, "--storage", "float32", "--output", str(output)]
    code = (
        "import sys; from train import data, manifest; from train.cache import main;"
        f" manifest.SHARD_BYTES = {manifest.SHARD_BYTES}; data.MIXED = {data.MIXED};"
        " sys.exit(main(sys.argv[1:]))"
    )
    # States are the same to the bit only of the same program.
    same = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *args], env=same)
    deadline = time.monotonic() + 120
    while not (output / "training-00001.array_record").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert command(cache, "--storage", "float32", "--output", output) == 0
    assert contents(output) == contents(whole)


# --- What is refused -------------------------------------------------------------------------


def refused(command, main, message, capsys, folder, *args):
    """Exit code 2, one line, and nothing changed."""
    before = contents(folder) if folder.is_dir() else None
    capsys.readouterr()
    assert command(main, *args) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert message in printed
    assert (contents(folder) if folder.is_dir() else None) == before


def text(change):
    return lambda path: path.write_text(change(path.read_text()))


def changed(**values):
    def of(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return of


def without_shard(path):
    values = json.loads(path.read_text())
    del values["shards"]["training-00003.array_record"]
    path.write_text(json.dumps(values))


def swap(path):
    other = path.with_name("training-00003.array_record")
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


MANIFEST, SHARD = "manifest.json", "training-00002.array_record"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (MANIFEST, Path.unlink, "manifest.json: no such file, expected a folder that train.cache"),
        (MANIFEST, text(lambda t: t[:50]), "manifest.json: not valid JSON"),
        (MANIFEST, text(lambda t: "[]"), "manifest.json: expected a JSON object"),
        (MANIFEST, changed(format=2), "manifest.json: expected format 1"),
        (MANIFEST, changed(rows={"training": 24}), "expected made_for, order, storage"),
        (MANIFEST, changed(storage="float16"), "expected made_for, order, storage"),
        (MANIFEST, changed(row_bytes=0), "expected numbers above 0"),
        (MANIFEST, changed(row_bytes=8), "rows have 8 bytes there, expected"),
        (MANIFEST, changed(shards={SHARD: 3}), f"{SHARD}: expected its rows, bytes and crc32"),
        (MANIFEST, changed(shard_rows={"training": 5, "held_out": 4}), "4 rows, expected 5"),
        (MANIFEST, without_shard, "1 shards of training are not written yet, from"),
        (SHARD, Path.unlink, f"{SHARD}: it is missing; the same train.cache command"),
        (SHARD, lambda path: os.truncate(path, 999), f"{SHARD}: it has 999 bytes, expected"),
        (SHARD, flip, f"{SHARD}: it has another checksum than when it was written"),
        (SHARD, swap, f"{SHARD}: it has another checksum than when it was written"),
    ],
)
def test_a_malformed_cache(command, whole, tmp_path, capsys, name, change, message):
    folder = shutil.copytree(whole, tmp_path / "cache")
    change(folder / name)
    options = ("--features", folder, "--workdir", tmp_path / "run")
    refused(command, train, message, capsys, folder, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip, "row 10 of training cannot be read (Corrupted"),
        (swap, "row 10 of training is row 14; expected it as it was written"),
    ],
)
def test_a_record_that_changed_is_found_when_it_is_read(
    given, whole, tmp_path, monkeypatch, change, message
):
    """In a cache that is too large to be read before."""
    folder = shutil.copytree(whole, tmp_path / "cache")
    change(folder / SHARD)
    monkeypatch.setattr(stored, "READ_AT_START", 0)
    rows = open_part(given, folder, "training")
    with pytest.raises(InputError) as error:
        rows[10]
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    intact = open_part(given, whole, "training")
    np.testing.assert_array_equal(rows[0]["tokens"], intact[0]["tokens"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target-layer-ids", 0, 1], "target_layer_ids is [0, 2] there and [0, 1] now; expected"),
        (["--max-length", 16], "max_length is 32 there and 16 now; expected a cache of the same"),
        (["--dtype", "bfloat16"], 'dtype is "float32" there and "bfloat16" now'),
        (["--documents-per-row", 1], "documents_per_row is 3 there and 1 now"),
        (["--thinking"], "thinking is false there and true now"),
        (["--evaluate-batches", 3], "8 held-out rows in it, expected those of evaluate_batches=3"),
        (["--decode-every", 2], "decode_every=2 with features="),
    ],
)
def test_a_cache_of_other_settings(command, whole, tmp_path, capsys, args, message):
    options = ("--features", whole, "--workdir", tmp_path / "run", *args)
    refused(command, train, message, capsys, whole, *options)
    assert not (tmp_path / "run").exists()


def test_a_cache_of_another_target_or_of_other_data(command, whole, small_target, tmp_path, capsys):
    options = ("--features", whole, "--workdir", tmp_path / "run")
    other = shutil.copytree(small_target, tmp_path / "target")
    flip(other / "model.safetensors")  # another training: a weight differs
    refused(command, train, "target is ", capsys, whole, *options, "--target", other)
    texts = write_documents(tmp_path / "other.jsonl", range(1, 91))
    refused(command, train, "files is ", capsys, whole, *options, "--files", texts)
    refused(
        command, train, "held_out_files is ", capsys, whole, *options, "--held-out-files", texts
    )
    missing = tmp_path / "none"
    refused(command, train, "no such folder", capsys, whole, *options, "--features", missing)


def test_moved_files_of_the_same_text_are_the_same(command, given, whole, tmp_path):
    moved = tmp_path / "moved.jsonl"
    shutil.copy(given[given.index("--files") + 1], moved)
    options = ("--features", whole, "--files", moved, "--workdir", tmp_path / "run")
    assert command(train, *options) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batches", 0], "batches=0: expected a number above 0"),
        (["--storage", "int8"], "--storage"),
        (["--features", "x"], "features=x: expected none"),
        (["--seed", 1], "seed is 0 there and 1 now; expected the same, or another folder"),
        (["--batches", 5], "rows of training is 24 there and 20 now"),
        (["--storage", "bfloat16"], 'storage is "float32" there and "bfloat16" now'),
        (["--target-layer-ids", 1], "target_layer_ids is [0, 2] there and [1] now"),
        (["--coordinator", "a:1", "--num-processes", 2, "--process-id", 0], "one process"),
    ],
)
def test_caches_that_cannot_be_written(command, whole, capsys, args, message):
    options = ("--output", whole, "--storage", "float32", *args)
    refused(command, cache, message, capsys, whole, *options)


def test_folders_that_hold_something_else(command, tmp_path, capsys):
    (tmp_path / "file").write_text("text")
    for output in (tmp_path / "file", tmp_path / "file" / "new"):
        message = f"{output}: expected a folder, {tmp_path / 'file'} is a file"
        refused(command, cache, message, capsys, tmp_path, "--output", output)
    message = "files in it and no manifest.json"
    refused(command, cache, message, capsys, tmp_path, "--output", tmp_path)


def test_a_disk_without_room(command, tmp_path, monkeypatch, capsys):
    left = shutil.disk_usage(tmp_path)._replace(free=500_000)
    monkeypatch.setattr(train_cache.shutil, "disk_usage", lambda _: left)
    output = tmp_path / "cache"
    assert command(cache, "--output", output) == 2
    printed = capsys.readouterr()
    size = "993 kB"  # 32 rows and the ends of 6 files
    assert printed.out == (
        f"32 of 32 rows of 6.44 kB are to be written: {size}, of 500 kB that are free\n"
    )
    assert printed.err == (
        f"error: {output}: {size} are to be written and 500 kB are free; expected room for them,"
        " or fewer --batches\n"
    )
    assert not output.exists()


def test_a_disk_that_fills_up(command, whole, tmp_path, monkeypatch, capsys):
    """What was finished stays, and one line says why the rest is not there."""

    class Full(stored.array_record_module.ArrayRecordWriter):
        def write(self, record):
            if "training-00001" in self.path:
                raise RuntimeError("write() failed: No space left on device; at byte 0")
            super().write(record)

        def __init__(self, path, options):
            self.path = path
            super().__init__(path, options)

    output = tmp_path / "cache"
    options = ("--storage", "float32", "--output", output)
    with monkeypatch.context() as patched:
        patched.setattr(stored.array_record_module, "ArrayRecordWriter", Full)
        assert command(cache, *options) == 1
    assert capsys.readouterr().err == (
        f"error: {output / 'training-00001.array_record'}: cannot be written (write() failed: No"
        " space left on device)\n"
    )
    assert command(cache, *options) == 0
    assert contents(output) == contents(whole)
