"""Sweeps of edits: each cell of the table is the run of this edit alone, by hooks on the projections of the model."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regard as rg
from regard import RegardError
from regard.attribution import sweeps

transformers = pytest.importorskip("transformers")

B, N, H, D, L = 3, 6, 4, 4, 3
DRAW = torch.Generator().manual_seed(0)
IDS, OTHER = (torch.randint(1, 20, (B, N), generator=DRAW) for _ in range(2))
PADDING = torch.ones(B, N, dtype=torch.long)
PADDING[1, :2] = 0
INPUTS = {"input_ids": IDS, "attention_mask": PADDING}
ANSWERS = torch.tensor([3, 7, 5])
SIZES = {"vocab_size": 20, "hidden_size": H * D, "num_hidden_layers": L, "intermediate_size": 8}


def model_of(name="llama"):
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=L, n_head=H, n_embd=H * D, vocab_size=20)
    elif name == "bert":
        config = transformers.BertConfig(**SIZES, num_attention_heads=H, is_decoder=False)
    else:
        config = transformers.LlamaConfig(**SIZES, num_attention_heads=H, num_key_value_heads=2, head_dim=D)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, None, 0
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="sdpa").double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture(scope="module")
def llama():
    return model_of()


def measure(output, examples):
    return output.logits[torch.arange(len(examples)), -1, ANSWERS[examples]]


def projections(model):
    """The output projections of the layers."""
    name = (
        "o_proj" if hasattr(model, "model") else "c_proj" if hasattr(model, "transformer") else "attention.output.dense"
    )
    return [m for path, m in model.named_modules() if path.endswith(name) and "mlp" not in path]


def hooked(model, changes, ids=IDS):
    """What is measured if the inputs of output projections are changed: {layer: function of (B, n, H, D)}."""
    with torch.no_grad(), ExitStack() as stack:
        for layer, change in changes.items():

            def hook(module, args, change=change):
                return (change(args[0].unflatten(-1, (H, D)).clone()).flatten(-2), *args[1:])

            stack.enter_context(projections(model)[layer].register_forward_pre_hook(hook))
        return measure(model(input_ids=ids, attention_mask=PADDING), torch.arange(B))


def outputs_of(model, ids):
    """The outputs of all heads, (L, B, n, H, D)."""
    kept = []
    with torch.no_grad(), ExitStack() as stack:
        for module in projections(model):
            stack.enter_context(module.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach())))
        model(input_ids=ids, attention_mask=PADDING)
    return torch.stack(kept).unflatten(-1, (H, D))


def with_head(head, value, rows=slice(None)):
    def change(x):
        x[:, rows, head] = value[:, rows] if isinstance(value, torch.Tensor) else value
        return x

    return change


def assert_cells(table, expected_of, model):
    torch.testing.assert_close(table.baseline, hooked(model, {}))
    for layer in range(L):
        for head in range(H):
            expected = expected_of(layer, head)
            torch.testing.assert_close(table.values[layer, head], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_zero_ablation_of_each_head(name, batch_size):
    model, counts = model_of(name), []
    table = rg.sweep(model, rg.KnockOut, INPUTS, measure, batch_size=batch_size, progress=lambda *n: counts.append(n))
    assert table.axes == {"layers": ["0", "1", "2"], "heads": ["0", "1", "2", "3"]} and table.values.shape == (L, H, B)
    assert_cells(table, lambda layer, head: hooked(model, {layer: with_head(head, 0.0)}), model)
    assert counts[-1][0] == counts[-1][1] and all(a < b for (a, _), (b, _) in pairwise(counts))
    torch.testing.assert_close(table.effects, (table.values - table.baseline).mean(-1))
    best = int(table.effects.abs().argmax())
    labels, effect = table.top(1)[0]
    assert labels == {"layers": str(best // H), "heads": str(best % H)} and effect == float(
        table.effects.flatten()[best]
    )


@pytest.mark.parametrize("batch_size", [2, 32])
def test_ablations_by_name(llama, batch_size):
    outputs = outputs_of(llama, IDS)
    sources = {"zero": torch.zeros_like(outputs), "resample": outputs.roll(-1, 1)}
    sources["mean"] = outputs.mean(1, keepdim=True).expand_as(outputs)
    for kind, source in sources.items():
        table = rg.sweep(llama, kind, INPUTS, measure, batch_size=batch_size)
        assert_cells(table, lambda l, h, x=source: hooked(llama, {l: with_head(h, x[l, :, :, h])}), llama)


@pytest.mark.parametrize("batch_size", [2, 32])
def test_activation_patching_at_positions_of_each_example(llama, batch_size):
    with torch.no_grad(), rg.watch(llama, keep="qkv") as seen:
        llama(OTHER, attention_mask=PADDING)
    subject, texts = [2, 3, 4], [["a"] * N for _ in range(B)]
    for example, place in enumerate(subject):
        texts[example][place] = "it"
    over = {"heads": [1, 3], "queries": {"subject": "it", "end": -1, "two": [[1, 2], [2, 3], [0, 5]]}, "layers": [2, 0]}
    table = rg.sweep(
        llama,
        lambda where: rg.edits.ActivationPatch(where, source=seen),
        INPUTS,
        measure,
        over=over,
        tokens=texts,
        batch_size=batch_size,
    )
    assert table.axes == {"heads": ["1", "3"], "queries": ["subject", "end", "two"], "layers": ["2", "0"]}
    other = outputs_of(llama, OTHER)
    places = {"subject": [[2], [3], [4]], "end": [[N - 1]] * B, "two": over["queries"]["two"]}
    for h, head in enumerate([1, 3]):
        for q, rows in enumerate(places.values()):
            for l, layer in enumerate([2, 0]):

                def change(x, rows=rows, head=head, layer=layer):
                    for b in range(B):
                        x[b, rows[b], head] = other[layer, b, rows[b], head]
                    return x

                expected = hooked(llama, {layer: change})
                torch.testing.assert_close(table.values[h, q, l], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [2, 32])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_path_patching(llama, part, batch_size):
    with rg.watch(llama, keep="qkv") as seen:
        llama(OTHER, attention_mask=PADDING)
    into = {part: rg.Where(layers=2, heads=[2, 3])}  # they share a key head
    send = lambda where: rg.edits.ActivationPatch(where, source=seen)  # noqa: E731
    table = rg.sweep(
        llama, send, INPUTS, measure, into=into, batch_size=batch_size, over={"layers": [0, 1], "heads": range(H)}
    )
    clean, other = outputs_of(llama, IDS), outputs_of(llama, OTHER)
    projection = getattr(llama.model.layers[2].self_attn, f"{part[0]}_proj")
    heads = [2, 3] if part == "query" else [1]
    for layer in range(2):
        for head in range(H):
            read = []
            held = {n: lambda x, n=n: clean[n].clone() for n in range(L)}
            held[layer] = lambda x, n=layer, h=head: with_head(h, other[n, :, :, h])(clean[n].clone())
            with projection.register_forward_hook(
                lambda module, args, output, read=read: read.append(output.unflatten(-1, (-1, D)))
            ):
                hooked(llama, held)

            def receive(module, args, output, read=read):
                output = output.unflatten(-1, (-1, D)).clone()
                output[:, :, heads] = read[0][:, :, heads]
                return output.flatten(-2)

            with projection.register_forward_hook(receive):
                expected = hooked(llama, {})
            torch.testing.assert_close(table.values[layer, head], expected, rtol=1e-9, atol=1e-9)
    assert float(table.effects.abs().max()) > 1e-3


def test_a_list_and_a_mapping_of_edits(llama):
    edits = {
        "first": rg.KnockOut(rg.Where(keys=2, heads="L1.H2")) & rg.edits.AddToScores(rg.Where(layers=0, keys=3), 1.0),
        "second": rg.edits.ReplaceWeights(rg.Where(layers=2, queries=5), "uniform"),
    }
    for edits_of_kind in (edits, list(edits.values())):
        table = rg.sweep(llama, edits_of_kind, INPUTS, measure)
        for n, one in enumerate(edits.values()):
            with torch.no_grad(), rg.edit(llama, one):
                expected = measure(llama(**INPUTS), torch.arange(B))
            torch.testing.assert_close(table.values[n], expected, rtol=1e-9, atol=1e-9)
    assert rg.sweep(llama, edits, INPUTS, measure).axes == {"edits": ["first", "second"]}


def test_given_weights_of_each_example(llama):
    with torch.no_grad(), rg.watch(llama) as seen:
        llama(OTHER, attention_mask=PADDING)
    tables = [
        rg.sweep(llama, lambda where, x=source: rg.edits.ReplaceWeights(where, x), INPUTS, measure, batch_size=size)
        for source in (seen, {n: seen[n] for n in range(L)})
        for size in (2, 32)
    ]
    for layer in range(L):
        for head in range(H):
            edit = rg.edits.ReplaceWeights(rg.Where(layers=layer, heads=head), seen)
            with torch.no_grad(), rg.edit(llama, edit):
                expected = measure(llama(**INPUTS), torch.arange(B))
            for table in tables:
                torch.testing.assert_close(table.values[layer, head], expected, rtol=1e-9, atol=1e-9)


def test_pairs_that_the_mask_forbids_have_no_effect(llama):
    table = rg.sweep(llama, rg.KnockOut, INPUTS, measure, over=["queries", "keys"])
    later = torch.ones(N, N).triu(1).bool()
    # A batch of another size may be summed in another order.
    assert table.effects[later].abs().max() < 1e-12 < 1e-6 < table.effects[-1].abs().max()


def test_blocks_before_the_edit_run_once(llama):
    runs = [0] * L
    with ExitStack() as stack:
        for n, block in enumerate(llama.model.layers):
            stack.enter_context(block.mlp.register_forward_hook(lambda *_, n=n: runs.__setitem__(n, runs[n] + 1)))
        rg.sweep(llama, rg.KnockOut, INPUTS, measure, batch_size=2 * B)
    runs_of_layer = H // 2
    assert runs == [1 + runs_of_layer, 1 + 2 * runs_of_layer, 1 + 3 * runs_of_layer]  # one without an edit
    assert all("forward" not in vars(block) for block in llama.model.layers)


class _Columns(nn.Module):
    """A model whose blocks hand on (tokens, examples, channels), so a copy of the examples is no copy of the rows."""

    def __init__(self, size):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
        self.blocks, self.size = nn.ModuleList(layers), size

    def forward(self, x):
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_blocks_with_another_layout_run_again(num_tokens):
    torch.manual_seed(0)
    model, x = _Columns(num_tokens).double().eval(), torch.randn(3, num_tokens, 8).double()
    table = rg.sweep(model, rg.KnockOut, x, lambda out, n: out[:, -1, 0], batch_size=6)
    for layer in range(2):
        for head in range(2):
            with torch.no_grad(), rg.edit(model, rg.KnockOut(rg.Where(layers=layer, heads=head))):
                torch.testing.assert_close(table.values[layer, head], model(x)[:, -1, 0], rtol=1e-9, atol=1e-9)


def test_a_translator_with_a_bias_of_its_first_block():
    """Blocks of T5 hand on a position bias without a batch axis, and three modules have each number of a layer."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    inputs = {"input_ids": IDS, "attention_mask": PADDING, "decoder_input_ids": OTHER[:, :4]}
    measure = lambda out, n: out.logits[:, -1, 7]  # noqa: E731
    table = rg.sweep(model, rg.KnockOut, inputs, measure, batch_size=6)
    for n, path in enumerate(table.axes["layers"]):
        for head in range(4):
            with torch.no_grad(), rg.edit(model, rg.KnockOut(rg.Where(layers=path, heads=head))):
                torch.testing.assert_close(table.values[n, head], measure(model(**inputs), 0), rtol=1e-9, atol=1e-9)
    assert len(table.axes["layers"]) == 6


