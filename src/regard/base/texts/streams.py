"""Reads text files as UTF-8: also compressed (gzip, bzip2, xz, zstd), in UTF-16 or UTF-32 with a byte order mark."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.base.errors import RegardError

__all__ = ["inner_suffix", "utf8_stream"]

#: The bytes that decide the kind of a file, and the bytes of one read.
HEAD, CHUNK = 512, 1 << 16
#: Endings of compressed files.
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
#: The first bytes of files that are not text.
NOT_TEXT = {
    b"PK\x03\x04": "a ZIP archive, as .docx and .xlsx files are",
    b"%PDF": "a PDF",
    b"PAR1": "a Parquet file",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"{\\rtf": "an RTF document",
    b"\x89PNG": "a PNG picture",
    b"SQLite format 3": "an SQLite database",
}
#: Byte order marks, the longest first, because that of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def inner_suffix(path: Path) -> str:
    """The ending of a file name without that of compression: `.jsonl` for `pairs.jsonl.gz`.

    >>> inner_suffix(Path("pairs.JSONL.gz")), inner_suffix(Path("a.en"))
    ('.jsonl', '.en')
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def utf8_stream(stream: Any, name: str, operation: str) -> io.BufferedReader:
    """The bytes of a text file in UTF-8. For a file that is not text, the error names its kind.

    A byte order mark of UTF-8 is kept; `decoded` (`text_files.py`) removes it.

    Args:
        stream: An unread binary stream. A read returns the available bytes and does not wait for more.
        name: The name of the file, for errors.
        operation: The operation that errors name.
    """
    stream = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    head = stream.peek(HEAD)[:HEAD]
    for magic, unpack in _PACKED.items():
        if head.startswith(magic):
            unpacked = _Reader(unpack(stream, name, operation), name, operation)
            return utf8_stream(io.BufferedReader(unpacked, CHUNK), name, operation)
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return io.BufferedReader(_Reader(_recoded(stream, encoding), name, operation), CHUNK)
    _check_text(head, name, operation)
    return stream


def _check_text(head: bytes, name: str, operation: str) -> None:
    """Refuse a file whose first bytes, `head`, are those of another format, or hold a zero byte."""
    kinds = [kind for magic, kind in NOT_TEXT.items() if head.startswith(magic)]
    if head[257:262] == b"ustar":
        kinds.append("a tar archive")
    if kinds:
        raise RegardError(f"{operation}: {name} is {kinds[0]}. Give a file of plain text.")
    if b"\0" in head:
        raise RegardError(
            f"{operation}: {name} has zero bytes: it is UTF-16 without a byte order mark, or not text. Convert it, "
            "for example with: iconv -f utf-16le -t utf-8"
        )


#: Reads at most the given number of bytes, and no bytes only at the end.
Read = Callable[[int], bytes]


class _Reader(io.RawIOBase):
    """A raw stream from a read function. Its error about a damaged file gives the name of the file."""

    def __init__(self, read: Read, name: str, operation: str) -> None:
        self._read, self._name, self._operation = read, name, operation

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes, and return their number; 0 at the end."""
        try:
            data = self._read(len(buffer))
        except RegardError:
            raise
        except (OSError, EOFError, UnicodeError, zlib.error, lzma.LZMAError, *_zstd_errors()) as error:
            raise RegardError(
                f"{self._operation}: {self._name} is cut short or damaged ({error}). Download or compress it again."
            ) from None
        buffer[: len(data)] = data
        return len(data)


def _recoded(stream: Any, encoding: str) -> Read:
    """Converts text from an encoding to UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)()
    return _converted(stream, lambda data: decoder.decode(data, final=not data).encode())


def _converted(stream: Any, convert: Callable[[bytes], bytes]) -> Read:
    """Converts a stream in parts. The last call of `convert` has no bytes."""
    rest, ended = bytearray(), False

    def read(size: int) -> bytes:
        nonlocal ended
        while not rest and not ended:
            data = stream.read1(CHUNK)
            ended = not data
            rest.extend(convert(data))
        part = bytes(rest[:size])
        del rest[:size]
        return part

    return read


def _gzip(stream: Any, name: str, operation: str) -> Read:
    return gzip.GzipFile(fileobj=stream, mode="rb").read1


def _bz2(stream: Any, name: str, operation: str) -> Read:
    return bz2.BZ2File(stream).read1


def _xz(stream: Any, name: str, operation: str) -> Read:
    return lzma.LZMAFile(stream).read1


def _zstd(stream: Any, name: str, operation: str) -> Read:
    """Decompresses with the module of Python 3.14 or newer, otherwise with the package zstandard."""
    try:
        from compression.zstd import ZstdFile  # type: ignore[import-not-found]

        return ZstdFile(stream).read1
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found]
    except ImportError:
        raise RegardError(
            f"{operation}: {name} is compressed by zstd, which needs one more package: pip install zstandard. Or "
            f"decompress it with: zstd -d {os.path.basename(name)}"
        ) from None
    return _converted(stream, _Frames(zstandard).decompress)


class _Frames:
    """Decompresses zstd frame by frame, because the reader of the package accepts a truncated frame."""

    def __init__(self, library: Any) -> None:
        self._new = lambda: library.ZstdDecompressor().decompressobj()
        self._frame: Any = None

    def decompress(self, data: bytes) -> bytes:
        """The content of the next bytes of a file, which may end inside of a frame. No bytes mean the end."""
        if not data and self._frame is not None:
            raise EOFError("the end of a frame is missing")
        parts = []
        while data:
            self._frame = self._frame or self._new()
            parts.append(self._frame.decompress(data))
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(parts)


def _zstd_errors() -> tuple[type[Exception], ...]:
    import sys

    modules = (sys.modules.get("zstandard"), sys.modules.get("compression.zstd"))
    return tuple(module.ZstdError for module in modules if module is not None)


_PACKED = {b"\x1f\x8b": _gzip, b"BZh": _bz2, b"\xfd7zXZ\x00": _xz, b"\x28\xb5\x2f\xfd": _zstd}
