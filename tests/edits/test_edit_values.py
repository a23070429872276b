"""Edits as values: selections by numbers, words and roles, composition, printing, JSON, and the mistakes of users."""

from __future__ import annotations

import copy
import json
import random
from collections import OrderedDict

import pytest
import torch

import regard as rg
from regard import RegardError
from regard.base.spans import INFINITY
from regard.edits.layer_edits import AddedToScores, KnockedOut, Pairs
from regard.edits.where import Indices, occurrence

transformers = pytest.importorskip("transformers")
TEXT = ["[CLS]", "The", "ani", "##mal", "said", "it", "was", "tired", ",", "and", "it", "slept"]
IDS = torch.arange(len(TEXT))[None]


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, intermediate_size=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def run(model, edit, **options):
    with torch.no_grad(), rg.edit(model, edit, **options), rg.watch(model) as seen:
        model(IDS)
    return seen


def zeros(model, edit, **options):
    """The pairs (layer, head, query, key) that an edit set to 0, of those that the causal mask allows."""
    seen = run(model, edit, **options)
    weights = torch.stack([seen[0].dense()[0], seen[1].dense()[0]])
    return {tuple(pair) for pair in ((weights == 0) & torch.ones(12, 12).tril().bool()).nonzero().tolist()}


SELECTIONS = [
    ("L1.H2: it#2 -> animal", {(1, 2, 10, 2), (1, 2, 10, 3)}),
    ("L1.H2, L0.H0: #4 -> #1, #2", {(1, 2, 4, 1), (1, 2, 4, 2), (0, 0, 4, 1), (0, 0, 4, 2)}),
    ("L0: slept -> TIRED", {(0, h, 11, 7) for h in range(4)}),
    ("#3 -> #0", {(n, h, 3, 0) for n in range(2) for h in range(4)}),
    ("L1.H3: * -> [CLS]", {(1, 3, i, 0) for i in range(12)}),
    ("l1.h3: #5 -> *", {(1, 3, 5, j) for j in range(6)}),
    ("induction: slept -> was", {(0, 1, 11, 6), (1, 3, 11, 6)}),
]


