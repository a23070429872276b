"""Parameters inside pieces are parameters of the attention that holds the pieces, whatever a piece is."""

from __future__ import annotations

import copy
import dataclasses
import io
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import regard as rg
from regard.composites.sum import Sum
from regard.nn import Embedding
from regard.pieces.transition import ChannelDecay, Decay


def learned(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 0.5))


@dataclass(frozen=True, eq=False)
class Scaled(rg.encodings.Encoding):
    """An encoding of the user that is no module."""

    factor: Any

    def encode(self, x, positions):
        return x * self.factor


class Mixed(rg.scores.Score):
    """A score of the user with everything that may hold a tensor: an attribute, containers, a module, another piece."""

    def __init__(self):
        self.factor, self.others = learned(), {"first": [learned()], "again": None}
        self.others["again"] = self.factor
        self.layer, self.inner = nn.Linear(8, 8), Scaled(learned())

    def check(self, sizes, key_dim):
        """Any size is right."""

    def tile(self, query, key, grid):
        scores = self.layer(query) @ key.mT * self.factor * self.others["first"][0]
        return self.inner.encode(scores, grid.query)


@dataclass(frozen=True, eq=False)
class Threshold(rg.masks.Mask):
    """A mask of the user with a number that an optimizer may change."""

    reach: Any

    def allowed(self, grid):
        return grid.distance.abs() <= self.reach


def attentions() -> dict[str, tuple[rg.Attention, set[str]]]:
    chain = rg.encodings.Chain
    cases = {
        "score": (rg.Attention(rg.Dot(scale=learned())), {"score_factor"}),
        "cosine": (rg.Attention(rg.scores.Cosine(learned(2, 1, 1))), {"score_factor"}),
        "mixed": (
            rg.Attention(Mixed()),
            {"score_factor", "score_others_first_0", "score_layer.weight", "score_layer.bias", "score_inner_factor"},
        ),
        "module": (rg.Attention(rg.scores.Bilinear(8, 8, 2)), {"score.weight"}),
        "encoding": (rg.Attention(position=Scaled(learned())), {"position_factor"}),
        "chain": (
            rg.Attention(position=chain(rg.encodings.QKNorm(8), Scaled(learned()))),
            {"position.part_0.query_scale", "position.part_0.key_scale", "position.part_1_factor"},
        ),
        "bias": (rg.Attention(bias=rg.biases.Softcap(learned())), {"bias_0_cap"}),
        "biases": (
            rg.Attention(bias=(rg.biases.LearnedTable(2, reach=3), rg.biases.Softcap(learned()))),
            {"bias_0.table", "bias_1_cap"},
        ),
        "mask": (rg.Attention(mask=Threshold(learned())), {"mask_reach"}),
        "composed mask": (rg.Attention(mask=rg.causal() & Threshold(learned())), {"mask_right_reach"}),
        "normalizer": (
            rg.Attention(normalizer=rg.normalizers.Softmax(temperature=learned())),
            {"normalizer_temperature"},
        ),
        "sink": (rg.Attention(normalizer=rg.normalizers.LearnedSink(2)), {"normalizer.sink"}),
        "transition": (rg.Attention(transition=Decay(nn.Parameter(torch.full((2,), -0.5)))), {"transition_log_decay"}),
        "two slots": (
            rg.Attention(rg.Dot(scale=learned()), normalizer=rg.normalizers.Softmax(temperature=learned())),
            {"score_factor", "normalizer_temperature"},
        ),
    }
    return cases


CASES = list(attentions())


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, 6, 8, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_is_registered_once_under_a_stable_name(case):
    attention, names = attentions()[case]
    assert {name for name, _ in attention.named_parameters()} == names == set(attention.state_dict())
    for name, parameter in attention.named_parameters():
        assert attention.get_parameter(name) is parameter


@pytest.mark.parametrize("case", [case for case in CASES if "mask" not in case])
def test_an_optimizer_changes_what_the_call_uses(case):
    attention, _ = attentions()[case]
    before = attention(*inputs()).output
    before.square().sum().backward()
    assert all(parameter.grad is not None for parameter in attention.parameters())
    torch.optim.SGD(attention.parameters(), lr=0.5).step()
    assert not torch.equal(attention(*inputs()).output, before)


