"""`regard.check`: each planted mistake is found by its name, and none in right functions of many styles."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import regard as rg
from attentions import RIGHT, MultiHead, by_einsum, by_loops, by_matmul, in_numpy, with_a_regard_mask
from regard.diagnosis.calling import LAYOUTS, Subject, WithoutDropout, argument_tensor, callers_of, canonical_tensor
from regard.diagnosis.masks import causal_pattern
from regard.diagnosis.numerics import speed_finding
from regard.diagnosis.weights import measure, measured
from wrong_attentions import AFTER_DROPOUT, WRONG, no_scale, softmax_over_axis_1

#: Right functions that are checked with further seeds: one for each way to find the weights.
SEVERAL_SEEDS = ["matmul", "einsum, drop mask", "loops", "torch", "multi-head module", "nanoGPT", "linear", "one head"]


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_right_function(name):
    function, mechanism, meant = RIGHT[name]
    report = rg.check(function, **meant)
    assert report.mistakes == (), str(report)
    assert report.mechanism == mechanism
    assert report.ok is (True if mechanism and name != "positions in values" else None), str(report)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SEVERAL_SEEDS)
def test_nothing_is_found_with_other_seeds(name, seed):
    function, mechanism, meant = RIGHT[name]
    torch.manual_seed(seed)  # of the parameters
    report = rg.check(function, seed=seed, **meant)
    assert report.mistakes == (), str(report)
    assert report.mechanism == mechanism


@pytest.mark.parametrize("removed", [[1], [0, 3], [0, 1, 2]])
def test_nothing_is_found_in_a_pruned_module(removed):
    """Its heads fill fewer channels than its output has."""
    report = rg.check(rg.prune(rg.nn.MultiHeadAttention(32, 4), {"": removed}).model)
    assert report.mistakes == (), str(report)
    assert finding_of(report, "weights").verdict == "right"


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_mistake_is_found_by_its_name_and_no_other(name):
    function, mistake, meant = WRONG[name]
    report = rg.check(function, **meant)
    assert report.mistakes == (mistake,), str(report)
    (finding,) = [finding for finding in report.findings if finding.verdict == "wrong"]
    assert finding.evidence and finding.remedy


@pytest.mark.parametrize(
    "kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
)
def test_checks_switch_dropout_off(kind):
    module, x = kind(0.9), torch.ones(2, 3, 4, 5, 6)[(0,) * {nn.Dropout1d: 2, nn.Dropout2d: 1}.get(kind, 0)]
    with WithoutDropout():
        assert torch.equal(module(x), x)


def test_dropout_of_torchs_attention_is_the_only_mistake_of_a_function_that_calls_it_in_training():
    """What the rest of the check measures is that of the module in evaluation."""
    module = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 16)
    with WithoutDropout():
        output, weights = module(x, x, x)
    expected = module.eval()(x, x, x)
    torch.testing.assert_close((output, weights), expected)
    module.train()
    assert rg.check(lambda q, k, v: module(q, k, v)[0]).mistakes == ("dropout is on in evaluation",)


@pytest.mark.parametrize("name", ["matmul", "einsum, drop mask", "loops", "length first", "alibi"])
def test_measured_weights_are_those_of_the_definition(name):
    """Against the mechanism of the catalog in float64, on the same inputs."""
    function, mechanism, _ = RIGHT[name]
    caller = next(c for c in callers_of(Subject(function)) if measured(c) is not None)
    caller = replace(caller, sizes=replace(caller.sizes, keys=caller.sizes.queries))
    inputs = caller.sizes.sample(5)
    arguments = {"num_heads": caller.sizes.heads} if mechanism == "alibi" else {}
    expected = rg.mechanism(mechanism).build(**arguments)(*inputs).weights.dense()
    torch.testing.assert_close(measure(caller, inputs).weights, expected)


def test_weights_of_a_module_are_measured_head_by_head():
    module = MultiHead(16, 4, dropout=0.0).double().eval()
    (caller, *_) = callers_of(Subject(module))
    found = measure(measured(caller)[0], caller.sizes.sample(0))
    assert found.weights.shape == (2, 4, 5, 7)
    with torch.no_grad():
        for layer in (module.W_q, module.W_k, module.W_v, module.W_o):
            layer.weight.copy_(torch.eye(16))
            layer.bias.zero_()
        torch.testing.assert_close(found.weights, module(*(x[:, 0] for x in caller.sizes.sample(0)))[1])


@pytest.mark.parametrize("axes", [pair[0] for pair in LAYOUTS])
def test_argument_tensor_and_canonical_tensor_are_inverse(axes):
    sizes = [size if axis in axes else 1 for axis, size in zip("bhnd", (2, 3, 5, 7), strict=True)]
    x = torch.randn(sizes)
    assert argument_tensor(x, axes).shape == tuple(sizes["bhnd".index(axis)] for axis in axes)
    assert torch.equal(canonical_tensor(argument_tensor(x, axes), axes), x)


@pytest.mark.parametrize(
    ("rows", "pattern"),
    [
        (["100", "110", "111"], "causal"),
        (["110", "111", "111"], "next"),
        (["000", "100", "110"], "past"),
        (["111", "011", "001"], "future"),
        (["011", "001", "000"], "later"),
        (["111", "111", "111"], "all"),
        (["110", "111", "011"], "other"),
    ],
)
def test_patterns_of_visible_pairs_have_names(rows, pattern):
    assert causal_pattern(torch.tensor([[x == "1" for x in row] for row in rows])) == pattern


BATCH, HEADS = "sequences of a batch mix", "heads mix"
SOFTMAX = "the softmax is over the {}".format
#: Operations along an axis: with the keys and values along it, one entry sees another.
OPERATIONS = {
    "roll": lambda x, axis: x.roll(1, axis),
    "flip": lambda x, axis: x.flip(axis),
    "first": lambda x, axis: x.narrow(axis, 0, 1).expand_as(x),
    "last": lambda x, axis: x.narrow(axis, -1, 1).expand_as(x),
    "center": lambda x, axis: x - x.mean(axis, keepdim=True),
    "cumsum": lambda x, axis: x.cumsum(axis),
    "norm": lambda x, axis: 3 * torch.nn.functional.normalize(x, dim=axis),
    "standardize": lambda x, axis: (x - x.mean(axis, keepdim=True)) / x.std(axis, keepdim=True),
    "softmax": lambda x, axis: x.softmax(axis),
    "sort": lambda x, axis: x.sort(axis).values,
    "maximum": lambda x, axis: x / x.abs().amax(axis, keepdim=True),
}


def along(operation, axis, changed):
    """A function that changes some of its inputs along an axis, counted from the front."""

    def attention(q, k, v):
        q, k, v = (operation(x, axis) if name in changed else x for name, x in zip("qkv", (q, k, v), strict=True))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    return attention


@pytest.mark.parametrize(("name", "changed"), list(zip(OPERATIONS, 4 * ["q", "k", "v"], strict=False)))
def test_an_operation_over_the_batch_or_the_heads_is_found(name, changed):
    """Four axes are given, so axis 0 is the batch, and axis 1 are the heads."""
    q, k, v = torch.randn(3, 2, 4, 5, 16)
    for axis, mistake in ((0, BATCH), (1, HEADS)):
        assert mistake in rg.check(along(OPERATIONS[name], axis, changed), q, k, v).mistakes, axis


@pytest.mark.parametrize(("name", "changed"), list(zip(OPERATIONS, 4 * ["kv", "v", "qkv"], strict=False)))
def test_an_operation_over_axis_0_or_1_is_never_right_without_a_word(name, changed):
    """Nothing is given: what is right with fewer axes has a note, and over axis 0 it is a mistake."""
    assert rg.check(along(OPERATIONS[name], 0, changed)).mistakes
    report = rg.check(along(OPERATIONS[name], 1, changed))
    assert report.mistakes or HEADS in finding_of(report, "axes").evidence, str(report)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_over_the_channels_is_said(name):
    """Values may be projected, so this is unknown, and not right."""
    report = rg.check(along(OPERATIONS[name], -1, "v"))
    assert "values" in finding_of(report, "channels").evidence
    report = rg.check(along(OPERATIONS[name], -1, "k"))
    assert {"query and key"} == {f.what for f in report.findings if f.verdict == "unknown"} - {
        "scale",
        "precision",
        "steps",
    }


def by_position(q, k, v):
    """Scores with a factor that depends on the place in the batch."""
    return (q @ k.mT / q.shape[-1] ** 0.5 * torch.arange(1, len(q) + 1).view(-1, *[1] * (q.ndim - 1))).softmax(-1) @ v


def by_size(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5 + torch.arange(k.shape[-2]) * q.shape[0]).softmax(-1) @ v


@pytest.mark.parametrize("function", [by_position, by_size])
def test_each_sequence_has_the_output_of_a_run_alone(function):
    report = rg.check(function, *torch.randn(3, 2, 4, 5, 16))
    assert BATCH in report.mistakes and "alone" in finding_of(report, "batch").evidence


def test_a_batch_of_one_that_does_not_run_is_said():
    def squeezed(q, k, v):
        """(batch, heads, length, width)"""
        assert q.ndim == 4
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).squeeze() @ v.squeeze()[:, :]

    def of_two(q, k, v):
        return by_matmul(*(x.view(2, 4, -1, 16) for x in (q, k, v)))[0]

    assert finding_of(rg.check(of_two, *torch.randn(3, 2, 4, 5, 16)), "batch").verdict == "unknown"
    assert rg.check(squeezed, *torch.randn(3, 2, 4, 5, 16)).findings


def test_the_softmax_over_axis_0_is_over_the_batch_if_there_is_one():
    assert rg.check(along(OPERATIONS["roll"], 2, "")).ok
    report = rg.check(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(0) @ v)
    assert report.mistakes == (SOFTMAX("batch"),)


def test_two_or_three_axes_can_be_meant_by_inputs():
    """Centered keys have the same softmax, and tokens may be centered over axis 0 or 1 if nothing precedes them."""
    for axis, inputs in ((0, torch.randn(3, 5, 16)), (1, torch.randn(3, 2, 5, 16))):
        assert rg.check(along(OPERATIONS["center"], axis, "k"), *inputs).ok


def numpy_softmax(scores, axis=-1):
    weights = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def in_plain_numpy(q, k, v):
    """np.exp takes tensors too, as long as they require no gradient."""
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    return np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True) @ v


def of_two_axes_in_numpy(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[-1])
    return np.exp(scores - 9) / np.exp(scores - 9).sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize(
    ("function", "mistakes"),
    [
        (lambda q, k, v: numpy_softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v, ()),
        (lambda q, k, v: numpy_softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])) @ v, ()),
        (in_plain_numpy, ("large scores overflow",)),
        (of_two_axes_in_numpy, ("large scores overflow",)),
        (lambda q, k, v: numpy_softmax(q @ np.swapaxes(k, -1, -2)) @ v, ("the scores are not scaled",)),
        (lambda q, k, v: numpy_softmax(q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5, -2) @ v, (SOFTMAX("queries"),)),
        (lambda q, k, v: in_plain_numpy(q, k[:1], v), (BATCH, "large scores overflow")),
    ],
)
def test_functions_of_numpy_are_judged(function, mistakes):
    report = rg.check(function)
    assert set(report.mistakes) == set(mistakes) and "NumPy arrays" in report.call, str(report)
    assert finding_of(report, "gradient").verdict == "unknown"


def test_what_numpy_returns_may_be_a_reversed_view():
    """Its strides are negative, which no tensor has."""

    def from_the_last_token_on(q, k, v):
        scores = q[..., ::-1, :] @ np.swapaxes(k[..., ::-1, :], -1, -2) / np.sqrt(q.shape[-1])
        weights = numpy_softmax(scores)[..., ::-1]
        return (weights @ v)[..., ::-1, :], weights[..., ::-1, :]

    report = rg.check(from_the_last_token_on)
    assert report.mistakes == () and "multi_head" in (report.mechanism, *report.equal), str(report)
    assert finding_of(report, "weights").verdict == "right"


def test_a_function_of_tensors_that_leaves_torch_has_no_gradient():
    """It runs with tensors only, and fails if they require a gradient."""

    def through_numpy(q, k, v):
        return torch.from_numpy(in_plain_numpy(*(x.to(torch.float64).numpy() for x in (q, k, v))))

    assert "the gradient is detached" in rg.check(through_numpy).mistakes


def test_the_order_of_axes_is_found():
    for function, axes in ((by_matmul, "bhnd"), (by_einsum, "bnhd"), (by_loops, "nd"), (MultiHead(16, 2), "bnd")):
        words = {"b": "batch", "h": "heads", "n": "length", "d": "width"}
        assert f"({', '.join(words[axis] for axis in axes)})" in rg.check(function).call
    assert "NumPy arrays" in rg.check(in_numpy).call


def test_a_users_module_stays_as_it_is():
    module = MultiHead(16, 2).train()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    state = torch.get_rng_state()
    rg.check(module)
    assert module.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) and x.dtype == torch.float32 for name, x in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", AFTER_DROPOUT)
def test_returned_weights_after_dropout_are_a_note(name):
    report = rg.check(AFTER_DROPOUT[name])
    assert report.ok and "weights" in report.open_questions
    assert "With dropout the rows" in finding_of(report, "weights").evidence


def test_inputs_without_tokens_show_no_mistake():
    assert rg.check(by_matmul, *torch.zeros(3, 1, 4, 0, 16)).mistakes == ()


def test_given_inputs_tell_the_sizes():
    def of_width_12(a, b, c):
        return (a @ b.mT / 12**0.5).softmax(-1) @ c.view(*c.shape[:-1], 3, 4).flatten(-2)

    with pytest.raises(rg.RegardError, match=r"could not be called\. Tried:\n.*\(2, 4, 5, 16\).*RuntimeError"):
        rg.check(of_width_12)
    report = rg.check(of_width_12, *torch.randn(3, 2, 5, 12))
    assert report.ok and "(2, 5, 12)" in report.call


def test_grouped_queries_can_be_given():
    def by_pairs(q, k, v):
        return by_matmul(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)))

    q, k = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8)
    report = rg.check(by_pairs, q, k, k)
    assert report.ok and report.mechanism == "multi_head" and "in 3 heads" in report.call, str(report)
    assert finding_of(report, "groups").verdict == "right"
    wrong = rg.check(lambda q, k, v: by_matmul(q, k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1)), q, k, k)
    assert wrong.mistakes == ("keys and values are repeated for different heads",)


class Residual(nn.Module):
    def __init__(self, width, num_heads, is_causal=True):
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(width), MultiHead(width, num_heads)
        self.is_causal = is_causal

    def attended(self, x):
        visible = torch.ones(2, x.shape[1], x.shape[1]).tril(0 if self.is_causal else 1)
        return self.self_attn(x, x, x, visible)[0]

    def forward(self, x):
        return x + self.attended(self.norm(x))


class PostNorm(Residual):
    def forward(self, x):
        return self.norm(x + self.attended(x))


@pytest.mark.parametrize("kind", [Residual, PostNorm])
def test_a_residual_of_a_module_is_named_and_what_is_behind_it_is_checked(kind):
    report = rg.check(kind(16, 2))
    residual = finding_of(report, "residual")
    assert residual.verdict == "unknown" and "residual connection" in residual.evidence
    assert report.ok and report.mechanism == "masked"
    assert rg.check(kind(16, 2, is_causal=False)).mistakes == (
        "the causal mask is off by one: it shows the next token",
    )


def test_what_was_tried_is_said_if_weights_cannot_be_measured():
    report = rg.check(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    scores = finding_of(report, "scores")
    assert scores.verdict == "unknown" and "Tried: " in scores.evidence
    assert "regard.check(module.self_attn)" in scores.remedy


def test_a_mask_of_regard_is_tried():
    report = rg.check(with_a_regard_mask)
    assert "a Mask of Regard" in finding_of(report, "mask").evidence
    assert finding_of(report, "empty rows").verdict == "right"


@pytest.mark.parametrize("term", [1.0, torch.linspace(0, 1, 16)])
def test_a_term_that_is_no_input_is_said(term):
    report = rg.check(lambda q, k, v: by_matmul(q, k, v)[0] + term)
    assert report.ok is None and report.mistakes == ()
    assert "another term is added" in finding_of(report, "residual").evidence


def test_numbers_that_are_rounded_on_purpose_are_no_mistake():
    def of_20_levels(q, k, v):
        return by_matmul(*((20 * x).round() / 20 for x in (q, k)), v)[0]

    report = rg.check(of_20_levels)
    assert "precision" in {finding.what for finding in report.findings if finding.verdict == "unknown"}
    assert not any("rounded" in mistake for mistake in report.mistakes)


def test_two_axes_can_be_meant():
    report = rg.check(softmax_over_axis_1, *torch.randn(3, 5, 16))
    assert report.ok and report.mechanism == "cross"


def test_mistakes_behind_others_are_found():
    def several(q, k, v):
        q, k, v = q.half(), k.half(), v.half()
        return ((q @ v.mT).softmax(-1) @ k).double()

    assert set(rg.check(several).mistakes) == {
        "the result is rounded to float16",
        "keys and values are swapped",
        "the scores are not scaled",
    }


class Passing(nn.Module):
    """A module with projections that returns its input."""

    def __init__(self, width=16, num_heads=2):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        self.query(x), self.key(x)
        return x


def over_heads(q, k, v):
    """(batch, length, heads, width), without the transposition."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class OverHeads(nn.Module):
    def __init__(self, width=16, num_heads=2):
        super().__init__()
        self.num_heads, self.qkv = num_heads, nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.qkv(x).chunk(3, -1))
        return over_heads(q, k, v).flatten(2)


