"""Modules as tutorials write and call them, against the tutorials' own code and against torch's modules."""

from __future__ import annotations

import math

import pytest
import torch
from test_nn import close, decoder_layers, randomized
from torch import nn

import regard as rg
from regard.nn import DecoderLayer, EncoderLayer, FeedForward, MultiHeadAttention, PositionalEncoding, TransformerConfig

B, I, J, C, H = 2, 5, 7, 16, 4
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
REAL_SOURCE = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()


def count(module):
    return sum(p.numel() for p in module.parameters())


# The weights


@pytest.mark.parametrize("num_queries", [1, I])
def test_a_pair_of_output_and_weights_is_torchs(num_queries):
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    ours = MultiHeadAttention.from_torch(theirs)
    query, key = torch.randn(B, num_queries, C).double(), torch.randn(B, J, C).double()
    output, weights = ours(query, key, key, mask=rg.padding(REAL_SOURCE))
    options = {"key_padding_mask": ~REAL_SOURCE, "average_attn_weights": False}
    expected, expected_weights = theirs(query, key, key, **options)
    close(output, expected)
    close(weights.dense(), expected_weights.detach())
    close(weights.dense().mean(1), theirs(query, key, key, key_padding_mask=~REAL_SOURCE)[1].detach())
    assert isinstance(weights, rg.AttentionMap)


def test_a_pair_does_not_hide_the_map_from_a_watcher():
    module, x = MultiHeadAttention(C, H), torch.randn(B, I, C)
    with rg.watch(module) as seen:
        _, weights = module(x, x, x)
    close(seen[0].dense(), weights.dense(), atol=0)


class Outer(nn.Module):
    """A module of a user that returns what its attention returns."""

    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(C, H)

    def forward(self, *inputs, **options):
        return self.attention(*inputs, **options)


@pytest.mark.parametrize("batch", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(C, H), Outer], ids=["alone", "inside"])
def test_the_result_unpacks_to_two_for_every_batch(make, batch):
    module, x = make(), torch.randn(batch, I, C)
    output, weights = result = module(x, x, x)
    assert output is result.output and weights is result.weights and type(output) is torch.Tensor
    assert output.shape == (batch, I, C) and weights.shape == (batch, H, I, I)
    with pytest.raises(ValueError, match="unpack"):
        _, _, _ = module(x)


@torch.no_grad()  # dynamo reads .grad of tensors that are no leaves, which torch warns of
def test_modules_are_compiled_exported_and_mapped():
    module, x = MultiHeadAttention(C, H).eval(), torch.randn(2, I, C)

    expected = module(x).output
    close(torch.vmap(lambda row: module(row[None]))(x).output[:, 0], expected, atol=1e-6)
    close(torch.export.export(module, (x,)).module()(x).output, expected, atol=1e-6)
    with pytest.raises(rg.RegardError, match="the output alone"):
        _, _ = torch.vmap(lambda row: module(row[None]))(x)
    output, weights = torch.compile(module, backend="eager")(x)
    close(output, expected, atol=1e-6)
    assert weights.shape == (2, H, I, I)


# The module


class Tutorial(nn.Module):
    """Multi-head attention as tutorials write it, without an output projection unless told."""

    def __init__(self, width, num_heads, has_output=True):
        super().__init__()
        self.num_heads, self.d_k = num_heads, width // num_heads
        self.W_q, self.W_k, self.W_v = (nn.Linear(width, width) for _ in range(3))
        self.W_o = nn.Linear(width, width) if has_output else None

    def forward(self, q, k, v, mask=None):
        size = q.size(0)
        q, k, v = (
            layer(x).view(size, -1, self.num_heads, self.d_k).transpose(1, 2)
            for layer, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v))
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        output = torch.matmul(weights, v).transpose(1, 2).contiguous().view(size, -1, self.num_heads * self.d_k)
        return (output if self.W_o is None else self.W_o(output)), weights


@pytest.mark.parametrize("has_output", [True, False])
def test_the_module_is_the_class_of_the_tutorials(has_output):
    theirs = randomized(Tutorial(C, H, has_output))
    ours = MultiHeadAttention(C, H, output_projection=has_output).double()
    names = {"W_q": ours.query, "W_k": ours.key, "W_v": ours.value} | ({"W_o": ours.output} if has_output else {})
    for name, layer in names.items():
        layer.load_state_dict(getattr(theirs, name).state_dict())
    assert count(ours) == count(theirs)
    x = torch.randn(B, I, C).double()
    (output, weights), (expected, expected_weights) = ours(x, x, x), theirs(x, x, x)
    close(output, expected)
    close(weights.dense(), expected_weights.detach())
    expected, expected_weights = theirs(x, x, x, torch.ones(I, I).tril())
    output, weights = ours(x, x, x, mask=rg.causal())
    close(output, expected)
    close(weights.dense(), expected_weights.detach())