def changed(attention: rg.Attention) -> dict[str, torch.Tensor]:
    """Other values for the parameters."""
    return {name: tensor + 0.25 for name, tensor in attention.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_is_loaded_into_what_the_call_uses(case, assign):
    one, other = attentions()[case][0], attentions()[case][0]
    state = changed(one)
    one.load_state_dict(state, assign=assign)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(state[name])
    assert torch.equal(one(*inputs()).output, other(*inputs()).output)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_conversion_changes_what_the_call_uses(case, overwrite):
    attention, names = attentions()[case]
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        attention.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    assert {name for name, _ in attention.named_parameters()} == names
    assert all(parameter.dtype == torch.float64 for parameter in attention.parameters())
    output = attention(*inputs(torch.float64)).output
    assert output.dtype == torch.float64
    if "mask" not in case:
        wanted = list(attention.parameters())
        assert all(g.dtype == torch.float64 for g in torch.autograd.grad(output.square().sum(), wanted))


@pytest.mark.parametrize("case", CASES)
def test_a_move_to_another_device_moves_what_the_call_uses(case):
    attention = attentions()[case][0].to("meta")
    assert all(parameter.is_meta for parameter in attention.parameters())
    tensors = [t for piece in attention.pieces() for t in rg_tensors(piece)]
    assert tensors and all(t.is_meta for t in tensors)


def rg_tensors(piece: Any) -> list[torch.Tensor]:
    from regard.pieces.contents import tensors_of

    return tensors_of(piece)


@pytest.mark.parametrize("case", CASES)
def test_copies_have_parameters_of_their_own(case):
    attention, names = attentions()[case]
    before = attention(*inputs()).output
    file = io.BytesIO()
    torch.save(attention, file)
    file.seek(0)
    for other in copy.deepcopy(attention), torch.load(file, weights_only=False):
        assert {name for name, _ in other.named_parameters()} == names
        assert not {id(p) for p in other.parameters()} & {id(p) for p in attention.parameters()}
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.25)
        assert torch.equal(attention(*inputs()).output, before)
        if "mask" not in case:
            assert not torch.equal(other(*inputs()).output, before)


def test_a_parameter_of_two_pieces_is_one():
    shared = learned()
    attention = rg.Attention(rg.Dot(scale=shared), normalizer=rg.normalizers.Softmax(temperature=shared))
    assert list(attention.parameters()) == [shared]
    other = copy.deepcopy(attention)
    assert len(list(other.parameters())) == 1
    assert other.score.factor is other.normalizer.temperature is next(other.parameters()) is not shared


def test_a_replaced_piece_takes_its_parameters_along():
    attention = rg.Attention(rg.Dot(scale=learned()), bias=rg.biases.Softcap(learned()))
    attention.score, attention.bias = rg.scores.Cosine(2.0), rg.biases.LearnedTable(2, reach=3)
    assert [name for name, _ in attention.named_parameters()] == ["bias_0.table"]
    attention.score, attention.bias = rg.Dot(scale=(scale := learned())), ()
    assert attention.score.factor is scale and list(attention.parameters()) == [scale]
    attention.score = rg.scores.Bilinear(8, 8, 2)
    assert [name for name, _ in attention.named_parameters()] == ["score.weight"]
    attention.score_of = nn.Linear(2, 2)  # another attribute of the user
    assert attention.score_of.weight.shape == (2, 2)


def test_pieces_without_parameters_stay_the_same_objects():
    score, bias = rg.Dot(scale=torch.tensor(2.0)), rg.biases.Softcap(3.0)
    attention = rg.Attention(score, bias=bias)
    assert attention.score is score and attention.bias == (bias,) and not list(attention.parameters())
    score = rg.Dot(scale=learned())
    attention = rg.Attention(score)
    assert attention.score is score and attention.with_mask(rg.causal()).score is score


