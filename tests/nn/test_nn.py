"""Modules of `regard.nn` against torch's own, from the same weights, and the laws of padding, causality and steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from regard.nn import (
    Cell,
    CrossAttention,
    Dropout,
    Embedding,
    FeedForward,
    MultiHeadAttention,
    RecurrentEncoder,
    Residual,
    TransformerConfig,
    attention_for,
)
from regard.nn.transformer import DecoderLayer, EncoderLayer

C, H = 16, 4
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
POSITIONS = ("sinusoidal", "learned", "rope", "alibi", "t5", "none")


def close(ours, theirs, atol=1e-10):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def randomized(module):
    """Biases and norms that are not 0 and 1, so that a forgotten one shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module.double().eval()


# Multi-head attention


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 10}], ids=["self", "other widths"])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_taken_over_from_torch(widths, bias):
    theirs = randomized(nn.MultiheadAttention(C, H, bias=bias, batch_first=True, **widths))
    ours = MultiHeadAttention.from_torch(theirs)
    query = torch.randn(3, 5, C).double()
    key, value = (torch.randn(3, 7, widths.get(name, C)).double() for name in ("kdim", "vdim"))
    real = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6]).bool()
    expected, weights = theirs(query, key, value, key_padding_mask=~real, average_attn_weights=False)
    with rg.watch(ours) as seen:
        close(ours(query, key, value, mask=rg.padding(real)).output, expected)
    close(seen[0].dense(), weights.detach())


def test_causal_attention_is_torchs():
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(2, 6, C).double()
    future = torch.ones(6, 6).triu(1).bool()
    close(ours(x, mask=rg.causal()).output, theirs(x, x, x, attn_mask=future)[0])


def test_what_torch_adds_to_keys_is_refused():
    with pytest.raises(rg.RegardError, match="add_zero_attn"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(C, H, add_zero_attn=True))