@pytest.mark.parametrize(
    "subject",
    [
        lambda q: q,
        lambda x: 2 * x + 1,
        torch.zeros_like,
        lambda query, keys: query,
        lambda q, k, v: v,
        Passing,
        OverHeads,
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
    ],
)
def test_a_function_in_which_no_token_sees_another_is_no_attention(subject):
    report = rg.check(subject)
    assert report.mistakes == ("no token attends to another",) and not report.ok, str(report)
    assert report.mechanism is None
    (finding,) = [finding for finding in report.findings if finding.verdict == "wrong"]
    assert "alone" in finding.evidence and finding.remedy


def finding_of(report, what):
    (finding,) = [finding for finding in report.findings if finding.what == what]
    return finding


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (lambda: 0, "has no argument for a query"),
        (lambda q, k, v, temperature: 0, "what is temperature?"),
        (3, "int cannot be called"),
        (nn.Bilinear, "Make an instance"),
    ],
)
def test_what_cannot_be_called_is_refused_with_a_remedy(subject, said):
    with pytest.raises(rg.RegardError, match="check: ") as error:
        rg.check(subject)
    assert said in str(error.value)


def with_a_misspelt_name(q, k, v):
    scores = q @ k.mT  # noqa: F841
    return scroes.softmax(-1) @ v  # noqa: F821