def test_functions_of_torch_exchange_the_parameters():
    attention, tensors = rg.Attention(rg.Dot(scale=learned())), inputs()

    def call(scale: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(attention, {"score_factor": scale}, tuple(tensors)).output.square().sum()

    scale = torch.tensor(0.7, requires_grad=True)
    expected = rg.Attention(rg.Dot(scale=scale))(*tensors).output.square().sum()
    torch.testing.assert_close(call(scale), expected)
    mine, theirs = (torch.autograd.grad(value, scale)[0] for value in (call(scale), expected))
    torch.testing.assert_close(mine, theirs)
    assert attention.score.factor.item() == 0.5
    nn.utils.parametrize.register_parametrization(attention, "score_factor", nn.Softplus())
    assert attention.score.factor.item() == pytest.approx(nn.functional.softplus(torch.tensor(0.5)).item())


def test_a_map_keeps_the_numbers_of_its_call():
    attention = rg.Attention(rg.Dot(scale=learned()), mask=rg.causal())
    weights = attention(*inputs()).weights
    before = weights.dense().clone()
    with torch.no_grad():
        attention.score.factor.fill_(3.0)
    assert torch.equal(weights.dense(), before)


def test_parts_of_composites_and_modules_with_an_encoding():
    parts = Sum([rg.Attention(rg.Dot(scale=learned())), rg.Attention()], [1.0, -0.5])
    assert [name for name, _ in parts.named_parameters()] == ["parts.0.score_factor"]

    class Twice(rg.composites.Composite):
        def __init__(self):
            super().__init__()
            self.encoding, self.attention = Scaled(learned()), rg.Attention()

        def prepare(self, call):
            query = self.encoding.encode(call.query, None)
            part = rg.composites.Part(self.attention, query, call.key, call.value, call.positions)
            return rg.composites.PreparedParts([part], lambda seen: (seen[0].output, seen[0].weights))

    assert [name for name, _ in Twice().named_parameters()] == ["encoding_factor"]
    embedding = Embedding(5, 8, position=Scaled(learned()))
    assert "position_factor" in dict(embedding.named_parameters())


def test_a_tensor_that_is_no_parameter_is_not_registered():
    base = learned()
    attention = rg.Attention(rg.Dot(scale=base.exp()), transition=None)
    assert not list(attention.parameters())
    attention(*inputs()).output.sum().backward()
    assert base.grad is not None
    decay = ChannelDecay(bonus=learned(2, 8))
    assert dataclasses.is_dataclass(decay)
    assert [n for n, _ in rg.Attention(transition=decay).named_parameters()] == ["transition_bonus"]


def test_every_score_lists_its_parameters_as_its_attention_does():
    scale = nn.Parameter(torch.tensor(2.0))
    for score, sizes in (
        (rg.Dot(), []),
        (rg.Dot(scale=2.0), []),
        (rg.Dot(scale=scale), [1]),
        (rg.scores.Cosine(scale), [1]),
        (rg.scores.Bilinear(3, 4), [12]),
        (rg.scores.Additive(3, 4, hidden=5), [15, 20, 5]),
    ):
        assert sorted(p.numel() for p in score.parameters()) == sorted(sizes)
        assert set(score.parameters()) == set(rg.Attention(score).parameters())


EVEN = 3**-0.5  # the standard deviation of numbers between -1 and 1
#: Learned pieces, and the mean and the standard deviation of each parameter at the beginning.
BEGINNINGS = {
    "T5": (lambda: rg.biases.T5Bias(64, num_buckets=64), {"table": (0, 1)}),
    "Shaw": (lambda: rg.biases.ShawBias(64, reach=50), {"keys": (0, 1 / 8)}),
    "Transformer-XL": (
        lambda: rg.biases.TransformerXLBias(64, 64),
        {"content": (0, 0.02), "distance": (0, 0.02), "projection": (0, 1 / 8)},
    ),
    "table": (lambda: rg.biases.LearnedTable(8, reach=4), {"table": (0, 0)}),
    "KERPLE": (lambda: rg.biases.KERPLEBias(4000), {"amplitude": (1, EVEN / 2), "rate": (1, EVEN / 2)}),
    "taps": (lambda: rg.transitions.Taps.random(64, 64), {"numbers": (0, EVEN / 8)}),
    "token shift": (lambda: rg.transitions.TokenShift(8), {"share": (0.5, 0)}),
    "QK norm": (lambda: rg.encodings.QKNorm(8, 8), {"query_scale": (1, 0), "key_scale": (1, 0)}),
    "scalable softmax": (lambda: rg.encodings.ScalableSoftmax(8), {"factor": (0.43, 0)}),
    "PoPE": (lambda: rg.encodings.PoPE(8, 8), {"phase": (0, 0)}),
    "sink": (lambda: rg.normalizers.LearnedSink(8), {"sink": (0, 0)}),
    "positions": (lambda: rg.encodings.LearnedPositions(64, 64), {"table": (0, 0.02)}),
    "groups": (
        lambda: rg.composites.ProjectedGroups(64, 64),
        {"of_keys": (0, EVEN / 8), "of_values": (0, EVEN / 8)},
    ),
    "latent": (lambda: rg.scores.LatentDot(16, 16, 16, 4), {"weight": (0, 1 / 4)}),
    "additive": (lambda: rg.scores.Additive(4, 4, 4096), {"direction": (0, EVEN / 64)}),
    "concat": (lambda: rg.scores.Concat(4, 4, 4096), {"direction": (0, EVEN / 64)}),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_learned_pieces_begin_with_numbers_of_a_known_size(name):
    make, expected = BEGINNINGS[name]
    found = dict(make().named_parameters())
    for part, (mean, deviation) in expected.items():
        assert found[part].mean().item() == pytest.approx(mean, abs=0.1 * deviation + 1e-7)
        assert found[part].std().item() == pytest.approx(deviation, rel=0.1, abs=1e-7)


class Sloped(rg.biases.AdditiveBias):
    """A learned number for each key further."""

    def __init__(self):
        self.slope = torch.nn.Parameter(torch.tensor(1.0))

    def term(self, grid, rows, cols):
        return self.slope * grid.distance


@torch.no_grad()
def test_a_functional_call_leaves_no_tensor_behind():
    """Also where it exchanges one of several parameters."""
    attention, x = rg.Attention(bias=(Sloped(), Sloped())), torch.randn(1, 2, 5, 4)
    before = attention(x, x, x).output
    for name in dict(attention.named_parameters()):
        other = torch.tensor(3.0)
        reference = weakref.ref(other)
        assert not torch.func.functional_call(attention, {name: other}, (x, x, x)).output.equal(before)
        del other
        assert reference() is None and attention(x, x, x).output.equal(before)


@pytest.mark.parametrize(("H", "D", "K"), [(1, 48, 48), (4, 64, 32), (8, 16, 96)])
def test_a_bilinear_score_begins_with_the_variance_that_it_says(H, D, K):
    """Published trainings begin with it. The remedy gives each matrix the variance of Xavier's rule."""
    torch.manual_seed(0)
    score = rg.scores.Bilinear(D, K, num_heads=H)

    def has_variance(variance):
        weight = score.weight.detach().double()
        assert weight.square().mean() == pytest.approx(variance, rel=0.1)  # about 5 standard errors of 2,304 numbers
        assert weight.abs().max() <= (3 * variance) ** 0.5 + 1e-6 and weight.abs().max() > 0.99 * (3 * variance) ** 0.5

    has_variance(2 / (K * (D + H)))
    for matrix in score.weight:
        torch.nn.init.xavier_uniform_(matrix)
    has_variance(2 / (D + K))


class Tagged:
    """A base of a user's own with an option of its classes."""

    def __init_subclass__(cls, tag, **options):
        super().__init_subclass__(**options)
        cls.tag = tag


def test_a_piece_may_have_another_base_whose_classes_have_options():
    class Own(rg.biases.AdditiveBias, Tagged, tag=3):
        def term(self, grid, rows, cols):
            return grid.distance * 0.0

    assert Own.tag == 3
