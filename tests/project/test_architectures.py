"""The script that watches every architecture of transformers, and the table that it makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from extras import needs_transformers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def architectures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import architectures

    yield architectures
    for name in ("architectures", "small_models"):
        sys.modules.pop(name, None)


def test_the_page_is_made_from_the_data_and_names_no_wrong_map(architectures, monkeypatch):
    rows = [json.loads(line) for line in architectures.DATA.read_text().splitlines()]
    assert len(rows) == len({row["key"] for row in rows}) and not [
        row["key"] for row in rows if row["state"] == "wrong"
    ]
    version = architectures.PAGE.read_text().partition("classes of transformers ")[2].partition(",")[0].split()[0]
    monkeypatch.setattr(architectures.transformers, "__version__", version)
    assert architectures.table(architectures.DATA) == architectures.PAGE.read_text()


@pytest.mark.parametrize(
    ("key", "way"),
    [
        ("bert", "eager"),
        ("longformer", "measured"),
        ("gpt_neo", "eager"),
        pytest.param("videomae", "eager", marks=needs_transformers("5.1", "eager attention is seen")),
        pytest.param("bark", "eager", marks=needs_transformers("5.1", "eager attention is seen")),
        pytest.param("musicgen_decoder", "eager", marks=needs_transformers("5.1", "it is built without its encoders")),
    ],
)
def test_an_architecture_is_built_small_and_compared(architectures, key, way):
    result = architectures.examined(key)
    assert result["state"] == "right" and set(result["ways"]) == {way} and result["identical"]


def test_the_last_result_of_an_architecture_is_kept(architectures, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"key": "a", "n": 1}\n{"key": "b", "n": 2}\n{"key": "a", "n": 3}\n')
    architectures._keep_last(data)
    assert [json.loads(line) for line in data.read_text().splitlines()] == [{"key": "a", "n": 3}, {"key": "b", "n": 2}]


def test_a_map_that_differs_is_wrong(architectures, monkeypatch):
    monkeypatch.setattr(architectures, "_difference", lambda mine, wanted: torch.tensor(1.0).item())
    monkeypatch.setattr(
        architectures.rg.hf.WatchedAttention, "verify", lambda seen: dict.fromkeys(seen.names, UNVERIFIED)
    )
    assert architectures.examined("bert")["state"] == "wrong"


class UNVERIFIED:
    ok, note = None, ""