def test_an_error_of_the_function_is_said_once_with_its_line_and_the_inputs():
    with pytest.raises(rg.RegardError) as error:
        rg.check(with_a_misspelt_name)
    message = str(error.value)
    line = with_a_misspelt_name.__code__.co_firstlineno + 2
    assert message.count("NameError") == 1, message
    assert f"name 'scroes' is not defined (test_check.py, line {line})" in message
    assert "q (2, 4, 5, 16), k (2, 4, 7, 16), v (2, 4, 7, 16), and" in message


def test_errors_inside_of_torch_have_the_line_of_the_user():
    def transposed_wrongly(q, k, v):
        return torch.nn.functional.softmax(q @ k, dim=-1) @ v

    with pytest.raises(rg.RegardError, match=r"RuntimeError: .* \(test_check\.py, line \d+\)") as error:
        rg.check(transposed_wrongly)
    assert str(error.value).count("Expected size") <= 1, error.value  # numbers alone make no other error
    assert "_tensor.py" not in str(error.value) and "functional.py" not in str(error.value)


def test_a_function_that_ends_the_program_is_an_error():
    def leaving(q, k, v):
        raise SystemExit("enough")

    with pytest.raises(rg.RegardError, match=r"SystemExit: enough \(test_check\.py, line \d+\)"):
        rg.check(leaving)