def test_three_projections_have_the_parameters_that_are_taught():
    assert count(MultiHeadAttention(256, 8, output_projection=False)) == 197_376  # 3 (256 x 256 + 256)
    assert count(MultiHeadAttention(512, 8, bias=False, output_projection=False)) == 3 * 512 * 512


def test_heads_without_an_output_projection_are_not_pruned_but_seen():
    layer = EncoderLayer(MultiHeadAttention(C, H, output_projection=False), FeedForward(C))
    x = torch.randn(B, I, C)
    with rg.watch(layer) as seen:
        assert layer(x).shape == x.shape
    assert seen[0].shape == (B, H, I, I)
    with pytest.raises(rg.RegardError, match="no output projection"):
        rg.prune(layer, {"self_attention": [1]})


def test_dropout_is_that_of_the_attention():
    torch.manual_seed(4)
    plain = MultiHeadAttention(C, H, dropout=0.5)
    own = MultiHeadAttention(C, H, attention=rg.Attention(dropout=0.5))
    own.load_state_dict(plain.state_dict())
    x, outputs = torch.randn(B, I, C), []
    for module in (plain, own):
        torch.manual_seed(7)
        outputs.append(module(x).output)
    close(*outputs, atol=0)
    assert not torch.equal(outputs[0], plain(x).output), "another pattern"
    assert torch.equal(plain.eval()(x).output, MultiHeadAttention.forward(own.eval(), x).output)
    assert not torch.allclose(plain(x).output, outputs[0])