@pytest.mark.parametrize("num_key_value_heads", [1, 2])
def test_groups_of_heads_share_keys_as_torch_shares_them(num_key_value_heads):
    ours = randomized(MultiHeadAttention(C, H, num_key_value_heads))
    x = torch.randn(2, 6, C).double()
    q, k, v = (p(x).unflatten(-1, (-1, C // H)).transpose(1, 2) for p in (ours.query, ours.key, ours.value))
    heads = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    close(ours(x).output, ours.output(heads.transpose(1, 2).flatten(2)))


def test_parameter_counts_are_those_of_the_books():
    def count(module):
        return sum(p.numel() for p in module.parameters())

    assert count(MultiHeadAttention(512, 8, bias=False)) == 1_048_576
    assert count(MultiHeadAttention(512, 8)) == count(nn.MultiheadAttention(512, 8)) == 1_050_624
    layer = TransformerConfig(512, num_heads=8, feed_forward=2048).encoder(1)
    assert count(layer.layers) == count(nn.TransformerEncoderLayer(512, 8, 2048))
    layer = TransformerConfig(512, num_heads=8, feed_forward=2048).decoder(1)
    assert count(layer.layers) == count(nn.TransformerDecoderLayer(512, 8, 2048))
    gated, plain = (count(FeedForward(512, 1536, name)) for name in ("swiglu", "relu"))
    assert abs(gated / plain - 1) < 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((10, 3), "must divide 10: 1, 2, 5, 10"), ((C, H, 3), "num_key_value_heads=3.*1, 2, 4"), ((C, 0), "heads")],
)
def test_heads_that_do_not_divide_are_refused(arguments, message):
    with pytest.raises(rg.RegardError, match=message):
        MultiHeadAttention(*arguments)


def test_inputs_of_another_width_are_refused():
    with pytest.raises(rg.RegardError, match=r"\(batch, length, 16\), got \(2, 3, 8\)"):
        MultiHeadAttention(C, H)(torch.randn(2, 3, 8))


# Layers, against torch's


def copied_residual(ours, norm):
    with torch.no_grad():
        ours.norm.weight.copy_(norm.weight)
        ours.norm.bias.copy_(norm.bias)


def copied_feed_forward(theirs):
    feeds = FeedForward(C, 32, "relu" if theirs.activation is nn.functional.relu else "gelu")
    feeds.inner.load_state_dict(theirs.linear1.state_dict())
    feeds.outer.load_state_dict(theirs.linear2.state_dict())
    return feeds


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_encoder_layer_is_torchs(norm, activation):
    options = {"dim_feedforward": 32, "activation": activation, "norm_first": norm == "pre", "batch_first": True}
    theirs = randomized(nn.TransformerEncoderLayer(C, H, **options)).train()  # eval would run a fused kernel
    theirs.dropout = theirs.dropout1 = theirs.dropout2 = nn.Identity()
    theirs.self_attn.dropout = 0.0
    layer = EncoderLayer(MultiHeadAttention.from_torch(theirs.self_attn), copied_feed_forward(theirs), norm).double()
    copied_residual(layer.around_self, theirs.norm1)
    copied_residual(layer.around_feed, theirs.norm2)
    x, real = torch.randn(2, 5, C).double(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    expected = theirs(x, src_key_padding_mask=~real)
    close(layer(x, rg.padding(real)), expected)


def decoder_layers(norm):
    """torch's decoder layer, and ours with the same weights."""
    options = {"dim_feedforward": 32, "norm_first": norm == "pre", "batch_first": True, "dropout": 0.0}
    theirs = randomized(nn.TransformerDecoderLayer(C, H, **options))
    own, cross = (MultiHeadAttention.from_torch(m) for m in (theirs.self_attn, theirs.multihead_attn))
    own.attention = own.attention.with_mask(rg.causal())
    layer = DecoderLayer(own, cross, copied_feed_forward(theirs), norm).double()
    for ours, norms in zip((layer.around_self, layer.around_cross, layer.around_feed), (1, 2, 3), strict=True):
        copied_residual(ours, getattr(theirs, f"norm{norms}"))
    return theirs, layer


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_decoder_layer_is_torchs(norm):
    theirs, layer = decoder_layers(norm)
    x, states = torch.randn(2, 5, C).double(), torch.randn(2, 7, C).double()
    future = torch.ones(5, 5).triu(1).bool()
    close(layer(x, layer.cross_attention.keys(states))[0], theirs(x, states, tgt_mask=future))


def test_names_of_options_are_checked():
    with pytest.raises(rg.RegardError, match="'gelu'"):
        FeedForward(C, activation="gelo")
    with pytest.raises(rg.RegardError, match="'post'"):
        Residual(C, "poste")
    with pytest.raises(rg.RegardError, match="Did you mean 'rope'"):
        TransformerConfig(C, positions="ropes").encoder(1)
    with pytest.raises(rg.RegardError, match="Did you mean 'sliding_window'"):
        TransformerConfig(C, attention="sliding_windw").encoder(1)
    with pytest.raises(rg.RegardError, match="encoder, decoder, cross"):
        TransformerConfig(C, attention={"encoders": "linear"}).encoder(1)
    with pytest.raises(rg.RegardError, match="no argument 'sise'"):
        TransformerConfig(C, attention={"name": "sliding_window", "sise": 3}).encoder(1)
    with pytest.raises(rg.RegardError, match="could make negative"):
        TransformerConfig(C, attention="linear", positions="alibi").encoder(1)


# Stacks

MECHANISMS = (
    "full",
    "sliding_window",
    "bigbird",
    "linear",
    "performer",
    "sparse",
    "top_k",
    "shaw",
    "sinks",
    "longformer",
)
PLANS = [{"positions": p} for p in POSITIONS] + [{"attention": m} for m in MECHANISMS]
PLANS += [{"num_key_value_heads": 1}, {"norm": "post", "activation": "swiglu"}, {"scaled": False}]


def plan(options):
    return TransformerConfig(C, num_heads=H, feed_forward=24, max_length=12, **options)


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_padding_does_not_reach_the_real_tokens(options):
    encoder = randomized(plan(options).encoder(2, vocab_size=30))
    ids = torch.randint(1, 30, (3, 6))
    together = encoder(torch.cat((ids, torch.zeros(3, 4, dtype=torch.long)), 1), rg.padding([6, 6, 6]))
    close(together[:, :6], encoder(ids))


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_no_token_sees_a_later_one_and_steps_are_the_whole(options):
    decoder = randomized(plan(options).decoder(2, vocab_size=30))
    keys = decoder.keys(torch.randn(2, 5, C).double(), rg.padding(torch.tensor([[1] * 5, [1, 1, 0, 0, 0]]).bool()))
    ids = torch.randint(1, 30, (2, 7))
    whole = decoder(ids, keys)
    changed = ids.clone()
    changed[:, 4:] = (ids[:, 4:] + 1) % 30
    close(decoder(changed, keys)[:, :4], whole[:, :4], atol=0 if "attention" not in options else 1e-12)
    outputs, past = [], None
    for piece in (ids[:, :3], *ids[:, 3:].split(1, 1)):
        output, past = decoder.advance(piece, keys, past)
        outputs.append(output)
    close(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize("positions", ["rope", "alibi", "t5", "none"])
def test_positions_inside_attention_do_not_care_where_a_text_begins(positions):
    encoder = randomized(plan({"positions": positions}).encoder(1))
    x = torch.randn(1, 4, C).double()
    moved = torch.cat((torch.randn(1, 3, C).double(), x), 1)
    close(encoder(moved, rg.padding(torch.arange(7)[None] >= 3))[:, 3:], encoder(x))


def test_an_encoder_without_positions_knows_no_order():
    x, order = torch.randn(1, 5, C).double(), torch.tensor([3, 1, 4, 0, 2])
    for positions in POSITIONS:
        encoder = randomized(plan({"positions": positions}).encoder(1, vocab_size=30))
        x = torch.randint(1, 30, (1, 5))
        same = torch.allclose(encoder(x)[:, order], encoder(x[:, order]))
        assert same == (positions == "none")


def test_learned_positions_end_where_the_table_ends():
    encoder = plan({"positions": "learned"}).encoder(1, vocab_size=30)
    with pytest.raises(rg.RegardError, match="has positions 0 to 11"):
        encoder(torch.ones(1, 13, dtype=torch.long))


def test_the_scale_is_left_out_where_it_is_asked_for():
    x = torch.randn(1, 3, C).double()
    scaled, unscaled = (randomized(plan({"scaled": s}).encoder(1)) for s in (True, False))
    unscaled.load_state_dict(scaled.state_dict())
    attention = unscaled.layers[0].self_attention
    with torch.no_grad():
        attention.query.weight.div_((C // H) ** 0.5)
        attention.query.bias.div_((C // H) ** 0.5)
    close(unscaled(x), scaled(x))


@pytest.mark.parametrize("scale", [True, False])
def test_token_vectors_start_at_the_deviation_asked_for(scale: bool):
    vectors = Embedding(4000, 64, scale=scale, std=0.3)(torch.arange(1, 4000)[None])
    assert vectors.std().item() == pytest.approx(0.3, rel=0.01)  # of 255,936 numbers; 1 % is seven deviations of it


def test_embeddings_are_the_formula():
    embedding = Embedding(9, 6, rg.encodings.Sinusoidal()).double()
    ids = torch.tensor([[4, 0, 8]])
    place = torch.arange(5, 8, dtype=torch.float64)[:, None] / 10_000 ** (torch.tensor([0, 0, 2, 2, 4, 4]).double() / 6)
    waves = torch.where(torch.arange(6) % 2 == 0, place.sin(), place.cos())
    close(embedding(ids, start=5)[0], embedding.table.weight[ids[0]] * 6**0.5 + waves)
    assert not embedding.table.weight[0].any()


# Recurrent layers, against torch's


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cells_are_torchs(kind):
    theirs = randomized((nn.LSTMCell if kind == "lstm" else nn.GRUCell)(5 + 3, C))
    cell = Cell(5, C, feed_size=3, kind=kind).double()
    with torch.no_grad():
        cell.input.weight.copy_(theirs.weight_ih[:, :5])
        cell.fed.copy_(theirs.weight_ih[:, 5:])
        cell.recurrent.copy_(theirs.weight_hh)
        cell.input.bias.copy_(theirs.bias_ih + theirs.bias_hh)
        if kind == "gru":
            cell.input.bias[2 * C :].copy_(theirs.bias_ih[2 * C :])
            cell.candidate_bias.copy_(theirs.bias_hh[2 * C :])
    x, fed, state = torch.randn(2, 5).double(), torch.randn(2, 3).double(), torch.randn(2, 2, C).double()
    given = tuple(state) if kind == "lstm" else (state[0],)
    expected = theirs(torch.cat((x, fed), -1), given if kind == "lstm" else given[0])
    for ours, wanted in zip(cell(cell.project(x), fed, given), expected if kind == "lstm" else [expected], strict=True):
        close(ours, wanted)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_all_steps_at_once_are_the_steps(kind):
    cell = randomized(Cell(5, C, kind=kind))
    x, state = torch.randn(2, 4, 5).double(), tuple(torch.randn(cell.num_parts, 2, C).double())
    whole, steps = cell.whole(x, state), []
    for projected in cell.project(x).unbind(1):
        state = cell(projected, None, state)
        steps.append(state[0])
    close(whole, torch.stack(steps, 1))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_recurrent_encoder_is_torchs_packed_one(kind, layers):
    theirs = randomized(
        (nn.LSTM if kind == "lstm" else nn.GRU)(5, C // 2, layers, bidirectional=True, batch_first=True)
    )
    ours = RecurrentEncoder(5, C, layers, kind).double()
    for n in range(layers):
        for name, suffix in ((ours.ahead[n], ""), (ours.back[n], "_reverse")):
            name.load_state_dict({f"{p}_l0": getattr(theirs, f"{p}_l{n}{suffix}") for p in PARAMETERS})
    x, lengths = torch.randn(3, 6, 5).double(), torch.tensor([2, 6, 1])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    states, last = theirs(packed)
    last = last[0] if kind == "lstm" else last
    mine, final = ours(x, lengths)
    close(mine, nn.utils.rnn.pad_packed_sequence(states, batch_first=True)[0])
    close(final, torch.cat((last[-2], last[-1]), -1))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("lengths", [[5, 3], [3, 5], [-1, 3], [3], [[3], [3]], [3.0, 2.0], [True, False]], ids=str)
def test_lengths_that_are_not_those_of_the_rows_are_refused(lengths, kind):
    """A length beyond the row would read the vectors of the next one."""
    with pytest.raises(rg.RegardError, match=r"^RecurrentEncoder: lengths are"):
        RecurrentEncoder(6, 8, 1, kind)(torch.randn(2, 3, 6), torch.tensor(lengths))


def test_unknown_cells_and_odd_widths_are_refused():
    with pytest.raises(rg.RegardError, match="'lstm'"):
        Cell(4, 4, kind="lstn")
    with pytest.raises(rg.RegardError, match="even"):
        RecurrentEncoder(4, 5)


def test_dropout_drops_its_share_and_keeps_the_mean():
    dropout, x = Dropout(0.2), torch.ones(200_000)
    y = dropout(x)
    share = float((y == 0).double().mean())
    assert abs(share - 51 / 256) < 5 * (0.2 * 0.8 / 200_000) ** 0.5
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(256 / 205))}
    assert dropout.eval()(x) is x
    torch.manual_seed(3)
    first = dropout.train()(x)
    torch.manual_seed(3)
    close(first, dropout(x), atol=0)


@pytest.mark.parametrize("p", [0.0001, 0.001, 0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.9, 0.99, 0.999])
def test_dropout_drops_what_it_is_told(p):
    n = 400_000
    y = Dropout(p)(torch.ones(n))
    allowed = 0.02 * min(p, 1 - p) + 5 * (p * (1 - p) / n) ** 0.5
    assert abs(float((y == 0).double().mean()) - p) < allowed
    assert abs(float(y.double().mean()) - 1) < 5 * (p / (1 - p) / n) ** 0.5


@pytest.mark.parametrize(
    "score", [rg.scores.Additive(8, 6, 4), rg.scores.Bilinear(8, 6), rg.scores.Concat(8, 6, 4)], ids=repr
)
def test_widths_of_a_single_query_are_checked_too(score):
    module = rg.nn.MultiHeadAttention(16, 2, attention=rg.Attention(score))
    for query in (torch.randn(1, 1, 16), torch.randn(1, 3, 16)):
        with pytest.raises(rg.RegardError, match="made for query width 8 and key width 6, got 8 and 8"):
            module(query, torch.randn(1, 5, 16))


def test_a_single_query_is_read_in_half_precision_whatever_the_score():
    """Cosine prepares vectors in float32, and values stay as they are: the fused kernel needs one dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        module = rg.nn.MultiHeadAttention(8, 2, attention=rg.Attention(rg.scores.Cosine())).to(dtype)
        keys = torch.randn(3, 5, 8, dtype=dtype)
        for mask in (None, rg.padding([5, 2, 1])):
            one = module(keys[:, :1], keys, mask=mask).output
            both = module(keys[:, :2], keys, mask=mask).output
            assert one.dtype == dtype
            torch.testing.assert_close(one, both[:, :1], rtol=5e-2, atol=5e-2)


# The bridge


@pytest.mark.parametrize(
    "name", ["bahdanau", "luong_dot", "luong_general", "luong_concat", "cosine", "sparse", "top_k", "linear"]
)
def test_single_queries_read_what_all_at_once_do(name):
    bridge = randomized(CrossAttention(attention_for("cross", name, head_dim=C), C, C))
    states, queries = torch.randn(3, 5, C).double(), torch.randn(3, 4, C).double()
    real = torch.tensor([[1] * 5, [1, 1, 0, 0, 0], [0] * 5]).bool()
    keys = bridge.keys(states, rg.padding(real))
    whole = bridge(queries, keys).output
    close(torch.cat([bridge(queries[:, i : i + 1], keys, start=i).output for i in range(4)], 1), whole)
    assert not whole[2].any()
    masked, inputs = bridge.attention.with_mask(rg.padding(real)), (queries[:, None], states[:, None], states[:, None])
    with torch.no_grad():
        seen = masked(*inputs, engine="reference")
    close(whole, seen.output[:, 0].to(whole))


def test_keys_are_prepared_once(monkeypatch):
    bridge, projected = randomized(CrossAttention(rg.mechanism("bahdanau").build(C, 6, 8), C, 6)), []
    bridge.attention.score.key.register_forward_hook(lambda module, given, output: projected.append(output.numel()))
    keys = bridge.keys(torch.randn(2, 5, 6).double())
    for step in range(3):
        bridge(torch.randn(2, 1, C).double(), keys, start=step)
    assert [size for size in projected if size] == [2 * 5 * 8]


def test_a_mechanism_that_does_not_fit_is_refused():
    with pytest.raises(rg.RegardError, match="must be equal"):
        CrossAttention(rg.Attention(), 8, 6)
    with pytest.raises(rg.RegardError, match="Use bahdanau"):
        attention_for("cross", "cosine", head_dim=8, key_dim=6)


# Pruning and importance


def test_pruned_heads_are_gated_heads():
    encoder = randomized(plan({"num_key_value_heads": 2, "positions": "rope"}).encoder(2))
    x = torch.randn(2, 5, C).double()
    found = rg.importance(encoder, lambda model, x: model(x).square().mean(), [x])
    assert list(found.values) == ["layers.0.self_attention", "layers.1.self_attention"]
    least = found.least(2, groups=True)
    gates = {name: [float((name, head) not in least) for head in range(H)] for name in found.values}
    with rg.hf.gated(encoder, gates):
        gated = encoder(x)
    pruned = rg.prune(encoder, least)
    close(encoder(x), gated)
    assert pruned.parameters_after < pruned.parameters_before


def test_a_piece_made_for_all_heads_is_not_cut():
    encoder = plan({"positions": "alibi"}).encoder(1)
    with pytest.raises(rg.RegardError, match="ALiBi has a number for each head"):
        rg.prune(encoder, {"layers.0.self_attention": [1]})


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("nystrom", "encoder", "several attentions"),
        ("retnet", "encoder", r"goes from token to token.*Use it in a decoder"),
        ("deltanet", "decoder", "needs beta for each call"),
        ("deepseek_sparse", "decoder", "needs index_query"),
    ],
)
def test_a_mechanism_that_a_module_cannot_run_is_refused_in_words(name, role, said):
    with pytest.raises(rg.RegardError, match=said):
        rg.nn.MultiHeadAttention(16, 2, attention=attention_for(role, name, num_heads=2, head_dim=8))


@pytest.mark.parametrize(("name", "slot"), [("retnet", "transition"), ("moba", "selection")])
def test_a_role_keeps_transitions_and_selections(name, slot):
    """Each slot of the mechanism reaches the module: the output is that of the mechanism, not of plain softmax."""
    attention = attention_for("decoder", name, num_heads=2, head_dim=8)
    assert getattr(attention, slot) is not None
    module = rg.nn.MultiHeadAttention(16, 2, attention=attention)
    assert module(torch.randn(1, 40, 16)).output.shape == (1, 40, 16)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("retnet", {"num_heads": 2, "head_dim": 8}),
        ("moba", {"size": 2, "k": 2}),
        ("short_convolution", {"num_heads": 2}),
        ("pooled_keys", {"size": 3}),
        ("differential", {"head_dim": 4}),
        ("infini", {"num_heads": 2, "size": 3}),
    ],
)
@torch.no_grad()
def test_one_token_at_a_time_is_the_same_attention(name, arguments):
    """Also where weights are no function of one score: transitions, selections, sums and groups of keys."""
    attention = rg.mechanism(name).build(**arguments)
    module, x = (
        rg.nn.MultiHeadAttention(16, 2, attention=attention).double(),
        torch.randn(1, 8, 16).double(),
    )
    output, weights = module(x)
    steps, past = [], None
    for token in x.split(1, 1):
        step, past = module.advance(token, past)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, 1), output)
    values = module.keys(x).value
    torch.testing.assert_close(module.output((weights.dense() @ values).transpose(1, 2).flatten(2)), output)


def test_a_composite_in_a_module_takes_no_mask_of_a_call():
    composite = rg.mechanism("nystrom").build(num_landmarks=2)
    module, x = rg.nn.MultiHeadAttention(16, 2, attention=composite), torch.randn(1, 6, 16)
    for options in ({"mask": rg.padding([4])}, {"is_causal": True}):
        with pytest.raises(rg.RegardError, match="several attentions, and a mask of a call"):
            module(x, **options)
    with pytest.raises(rg.RegardError, match="GateFactors needs"):
        rg.nn.MultiHeadAttention(16, 2, attention=rg.mechanism("nsa").build(size=2))
    with rg.watch(module) as seen:
        module(x)
    assert seen[0].shape == (1, 2, 6, 6)
    retnet = rg.nn.MultiHeadAttention(16, 2, attention=rg.mechanism("retnet").build(2, 8))
    for whole, reason in ((module, "Nystrom is made of several"), (retnet, "Decay has a number for each head")):
        with pytest.raises(rg.RegardError, match=reason):
            rg.prune(nn.Sequential(whole), {"0": [1]})


# Tensors as masks: those that `attend` takes, against torch's module


@pytest.mark.parametrize("kind", ["pairs", "keys", "four axes", "added", "added keys"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 6), (4, 7)])
def test_a_tensor_is_a_mask_of_a_module_as_in_torch(kind, queries, keys):
    """Booleans are opposite in torch's module; one key of each query stays, so no row is empty."""
    theirs = randomized(nn.MultiheadAttention(C, H, batch_first=True))
    ours = MultiHeadAttention.from_torch(theirs)
    x, y = torch.randn(3, queries, C).double(), torch.randn(3, keys, C).double()
    allowed = torch.rand(3, 1, queries, keys) < 0.6
    if "keys" in kind:
        allowed = allowed[:, :, :1].expand(-1, -1, queries, -1).clone()
    elif kind != "four axes":
        allowed = allowed[:1].expand(3, -1, -1, -1).clone()
    allowed[..., 0] = True
    mask = {"pairs": allowed[0, 0], "keys": allowed[:, 0, 0], "four axes": allowed}.get(kind)
    if mask is None:
        mask = allowed[0, 0] if kind == "added" else allowed[:, 0, 0]
        mask = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)
    hidden = ~allowed.expand(3, H, -1, -1).reshape(3 * H, queries, keys)
    output, weights = ours(x, y, y, mask=mask)
    expected, shares = theirs(x, y, y, attn_mask=hidden, average_attn_weights=False)
    close(output, expected)
    close(weights.dense(), shares)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(5, 5).tril().int(), "torch.int32"),
        (torch.ones(5, 5, dtype=torch.bool).triu(1), "True seems to mean: may not attend"),
        (torch.linspace(-1, 1, 25).view(5, 5), "a bias of the scores"),
        (torch.ones(3, 3, dtype=torch.bool), "has shape (3, 3)"),
        (torch.ones(2, 5, 5, dtype=torch.bool), "(batch, queries, keys) becomes mask[:, None]"),
        (torch.zeros(H, 5, 5), "(heads, queries, keys) becomes mask[None]"),
    ],
)
def test_a_tensor_that_is_no_mask_of_the_call_is_refused(mask, said):
    with pytest.raises(rg.RegardError, match="MultiHeadAttention") as error:
        MultiHeadAttention(C, H)(torch.randn(2, 5, C), mask=mask)
    assert said in str(error.value)