def test_a_sense_that_does_not_exist_is_refused():
    with pytest.raises(rg.RegardError, match="Did you mean 'keep'"):
        rg.check(by_matmul, mask="kep")


# Pieces and mechanisms of Regard


@dataclass(frozen=True)
class Blocks(rg.masks.Mask):
    """A query attends to its own block; `slack` keys too few or too many are said to be allowed."""

    size: int
    slack: int = 0

    def allowed(self, grid):
        return grid.i // self.size == grid.j // self.size

    def any_allowed(self, start, stop):
        return rg.types.Spans.of((start // self.size * self.size, -(-stop // self.size) * self.size - self.slack))


@dataclass(frozen=True)
class TileBias(rg.biases.AdditiveBias):
    """Depends on the size of the tile: wrong."""

    def term(self, grid, rows, cols):
        return -(grid.j - grid.j.min()).abs().float()


@dataclass(frozen=True)
class HalfSoftmax(rg.normalizers.Softmax):
    """Says that its rows sum to 1, and halves them."""

    row_sum = 1.0

    def weights(self, scores, row_statistic, columns):
        return super().weights(scores, row_statistic, columns) / 2


@pytest.mark.parametrize(
    "subject", [rg.causal(), rg.Attention(rg.scores.Cosine(5.0)), rg.mechanism("masked"), Blocks(4)]
)
def test_all_laws_hold_for_right_pieces(subject):
    report = rg.check(subject)
    assert report.ok and len(report.findings) >= 13, str(report)


def test_broken_laws_of_pieces_are_named():
    assert "broken law: spans bound the mask" in rg.check(Blocks(4, slack=1)).mistakes
    assert "broken law: rows sum to what the normalizer declares" in rg.check(HalfSoftmax()).mistakes


def test_an_attention_with_inputs_of_its_own():
    attention = rg.Attention(rg.scores.Additive(6, 10, 4))
    with pytest.raises(rg.RegardError, match="Give inputs"):
        rg.check(attention)
    q, k = torch.randn(2, 1, 5, 6), torch.randn(2, 1, 9, 10)
    assert rg.check(attention, q, k, k).ok


def hides_where_true(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(mask, -1e9)).softmax(-1) @ v


def test_the_first_line_names_what_is_for_the_user_to_decide():
    """A reversed mask may be meant, so it is no mistake; but who reads one line must see it."""
    report = rg.check(hides_where_true)
    assert report.ok and str(report).startswith(
        "hides_where_true: no mistake found; for you to decide: mask, empty rows\n"
    )
    assert "mask" not in rg.check(hides_where_true, mask="drop").open_questions


@pytest.mark.parametrize("like", [None, "scaled_dot_product"])
def test_lengths_that_were_not_given_are_a_question(like):
    def attention(queries, keys, values, valid_lens=None):
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        if valid_lens is not None:  # the wrong way round
            scores = scores.masked_fill(torch.arange(scores.shape[-1]) < valid_lens[:, None, None], -1e6)
        return scores.softmax(-1) @ values

    report = rg.check(attention, like=like)
    assert report.open_questions == ("lengths",) and "valid_lens" in finding_of(report, "lengths").evidence
    assert "lengths" not in rg.check(by_matmul, like=like).open_questions


def test_a_report_is_aligned_and_names_the_remedy():
    lines = str(rg.check(no_scale)).splitlines()
    assert lines[0] == "no_scale: 1 mistake: the scores are not scaled"
    assert max(map(len, lines)) <= 100
    first = next(line for line in lines if line.startswith("  wrong"))
    assert first.startswith("  wrong    scale          The scores are not scaled.")
    columns = {line.index(line.split("  ")[-1]) for line in lines if line.startswith(("  right    batch", first[:11]))}
    assert columns == {26}


def test_the_error_of_a_state_without_the_axis_of_the_length_names_the_axis():
    def weights(state, states):
        return (state + states).tanh().sum(-1).softmax(-1)

    with pytest.raises(rg.RegardError, match=r"on the inputs that were given\..* state\[:, None\]\.$"):
        rg.check(weights, torch.randn(2, 16), torch.randn(2, 7, 16), like="bahdanau")
    with pytest.raises(rg.RegardError, match=r"on the inputs that were given\.$"):
        rg.check(lambda state, states: state @ states, *torch.randn(2, 2, 3, 16), like="bahdanau")


@pytest.mark.parametrize("like", [None, "bahdanau"])
def test_a_state_may_be_wider_than_the_states_of_the_encoder(like):
    class Additive(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_state, self.of_states, self.score = nn.Linear(24, 8), nn.Linear(16, 8), nn.Linear(8, 1)

        def forward(self, state, states):
            energies = (self.of_state(state)[:, None] + self.of_states(states)).tanh()
            weights = self.score(energies).squeeze(-1).softmax(-1)
            return (weights[:, None] @ states)[:, 0], weights

    assert rg.check(Additive(), like=like, limit=None).mistakes == ()


def test_a_scale_where_none_is_meant_is_named():
    report = rg.check(by_matmul, scale=1.0, limit=None)
    assert report.mistakes == ("the scores are scaled",) and "Leave the factor out." in str(report)


def _softmax_by_changes(q, k, v):
    scores = q @ k.mT
    scores /= q.shape[-1] ** 0.5
    scores -= scores.amax(-1, keepdim=True)
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores @ v


@pytest.mark.parametrize("part", [lambda o: o[-1:], lambda o: o[0], lambda o: o.mean(0), lambda o: o.sum(-2)])
def test_an_output_for_some_of_the_queries_is_not_right(part):
    """One query alone got an output, so the calls with one query were right."""

    def of_some(q, k, v):
        return part(nn.functional.scaled_dot_product_attention(q, k, v))

    assert rg.check(of_some, like="scaled_dot_product", limit=None).ok is False


def test_a_batch_of_one_that_loses_its_axis_is_a_mistake():
    def squeezed(q, k, v):
        output = nn.functional.scaled_dot_product_attention(q, k, v)
        return output.squeeze(0) if len(output) == 1 else output

    assert rg.check(squeezed, limit=None).mistakes == ("sequences of a batch mix",)


def test_queries_may_be_narrower_than_the_output():
    def narrow(q, k, v):
        return (q @ k[..., :8].mT / 8**0.5).softmax(-1) @ v

    report = rg.check(narrow, torch.randn(2, 5, 8), *torch.randn(2, 2, 6, 16))
    assert "1/sqrt(8)" in finding_of(report, "scale").evidence
    assert {finding_of(report, what).verdict for what in ("scale", "query and key", "softmax axis")} == {"right"}


@pytest.mark.parametrize("value_width", [4, 12])
def test_values_may_have_a_width_of_their_own(value_width):
    """Against the same function of four axes, where a head shows its queries and keys itself."""

    def attention(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, value_width)
    heads = (x[:, None].expand(-1, 3, -1, -1) for x in (q, k, v))
    for report in (rg.check(attention, q, k, v), rg.check(attention, *heads)):
        assert report.ok and report.mechanism in ("multi_head", "cross"), str(report)
        assert "1/sqrt(8)" in finding_of(report, "scale").evidence
    wrong = rg.check(lambda q, k, v: (q @ k.mT / v.shape[-1] ** 0.5).softmax(-1) @ v, q, k, v)
    assert wrong.mistakes == ("the scores have another factor",)


def test_a_causal_mask_of_weights_of_both_signs_is_seen():
    """Of one sequence without heads, each pair has one weight, and it may be negative."""

    def signed(q, k, v, offset=0):
        return (q @ k.mT / q.shape[-1] ** 0.5).tril(offset) @ v

    for offset, words in ((0, "up to i, and none after"), (1, "query i sees key i + 1")):
        report = rg.check(lambda q, k, v, offset=offset: signed(q, k, v, offset), *torch.randn(3, 5, 16))
        assert words in finding_of(report, "future").evidence
    negative = rg.check(lambda q, k, v: -(q @ k.mT).abs().tril() @ v)
    assert "up to i, and none after" in finding_of(negative, "future").evidence


def test_causal_is_said_only_where_no_later_key_is_visible():
    """A window of both sides is not causal, and keys that are chosen by their scores have no order at all."""

    def attend(q, k, v, visible):
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1) @ v

    def distances(q, k):
        return torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]

    def causal(q, k, v):
        return attend(q, k, v, distances(q, k) <= 0)

    def window(q, k, v):
        return attend(q, k, v, distances(q, k).abs() <= 1)

    def best_two(q, k, v):
        scores = q @ k.mT
        return attend(q, k, v, scores >= scores.topk(2).values[..., -1:])

    said = {f.__name__: finding_of(rg.check(f), "order") for f in (causal, window, best_two)}
    assert "is causal" in said["causal"].evidence
    assert "causal" not in said["window"].evidence and said["window"].verdict == "right"
    assert "does not change" in said["best_two"].evidence


def test_a_causal_mask_may_align_the_last_query_with_the_last_key():
    def causal(q, k, v):
        return rg.attend(q, k, v, mask=rg.causal()).output

    report = rg.check(causal, like="causal_dot_product", limit=None)
    assert report.ok and "the last query is aligned with the last key" in " ".join(str(report).split())


def test_a_gradient_that_torch_refuses_is_a_mistake_and_no_error():
    assert rg.check(_softmax_by_changes, limit=None).mistakes == ("the gradient cannot be computed",)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(rg.RegardError, match=r"max.* has no signature that Python can read"):
        rg.check(max)
    with pytest.raises(rg.RegardError, match=r"check\(scale=nan\): the factor of the scores is a finite number"):
        rg.check(by_matmul, scale=float("nan"))


def test_a_check_computes_in_one_thread_but_for_its_times():
    """On a busy machine threads wait for each other, and its tensors are small."""
    seen = {}

    def attention(q, k, v):
        seen.setdefault(q.shape[-2], set()).add(torch.get_num_threads())
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rg.check(attention)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen.pop(16) == {3}  # only times are taken of 16 tokens, and of 256 if these are fast
    assert seen.pop(256, {3}) == {3} and set().union(*seen.values()) == {1}


def test_a_fast_function_is_timed_on_a_busy_machine_and_one_that_loops_is_not():
    """Other work may delay the first calls. A function that loops over pairs is slow in every call."""
    delays = []

    def delayed(q, k, v):
        if delays:
            time.sleep(delays.pop())
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def slow(q, k, v):
        time.sleep(2e-5 * q.shape[2] * k.shape[2])
        return nn.functional.scaled_dot_product_attention(q, k, v)

    fast, looping = (next(iter(callers_of(Subject(function)))) for function in (delayed, slow))
    delays.extend([0.006] * 4)
    assert (speed_finding(fast).verdict, delays) == ("right", [])
    assert speed_finding(looping).verdict == "unknown"


def test_the_prompt_shows_what_print_shows():
    report = rg.check(no_scale)
    assert repr(report) == str(report)