def test_tokens_of_two_words_are_no_word():
    words = ["Ġin", "Ġto", "Ġin", "to", "▁in", "▁to"]
    assert occurrence("into", words) == range(2, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_softmax_may_be_given(dtype):
    """In bfloat16, 3 weights of 1/3 sum to 1.002. A sum that rounding does not explain is refused."""
    rows = torch.randn(64, 12).softmax(-1)
    rows[0] = (torch.arange(12) < 3) / 3
    assert torch.equal(rg.edits.ReplaceWeights(rg.Where(), rows.to(dtype)).weights, rows.to(dtype))
    with pytest.raises(rg.RegardError, match="must sum to 1"):
        rg.edits.ReplaceWeights(rg.Where(), (rows * 1.02).to(dtype))


@pytest.mark.parametrize(("text", "pairs"), SELECTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_short_text_selects_the_pairs_that_it_names(model, text, pairs):
    roles = {"induction": [(0, 1), (1, 3)]}
    assert zeros(model, rg.KnockOut(rg.Where.parse(text, TEXT, roles=roles))) == pairs
    assert zeros(model, rg.KnockOut(rg.Where.parse(text)), tokens=TEXT, roles=roles) == pairs


def test_roles_come_from_a_table_of_roles(model):
    table = rg.types.RoleTable(
        [rg.types.Role("previous", n, h, 0.9, 0.9, label=n == h) for n in range(2) for h in range(4)]
    )
    where = rg.Where(roles="previous", queries=5, keys=4)
    assert zeros(model, rg.KnockOut(where), roles=table) == {(0, 0, 5, 4), (1, 1, 5, 4)}
    assert zeros(model, rg.KnockOut(rg.Where(layers=1, roles="previous", queries=5, keys=4)), roles=table) == {
        (1, 1, 5, 4)
    }


def test_numbers_names_slices_and_lists_select(model):
    where = rg.Where(layers="*layers.1.*", heads=slice(1, 4, 2), queries=[7, slice(9, None)], keys=[0, "tired"])
    expected = {(1, h, i, j) for h in (1, 3) for i in (7, 9, 10, 11) for j in (0, 7)}
    assert zeros(model, rg.KnockOut(where), tokens=TEXT) == expected
    assert zeros(model, rg.KnockOut(rg.Where(layers=0, heads=0, queries=-1, keys=slice(-3, None))), tokens=TEXT) == {
        (0, 0, 11, j) for j in (9, 10, 11)
    }


def test_given_rows_are_the_rows_of_the_map(model):
    rows = torch.rand(2, 12).tril(3).softmax(-1) * torch.tensor([1.0] * 5 + [0.0] * 7)
    rows = rows / rows.sum(-1, keepdim=True)
    where = rg.Where(layers=1, heads=[3, 0], queries=[8, 5])
    seen = run(model, rg.edits.ReplaceWeights(where, rows))
    for head in (0, 3):
        torch.testing.assert_close(seen[1][0, head, [8, 5]], rows)
    by_head = torch.stack([rows, rows.flip(0)])
    seen = run(model, rg.edits.ReplaceWeights(where, by_head))
    torch.testing.assert_close(seen[1][0, [3, 0]][:, [8, 5]], by_head)
    plain = run(model, rg.edits.EditSequence())
    assert torch.equal(seen[1][0, 1], plain[1][0, 1])


def test_a_row_without_an_axis_of_rows_serves_all_queries(model):
    row = torch.tensor([0.25, 0.75] + [0.0] * 10)
    seen = run(model, rg.edits.ReplaceWeights(rg.Where(layers=1, queries=[1, 8, 5]), row))
    torch.testing.assert_close(seen[1][0, :, [1, 8, 5]], row.expand(4, 3, 12))


@pytest.mark.parametrize("queries", [[1, 2], [1, 2, 3], slice(1, None)], ids=["two", "three", "open slice"])
@pytest.mark.parametrize("axes", [(1, 12), (1, 1, 12), (4, 1, 12), (1, 4, 1, 12)], ids=str)
def test_one_row_of_a_tensor_with_an_axis_of_rows_does_not_serve_several_queries(model, axes, queries):
    edit = rg.edits.ReplaceWeights(rg.Where(queries=queries), torch.eye(12)[0].expand(axes))
    with pytest.raises(RegardError) as error:
        run(model, edit)
    assert f"have the shape {axes} with 1 row, and this run needs number" in str(error.value)
    assert "Give a row for each, a tensor of shape (12,) as the row of all, or select fewer" in str(error.value)


def test_a_map_of_one_query_does_not_replace_the_rows_of_later_ones(model):
    with torch.no_grad(), rg.watch(model) as first_token:
        model(IDS[:, :1])
    for weights in (first_token, first_token[0]):
        with pytest.raises(RegardError, match="with 1 row, and this run needs number 1 "):
            run(model, rg.edits.ReplaceWeights(rg.Where(layers=0, queries=1), weights))


def test_maps_of_another_run_replace_weights(model):
    other = copy.deepcopy(model)
    torch.nn.init.normal_(other.model.layers[1].self_attn.q_proj.weight)
    with torch.no_grad(), rg.watch(other) as source:
        expected = other(IDS).logits
    for weights in (source[1], source, {1: source[1].dense()}):
        edit = rg.edits.ReplaceWeights(rg.Where(layers=1), weights)
        with torch.no_grad(), rg.edit(model, edit):
            torch.testing.assert_close(model(IDS).logits, expected)
        again = rg.edits.edit_from_json(edit.to_json())
        with torch.no_grad(), rg.edit(model, again):
            torch.testing.assert_close(model(IDS).logits, expected)


def test_uniform_rows_share_the_allowed_keys(model):
    seen = run(model, rg.edits.ReplaceWeights(rg.Where(layers=0, queries=5), "uniform"))
    torch.testing.assert_close(seen[0][0, 1, 5], torch.tensor([1 / 6] * 6 + [0.0] * 6))
    seen = run(model, rg.edits.ReplaceWeights(rg.Where(layers=0, queries=5, keys=[1, 3, 9]), "uniform"))
    assert seen[0][0, 1, 5].tolist() == [0, 0.5, 0, 0.5, *[0] * 8]


def test_rows_that_may_attend_to_none_of_the_shared_keys_keep_their_weights(model):
    plain = run(model, rg.edits.EditSequence())[0].dense()
    seen = run(model, rg.edits.ReplaceWeights(rg.Where(layers=0, keys=[3, 5]), "uniform"))[0].dense()
    assert torch.equal(seen[:, :, :3], plain[:, :, :3])
    torch.testing.assert_close(seen[0, 0, 4:6, 3:6], torch.tensor([[1.0, 0, 0], [0.5, 0, 0.5]]))


def test_uniform_rows_and_gates_of_a_model_in_float64_are_float64(model):
    model = copy.deepcopy(model).double()
    seen = run(model, rg.edits.ReplaceWeights(rg.Where(layers=0, queries=2), "uniform"))
    torch.testing.assert_close(seen[0][0, 0, 2, :3], torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1e-16)
    third = torch.full((seen[0].shape[1],), 1 / 3, dtype=torch.float64)
    logits = []
    for gates in (third.tolist(), third):
        with torch.no_grad(), rg.hf.gated(model, {0: gates}):
            logits.append(model(IDS).logits)
    assert torch.equal(*logits)


class SoftmaxAttention(torch.nn.Module):
    """An attention that computes its softmax itself."""

    def forward(self, x):
        scores = x @ x.mT + torch.full((12, 12), -torch.inf).triu(1)
        return scores.softmax(-1) @ x


class FusedAttention(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def _uniform_but(number):
    """A row of weights, of which the first key has this share of all."""
    number = torch.as_tensor(number)
    return torch.cat((number.reshape(1), (1 - number).expand(11) / 11))


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: rg.edits.ScaleWeights(rg.Where(heads=1, keys=[0, 3]), x),
        lambda x: rg.edits.AddToScores(rg.Where(heads=1, keys=[0, 3]), x),
        lambda x: rg.edits.ReplaceWeights(rg.Where(heads=1, queries=11), _uniform_but(x)),
    ],
    ids=["scale", "add", "replace"],
)
@pytest.mark.parametrize("kind", ["model", "softmax", "sdpa"])
def test_a_learned_number_of_an_edit_has_its_gradient(model, edit, kind):
    inputs = torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edited = {"model": copy.deepcopy(model).double(), "softmax": SoftmaxAttention(), "sdpa": FusedAttention()}[kind]

    def loss(number):
        with rg.edit(edited, edit(number)):
            return (edited(IDS).logits if kind == "model" else edited(inputs)).sin().sum()

    number = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(number), number)
    step, error = (1e-3, 1e-3) if kind == "model" else (1e-5, 1e-6)  # Llama rounds its norms to float32
    more, less = (loss(torch.tensor(0.5 + sign * step, dtype=torch.float64)).detach() for sign in (1, -1))
    torch.testing.assert_close(found, (more - less) / (2 * step), rtol=error, atol=error)


