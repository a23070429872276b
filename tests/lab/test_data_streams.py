"""Text files as they come: packed, in UTF-16, damaged, and files that hold no text."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zipfile

import pytest

from regard.base.errors import RegardError
from regard.base.texts.streams import utf8_stream
from regard.base.texts.text_files import lines
from regard.lab.data import load_corpus

LINES = [f"猫 {n} été\u2028x\tΟ σκύλος {n}" for n in range(40)]
TEXT = "\n".join(LINES) + "\n"


def zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32")


def encoded(encoding):
    return (("\ufeff" if encoding == "utf-16-be" else "") + TEXT).encode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("suffix", ["", *PACK])
def test_a_packed_file_is_the_file(tmp_path, suffix, encoding):
    path = tmp_path / f"pairs.tsv{suffix}"
    path.write_bytes(PACK.get(suffix, bytes)(encoded(encoding)))
    assert list(lines(path, "test")) == list(enumerate(LINES, 1))


def test_a_packed_corpus_is_the_corpus(tmp_path):
    (tmp_path / "pairs.tsv").write_text(TEXT)
    (tmp_path / "pairs.tsv.gz").write_bytes(gzip.compress(encoded("utf-16")))
    rows = "".join(f'{{"source": "a {n}", "target": "b"}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress(rows.encode()))
    for plain, packed in (("pairs.tsv", "pairs.tsv.gz"), ("rows.jsonl", "rows.jsonl.xz")):
        assert load_corpus(tmp_path / plain).hash == load_corpus(tmp_path / packed).hash


@pytest.mark.parametrize("suffix", PACK)
def test_files_that_are_packed_in_parts_are_one_text(tmp_path, suffix):
    (tmp_path / "a").write_bytes(PACK[suffix](TEXT.encode()) + PACK[suffix](b"the end"))
    assert [line for _, line in lines(tmp_path / "a", "test")] == [*LINES, "the end"]


@pytest.mark.parametrize("suffix", PACK)
def test_a_file_that_is_cut_short_is_named(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](TEXT.encode() * 9)[:-12])
    with pytest.raises(RegardError, match=rf"test: .*a\.txt\{suffix} is cut short or damaged"):
        list(lines(path, "test"))


def test_half_a_character_of_utf_16_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffabc".encode("utf-16-le") + b"\x41")
    with pytest.raises(RegardError, match="is cut short or damaged"):
        list(lines(tmp_path / "a.txt", "test"))


def test_zstd_without_its_package_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    for name in ("zstandard", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RegardError, match=r"a\.zst is compressed by zstd, .*pip install zstandard"):
        list(lines(tmp_path / "a.zst", "test"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"%PDF-1.7\n", "is a PDF"),
        (b"PAR1abc", "is a Parquet file"),
        ("no mark".encode("utf-16-le"), "UTF-16 without a byte order mark, or not text"),
        (bytes(257) + b"ustar", "is a tar archive"),
        (gzip.compress(bytes(257) + b"ustar"), "is a tar archive"),
    ],
    ids=["PDF", "Parquet", "UTF-16", "tar", "packed tar"],  # those of bytes would hold the time of packing
)
def test_what_is_no_text_is_named_for_what_it_is(tmp_path, data, said):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(RegardError, match=said):
        list(lines(tmp_path / "a.txt", "test"))


def test_an_archive_is_no_text(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(RegardError, match=r"is a ZIP archive, as \.docx"):
        list(lines(tmp_path / "a.docx", "test"))


def test_a_stream_is_read_as_it_comes():
    """No byte is waited for that is not needed for the next line."""

    class Slow(io.RawIOBase):
        def __init__(self):
            self.parts = [part.encode("utf-16-le") for part in ("\ufeffone\n", "two", "\n")]

        def readable(self):
            return True

        def readinto(self, buffer):
            data = self.parts.pop(0) if self.parts else b""
            buffer[: len(data)] = data
            return len(data)

    raw = Slow()
    stream = utf8_stream(raw, "a stream", "test")
    assert stream.readline() == b"one\n" and len(raw.parts) == 2
    assert stream.read() == b"two\n"
