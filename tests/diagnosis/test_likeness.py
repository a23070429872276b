"""`check(like=...)`: solutions of students, right and wrong, beside the reference that they should be."""

from __future__ import annotations

import json
import math
import re
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import regard as rg
from regard.cli.app import app
from regard.diagnosis import likeness
from regard.testing import assert_attention
from students_right import RIGHT
from students_wrong import WRONG, keys_before_the_cache, values_before_the_cache

#: Right solutions in which the matrices cannot be told.
NOT_CHECKED = ("learned positions, one-hot positions",)
#: Wrong solutions that are another reference, or right with a mask that is given; and those without the matrices.
RIGHT_TOO = ("decoder block, nn.TransformerDecoderLayer without a mask", "padding mask, pad id 1")
WITHOUT_MATRICES = ("encoder block, norm over the tokens",)
#: A change between two steps is named by the later ones, and heads that are left out by the matrices that do not fit.
OTHERWISE = {
    "scaled dot product, scores clipped at 5": "the steps 'mask' or 'softmax'",
    "multi-head, half of the heads": "projection of the query",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_solution_is_right(name):
    function, reference = RIGHT[name]
    report = rg.check(function, like=reference, limit=None)
    assert report.mistakes == (), str(report)
    assert report.ok is (None if name in NOT_CHECKED else True)
    assert name in NOT_CHECKED or report.mechanism == reference


@pytest.mark.parametrize("name", WRONG)
def test_the_mistake_of_a_wrong_solution_is_named_by_its_step(name):
    function, reference, words = WRONG[name]
    report = rg.check(function, like=reference, limit=None)
    if name in (*RIGHT_TOO, *WITHOUT_MATRICES):
        assert report.ok is (True if name in RIGHT_TOO else None)
        return
    assert report.ok is False
    words = OTHERWISE.get(name, words)
    assert re.search(words, "; ".join(report.mistakes), re.IGNORECASE), str(report)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_mistake_that_fits_one_query_by_chance_is_not_named(count):
    """Of seven scores three happen to be above 0, so hiding the others looked like the best three."""

    def best(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(scores < scores.topk(count).values[..., -1:], -torch.inf).softmax(-1) @ v

    assert rg.check(best, like="scaled_dot_product").mistakes == ("the steps 'mask' or 'softmax' differ",)


def test_scores_below_0_that_are_hidden_are_named():
    def above(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(scores <= 0, -torch.inf).softmax(-1) @ v

    assert rg.check(above, like="scaled_dot_product").mistakes == ("scores of 0 and less are hidden",)


def test_every_head_of_a_mask_counts():
    def with_second_head(offset):
        return lambda n: torch.stack([torch.ones(n, n).tril(), torch.ones(n, n).tril(offset)])[None]

    assert rg.check(with_second_head(0), like="causal_mask").ok
    assert rg.check(with_second_head(1), like="causal_mask").ok is False


def test_a_mask_of_numpy_may_be_a_reversed_view():
    assert rg.check(lambda n: np.triu(np.ones((n, n)))[::-1, ::-1], like="causal_mask").ok


def test_the_sense_of_a_mask_can_be_meant():
    def hidden(n):
        return torch.ones(n, n).triu(1).bool()

    assert rg.check(hidden, like="causal_mask", mask="drop").ok
    assert rg.check(hidden, like="causal_mask", mask="keep").mistakes == ("the mask is reversed",)
    both = rg.check(lambda n: torch.ones(n, n).triu().bool(), like="causal_mask").mistakes[0]
    assert "shows later tokens" in both and "hides the token itself" in both
    with pytest.raises(rg.RegardError, match=r"built no mask\. Tried:\n.*ValueError"):
        rg.check(lambda n: int("x"), like="causal_mask")


class Heads(nn.Module):
    def __init__(self, scale=0.5):
        super().__init__()
        self.num_heads, self.scale = 4, scale
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.a, self.b, self.c))
        return self.d((q @ k.mT * self.scale).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


def test_matrices_can_be_given():
    assert rg.check(Heads(), like="multi_head").ok
    wrong = rg.check(Heads(), like="multi_head", matrices={"value": "b.weight", "key": "c.weight"})
    assert wrong.ok is False
    with pytest.raises(rg.RegardError, match=r"there is no matrix 'valu'\. Did you mean 'value'"):
        rg.check(Heads(), like="multi_head", matrices={"valu": "b.weight"})
    with pytest.raises(rg.RegardError, match=r"the module has no matrix 'e\.weight'"):
        rg.check(Heads(), like="multi_head", matrices={"value": "e.weight"})
    with pytest.raises(rg.RegardError, match=r"like='multihead'\).*Did you mean 'multi_head'"):
        rg.check(Heads(), like="multihead")


class OneHead(nn.Module):
    def __init__(self, is_causal=False, factor=8**-0.5):
        super().__init__()
        self.key, self.query, self.value = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 12, bias=False)
        self.is_causal, self.factor = is_causal, factor

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT * self.factor
        if self.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).tril() == 0, -torch.inf)
        return scores.softmax(-1) @ self.value(x)