def test_a_model_that_is_an_attention_itself_is_called_the_model_in_errors():
    model, edit = FusedAttention(), rg.KnockOut(rg.Where(heads=2))
    with pytest.raises(RegardError, match="and the model has heads 0 to 1"), rg.edit(model, edit):
        model(torch.randn(1, 2, 12, 4))


TYPED = [
    "EditSequence()",
    "KnockOut(Where(heads='L5.H3', queries='it', keys='animal'))",
    "KnockOut(Where(layers=[1, 2], keys=slice(0, 4)), renormalize=False) & AddToScores(Where(roles='induction'), -2.5)",
    "ScaleWeights(Where(), 0.5) & ReplaceWeights(Where(queries=[1, slice(4, None)]), 'uniform')",
]


@pytest.mark.parametrize("pattern", ["h.*.attn", "h.?.attn"])
def test_a_pattern_names_no_single_layer(pattern):
    assert rg.Where(layers=[pattern, "h.1.attn", 3, slice(4)]).names_layers == ["h.1.attn", 3]


@pytest.mark.parametrize("typed", TYPED)
def test_an_edit_prints_as_one_types_it_and_returns_from_json(typed):
    edit = eval(typed, {name: getattr(rg.edits, name) for name in rg.edits.__all__})
    again = rg.edits.edit_from_json(edit.to_json())
    assert repr(edit) == repr(again) == typed and edit == again and hash(edit) == hash(again)
    assert len(edit & again) == 2 * len(edit.parts)


def test_equal_edits_have_equal_hashes():
    where, weights = rg.Where(heads="L1.H0"), torch.full((1, 2, 3, 4), 0.25)
    replace = rg.edits.ReplaceWeights
    equal = [
        (rg.edits.ScaleWeights(where, 0.0), rg.edits.ScaleWeights(where, -0.0)),
        (rg.KnockOut(where) & rg.edits.AddToScores(where, 0.0), rg.KnockOut(where) & rg.edits.AddToScores(where, -0.0)),
        (replace(where, {1: weights}), replace(where, OrderedDict({1: weights.clone()}))),
        (replace(where, weights), replace(where, weights.clone())),
        (rg.KnockOut(rg.Where(layers=[1], keys=0)), rg.KnockOut(rg.Where(layers=torch.tensor([1]), keys=0))),
    ]
    for one, other in equal:
        assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    different = {edit for pair in equal for edit in pair} | {
        rg.edits.ScaleWeights(where, 2.0),
        replace(where, "uniform"),
    }
    assert len(different) == len(equal) + 2