class _InPlace(nn.Module):
    """A block that adds to its input in place."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return x.add_(self.attention(x, x, x, need_weights=False)[0])


def test_blocks_that_change_their_input_in_place():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([_InPlace() for _ in range(3)])), torch.randn(2, 5, 8)
    model.double().eval()
    model.forward = lambda x: model[1][2](model[1][1](model[1][0](model[0](x))))
    table = rg.sweep(model, rg.KnockOut, x.double(), lambda out, n: out[:, -1, 0], batch_size=2)
    for layer, path in enumerate(table.axes["layers"]):
        for head in range(2):
            where = rg.Where(layers=int(path) if path.isdigit() else path, heads=head)
            with torch.no_grad(), rg.edit(model, rg.KnockOut(where)):
                expected = model(x.double())[:, -1, 0]
            torch.testing.assert_close(table.values[layer, head], expected, rtol=1e-9, atol=1e-9)


class _Shared(nn.Module):
    """A model whose layers are one block, which runs twice, and of which a block alone is no way to replay it."""

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x):
        for _ in range(2):
            x = self.blocks[0](x)
        return x


def test_a_block_that_runs_twice_runs_again():
    torch.manual_seed(0)
    model = _Shared(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).double().eval()
    x = torch.randn(2, 5, 8).double()
    table = rg.sweep(model, [rg.KnockOut(rg.Where(heads=1, keys=0))], x, lambda out, n: out[:, -1, 0])
    with torch.no_grad(), rg.edit(model, rg.KnockOut(rg.Where(heads=1, keys=0))):
        torch.testing.assert_close(table.values[0], model(x)[:, -1, 0], rtol=1e-9, atol=1e-9)


def test_a_sweep_that_was_stopped_continues(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.attribution.sweeps.PAUSE", 0.0)
    file, calls = tmp_path / "sweep.json", []

    def stopping(output, examples):
        calls.append(len(examples))
        if len(calls) > 4:
            raise KeyboardInterrupt
        return measure(output, examples)

    expected = rg.sweep(llama, rg.KnockOut, INPUTS, measure, batch_size=B)
    with pytest.raises(KeyboardInterrupt):
        rg.sweep(llama, rg.KnockOut, INPUTS, stopping, batch_size=B, file=file)
    done = len(calls) - 1 - 2  # two calls are of runs without an edit
    known = torch.tensor(json.loads(file.read_text())["values"])
    assert done == 2 and (~known.isnan().any(1)).sum() == done
    counts = []
    table = rg.sweep(llama, rg.KnockOut, INPUTS, measure, batch_size=B, file=file, progress=lambda *n: counts.append(n))
    assert torch.equal(table.values, expected.values) and torch.equal(table.baseline, expected.baseline)
    assert counts[0] == (done + 1, L * H)
    again = rg.sweep(llama, rg.KnockOut, INPUTS, measure, file=file, progress=lambda *n: pytest.fail("nothing is left"))
    assert torch.equal(again.values, expected.values)
    with pytest.raises(RegardError, match="of another sweep"):
        rg.sweep(llama, "mean", INPUTS, measure, file=file)
    with pytest.raises(RegardError, match="another model, other inputs or another measure"):
        rg.sweep(llama, rg.KnockOut, INPUTS | {"input_ids": OTHER}, measure, file=file)
    file.write_text("[]")
    with pytest.raises(RegardError, match="no file of a sweep"):
        rg.sweep(llama, rg.KnockOut, INPUTS, measure, file=file)


@pytest.mark.parametrize(("edits", "options", "message"), [
    ("zeros", {}, "no ablation 'zeros'"),
    ([], {}, "no edits"),
    (rg.KnockOut, {"over": ["layer"]}, "no axis 'layer'"),
    ([rg.KnockOut(rg.Where(batch=0))], {}, "names batch entries"),
    ([rg.KnockOut(rg.Where(keys=[[1], [2]]))], {}, "tokens for 2 batch entries, and selects 3"),
    (rg.KnockOut, {"into": {"query": rg.Where(heads="L2.H0")}}, "a sender is an ActivationPatch of outputs"),
    (rg.KnockOut, {"into": {"output": rg.Where(heads="L2.H0")}}, "a sender is an ActivationPatch of outputs"),
])  # fmt: skip
def test_mistakes_are_named(llama, edits, options, message):
    with pytest.raises(RegardError, match=message):
        rg.sweep(llama, edits, INPUTS, measure, **options)


def test_mistakes_of_inputs_and_measures_are_named(llama):
    with pytest.raises(RegardError, match="a number for each of the 3 entries of the run"):
        rg.sweep(llama, rg.KnockOut, INPUTS, lambda out, n: out.logits.sum())
    with pytest.raises(RegardError, match="no examples"):
        rg.sweep(llama, rg.KnockOut, {"input_ids": [[1, 2]]}, measure)
    one = {name: x[:1] for name, x in INPUTS.items()}
    with pytest.raises(RegardError, match="at least two"):
        rg.sweep(llama, "mean", one, measure)


def test_a_measure_with_other_arguments_is_refused_before_the_model_runs():
    """The model is one that cannot run."""
    for bad in (lambda out: out, lambda: 0, lambda out, n, answers: out):
        with pytest.raises(RegardError, match=r"called as measure\(output, examples\), but it takes \("):
            rg.sweep(nn.Identity(), rg.KnockOut, {"input_ids": IDS}, bad)
    for good in (lambda *given: given[0].logits[:, -1, 0], partial(lambda word, out, n: out.logits[:, -1, word], 3)):
        assert rg.sweep(model_of(), [rg.KnockOut(rg.Where(layers=0))], {"input_ids": IDS}, good).values.shape == (1, B)


def test_the_heatmap_has_a_panel_for_each_position(llama):
    pytest.importorskip("matplotlib")
    over = {"layers": range(L), "heads": range(H), "keys": {"first": 2, "last": 5}}
    table = rg.sweep(llama, rg.KnockOut, INPUTS, measure, over=over)
    figure = table.heatmap(title="knock-out")
    first, second, bar = figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["first", "last"]
    for n, axes in enumerate((first, second)):
        shown = torch.as_tensor(axes.images[0].get_array().data)
        torch.testing.assert_close(shown, table.effects[:, :, n].float())
    assert bar.get_ylabel() == "change of the measure, square root scale" and first.get_ylabel() == "layers"
    single = rg.sweep(llama, rg.KnockOut, INPUTS, measure, over=["layers"]).heatmap()
    assert single.axes[0].images[0].get_array().shape == (L, 1)


@pytest.mark.parametrize("measure", [lambda output, examples: None, lambda output, examples: "x"])
def test_a_measure_that_returns_no_numbers_is_named(llama, measure):
    with pytest.raises(RegardError, match=r"examples\) returns a tensor of numbers, got (NoneType|str)"):
        rg.sweep(llama, "zero", torch.arange(1, 9).view(2, 4), measure)


@pytest.mark.parametrize(
    "edits", [[rg.KnockOut(rg.Where(heads=0))], {"first": rg.KnockOut(rg.Where(heads=0))}], ids=["list", "mapping"]
)
def test_edits_that_are_given_have_no_axes(llama, edits):
    ids = torch.arange(1, 9).view(2, 4)
    with pytest.raises(RegardError, match=r"sweep\(over=\['heads'\]\): a list or mapping of edits is the only axis"):
        rg.sweep(llama, edits, ids, lambda output, n: output.logits[:, -1, 0], over=["heads"])


def test_a_sweep_needs_an_axis(llama):
    with pytest.raises(RegardError, match=r"sweep\(over=\[\]\): name at least one axis of the table: layers"):
        rg.sweep(llama, "zero", torch.arange(1, 9).view(2, 4), lambda output, n: output.logits[:, -1, 0], over=[])


@pytest.mark.parametrize("size", [1, B + 1])
def test_inputs_of_other_numbers_of_examples_are_named(llama, size):
    with pytest.raises(RegardError, match=rf"these inputs differ: {{'input_ids': {B}, 'attention_mask': {size}}}"):
        rg.sweep(model_of(), rg.KnockOut, {"input_ids": IDS, "attention_mask": torch.ones(size, N - 1)}, measure)


@pytest.mark.parametrize("values", [1, "it"])
def test_the_values_of_an_axis_are_a_list(llama, values):
    with pytest.raises(RegardError, match=r"give the values of an axis in a list or a dict"):
        rg.sweep(llama, rg.KnockOut, INPUTS, measure, over={"queries": values})


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 6), st.integers(1, 12))
def test_no_other_runs_compute_less(first_blocks, num_examples, batch_size):
    """Against every way to cut the list: the cost counts the blocks from the first edit's on, for all entries."""
    first_blocks.sort()
    most, num_blocks = max(1, batch_size // num_examples), 6

    def cost(runs):
        entries = [(run.stop - run.start) * num_examples + sweeps.ENTRIES_OF_RUN for run in runs]
        return sum((num_blocks + 1 - first_blocks[run.start]) * count for run, count in zip(runs, entries, strict=True))

    n = len(first_blocks)
    cuts = (c for k in range(n) for c in itertools.combinations(range(1, n), k))
    every = [list(map(slice, (0, *c), (*c, n))) for c in cuts]
    allowed = [runs for runs in every if max(run.stop - run.start for run in runs) <= most]
    found = sweeps._runs(first_blocks, num_blocks, num_examples, batch_size)
    assert found in allowed and cost(found) == min(map(cost, allowed))