@pytest.mark.parametrize("name", ["self_attention", "causal_self_attention"])
def test_one_head_has_no_output_projection(name):
    assert rg.check(OneHead("causal" in name), like=name).ok
    assert rg.check(OneHead("causal" in name, 16**-0.5), like=name).ok is False
    assert rg.check(OneHead("causal" not in name), like=name).ok is False
    assert rg.check(OneHead("causal" in name), like="multi_head").ok is None


class Swapped(OneHead):
    """The matrix named for the values makes the keys, and that named for the keys makes the values."""

    def forward(self, x):
        scores = self.query(x) @ self.value(x).mT * self.factor
        if self.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).tril() == 0, -torch.inf)
        return scores.softmax(-1) @ self.key(x)


@pytest.mark.parametrize("name", ["self_attention", "causal_self_attention"])
def test_projections_of_one_head_that_are_swapped_are_named(name):
    head = Swapped("causal" in name)
    head.key, head.value = nn.Linear(16, 12), nn.Linear(16, 8)
    assert rg.check(head, like=name).mistakes == ("the projections of key and value are swapped",)


class Decoder(nn.Module):
    """A layer of torch, with a causal mask in float32 or without one."""

    def __init__(self, is_causal):
        super().__init__()
        self.layer, self.is_causal = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), is_causal

    def forward(self, x, memory):
        n = x.shape[1]
        mask = torch.full((n, n), -torch.inf, dtype=torch.float32).triu(1) if self.is_causal else None
        return self.layer(x, memory, tgt_mask=mask)


def test_only_a_decoder_that_takes_a_mask_may_have_none():
    assert rg.check(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), like="decoder_block").ok
    assert rg.check(Decoder(False), like="decoder_block").mistakes == ("the causal mask is missing",)


def test_a_module_that_runs_in_float32_alone_is_compared():
    assert rg.check(Decoder(True), like="decoder_block").ok


def test_inputs_of_three_widths_are_compared():
    """A layer of torch has one bias for queries, keys and values, and three matrices."""
    layer = nn.MultiheadAttention(16, 4, kdim=12, vdim=20, batch_first=True)
    inputs = torch.randn(2, 5, 16), torch.randn(2, 7, 12), torch.randn(2, 7, 20)
    assert rg.check(layer, *inputs, like="multi_head", mask="drop").ok
    assert rg.check(
        lambda q, k, v: dot(q, k, v), *torch.randn(2, 2, 5, 8), inputs[2][:, :5], like="scaled_dot_product"
    ).ok


def test_steps_that_do_not_run_are_said_with_the_shapes_of_the_inputs():
    def narrow(q, k, v):
        return dot(q, k[..., :8], v)

    report = rg.check(narrow, torch.randn(2, 5, 8), *torch.randn(2, 2, 6, 16), like="scaled_dot_product")
    (finding,) = report.findings
    assert finding.verdict == "unknown" and "q (2, 5, 8), k (2, 7, 16)" in finding.evidence
    assert "matri" not in finding.evidence + finding.remedy


def test_two_mistakes_are_two():
    class Two(Heads):
        def forward(self, x):
            q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.a, self.b, self.c))
            return self.d((q @ k.mT).softmax(-2).matmul(v).transpose(1, 2).flatten(2))

    mistakes = rg.check(Two(), like="multi_head").mistakes
    assert mistakes == ("the scores are not scaled", "the softmax is over the queries")


def test_what_was_not_checked_is_no_praise():
    report = rg.check(Heads(), like="bahdanau")
    assert report.ok is None and report.mistakes == () and report.unchecked == ("steps",)
    assert (
        str(report).startswith("Heads: not checked: steps") and json.loads(json.dumps(report.as_dict()))["ok"] is None
    )