def test_heads_are_pairs_of_a_layer_and_a_head(model):
    """As `prune` takes them and `RoleTable` has them; a tuple of two numbers is still two heads."""
    pairs = rg.Where(heads=[(0, 2), (torch.tensor(1), 3)])
    assert pairs == rg.Where(heads=["L0.H2", "L1.H3"]) != rg.Where(heads=(0, 2)) == rg.Where(heads=[0, 2])
    assert rg.Where(heads={(1, 3), (0, 2)}) == pairs
    with rg.watch(model) as seen, rg.edit(model, rg.KnockOut(rg.Where(heads=[(0, 2)], keys=0))), torch.no_grad():
        model(IDS)
    gone = torch.stack([weights[0, :, :, 0].sum(-1) for weights in seen]) == 0
    assert gone.nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_of_an_edit_are_saved_exactly(tmp_path, dtype):
    rows = torch.rand(3, 4, 5).softmax(-1).to(dtype)
    edit = rg.edits.ReplaceWeights(rg.Where(layers=1), rows) & rg.edits.ActivationPatch(
        rg.Where(layers=0), source={0: rows[None]}
    )
    file = tmp_path / "edit.safetensors"
    for text in (edit.to_json(), edit.to_json(tensors=file)):
        json.loads(text)
        assert rg.edits.edit_from_json(text) == edit
    file.unlink()
    with pytest.raises(RegardError, match="cannot be read"):
        rg.edits.edit_from_json(text)


