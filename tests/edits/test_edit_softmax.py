"""Edits of models that compute their softmax themselves equal runs whose softmax is patched by hand."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg
from dense_edits import Dense, drawn
from regard import RegardError
from regard.hf.attention_modules import attention_modules
from regard.stats.numbering import layer_number

transformers = pytest.importorskip("transformers")
N = 8
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
TINY = {"vocab_size": 40, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "sep_token_id": 0}
BERT_LIKE = SMALL | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0, "sep_token_id": 0}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
CONFIGS = {
    "Bloom": TINY | {"hidden_size": 16},
    "GPTNeo": {
        "vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 5, "bos_token_id": 0,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "eos_token_id": 0,
    },
    "Mpt": {"vocab_size": 40, "d_model": 16, "n_heads": 4, "n_layers": 2},
    "XLNet": TINY | {"d_model": 16, "d_inner": 16},
    "Deberta": BERT_LIKE | RELATIVE,
    "DebertaV2": BERT_LIKE | RELATIVE | {"position_buckets": 8},
    "RoFormer": BERT_LIKE,
    "MPNet": BERT_LIKE,
    "BigBird": BERT_LIKE | {"attention_type": "original_full"},
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**CONFIGS[name]))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


@contextmanager
def patched_softmax(model, dense, monkeypatch):
    """A block in which the softmax of each attention module is that of the oracle."""
    running = []

    def replacing(softmax):
        def replaced(x, dim=None, *args, dtype=None, **options):
            if not running or x.ndim < 3:
                return softmax(x, dim, *args, dtype=dtype, **options)
            scores = (x if x.ndim == 4 else x.unflatten(0, (-1, 4))).to(dtype or x.dtype)
            weights = dense.weights(scores.masked_fill(scores < -5000, -torch.inf), running[-1])
            return weights.reshape(x.shape)

        return replaced

    hooks = []
    for path, module in attention_modules(model).items():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(layer_number(path))))
        hooks.append(module.register_forward_hook(lambda *_: running.clear()))
    with monkeypatch.context() as patches:
        for owner in (F, torch, torch.Tensor):
            patches.setattr(owner, "softmax", replacing(owner.softmax))
        yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_drawn_edits_equal_a_softmax_patched_by_hand(name, monkeypatch):
    model, rng, dense = build(name), random.Random(name), Dense()
    ids = torch.randint(3, 40, (2, N))
    num_changed, error = 0, 1e-5 if name in ("Bloom", "Mpt") else 1e-9  # their softmax is in float32
    for _ in range(6):
        (first, one), (second, other) = drawn(rng, N), drawn(rng, N)
        dense.edits = [one, other]
        with rg.watch(model) as outside, rg.edit(model, first & second), rg.watch(model) as inside:
            edited = model(ids)[0]
        with rg.edit(model, first), rg.edit(model, second):
            nested = model(ids)[0]
        with patched_softmax(model, dense, monkeypatch):
            expected = model(ids)[0]
        torch.testing.assert_close(edited, expected, rtol=error, atol=error)
        torch.testing.assert_close(nested, expected, rtol=error, atol=error)
        assert inside.names and not inside.missing
        for path, weights in inside.maps.items():
            torch.testing.assert_close(weights.dense(), outside[path].dense(), rtol=0, atol=0)
        num_changed += not torch.allclose(edited, model(ids)[0], atol=1e-6)
    assert num_changed >= 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["Bloom", "XLNet", "DebertaV2", "Mpt"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_watch_returns_the_edited_weights_also_if_it_runs_the_module_again(name, length):
    model, ids = build(name).float(), torch.randint(3, 40, (2, length))
    edit = rg.edits.ScaleWeights(rg.Where(layers=1, heads=[0, 3], keys=0), 0.5)
    with rg.watch(model, keep="qkv") as plain:
        before = model(ids)[0]
    with rg.edit(model, edit) as run, rg.watch(model, keep="qkv") as seen:
        after = model(ids)[0]
    assert list(run.calls.values()) == [1] and not run.left_out
    expected = plain[1].dense().clone()
    expected[:, [0, 3], :, 0] *= 0.5
    torch.testing.assert_close(seen[1].dense(), expected)
    torch.testing.assert_close(seen[0].dense(), plain[0].dense(), rtol=0, atol=0)
    assert not torch.allclose(before, after, atol=1e-5) and torch.equal(model(ids)[0], before)
    torch.testing.assert_close(seen.head_output(1), expected @ seen[1].value, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_what_no_edit_selects_keeps_its_bits(name):
    model, ids = build(name).float(), torch.randint(3, 40, (1, N))
    with rg.watch(model) as plain:
        model(ids)
    with rg.edit(model, rg.KnockOut(rg.Where(layers=1, heads=2, queries=5, keys=[0, 4]))), rg.watch(model) as seen:
        model(ids)
    changed = (seen[1].dense() != plain[1].dense()).nonzero()
    assert {(head, query) for _, head, query, _ in changed.tolist()} == {(2, 5)}
    assert seen[1][0, 2, 5, [0, 4]].eq(0).all() and float(seen[1][0, 2, 5].sum()) == pytest.approx(1.0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Bloom", "GPTNeo", "Mpt"])
def test_a_generation_counts_queries_from_the_start_of_the_sequence(name):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**CONFIGS[name])).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    ids = torch.randint(3, 40, (1, N))
    where = rg.Where(queries=[3, N + 1], keys=[0, 2, N])
    edit = rg.KnockOut(where) & rg.edits.AddToScores(rg.Where(layers=1, queries=slice(N, None), keys=N - 1), 2.0)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with rg.edit(model, edit):
        out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
        whole = model(out.sequences, use_cache=False).logits[:, N - 1 : -1]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(out.sequences).logits[:, N - 1 : -1], whole, atol=1e-3)


def test_gradients_flow_through_the_edit(monkeypatch):
    model, ids = build("RoFormer"), torch.randint(3, 40, (2, N))
    edit, e = rg.edits.AddToScores(rg.Where(heads=1, keys=3), 0.7), {
        "layers": range(2), "heads": [1], "queries": range(N), "keys": [3], "kind": "steer", "number": 0.7,
    }  # fmt: skip
    dense, slopes = Dense(), []
    dense.edits = [e]
    for block in (rg.edit(model, edit), patched_softmax(model, dense, monkeypatch)):
        with block:
            loss = model(ids)[0].square().sum()
        slopes.append(torch.autograd.grad(loss, [*model.encoder.layer.parameters()]))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


class Own(nn.Module):
    """Attention whose softmax is written in one of the usual ways."""

    def __init__(self, softmax, after=lambda weights: weights, three_axes=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.softmax, self.after, self.three_axes = softmax, after, three_axes

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.flatten(0, 1) if self.three_axes else t for t in (q, k, v))
        heads = self.after(self.softmax(q @ k.mT)) @ v
        heads = heads.unflatten(0, (len(x), 4)) if self.three_axes else heads
        return heads.transpose(1, 2).flatten(2)


WAYS = {
    "method": lambda s: s.softmax(-1),
    "method, positive axis": lambda s: s.softmax(dim=s.ndim - 1),
    "torch": lambda s: torch.softmax(input=s, dim=-1),
    "functional": lambda s: F.softmax(s, dim=-1),
    "module": nn.Softmax(dim=-1),
    "in float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "strided": lambda s: s.transpose(-1, -2).contiguous().transpose(-1, -2).softmax(-1),
}


@torch.no_grad()
@pytest.mark.parametrize("three_axes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_softmax(way, dtype, three_axes):
    torch.manual_seed(0)
    model, x = nn.ModuleList([Own(WAYS[way], three_axes=three_axes)]).to(dtype), torch.randn(2, 6, 16, dtype=dtype)
    plain = model[0](x)
    with rg.edit(model, rg.KnockOut(rg.Where(heads=[1, 3], queries=4, keys=[0, 5]))):
        edited = model[0](x)
    q, k, v = (
        f(x).double().unflatten(-1, (4, 4)).transpose(1, 2) for f in (model[0].q_proj, model[0].k_proj, model[0].v_proj)
    )
    scores = q @ k.mT
    scores[:, [1, 3], 4, 0] = scores[:, [1, 3], 4, 5] = -torch.inf
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    error = {torch.float64: 1e-12 if way != "in float32" else 1e-6, torch.float32: 1e-5}.get(dtype, 3e-2)
    torch.testing.assert_close(edited.double(), expected, atol=error, rtol=error)
    untouched = torch.tensor([0, 1, 2, 3, 5])
    assert torch.equal(edited[:, untouched], plain[:, untouched])


@torch.no_grad()
def test_a_row_without_keys_has_output_zero_and_a_score_beyond_the_softmax_counts():
    model, x = nn.ModuleList([Own(WAYS["method"])]), torch.randn(1, 6, 16)
    with rg.edit(model, rg.KnockOut(rg.Where(queries=2))):
        assert model[0](x)[0, 2].eq(0).all() and model[0](x)[0, 3].ne(0).any()

    class Peaked(Own):
        def forward(self, x):
            scores = torch.tensor([300.0, 0.0, 1.0, -1e4]).expand(1, 2, 4, 4)
            q = k = v = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return (scores + 0 * (q @ k.mT)).softmax(-1) @ v

    with rg.edit(nn.ModuleList([peaked := Peaked(None)]), rg.KnockOut(rg.Where(keys=0))):
        heads = peaked(x[:, :4])
    values = x[:, :4].unflatten(-1, (2, -1)).transpose(1, 2)
    expected = torch.tensor([0.0, 1.0]).softmax(-1) @ values[:, :, 1:3]
    torch.testing.assert_close(heads, expected[:, :, None].expand_as(heads))


class TwiceAttention(Own):
    def forward(self, x):
        return super().forward(super().forward(x))


@torch.no_grad()
def test_what_is_not_certain_is_refused():
    x, edit = torch.randn(2, 6, 16), rg.KnockOut(rg.Where(keys=0))
    for module, reason in (
        (Own(WAYS["method"], lambda w: w * 2), "changes its weights after the softmax"),
        (TwiceAttention(WAYS["method"]), "multiplies by 2 softmaxes"),
    ):
        model = nn.ModuleList([module])
        with pytest.raises(RegardError, match=f"edit: 0 cannot be edited at its softmax: .*{reason}"):  # noqa: SIM117
            with rg.edit(model, edit):
                model[0](x)
    model = build("Bloom").float()
    ids = torch.randint(3, 40, (1, N))
    with rg.watch(model, keep="qkv") as seen:
        model(ids)
    patch = rg.edits.ActivationPatch(rg.Where(layers=1, heads=0), part="value", source=seen)
    with pytest.raises(RegardError, match=r"cannot patch h\.1.* computes its softmax itself"), rg.edit(model, patch):
        model(ids)
    with pytest.raises(RegardError, match=r"selects head 7, and h\.0\.self_attention has heads 0 to 3"):  # noqa: SIM117
        with rg.edit(model, rg.KnockOut(rg.Where(heads=7))):
            model(ids)


PROJECTIONS = {
    "Bloom": "h.1.self_attention.dense", "GPTNeo": "h.1.attn.attention.out_proj", "Mpt": "blocks.1.attn.out_proj",
    "Deberta": "encoder.layer.1.attention.output.dense", "MPNet": "encoder.layer.1.attention.attn.o",
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", PROJECTIONS)
def test_patched_outputs_are_what_the_output_projection_reads(name):
    model, (ids, others), read = build(name), torch.randint(3, 40, (2, 2, N)), []
    model.get_submodule(PROJECTIONS[name]).register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with rg.watch(model, keep="qkv") as seen:
        model(others)
    plain, where = model(ids)[0], rg.Where(layers=1, heads=[1, 3], queries=[2, 5], batch=1)
    edit = rg.edits.ActivationPatch(where, part="output", source=seen)
    with rg.watch(model, keep="qkv") as outside, rg.edit(model, edit) as run, rg.watch(model, keep="qkv") as inside:
        patched = model(ids)[0]
    with rg.edit(model, rg.edits.ActivationPatch(rg.Where(layers=1), part="output", source=seen)):
        model(ids)
    expected = read[1].unflatten(-1, (4, -1)).clone()
    for head in (1, 3):
        expected[1, [2, 5], head] = read[0].unflatten(-1, (4, -1))[1, [2, 5], head]
    assert list(run.calls.values()) == [1] and torch.equal(patched[0], plain[0])
    assert not torch.allclose(patched[1], plain[1])
    hooked = model.get_submodule(PROJECTIONS[name])
    with rg.edit(model, rg.edits.ActivationPatch(where, part="output", source=seen)):
        kept = hooked.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        model(ids)
    kept.remove()
    torch.testing.assert_close(read[-1].unflatten(-1, (4, -1)), expected)
    for watched in (outside, inside):
        torch.testing.assert_close(watched.patch_source("output", 1).transpose(1, 2), expected)
    with pytest.raises(RegardError, match="part='output' patches those"):  # noqa: SIM117
        with rg.edit(model, rg.edits.ActivationPatch(rg.Where(layers=1), part="value", source=seen)):
            model(ids)


MEASURED = {
    "Longformer": BERT_LIKE | {"attention_window": 4},
    "LED": {
        "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "attention_window": 4,
    },
    "BigBird": BERT_LIKE | {"block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 64},
}  # fmt: skip


def measured_layer(name):
    """The encoder of a model, its first module of attention, and the path of this module."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MEASURED[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model = model.get_encoder() if name == "LED" else model
    path = next(path for path in attention_modules(model) if "0" in path)
    return model, model.get_submodule(path), path