def test_modules_that_keep_tensors_of_a_call_are_copied():
    class Keeps(Heads):
        def forward(self, x):
            self.kept = self.a(x)
            return super().forward(x)

    module = Keeps()
    module(torch.randn(1, 3, 16))
    assert not module.kept.is_leaf and rg.check(module, like="multi_head").ok


class Positions(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        angles = torch.arange(50)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.stack((angles.sin(), angles.cos()), -1).flatten(1))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


def test_positions_are_known_without_like():
    report = rg.check(Positions())
    assert report.ok and report.mechanism == "sinusoidal"
    other = Positions()
    other.table += 0.5
    report = rg.check(other)
    assert report.ok is None and "seems to add positions" in report.findings[0].evidence


@pytest.mark.parametrize("like", [None, "sinusoidal"])
def test_positions_in_a_buffer_say_the_width(like):
    assert rg.check(Positions(width=24), like=like).ok


def table_in_numpy(exponent):
    """A function that returns the table of positions, as courses write it; its base has this power of i / width."""

    def positional_encoding(length, depth):
        channels = np.arange(depth)[None]
        table = np.arange(length)[:, None] / 10_000 ** (exponent * (channels // 2) / depth)
        table[:, 0::2], table[:, 1::2] = np.sin(table[:, 0::2]), np.cos(table[:, 1::2])
        return table

    return positional_encoding


def test_a_function_that_returns_a_table_of_positions_is_compared():
    assert rg.check(table_in_numpy(2), like="sinusoidal").ok
    (mistake,) = rg.check(table_in_numpy(4), like="sinusoidal").mistakes
    assert mistake == "the exponent of the angles is 4 i / width in place of 2 i / width"
    with pytest.raises(rg.RegardError, match="like='sinusoidal'"):
        rg.check(table_in_numpy(2))


class BroadcastState(nn.Module):
    """Bahdanau's attention without a product of matrices, which runs with states (length, width) too."""

    def __init__(self, squash=torch.tanh):
        super().__init__()
        self.W, self.U, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1, bias=False)
        self.squash = squash

    def forward(self, decoder_state, encoder_outputs):
        summed = self.W(decoder_state).unsqueeze(1) + self.U(encoder_outputs)
        weights = self.v(self.squash(summed)).squeeze(-1).softmax(-1)
        return (weights.unsqueeze(-1) * encoder_outputs).sum(1), weights


@pytest.mark.parametrize("like", [None, "bahdanau"])
def test_a_state_that_is_broadcast_over_the_keys_is_one_state(like):
    report = rg.check(BroadcastState(), like=like)
    assert report.ok and report.mechanism == "bahdanau", str(report)
    assert rg.check(BroadcastState(nn.Identity()), like=like).mistakes == ("tanh is missing",)


class HeadsInDicts(nn.Module):
    """Heads in a list, each with its own projections, which have biases."""

    def __init__(self):
        super().__init__()
        projections = [nn.ModuleDict({role: nn.Linear(16, 4) for role in "qkv"}) for _ in range(4)]
        self.heads, self.proj = nn.ModuleList(projections), nn.Linear(16, 16)

    def forward(self, x):
        heads = [F.scaled_dot_product_attention(*(head[role](x) for role in "qkv")) for head in self.heads]
        return self.proj(torch.cat(heads, -1))


def test_biases_of_heads_in_a_list_are_those_of_their_matrices():
    assert rg.check(HeadsInDicts(), like="multi_head").ok


class WeightsOfTheLengthFirst(nn.Module):
    """A state (batch, width) beside states (length, batch, width); it returns the weights alone."""

    def __init__(self, batch_first):
        super().__init__()
        self.joined, self.v, self.batch_first = nn.Linear(32, 16), nn.Linear(16, 1, bias=False), batch_first

    def forward(self, hidden, encoder_outputs):
        length, batch = len(encoder_outputs), len(hidden)
        hidden = hidden.unsqueeze(1).repeat(1, length, 1)
        states = self.batch_first(encoder_outputs, batch, length)
        return self.v(self.joined(torch.cat((hidden, states), 2)).tanh()).squeeze(2).softmax(1)


def test_states_of_an_encoder_may_have_the_length_first():
    transposed = WeightsOfTheLengthFirst(lambda x, batch, length: x.permute(1, 0, 2))
    assert rg.check(transposed, like="bahdanau").ok
    # of one sequence alone both are the same
    reshaped = WeightsOfTheLengthFirst(lambda x, batch, length: x.reshape(batch, length, -1))
    assert rg.check(reshaped, like="bahdanau").ok is False


class LargestContext(nn.Module):
    """Bahdanau's attention with a maximum in place of the weighted sum; its matrices do not keep the width."""

    def __init__(self):
        super().__init__()
        self.W, self.U, self.v = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 1)

    def forward(self, decoder_state, encoder_outputs):
        weights = self.v((self.W(decoder_state.unsqueeze(1)) + self.U(encoder_outputs)).tanh()).softmax(1)
        return (weights * encoder_outputs).amax(1), weights