MISTAKES = {
    "a width and a number of heads": (
        lambda: MultiHeadAttention(d_model=8, nhead=2),
        r"d_model: .* embed_dim\. nhead: .* num_heads\.",
    ),
    "heads first by name": (lambda: MultiHeadAttention(num_heads=2, n_embd=8), "n_embd: it is called embed_dim"),
    "heads first by place": (lambda: MultiHeadAttention(8, d_model=512), "d_model: it is called embed_dim"),
    "heads before the width": (lambda: MultiHeadAttention(8, 512), r"width comes first: MultiHeadAttention\(512, 8\)"),
    "names of a book": (
        lambda: MultiHeadAttention(d_in=8, d_out=8, context_length=9, num_heads=2, qkv_bias=True),
        r"d_in: it is called embed_dim\..*qkv_bias: it is called bias",
    ),
    "a causal module with its own attention": (
        lambda: MultiHeadAttention(8, 2, attention=rg.Attention(), is_causal=True),
        r"regard\.Attention\(\.\.\., mask=regard\.causal\(\)\)",
    ),
    "a causal module by another name": (lambda: MultiHeadAttention(8, 2, causal=True), "it is called is_causal"),
    "a causal call by another name": (
        lambda: MultiHeadAttention(8, 2)(torch.randn(1, 3, 8), use_causal_mask=True),
        "it is called is_causal",
    ),
    "a causal call with other keys": (
        lambda: MultiHeadAttention(8, 2)(torch.randn(1, 3, 8), torch.randn(1, 5, 8), is_causal=True),
        r"3 queries and 5 keys.*start=0 for torch.*start=2 for that of regard\.causal\(\)",
    ),
    "a causal call with fewer keys": (
        lambda: MultiHeadAttention(8, 2)(torch.randn(1, 5, 8), torch.randn(1, 3, 8), is_causal=True),
        r"5 queries and 3 keys.*start=-2",
    ),
    "weights of a call": (
        lambda: MultiHeadAttention(8, 2)(torch.randn(1, 3, 8), need_weights=True),
        "output, weights = ",
    ),
    "dropout by another name": (lambda: MultiHeadAttention(8, 2, attn_dropout=0.1), "it is called dropout"),
    "dropout twice": (
        lambda: MultiHeadAttention(8, 2, dropout=0.1, attention=rg.Attention()),
        r"regard\.Attention\(\.\.\., dropout=0\.1\)",
    ),
    "too much dropout": (lambda: MultiHeadAttention(8, 2, dropout=1.0), r"in \[0, 1\)"),
    "a mask for projected keys": (
        lambda: MultiHeadAttention(8, 2)(
            torch.randn(1, 3, 8), MultiHeadAttention(8, 2).keys(torch.randn(1, 3, 8)), mask=rg.causal()
        ),
        r"keys\(key, value, mask\)",
    ),
    "a length of sinusoids": (
        lambda: PositionalEncoding(d_model=8, max_len=5000),
        r"d_model: .* embed_dim\. max_len: .*any length",
    ),
    "rotations that are added": (lambda: PositionalEncoding(8, position=rg.RoPE(8)), r"regard\.Attention\(position="),
    "vectors of another width": (
        lambda: PositionalEncoding(8)(torch.randn(1, 3, 4)),
        r"\(batch, length, 8\), got \(1, 3, 4\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_tutorials_call_it_is_explained(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(rg.RegardError, match=message):
        call()


# Causal attention

CAUSAL = torch.ones(I, I).triu(1).bool()  # torch's sense: True = may not attend


def with_causal_default(theirs):
    module = MultiHeadAttention(C, H, is_causal=True).double()
    module.load_state_dict(MultiHeadAttention.from_torch(theirs).state_dict())
    return module


@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_is_torchs(need_weights):
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    x, options = torch.randn(B, I, C).double(), {"need_weights": need_weights}
    by_call = MultiHeadAttention.from_torch(theirs)
    by_attention = MultiHeadAttention.from_torch(theirs)
    by_attention.attention = rg.Attention(mask=rg.causal())
    expected = theirs(x, x, x, attn_mask=CAUSAL, is_causal=True, **options)[0]
    for output in (by_call(x, is_causal=True).output, by_call(x, mask=rg.causal()).output, by_attention(x).output):
        close(output, expected)
    close(with_causal_default(theirs)(x, is_causal=True).output, expected)
    assert not torch.allclose(by_call(x).output, expected)
    padded = theirs(x, x, x, key_padding_mask=~REAL, attn_mask=CAUSAL, is_causal=True, **options)[0]
    close(by_call(x, mask=rg.padding(REAL), is_causal=True).output, padded)
    close(with_causal_default(theirs)(x, mask=rg.padding(REAL)).output, padded)


def test_is_causal_is_added_to_a_mask_where_torchs_is_a_hint_about_it():
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(B, I, C).double()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True)
    close(ours(x, is_causal=True).output, theirs(x, x, x, attn_mask=CAUSAL)[0])
    allowed = torch.rand(I, I) < 0.6
    allowed.fill_diagonal_(True)
    output, weights = ours(x, mask=rg.mask_tensor(allowed), is_causal=True)
    expected, expected_weights = theirs(x, x, x, attn_mask=~allowed | CAUSAL, average_attn_weights=False)
    close(output, expected)
    close(weights.dense(), expected_weights.detach())


@pytest.mark.parametrize("num_keys", [3, J])
def test_other_numbers_of_keys_are_torchs_with_start_zero(num_keys):
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    ours, x, keys = (
        MultiHeadAttention.from_torch(theirs),
        torch.randn(B, I, C).double(),
        torch.randn(B, num_keys, C).double(),
    )
    hint = torch.zeros(I, num_keys).bool()  # without weights torch reads is_causal in place of it
    expected = theirs(x, keys, keys, attn_mask=hint, is_causal=True, need_weights=False)[0]
    close(ours(x, keys, is_causal=True, start=0).output, expected)
    allowed = torch.ones(I, num_keys).tril(num_keys - I).bool()
    last = theirs(x, keys, keys, attn_mask=~allowed, need_weights=False)[0]
    rows = allowed.any(1)  # torch gives NaN for the other rows
    close(ours(x, keys, is_causal=True, start=num_keys - I).output[:, rows], last[:, rows])


@pytest.mark.parametrize("cuts", [[1] * I, [2, 3], [1, 3, 1], [I]])
@pytest.mark.parametrize("by_module", [True, False])
def test_the_positions_of_a_cache_continue(cuts, by_module):
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    x, past, outputs = torch.randn(B, I, C).double(), None, []
    module = with_causal_default(theirs) if by_module else MultiHeadAttention.from_torch(theirs)
    options = {} if by_module else {"is_causal": True}
    for part in x.split(cuts, 1):
        output, past = module.advance(part, past, **options)
        outputs.append(output)
    expected = theirs(x, x, x, attn_mask=CAUSAL)[0]
    close(torch.cat(outputs, 1), expected)
    close(module(x[:, 2:], past, **options).output, expected[:, 2:])  # the last query is the last token
    close(module(x[:, :2], past, start=0, **options).output, expected[:, :2])


# Layers


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_without_biases_are_torchs(norm):
    options = {"dim_feedforward": 32, "norm_first": norm == "pre", "batch_first": True, "dropout": 0.0, "bias": False}
    theirs = randomized(nn.TransformerEncoderLayer(C, H, **options)).train()  # eval would run a fused kernel
    feed_forward = FeedForward(C, 32, bias=False)
    feed_forward.load_state_dict({"inner.weight": theirs.linear1.weight, "outer.weight": theirs.linear2.weight})
    own = MultiHeadAttention.from_torch(theirs.self_attn)
    layer = EncoderLayer(own, feed_forward, norm, bias=False).double()
    layer.around_self.norm.load_state_dict(theirs.norm1.state_dict())
    layer.around_feed.norm.load_state_dict(theirs.norm2.state_dict())
    x = torch.randn(B, I, C).double()
    close(layer(x, rg.padding(REAL)), theirs(x, src_key_padding_mask=~REAL))
    assert count(layer) == count(theirs)
    decoder = nn.TransformerDecoderLayer(C, H, **options)
    modules = [MultiHeadAttention(C, H, bias=False) for _ in range(2)]
    assert count(DecoderLayer(*modules, FeedForward(C, 32, bias=False), bias=False)) == count(decoder)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_a_transformer_without_biases_has_none(norm, activation):
    config = TransformerConfig(C, num_heads=H, feed_forward=24, norm=norm, activation=activation, bias=False)
    for stack in (config.encoder(2, vocab_size=9), config.decoder(2, vocab_size=9)):
        assert not [name for name, _ in stack.named_parameters() if "bias" in name]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_of_both_sides_of_a_decoder_layer_is_torchs(norm):
    theirs, layer = decoder_layers(norm)
    x, states = torch.randn(B, I, C).double(), torch.randn(B, J, C).double()
    real = REAL.flip(1)  # padding on the left is seen by later tokens
    real[:, 0] = True  # torch gives NaN for a row without keys
    masks = {"tgt_key_padding_mask": ~real, "memory_key_padding_mask": ~REAL_SOURCE}
    expected = theirs(x, states, tgt_mask=torch.ones(I, I).triu(1).bool(), **masks)
    keys = layer.cross_attention.keys(states, mask=rg.padding(REAL_SOURCE))
    close(layer(x, keys, mask=rg.padding(real))[0], expected)


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_texts_with_padding_on_the_left_are_decoded_as_if_alone(positions):
    """With positions that count from the query, padding on the left changes nothing, whole or step by step."""
    config = TransformerConfig(C, num_heads=H, feed_forward=24, positions=positions)
    decoder = randomized(config.decoder(2, vocab_size=30, cross=False))
    ids, short = torch.randint(1, 30, (2, 7)), 4
    real = torch.ones(2, 7).bool()
    real[1, : 7 - short] = False
    alone = decoder(ids[1:, 7 - short :])
    close(decoder(ids, mask=rg.padding(real))[1:, 7 - short :], alone)
    outputs, past = [], None
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        output, past = decoder.advance(ids[:, start:stop], past=past, mask=rg.padding(real[:, :stop]))
        outputs.append(output)
    close(torch.cat(outputs, 1)[1:, 7 - short :], alone)


def test_padding_of_the_target_of_a_transformer_does_not_reach_its_tokens():
    config = TransformerConfig(C, num_heads=H, feed_forward=24, positions="none")
    model = randomized(rg.nn.Transformer(config.encoder(1, vocab_size=30), config.decoder(1, vocab_size=30)))
    source, target = torch.randint(1, 30, (2, J)), torch.randint(1, 30, (2, I))
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    given = model(source, target, rg.padding(REAL_SOURCE), rg.padding(real))
    close(given[:1, 2:], model(source[:1, :4], target[:1, 2:]))
    close(given[1:], model(source[1:], target[1:]))


# Positions


class TutorialPositions(nn.Module):
    """Sinusoids as tutorials of PyTorch write them."""

    def __init__(self, d_model, dropout=0.1, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.double).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).double() * (-math.log(10000.0) / d_model))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


