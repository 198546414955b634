import zlib

import pytest

from train import checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "small").write_bytes(b"text")
    (tmp_path / "deep" / "large").write_bytes(bytes(checksums.SMALL + 1))
    checksums.write(tmp_path)
    return tmp_path


def test_what_is_as_it_was(folder):
    assert checksums.difference(folder, thorough=True) is None
    assert str(zlib.crc32(b"text")) in (folder / "checksums.json").read_text()
    (folder / "new").write_bytes(b"")  # nobody reads it
    assert checksums.difference(folder, thorough=True) is None


def test_large_files_are_read_only_when_thorough(folder):
    path = folder / "deep" / "large"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert checksums.difference(folder, thorough=False) is None
    expected = "deep/large has another checksum than when it was written"
    assert checksums.difference(folder, thorough=True) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"Text", "small has another checksum than when it was written"),
        (b"tex", "small has 3 bytes, expected 4"),
        (None, "small is missing"),
    ],
)
def test_small_files_are_always_read(folder, data, expected):
    (folder / "small").unlink()
    if data is not None:
        (folder / "small").write_bytes(data)
    assert checksums.difference(folder, thorough=False) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{", "not valid JSON"),
        (b"{}", "checksums.json tells of no file"),
        (b'{"small": 3}', "checksums.json does not tell of small"),
        (b'{"small": {"size": 4, "crc33": 1}}', "checksums.json does not tell of small"),
    ],
)
def test_checksums_that_are_damaged_themselves(folder, data, expected):
    (folder / "checksums.json").write_bytes(data)
    assert expected in checksums.difference(folder, thorough=True)


def test_without_checksums_nothing_is_known(folder):
    (folder / "checksums.json").unlink()
    assert checksums.difference(folder, thorough=True) is None
