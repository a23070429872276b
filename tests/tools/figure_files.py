"""What tests read of the files of a figure: the paper of a PDF, the chunks of a PNG."""

from __future__ import annotations

import io
import re
import struct
import zlib


def media_box(content):
    (box,) = set(re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", content))
    return [float(side) / 72 * 25.4 for side in box]


def chunks(png):
    """The chunks of a PNG by name; their checksums have to be right."""
    at, found = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + data)
        found.setdefault(name.decode(), data)
        at += 12 + size
    return found


def pdf_text(content):
    """The text of the only page of a PDF; None without pypdf."""
    try:
        import pypdf
    except ModuleNotFoundError:
        return None
    (page,) = pypdf.PdfReader(io.BytesIO(content)).pages
    return page.extract_text()