MISTAKES = [
    (lambda: rg.KnockOut(rg.Where(layers=5)), "no attention layer of LlamaForCausalLM. It has layers 0, 1"),
    (lambda: rg.KnockOut(rg.Where(layers=slice(5, None))), "selects no layer of LlamaForCausalLM. It has layers 0, 1"),
    (lambda: rg.KnockOut(rg.Where(heads="L7.H0")), "names layer 7, which is no attention layer"),
    (lambda: rg.KnockOut(rg.Where(layers=[1, 7])), "names layer 7, which is no attention layer of LlamaForCausalLM"),
    (lambda: rg.KnockOut(rg.Where(heads=["L1.H0", "L7.H0"])), "It has layers 0, 1"),
    (lambda: rg.KnockOut(rg.Where(layers=["model.layers.1.*", "model.layer.0"])), "names layer 'model.layer.0'"),
    (lambda: rg.KnockOut(rg.Where(keys=slice(0, 4, 0))), "the step is at least 1"),
    (lambda: rg.KnockOut(rg.Where(queries=slice("it", None))), "are integers or None"),
    (lambda: rg.edits.AddToScores(rg.Where(), 10**400), "amount"),
    (lambda: rg.KnockOut(rg.Where(layers=1, heads=4)), "selects head 4, and model.layers.1.self_attn has heads 0 to 3"),
    (lambda: rg.KnockOut(rg.Where(queries=12)), "selected nothing: the run had queries 0 to 11"),
    (lambda: rg.edits.AddToScores(rg.Where(keys=[40, 50]), 1.0), "selected nothing: the run had keys 0 to 11"),
    (lambda: rg.KnockOut(rg.Where(queries=3, keys=7)), "selected nothing: the mask"),
    (
        lambda: rg.KnockOut(rg.Where.parse("L1.H3: it -> animal")),
        "'it' is 2 times in the text .tokens 5, 10.. Write it#1 or it#2",
    ),
    (
        lambda: rg.KnockOut(rg.Where.parse("L1.H3: it#3 -> animal")),
        "'it' is 2 times in the text, so there is no 'it#3'",
    ),
    (lambda: rg.KnockOut(rg.Where.parse("slept -> cat")), "no word 'cat'"),
    (lambda: rg.KnockOut(rg.Where(roles="induction")), "names roles. Give the heads that have them"),
    (lambda: rg.KnockOut(rg.Where(queries=slice(5, 5))), "selects nothing"),
    (lambda: rg.KnockOut(rg.Where(heads=[])), "an empty list selects nothing"),
    (lambda: rg.KnockOut(rg.Where(heads="third")), "a head is a number, or a name with its layer"),
    (lambda: rg.KnockOut(rg.Where(heads=[(1, -2)])), "a head is a number, or a name with its layer"),
    (lambda: rg.KnockOut(rg.Where(heads=[(1, 2, 3)])), "heads must be .* or a list of tuples, got list"),
    (lambda: rg.KnockOut(rg.Where(heads=-1)), "counts from the end"),
    (lambda: rg.KnockOut(rg.Where(keys=10**20)), "got a number beyond 64 bits"),
    (lambda: rg.KnockOut(rg.Where(keys=slice(10**20))), "larger than any number of a token"),
    (
        lambda: rg.KnockOut(rg.Where(layers=True)),
        "layers must be an integer or a text or a slice or a list of values or None",
    ),
    (lambda: rg.KnockOut(rg.Where.parse("L1.H3 it animal")), "no head .L5.H3., no layer .L5. and no role"),
    (lambda: rg.KnockOut(rg.Where.parse("L1.H3: it")), "a selection is 'L5.H3: it -> animal'"),
    (lambda: rg.KnockOut(rg.Where.parse("")), "a selection is"),
    (lambda: rg.KnockOut(rg.Where.parse("L1, L1.H3: * -> #1")), "give heads, or layers, or roles"),
    (lambda: rg.edits.AddToScores(rg.Where(), float("-inf")), "must be a finite number. KnockOut removes pairs"),
    (lambda: rg.KnockOut(rg.Where()) & rg.Where(), "both sides must be edits"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), "equal"), "weights are a tensor, a map or 'uniform'"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), torch.full((12, 12), 0.2)), "sums to 2.4, and must sum to 1"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), torch.eye(12) * 0.5), "sums to 0.5, and must sum to 1"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), -torch.eye(12)), "finite and not negative"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(keys=1), torch.eye(12)), "whole rows are replaced, so leave keys out"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), torch.eye(11)), "this run needs number 11"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(queries=5), torch.eye(4)[:1]), "rows of 4 keys were given"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), torch.eye(12).roll(1, 1)), "weight on keys that the mask forbids"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(heads=[1, 2, 3]), torch.eye(12).expand(2, 12, 12)), "weights of 2 heads"),
    (lambda: rg.edits.ReplaceWeights(rg.Where(), torch.eye(12).expand(3, 4, 12, 12)), "weights of 3 batch entries"),
    (
        lambda: rg.edits.ReplaceWeights(rg.Where(layers=1), {0: torch.eye(12)}),
        "has no layer 'model.layers.1.self_attn'",
    ),
    (
        lambda: rg.edits.ActivationPatch(rg.Where(), part="weights", source=torch.ones(1)),
        "Known names: key, output, query, value",
    ),
    (lambda: rg.edits.ActivationPatch(rg.Where()), "give the run to patch from"),
    (lambda: rg.edits.ActivationPatch(rg.Where(keys=1), source=torch.ones(1)), "select queries, not keys"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_mistakes_are_named(model, make, message):
    with pytest.raises(RegardError, match=message):
        run(model, make(), tokens=TEXT)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": "regard edit", "version": 9}',
        '{"format": "regard edit", "version": 1, "edits": [{"edit": "Drop"}]}',
    ],
)
def test_a_text_that_is_no_edit_is_refused(text):
    with pytest.raises(RegardError, match="edit_from_json"):
        rg.edits.edit_from_json(text)


def test_numbers_that_json_does_not_have_are_refused():
    patch = rg.edits.ActivationPatch(rg.Where(heads=0), source=torch.tensor([[[[torch.nan]]]]))
    with pytest.raises(RegardError, match=r"to_json\(tensors=path\)"):
        patch.to_json()


def test_words_without_tokens_are_refused(model):
    with pytest.raises(RegardError, match="Give the tokens of the text"):
        run(model, rg.KnockOut(rg.Where.parse("it -> animal")))


def test_a_compiled_model_is_refused(model):
    compiled = torch.nn.Sequential(model)
    compiled._orig_mod = model
    with (
        pytest.raises(RegardError, match="edit: the model is compiled"),
        rg.edit(compiled, rg.KnockOut(rg.Where(keys=0))),
    ):
        pass


@torch.no_grad()
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_code_that_was_compiled_before_is_not_gated_in_silence(model, is_compiled_before):
    torch._dynamo.reset()
    model, gates = copy.deepcopy(model), {0: torch.zeros(4)}
    compiled, plain = torch.compile(model, backend="eager"), model(IDS).logits
    if is_compiled_before:
        compiled(IDS)
    with rg.hf.gated(model, gates):
        expected = model(IDS).logits
        if is_compiled_before:
            with pytest.raises(RegardError, match="none of its gates was applied"):
                compiled(IDS)
        else:
            torch.testing.assert_close(compiled(IDS).logits, expected)
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(compiled(IDS).logits, plain)