def test_positions_are_added_as_in_the_tutorials():
    theirs, ours = TutorialPositions(C).eval(), PositionalEncoding(C, 0.1).eval()
    x = torch.randn(B, 300, C)
    close(ours(x), theirs(x), atol=1e-6)
    close(ours(x[:, 200:], start=200), theirs(x)[:, 200:], atol=1e-6)
    assert count(ours) == count(theirs) == 0 and not ours.state_dict()
    dropped = (ours.train()(torch.ones(8, 500, C)) == 0).double().mean()
    assert abs(float(dropped) - 0.1) < 0.01


def test_a_learned_table_is_added_row_by_row():
    ours = PositionalEncoding(C, position=rg.encodings.LearnedPositions(9, C))
    x = torch.randn(B, I, C)
    close(ours(x, start=2), x + ours.position.table[2 : 2 + I])
    assert count(ours) == 9 * C
    with pytest.raises(rg.RegardError, match="has positions 0 to 8"):
        ours(torch.randn(1, 10, C))


def test_encodings_count_their_parameters():
    class Scaled(rg.encodings.Encoding, nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def encode(self, x, positions):
            return x * self.factor.sum()

    pieces = (rg.encodings.Sinusoidal(), rg.RoPE(8), rg.encodings.LearnedPositions(9, C), Scaled())
    assert [sum(p.numel() for p in piece.parameters()) for piece in pieces] == [0, 0, 9 * C, 3]
