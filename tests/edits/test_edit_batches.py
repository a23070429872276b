"""Edits of batch entries: each entry of a batch is what its run alone gives, with padding too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import regard as rg
from dense_edits import drawn
from regard import RegardError
from registered import OURS
from zoo import Attending, Own

transformers = pytest.importorskip("transformers")

B, N, H, D = 4, 9, 4, 4
IDS = torch.randint(1, 20, (B, N), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(B, N, dtype=torch.long)
PADDING[1, :2], PADDING[3, :1] = 0, 0
SIZES = {"vocab_size": 20, "hidden_size": H * D, "num_hidden_layers": 2, "intermediate_size": 8}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_attention_heads=H, num_key_value_heads=2, head_dim=D),
    "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=H, n_embd=H * D, vocab_size=20),
}


def model_of(name, backend="sdpa"):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, None, 0
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=backend)
    model = model if backend == "eager" else model.double()  # eager gives NaN for padding in float64
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture(scope="module", params=["sdpa", "eager", *OURS])
def llama(request):
    return model_of("llama", request.param)


def logits_of(model, entries=slice(None), edit=None, **options):
    with torch.no_grad(), rg.edit(model, edit or rg.edits.EditSequence(), **options), rg.watch(model) as seen:
        logits = model(IDS[entries], attention_mask=PADDING[entries]).logits
    assert all(check.ok is not False for check in seen.verify().values())
    return logits, [seen[layer].dense() for layer in range(2)]


def assert_each_alone(model, edit, alone, **options):
    """Each entry of one run is the run of this entry with its own edit, where the text has tokens."""
    error = 1e-4 if model.dtype == torch.float32 else 1e-9
    logits, maps = logits_of(model, edit=edit, **options)
    for entry in range(B):
        expected, own_maps = logits_of(model, slice(entry, entry + 1), alone[entry])
        real = PADDING[entry].bool()
        torch.testing.assert_close(logits[entry][real], expected[0][real], rtol=error, atol=error)
        for ours, own in zip(maps, own_maps, strict=True):
            assert torch.allclose(ours[entry][:, real], own[0][:, real], atol=1e-5)


def of_entry(edit, entry):
    return replace(edit, where=replace(edit.where, batch=entry))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["sdpa", "eager", *OURS])
def test_drawn_edits_of_each_entry_are_those_of_its_run_alone(name, backend):
    model, rng = model_of(name, backend), random.Random(name)
    for _ in range(6):
        alone = [rg.edits.EditSequence(tuple(drawn(rng, N)[0] for _ in range(rng.randint(0, 2)))) for _ in range(B)]
        together = [of_entry(part, entry) for entry, edits in enumerate(alone) for part in edits]
        try:
            assert_each_alone(model, rg.edits.EditSequence(tuple(together)), alone)
        except RegardError as error:  # all pairs of an edit are padding, also in the run alone
            assert "forbids all its pairs" in str(error)


KINDS = {
    "knock out": lambda where: rg.KnockOut(where),
    "not renormalized": lambda where: rg.KnockOut(where, renormalize=False),
    "steer": lambda where: rg.edits.AddToScores(where, 1.5),
    "scale": lambda where: rg.edits.ScaleWeights(where, -0.5),
}
PLACES = [[8], [3, 7], [5], [3, 7]]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_each_entry_as_lists_tensors_and_words(llama, kind):
    make, common = KINDS[kind], {"heads": [1, 2], "layers": 1}
    alone = [make(rg.Where(**common, queries=places, keys=2)) for places in PLACES]
    assert_each_alone(llama, make(rg.Where(**common, queries=PLACES, keys=2)), alone)
    of_keys = [make(rg.Where(**common, keys=places)) for places in PLACES]
    assert_each_alone(llama, make(rg.Where(**common, keys=PLACES)), of_keys)
    one_each = [make(rg.Where(**common, queries=n)) for n in (8, 3, 5, 3)]
    assert_each_alone(llama, make(rg.Where(**common, queries=torch.tensor([8, 3, 5, 3]))), one_each)
    texts = [[f"t{n}" for n in range(N)] for _ in range(B)]
    for entry, places in enumerate(PLACES):
        texts[entry][places[0]] = "it"
    words = make(rg.Where(**common, queries="it", keys=[2, -1]))
    in_words = [make(rg.Where(**common, queries=places[0], keys=[2, N - 1])) for places in PLACES]
    assert_each_alone(llama, words, in_words, tokens=texts)
    some = make(rg.Where(**common, queries="it", batch=[3, 0]))
    chosen = [
        make(rg.Where(**common, queries=PLACES[entry][0])) if entry in (0, 3) else rg.edits.EditSequence()
        for entry in range(B)
    ]
    assert_each_alone(llama, some, chosen, tokens=texts)


@pytest.mark.parametrize("part", ["output", "query", "key", "value"])
def test_patches_of_entries(llama, part):
    with torch.no_grad(), rg.watch(llama, keep="qkv") as seen:
        llama(IDS.flip(1))
    of_keys = part in ("key", "value")
    name, heads = ("keys", [2, 3]) if of_keys else ("queries", 1)
    sources = [seen.patch_source(part, path) for path in seen.maps]

    def patch(entry=None, source=seen, **where):
        source = source if entry is None else {n: tensor[entry : entry + 1] for n, tensor in enumerate(sources)}
        return rg.edits.ActivationPatch(rg.Where(heads=heads, **where), part, source)

    assert_each_alone(llama, patch(**{name: PLACES}), [patch(n, **{name: PLACES[n]}) for n in range(B)])
    none = rg.edits.EditSequence()
    chosen = [none, patch(1, **{name: [2]}), none, patch(3, **{name: [4, 5]})]
    assert_each_alone(llama, patch(**{name: [[4, 5], [2]]}, batch=[3, 1]), chosen)
    reordered = {n: tensor[[3, 1]] for n, tensor in enumerate(sources)}  # a source for the selected entries only
    assert_each_alone(llama, patch(source=reordered, **{name: [[4, 5], [2]]}, batch=[3, 1]), chosen)


def test_given_weights_of_entries(llama):
    """The mask of an entry that is not selected forbids some of the given weights, and does not matter."""
    rows = torch.eye(N)[[0]].expand(2, 1, 1, N).double().contiguous()  # token 0 is padding in entries 1 and 3
    where = rg.Where(layers=0, heads=2, queries=5, batch=[2, 0])
    rows[0, 0, 0] = torch.full((N,), 0.0).index_fill(0, torch.tensor([1, 4]), 0.5)
    own = [rg.edits.ReplaceWeights(replace(where, batch=None), row[None]) for row in rows]
    none = rg.edits.EditSequence()
    assert_each_alone(llama, rg.edits.ReplaceWeights(where, rows), [own[1], none, own[0], none])
    maps = logits_of(llama)[1]
    by_layer = {n: weights.roll(1, 1) for n, weights in enumerate(maps)}
    tokens = [[4], [6, 5], [8], [4]]
    each = [
        rg.edits.ReplaceWeights(
            rg.Where(heads=1, queries=tokens[e]), {n: w[[e], 1:2][:, :, tokens[e]] for n, w in by_layer.items()}
        )
        for e in range(B)
    ]
    joined = rg.edits.EditSequence(
        tuple(replace(edit, where=replace(edit.where, batch=entry)) for entry, edit in enumerate(each))
    )
    assert_each_alone(llama, joined, each)
    uniform = rg.edits.ReplaceWeights(rg.Where(queries=tokens, keys=[[1, 2], [3], [4], [2]]), "uniform")
    alone = [
        rg.edits.ReplaceWeights(rg.Where(queries=i, keys=j), "uniform")
        for i, j in zip(tokens, [[1, 2], [3], [4], [2]], strict=True)
    ]
    assert_each_alone(llama, uniform, alone)


def test_entries_that_no_edit_selects_keep_their_bits(llama):
    plain, _ = logits_of(llama)
    edited, _ = logits_of(llama, edit=rg.KnockOut(rg.Where(keys=2, batch=[1, 3]), renormalize=False))
    changed = (plain != edited).flatten(1).any(1)
    assert changed.tolist() == [False, True, False, True]


@pytest.mark.parametrize("make", [Own, Attending, lambda: nn.MultiheadAttention(16, 4, batch_first=True)])
@pytest.mark.parametrize("kind", KINDS)
def test_own_modules(make, kind):
    torch.manual_seed(0)
    model = nn.Sequential(make()).double().eval()
    call = (lambda x: model[0](x, x, x)[0]) if isinstance(model[0], nn.MultiheadAttention) else model
    width = next(p.shape[-1] for p in model.parameters() if p.ndim == 2)
    x, edit = torch.randn(B, N, width).double(), KINDS[kind](rg.Where(heads=[0, 2], keys=[[1], [0, 2], [], [4]]))
    with torch.no_grad(), rg.edit(model[0], edit):
        together = call(x)
    for entry, places in enumerate([[1], [0, 2], [], [4]]):
        alone = KINDS[kind](rg.Where(heads=[0, 2], keys=places)) if places else rg.edits.EditSequence()
        with torch.no_grad(), rg.edit(model[0], alone):
            torch.testing.assert_close(call(x[entry : entry + 1])[0], together[entry], rtol=1e-9, atol=1e-9)


def test_gradients_of_entries_are_those_of_their_runs_alone():
    model = model_of("llama")
    edit = rg.edits.ScaleWeights(rg.Where(layers=0, heads=[0, 1], keys=[[1], [2], [3], [4]]), 0.3)

    def gradients(entries, edit):
        model.zero_grad()
        with rg.edit(model, edit):
            model(IDS[entries]).logits.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    alone = [replace(edit, where=rg.Where(layers=0, heads=[0, 1], keys=n + 1)) for n in range(B)]
    total = sum(gradients(slice(n, n + 1), alone[n]) for n in range(B))
    torch.testing.assert_close(gradients(slice(None), edit), total, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("typed", [
    "KnockOut(Where(heads=1, queries=[[8], [3, slice(5, None)], []], batch=slice(0, 3)))",
    "KnockOut(Where(keys=[['it'], ['cat', 2]], batch=[2, 0]))",
])  # fmt: skip
def test_entries_print_as_typed_and_return_from_json(typed):
    edit = eval(typed, {"KnockOut": rg.KnockOut, "Where": rg.Where, "slice": slice})
    assert repr(edit) == typed and rg.edits.edit_from_json(edit.to_json()) == edit


@pytest.mark.parametrize(("where", "message"), [
    ({"batch": 4}, r"selects batch entry 4, and the batch has entries 0 to 3"),
    ({"queries": [[1], [2]]}, r"tokens for 2 batch entries, and selects 4 of this run"),
    ({"keys": torch.tensor([1, 2, 3]), "batch": [0, 1]}, r"tokens for 3 batch entries, and selects 2"),
    ({"queries": [[1], [99], [2], [3]], "batch": [0]}, r"tokens for 4 batch entries, and selects 1"),
])  # fmt: skip
def test_mistakes_are_named(where, message):
    model = model_of("llama")
    with pytest.raises(RegardError, match=message), rg.edit(model, rg.KnockOut(rg.Where(**where))):
        model(IDS)


def test_mistakes_of_a_selection_are_named():
    with pytest.raises(RegardError, match="batch entries are numbers"):
        rg.Where(batch="first")
    with pytest.raises(RegardError, match="no word 'it'"):
        rg.Where(queries="it").found([["it"], ["so"]])
    with pytest.raises(RegardError, match="tokens for 3 batch entries, and selects 2"):
        rg.Where(queries=[[0], [0], [0]]).found([["it"], ["so"]])
    model, texts = model_of("llama"), [["it"] * 3] * B
    with (
        pytest.raises(RegardError, match="3 tokens were given, and the model reads 9"),
        rg.edit(model, rg.KnockOut(rg.Where(queries="it#2")), tokens=texts),
    ):
        model(IDS)


def test_windows_of_an_image_are_not_batch_entries():
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4, num_channels=1
    )
    model = transformers.SwinModel(config).eval()
    edit = rg.KnockOut(rg.Where(keys=0, batch=1))
    with pytest.raises(RegardError, match="which are not those of the model"), rg.edit(model, edit):
        model(torch.randn(2, 1, 16, 16))