@torch.no_grad()
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("kind", ["knock", "steer", "zero", "scale", "uniform"])
def test_measured_weights_are_edited(name, kind):
    model, module, path = measured_layer(name)
    ids, kept = torch.randint(3, 40, (2, 20)), []
    module.register_forward_hook(lambda _, args, kwargs, output: kept.append((args, kwargs, output)), with_kwargs=True)
    with rg.watch(model) as plain:
        model(ids)
    where = rg.Where(layers=path, heads=[0, 2], queries=slice(3, 9), keys=[4, 6])
    edit, e = {
        "knock": (rg.KnockOut(where), {}),
        "steer": (rg.edits.AddToScores(where, 1.5), {"number": 1.5}),
        "zero": (rg.KnockOut(where, renormalize=False), {}),
        "scale": (rg.edits.ScaleWeights(where, -0.5), {"number": -0.5}),
        "uniform": (rg.edits.ReplaceWeights(where, "uniform"), {}),
    }[kind]
    dense = Dense()
    dense.edits = [
        {"layers": [0], "heads": [0, 2], "queries": range(3, 9), "keys": [4, 6], "kind": kind, "number": 0.0} | e
    ]
    with rg.watch(model) as outside, rg.edit(model, edit) as run, rg.watch(model) as inside:
        model(ids)
    hidden = kept[0][0][0] if kept[0][0] else kept[0][1]["hidden_states"]
    values = module.value(hidden).unflatten(-1, (4, 4)).transpose(1, 2)
    before = plain[path].dense()
    after = dense.weights(before.log().masked_fill(before < 1e-7, -torch.inf), 0)
    first = [x[0] if isinstance(x, tuple) else x for *_, x in kept]
    torch.testing.assert_close(first[0], (before @ values).transpose(1, 2).flatten(2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(inside[path].dense(), after, atol=1e-5, rtol=1e-4)
    assert torch.equal(inside[path].dense(), outside[path].dense()) and run.calls == {path: 1} and not run.left_out
    with rg.edit(model, edit):
        output = model(ids)[0]
    expected = (after @ values).transpose(1, 2).flatten(2)
    hook = module.register_forward_hook(
        lambda _, __, given: (expected, *given[1:]) if isinstance(given, tuple) else expected
    )
    torch.testing.assert_close(output, model(ids)[0], atol=1e-4, rtol=1e-3)
    hook.remove()
    assert not torch.allclose(output, model(ids)[0], atol=1e-4)


def test_measured_edits_refuse_what_they_cannot_give():
    model, *_ = measured_layer("Longformer")
    ids, edit = torch.randint(3, 40, (1, 12)), rg.KnockOut(rg.Where(layers="*", queries=5, keys=4))
    with pytest.raises(RegardError, match=r"measured, so an edited run has no gradients"), rg.edit(model, edit):
        model(ids)
    with torch.no_grad(), pytest.raises(RegardError, match="Leave output_attentions out"), rg.edit(model, edit):
        model(ids, output_attentions=True)


@torch.no_grad()
def test_a_sum_of_two_softmaxes_is_not_edited_as_if_it_were_one():
    """A factor of 1 changes no weight. Where rows sum to 2, normalizing them again would halve the output."""

    def in_blocks(scores):
        return scores.unflatten(2, (2, -1)).softmax(-1).flatten(2, 3)

    torch.manual_seed(0)
    x, edit = torch.randn(1, 6, 16), rg.edits.ScaleWeights(rg.Where(heads=0, queries=2), 1.0)
    for num_softmaxes in (1, 2):
        module = Own(lambda s, count=num_softmaxes: sum(in_blocks((n + 1) * s) for n in range(count)))
        module.num_heads = 4
        model = nn.ModuleList([module])
        plain = model[0](x)
        if num_softmaxes == 1:
            with rg.edit(model, edit):
                torch.testing.assert_close(model[0](x), plain, rtol=1e-5, atol=1e-5)
        else:
            with pytest.raises(RegardError, match="could not be applied to 0: Own"), rg.edit(model, edit):
                model[0](x)