@torch.no_grad()
def test_a_block_that_applies_no_gate_is_refused(model):
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(lambda ids: model(ids).logits, backend="eager")
    plain = compiled(IDS)
    with (
        pytest.raises(RegardError, match="the block ended, and none of its gates was applied"),
        rg.hf.gated(model, {0: torch.zeros(4)}),
    ):
        compiled(IDS)
    with rg.hf.gated(model, {}):
        torch.testing.assert_close(model(IDS).logits, plain)


def test_the_spans_of_knocked_out_pairs_never_lose_a_key():
    """`any_allowed` has every key that some query may attend to, and `all_allowed` no other than all may attend to."""
    rng = random.Random(0)
    for _ in range(60):
        heads, queries, keys = (drawn_indices(rng) for _ in range(3))
        pairs = Pairs(heads, queries, keys, query_shift=rng.randint(0, 3), key_shift=rng.randint(0, 3))
        mask, n = KnockedOut(pairs), 14
        allowed = mask.dense(n, num_heads=3).reshape(-1, n, n)
        for start in range(n):
            stop = rng.randint(start + 1, n)
            some, every = allowed[:, start:stop].any(0).any(0), allowed[:, start:stop].all(0).all(0)
            spans = mask.any_allowed(start, stop), mask.all_allowed(start, stop)
            for key in range(n):
                assert key in spans[0] or not some[key], pairs
                assert key not in spans[1] or every[key], pairs


def drawn_indices(rng):
    start, kind = rng.randint(0, 6), rng.randint(0, 3)
    ranges = [
        ((0, INFINITY, 1),),
        ((start, INFINITY, 1),),
        ((start, start + 4, 2), (9, 10, 1)),
        ((start, start + 3, 1),),
    ]
    return Indices(ranges[kind])


@pytest.mark.parametrize(("engine", "is_steered"), [("dense", True), ("blocked", True), ("kernel", False)])
def test_edits_of_scores_run_in_every_engine(engine, is_steered):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 8, dtype=torch.float32)
    knocked = KnockedOut(Pairs(Indices.of(1), Indices(((100, 250, 1),)), Indices(((20, 60, 1), (99, 200, 3)))))
    steered = AddedToScores(Pairs(Indices.of(0), Indices(((7, INFINITY, 1),)), Indices.of(3, 5)), 1.5)
    attention = rg.Attention(mask=rg.causal() & knocked, bias=[steered] if is_steered else [])
    seen = attention(q, k, v, engine=engine)
    s = (q @ k.mT * 8**-0.5).double()
    i, j = torch.arange(300)[:, None], torch.arange(300)
    s[:, 0] += 1.5 * is_steered * ((i >= 7) & ((j == 3) | (j == 5)))
    out = (i >= 100) & (i < 250) & (((j >= 20) & (j < 60)) | ((j >= 99) & (j < 200) & ((j - 99) % 3 == 0)))
    s[:, 1].masked_fill_(out, -torch.inf)
    weights = s.masked_fill(j > i, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(seen.output, (weights @ v.double()).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.weights.dense(), weights.float(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_an_error_that_shows_an_edit_is_one_short_line():
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=30, num_attention_heads=2
    )
    model, ids = transformers.LlamaModel(config).eval(), torch.arange(5)[None]
    with rg.watch(model, keep="qkv") as seen:
        model(ids)
    for edit in (
        rg.edits.ActivationPatch(rg.Where(layers=99), source=seen),
        rg.edits.ReplaceWeights(rg.Where(layers=99), seen.maps),
        rg.edits.ReplaceWeights(rg.Where(layers="decoder.*"), {3: torch.eye(5)}),
    ):
        with pytest.raises(RegardError, match=r"of LlamaModel\. It has layers 0, 1") as error, rg.edit(model, edit):
            model(ids)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("shape", "message"), [((2, 2, 2), r"is \(B,\) or \(B, n\), got \(2, 2, 2\)"), ((0,), "empty list")]
)
def test_a_tensor_of_tokens_has_a_row_for_each_batch_entry(shape, message):
    with pytest.raises(RegardError, match=message):
        rg.Where(queries=torch.zeros(shape, dtype=torch.long))
