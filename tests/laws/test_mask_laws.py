"""What a mask hides: no key that a row may not attend to moves its output, its weights or its gradients.

Each law is drawn for every mechanism of the catalog. Mechanisms that refuse a mask or a cache are named, so that the
lists can only become shorter.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from cataloged import TRANSPORTED
from drawn import examples
from regard.catalog import mechanisms
from regard.pieces.call_tensors import needs_of

pytestmark = pytest.mark.usefixtures("small_blocks")
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
#: Composites without a place for a mask: all their tokens are one sequence.
WITHOUT_MASK = {"infini", "linformer", "nystrom", "perceiver"}
#: Transitions take `causal()` only, and say so.
REFUSE_MASKS = {*TRANSPORTED}
#: They need tensors of earlier keys, or read all of them, and ask for `GrowingCache`.
REFUSE_RING = {
    *(WITHOUT_MASK | REFUSE_MASKS),
    *("deepseek_sparse", "differential", "forgetting", "minimax_sparse", "nsa", "pooled_keys"),
}
#: Mechanisms whose blocks begin with each document: alone they are compared at position 0.
BLOCKS = {"minimax_sparse", "moba", "nsa", "pooled_keys", "selected branch of nsa"}
every_mechanism = pytest.mark.parametrize("name", [*sorted(mechanisms()), "selected branch of nsa"])


def masked(attention, mask):
    """The mechanism with a further mask on each of its attentions; None if one of them has no place for it."""
    if isinstance(attention, rg.Attention):
        return attention.with_mask(mask if attention.mask is None else attention.mask & mask)
    if isinstance(attention, rg.composites.Sum):
        parts = [masked(part, mask) for part in attention.parts]
        return (
            None
            if None in parts
            else rg.composites.Sum(parts, attention.factors, splits_channels=attention.splits_channels)
        )
    if isinstance(attention, rg.composites.Grouped) and isinstance(attention.groups, rg.composites.MeanGroups):
        return rg.composites.Grouped(masked(attention.attention, mask), attention.groups)
    return None


def drawn_call(data, name, shortest=0):
    """A mechanism with drawn blocks, its inputs of one drawn length, and its tensors of the call with their axes."""
    mechanism = mechanisms()["nsa" if name in BLOCKS - set(mechanisms()) else name]
    longest = {"axial_rope": 16, "multimodal_rope": 16} | dict.fromkeys(BLOCKS, 40)
    n = data.draw(st.integers(shortest, longest.get(name, 21)), label="length")
    seed = data.draw(st.integers(0, 999), label="seed")
    attention, q, k, v = mechanism.example(seed, queries=n, keys=n)
    options = dict(mechanism.tiny)
    if name in BLOCKS:
        options["size"] = data.draw(st.integers(1, 6), label="size")
        if name == "pooled_keys":
            options["stride"] = data.draw(st.none() | st.integers(1, 7), label="stride")
        attention = mechanism.build(**options)
        attention = attention.parts[1] if name not in mechanisms() else attention
    torch.manual_seed(seed)
    tensors = mechanism.tensors(attention, q, k, v)
    axes = {key: words.split() for piece in attention.pieces() for key, words in needs_of(piece).items()}
    return attention, (q, k, v), tensors, axes


def cut(tensors, axes, rows, keys):
    """The tensors of a call for some rows and keys."""
    places = {"I": rows, "J": keys}
    return {name: x[tuple(places.get(letter, slice(None)) for letter in axes[name])] for name, x in tensors.items()}


def moved(k, v, tensors, hidden):
    """Keys, values and index keys, with other numbers where `hidden`, a boolean vector (J,) or (B, J)."""
    there = hidden.expand(len(k), -1)[:, None, :, None]
    k, v = (torch.where(there, 3 * torch.randn_like(x) + 1, x) for x in (k, v))
    index = {name: torch.where(there, x.flip(2), x) for name, x in tensors.items() if name == "index_key"}
    return k, v, tensors | index


def attend(attention, inputs, tensors, **options):
    return attention(*inputs, **tensors, **options)


def run(attention, inputs, call, engine):
    """The result of a call, its weights, and its keys and values, which are leaves of its graph."""
    q, k, v = inputs
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in (k, v)]
        seen = attend(attention, (q, *leaves), call, engine=engine)
    return seen, seen.weights.dense().detach(), leaves


def check_hidden(attention, inputs, call, hidden, rows, engine, known=None):
    """New numbers of the hidden keys, (J,) or (B, J), change no row of `rows`, and the rows give them no gradient.

    `known` is the `run` of this call, if there is one. Returns it.
    """
    q, k, v = inputs
    rows = rows.expand(len(q), -1)
    seen, weights, leaves = known = known or run(attention, inputs, call, engine)
    with torch.enable_grad():
        kept = seen.output * rows[:, None, :, None]
        slopes = torch.autograd.grad(kept.square().sum(), leaves, allow_unused=True, retain_graph=True)
    there = hidden.expand(len(k), -1)[:, None, :, None]
    for slope in slopes:
        assert slope is None or not (slope * there).abs().gt(1e-12).any()
    weights = weights * rows[:, None, :, None]
    assert not (weights * there.mT).any()
    k, v, call = moved(k, v, call, hidden)
    other = attend(attention, (q, k, v), call, engine=engine)
    torch.testing.assert_close(other.output * rows[:, None, :, None], kept.detach(), **CLOSE)
    torch.testing.assert_close(other.weights.dense() * rows[:, None, :, None], weights, **CLOSE)
    return known


def maskable(name, attention, mask, *call):
    """The masked mechanism; None if it takes no mask, which the lists above must then say."""
    if name in REFUSE_MASKS:
        with pytest.raises(rg.RegardError, match="with a transition the mask is"):
            attend(masked(attention, mask), *call)
        return None
    found = masked(attention, mask)
    assert (found is None) == (name in WITHOUT_MASK)
    return found


engines = st.sampled_from(["auto", "dense", "blocked"])


@every_mechanism
@examples(8)
@given(st.data())
@torch.no_grad()
def test_a_packed_document_is_read_alone(name, data):
    attention, inputs, tensors, axes = drawn_call(data, name, shortest=2)
    n = inputs[0].shape[2]
    first = data.draw(st.integers(1, n - 1), label="first")
    documents = maskable(name, attention, rg.documents([first, n - first]), inputs, tensors)
    if documents is None:
        return
    engine, place = data.draw(engines), torch.arange(n)
    packed = None
    for own in (place < first, place >= first):
        packed = check_hidden(documents, inputs, tensors, ~own, own, engine, packed)
    part = slice(first, n)
    alone, start = (attention, 0) if name in BLOCKS else (documents, first)
    expected = attend(
        alone,
        [x[:, :, part] for x in inputs],
        cut(tensors, axes, part, part),
        positions=rg.types.Positions(start, rg.types.Spans.of((start, start + n - first))),
    )
    seen, weights, _ = packed
    torch.testing.assert_close(seen.output[:, :, part].detach(), expected.output, **CLOSE)
    torch.testing.assert_close(weights[:, :, part, part], expected.weights.dense(), **CLOSE)


@every_mechanism
@examples(8)
@given(st.data())
@torch.no_grad()
def test_padding_is_not_read(name, data):
    """Padding anywhere; and left padding, which differs between entries, gives what the text without it gives."""
    attention, inputs, tensors, axes = drawn_call(data, name)
    B, n, engine = len(inputs[0]), inputs[0].shape[2], data.draw(engines)
    padded = maskable(name, attention, rg.padding(torch.rand(B, n) < 0.7), inputs, tensors)
    if padded is None:
        return
    real = torch.rand(B, n) < 0.7
    check_hidden(masked(attention, rg.padding(real)), inputs, tensors, ~real, torch.ones(n), engine)
    starts = [data.draw(st.integers(0, n), label="padding") for _ in range(B)]
    real = torch.arange(n) >= torch.tensor(starts)[:, None]
    padded = masked(attention, rg.padding(real))
    seen, *_ = check_hidden(padded, inputs, tensors, ~real, real, engine)
    for entry, pad in enumerate(starts):
        part, start = slice(pad, n), 0 if name in BLOCKS else pad
        of_entry = {name: x[entry : entry + 1] if axes[name][0] == "B" else x for name, x in tensors.items()}
        expected = attend(
            attention,
            [x[entry : entry + 1, :, part] for x in inputs],
            cut(of_entry, axes, part, part),
            positions=rg.types.Positions(start, rg.types.Spans.of((start, start + n - pad))),
        )
        torch.testing.assert_close(seen.output[entry : entry + 1, :, part].detach(), expected.output, **CLOSE)
        torch.testing.assert_close(seen.weights[entry : entry + 1, :, part, part], expected.weights.dense(), **CLOSE)


@every_mechanism
@examples(8)
@given(st.data())
@torch.no_grad()
def test_a_row_does_not_read_what_a_window_hides(name, data):
    attention, inputs, tensors, _ = drawn_call(data, name, shortest=1)
    n = inputs[0].shape[2]
    size, row = data.draw(st.integers(1, n), label="window"), data.draw(st.integers(0, n - 1), label="row")
    kinds = {
        "window": rg.causal() & rg.window(size),
        "prefix": rg.causal() | rg.masks.prefix(size),
        "any pair": rg.mask_tensor(torch.rand(1, 1, n, n) < 0.6),
        "predicate": rg.mask_mod(lambda b, h, i, j: (j <= i) & (i // size == j // size)),
    }
    mask = kinds[data.draw(st.sampled_from(list(kinds)), label="mask")]
    windowed = maskable(name, attention, mask, inputs, tensors)
    if windowed is None:
        return
    hidden = ~mask.dense(n)[..., row, :].flatten()
    check_hidden(windowed, inputs, tensors, hidden, torch.arange(n) == row, data.draw(engines))


@every_mechanism
@examples(8)
@given(st.data())
@torch.no_grad()
def test_a_ring_cache_gives_token_by_token_what_one_call_gives(name, data):
    attention, inputs, tensors, axes = drawn_call(data, name)
    n = inputs[0].shape[2]
    cache = rg.caches.RingCache(
        data.draw(st.integers(1, 12), label="ring"), data.draw(st.integers(0, 3), label="sinks")
    )
    if name not in REFUSE_RING:
        attention = masked(attention, rg.causal())
    else:
        with pytest.raises(
            rg.RegardError, match=r"RingCache does not keep|which RingCache does not|the mask is causal"
        ):
            attend(attention, inputs, tensors, cache=cache)
        return
    whole = attend(attention, inputs, tensors, cache=cache)
    expected = whole.weights.dense()
    for token in range(n):
        part = slice(token, token + 1)
        seen = attend(attention, [x[:, :, part] for x in inputs], cut(tensors, axes, part, part), cache=cache)
        cache = seen.cache
        torch.testing.assert_close(seen.output, whole.output[:, :, part], **CLOSE)
        keys = seen.weights.positions.keys.tensor()
        torch.testing.assert_close(seen.weights.dense(), expected[:, :, part][..., keys], **CLOSE)


@pytest.mark.parametrize(
    "mask", [rg.documents([7, 13]), rg.padding(torch.arange(20) >= torch.tensor([[3], [7]]))], ids=str
)
def test_masks_of_blocks_and_groups_are_bounded_by_their_spans_and_come_back_from_a_file(mask, tmp_path):
    pytest.importorskip("safetensors")
    from regard.maps.stored import load_map, save_map

    q, k, v = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    attention = rg.Attention(mask=rg.causal() & mask, selection=rg.selections.BlockMeans(3, 2))
    grouped = rg.composites.Grouped(rg.Attention(mask=rg.causal() & mask), rg.composites.MeanGroups(3))
    blocks, groups = (each(q, k, v).weights for each in (attention, grouped))
    for each, weights in ((attention, blocks), (grouped, groups)):
        defined = each(q, k, v, engine="reference").weights
        torch.testing.assert_close(defined.dense(), weights.dense(), check_dtype=False)
    for weights, chosen in ((blocks, blocks.attention.mask.right), (groups.by_group, groups.by_group.attention.mask)):
        allowed = chosen.allowed(weights.grid).expand(weights.shape)
        assert weights.dense().gt(0).equal(weights.attention.mask.allowed(weights.grid).expand(weights.shape))
        for start in range(0, 20, 4):
            rows = allowed[:, :, start : start + 4].flatten(0, 2)
            some, every = (ask(start, start + 4) for ask in (chosen.any_allowed, chosen.all_allowed))
            keys = weights.positions.keys.tensor().tolist()
            assert all(key in some for key, flag in zip(keys, rows.any(0), strict=True) if flag)
            assert all(flag for key, flag in zip(keys, rows.all(0), strict=True) if key in every)
        entry = chosen.select(torch.tensor([1])).allowed(rg.types.Grid.whole(weights.positions, 1, 4, 20))
        assert entry.expand(1, 4, -1, -1).equal(allowed[1:])
    for weights in (blocks, groups):
        save_map(tmp_path / "map.safetensors", weights)
        torch.testing.assert_close(load_map(tmp_path / "map.safetensors").dense(), weights.dense(), rtol=0, atol=0)


def test_the_lists_name_mechanisms():
    assert set(mechanisms()) >= WITHOUT_MASK | REFUSE_MASKS | REFUSE_RING
    assert len(WITHOUT_MASK) == 4 and len(REFUSE_RING) - len(WITHOUT_MASK) - len(REFUSE_MASKS) == 6
    assert not any("mask" in inspect.signature(mechanisms()[name].build).parameters for name in WITHOUT_MASK)