def test_right_weights_beside_a_wrong_output_have_no_false_cause():
    assert rg.check(LargestContext(), like="bahdanau").mistakes == ("the step 'context' differs",)


@pytest.mark.parametrize(("axis", "over"), [(0, "the queries"), (None, "everything together")])
def test_one_vector_does_not_hide_a_softmax_over_the_queries(axis, over):
    def attention(q, k, v):
        scores = q @ k.T / np.sqrt(k.shape[-1])
        weights = np.exp(scores - scores.max())
        return weights / weights.sum(axis=axis, keepdims=True) @ v

    assert rg.check(attention, like="scaled_dot_product").mistakes == (f"the softmax is over {over}",)


def test_luongs_dot_score_of_a_decoder_needs_no_factor():
    def attention(decoder_hidden, encoder_outputs):
        weights = (encoder_outputs @ decoder_hidden[..., None]).softmax(1)
        return (weights * encoder_outputs).sum(1)

    assert rg.check(attention).ok
    assert rg.check(lambda q, k, v: (q @ k.mT).softmax(-1) @ v).mistakes == ("the scores are not scaled",)


def test_luongs_general_score_with_projected_values_is_no_false_cause():
    class General(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Linear(16, 16, bias=False)

        def forward(self, decoder_hidden, encoder_outputs):
            projected = self.W(encoder_outputs)
            weights = (projected @ decoder_hidden[..., None]).softmax(1)
            return (weights * projected).sum(1)

    expected = ("the projected keys are summed in place of the values",)
    assert rg.check(General()).mistakes == rg.check(General(), like="luong_general").mistakes == expected


def test_assert_attention_fails_with_the_report():
    assert_attention(Heads(), like="multi_head")
    with pytest.raises(AssertionError, match=r"1 mistake: the scores are not scaled(.|\n)*The formula"):
        assert_attention(Heads(scale=1.0), like="multi_head")
    with pytest.raises(AssertionError, match="not checked"):
        assert_attention(Heads(), like="bahdanau")


def test_the_report_of_a_notebook_escapes_its_text():
    finding = rg.types.CheckFinding("steps", "wrong", "a < b", "Write a & b.", "<script>")
    html = rg.types.CheckReport("f", "f(x)", (finding,))._repr_html_()
    assert "a &lt; b" in html and "a &amp; b" in html and "<script>" not in html


SOLUTION = """
import torch
def right(q, k, v): return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
def wrong(q, k, v): return (q @ k.mT).softmax(-1) @ v
class Layer(torch.nn.Module):
    def forward(self, x): return x.mean(1, keepdim=True).expand_as(x)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["right", "--like", "scaled_dot_product"], 0, "no mistake found"),
        (["wrong", "--like", "scaled_dot_product"], 1, "the scores are not scaled"),
        (["Layer", "--like", "bahdanau"], 3, "not checked: steps"),
        (["right", "--like", "nothing"], 2, "other names"),
        (["right", "--like", "multi_head", "--matrix", "query"], 2, "is not ROLE=NAME"),
    ],
)
def test_the_exit_status_says_what_came_of_it(tmp_path, arguments, status, text):
    file = tmp_path / "solution.py"
    file.write_text(SOLUTION)
    result = CliRunner().invoke(app, ["check", f"{file}:{arguments[0]}", *arguments[1:]])
    assert (result.exit_code if not isinstance(result.exception, rg.RegardError) else 2) == status
    assert text in result.output + str(result.exception)


def dot(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize(
    ("subject", "inputs", "options", "message"),
    [
        (rg.Attention(), (), {"like": "bahdanau"}, "are written with Regard"),
        (rg.causal(), (), {"like": "causal_mask"}, "are written with Regard"),
        (dot, (), {"matrices": {"query": "W"}}, r"matrices=.*needs like="),
        (dot, (), {"like": "causal_mask", "matrices": {"query": "W"}}, "has no matrices"),
        (Heads(), (), {"like": "multi_head", "matrices": ["query"]}, r"matrices=\['query'\]\): it maps"),
        (Heads(), (), {"like": "multi_head", "matrices": {"query": 3}}, "it maps"),
        (lambda n: torch.ones(n, n).tril(), (torch.zeros(3),), {"like": "causal_mask"}, "takes no inputs"),
        (lambda n: torch.ones(1, 1, 1, n, n).tril(), (), {"like": "causal_mask"}, "5 axes"),
        (3, (), {"like": "causal_mask"}, "no function that builds a mask"),
    ],
)
def test_what_like_cannot_be_used_for_is_refused(subject, inputs, options, message):
    with pytest.raises(rg.RegardError, match=message):
        rg.check(subject, *inputs, **options)


def half_scores(q, k, v):
    scores = (q.to(torch.bfloat16) @ k.to(torch.bfloat16).mT).to(v.dtype) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


def half_scores_without_scale(q, k, v):
    return (q.half() @ k.half().mT).to(v.dtype).softmax(-1) @ v


def test_half_precision_inside_is_named_and_all_else_is_compared_without_it():
    report = rg.check(half_scores, like="scaled_dot_product")
    assert report.mistakes == ("the result is rounded to bfloat16",)
    assert report.findings[0].what == "steps" and report.findings[0].verdict == "right"
    both = rg.check(half_scores_without_scale, like="scaled_dot_product")
    assert sorted(both.mistakes) == ["the result is rounded to float16", "the scores are not scaled"]


def test_an_output_that_loses_sequences_is_named():
    def first_of_two(q, k, v):
        output = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return output[:1] if output.shape[0] == 2 else output

    for like in (None, "scaled_dot_product"):
        assert rg.check(first_of_two, like=like).mistakes == ("the output has lost sequences",)


@pytest.mark.parametrize("wrong", [values_before_the_cache, keys_before_the_cache])
def test_a_cache_in_a_wrong_order_is_named_without_a_reference(wrong):
    assert rg.check(wrong, limit=600.0).mistakes == ("the cache joins keys and values in different orders",)


def test_a_long_search_is_not_called_an_endless_call(monkeypatch):
    monkeypatch.setattr(likeness, "_mistake_of", lambda tried, reference: time.sleep(60))
    with pytest.raises(rg.RegardError, match=r"the search for the mistake has taken . s since the last call"):
        rg.check(lambda q, k, v: (q @ k.mT).sin().softmax(-1) @ v, like="scaled_dot_product", limit=3.0)


def test_right_without_a_batch_and_not_with_one_is_a_question():
    def over_axis_1(q, k, v):
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(1) @ v

    def alone(q, k, v):
        return (q @ k.T / math.sqrt(q.shape[-1])).softmax(1) @ v

    report = rg.check(over_axis_1, like="scaled_dot_product")
    assert report.ok is True and report.open_questions == ("axes",)
    assert report.as_dict()["open_questions"] == ["axes"]
    assert rg.check(over_axis_1, *torch.randn(3, 5, 8), like="scaled_dot_product").open_questions == ()
    batched = rg.check(over_axis_1, *torch.randn(3, 2, 5, 8), like="scaled_dot_product")
    assert batched.mistakes == ("the softmax is over the queries",)
    with warnings.catch_warnings(action="ignore"):  # torch: .T of more than two axes
        assert rg.check(alone, like="scaled_dot_product").open_questions == ()


def test_right_with_the_length_first_and_not_with_the_batch_first_is_a_question():
    layer = {
        length_first: nn.TransformerEncoderLayer(16, 2, 32, batch_first=not length_first) for length_first in (0, 1)
    }
    reports = [rg.check(layer[length_first], like="encoder_block") for length_first in (0, 1)]
    assert [report.ok for report in reports] == [True, True]
    assert ["axes" in report.open_questions for report in reports] == [False, True]
