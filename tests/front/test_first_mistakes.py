"""What a person who tries everything in the first hour mistypes, and the answers: plain words, and a remedy."""

import os
import socket
import stat

import pytest
import torch
from typer.testing import CliRunner

import regard as rg
from regard.base.names import OF_FIGURES
from regard.cli.app import app
from regard.cli.check import load
from regard.engine.formatting import size
from regard.lab.pages.run_folders import open_folder
from regard.maps.stored import load_map, save_map
from regard.viewer.server import listen


def example():
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    return rg.Attention()(q, k, v)


@pytest.mark.parametrize("name", [None, 3, "", "  "])
def test_load_model_needs_a_name(name):
    with pytest.raises(rg.RegardError, match="load_model"):
        rg.load_model(name)


def test_register_takes_no_argument():
    with pytest.raises(rg.RegardError, match="register: too many positional arguments"):
        rg.register("bert")  # type: ignore[call-arg]


@pytest.mark.parametrize("arguments", [(None, None), ("minilm", "minilm")])
def test_a_reader_needs_a_model_and_a_tokenizer(arguments):
    with pytest.raises(rg.RegardError, match=r"TextReader: .*TextReader\.load"):
        rg.TextReader(*arguments)


def test_a_result_unpacks_to_the_output_and_the_weights():
    output, weights = seen = example()
    assert output is seen.output and weights is seen.weights
    with pytest.raises(ValueError, match="unpack"):
        _, _, _ = example()


def test_a_cache_class_in_place_of_a_cache_has_a_remedy():
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(rg.RegardError, match=r"the class GrowingCache.*GrowingCache\(\)"):
        rg.Attention()(x, x, x, cache=rg.GrowingCache)


def test_a_saved_map_has_the_permissions_of_the_files_beside_it(tmp_path):
    save_map(tmp_path / "map.safetensors", example().weights)
    assert stat.S_IMODE(os.stat(tmp_path / "map.safetensors").st_mode) == 0o644


def test_a_truncated_map_has_a_remedy(tmp_path):
    path = tmp_path / "map.safetensors"
    save_map(path, example().weights)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(rg.RegardError, match=r"truncated or damaged.*Copy it again"):
        load_map(path)


def test_a_port_in_use_names_the_port_that_is_always_free():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(rg.RegardError, match="--port 0") as caught:
        listen("127.0.0.1", taken.getsockname()[1], "")
    assert "while attempting" not in str(caught.value)


def test_view_says_whether_a_folder_is_missing_or_empty(tmp_path):
    (tmp_path / "a.txt").touch()
    for path, rule in ((tmp_path / "no", "there is no folder"), (tmp_path / "a.txt", "is a file")):
        with pytest.raises(rg.RegardError, match=f"view: .*{rule}.*regard analyze TEXT --save DIR"):
            open_folder(path)


@pytest.mark.parametrize("columns", [30, 40, 49])
def test_a_narrow_terminal_shows_whole_rows_of_weights(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = CliRunner().invoke(app, ["info", "masked"], env={"COLUMNS": str(columns)}).output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Weights of head 0"))
    picture = [line.rstrip() for line in lines[start + 1 :] if "·" in line and "masked" not in line]
    shown = (columns - 2) // 2
    text = " ".join(" ".join(lines[start : start + 4]).split())
    assert f"the first {shown} of 24 rows of queries, the first {shown} of 24 columns" in text
    assert len(picture) == shown - 1  # the last row sees every key that is shown
    assert max(map(len, picture)) <= columns
    assert lines[-1].rstrip().endswith("· masked")


@pytest.mark.parametrize(
    "count, text", [(1023.7 * 1024, "1,024 KiB"), (999.9 * 2**20, "1,000 MiB"), (1000 * 1024, "1,000 KiB")]
)
def test_sizes_have_no_exponent(count, text):
    assert size(count) == text


@pytest.mark.parametrize("code, words", [("1/0", "line 2"), ("raise SystemExit(3)", "SystemExit")])
def test_check_names_the_line_of_a_file_that_cannot_be_imported(tmp_path, code, words):
    (tmp_path / "mine.py").write_text(f"import math\n{code}\n")
    with pytest.raises(rg.RegardError, match=f"could not be imported.*{words}"):
        load(f"{tmp_path / 'mine.py'}:f")


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_a_table_of_sinusoids_has_the_default_dtype_and_is_rounded_once(default):
    """Beside the formula in float64; a Linear of the same default takes the sum, as tutorials write it."""
    angle = torch.arange(700).double()[:, None] / 10_000 ** (torch.arange(0, 16, 2).double() / 16)
    expected = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    torch.set_default_dtype(default)
    try:
        table = rg.encodings.Sinusoidal().table(torch.arange(700), 16)
        layer = torch.nn.Linear(16, 16)
        assert layer(torch.randn(2, 700, 16) + table).dtype == table.dtype == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert rg.encodings.Sinusoidal().table(torch.arange(3), 16, torch.float64).dtype == torch.float64
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=torch.finfo(default).eps / 4 + 1e-12)


def test_the_remedy_for_scale_is_that_of_the_score():
    with pytest.raises(rg.RegardError, match=r"scale: the factor belongs to the score: Attention\(regard\.Dot\(scale="):
        rg.Attention(scale="linear")


@pytest.mark.parametrize("name", sorted(OF_FIGURES))
def test_arguments_of_other_figures_are_explained(name):
    with pytest.raises(rg.RegardError, match=f"{name}: {OF_FIGURES[name][:12]}"):
        rg.heatmap(torch.rand(3, 3), **{name: 3})


def test_a_remedy_names_only_arguments_that_the_function_has():
    with pytest.raises(rg.RegardError) as error:
        rg.heatmap(torch.rand(3, 3), embed_dim=3, n_heads=2)
    assert "it is called" not in str(error.value)


def test_cross_attention_says_where_its_keys_come_from():
    attention = rg.nn.CrossAttention(rg.Attention(), 8, 8)
    state, states = torch.randn(2, 1, 8), torch.randn(2, 5, 8)
    for keys in (states, None, [states]):
        with pytest.raises(rg.RegardError, match=r"CrossAttention: keys must be .*keys = attention\.keys\(states\)"):
            attention(state, keys)
    keys = attention.keys(states)
    with pytest.raises(rg.RegardError, match=r"query must be \(B, I, D\), got \(2, 8\).*query\[:, None\]"):
        attention(state[:, 0], keys)
    assert attention(state, keys).output.shape == (2, 1, 8)
