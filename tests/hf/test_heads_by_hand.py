"""Heads of multi-head attention written by hand: importance, gates and curves, against a mask on the weights."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

import regard as rg
from regard.hf.names import BY_HAND, OUTPUTS, sides_of

C, H, T = 12, 3, 5


class MultiHead(nn.Module):
    """Multi-head attention as tutorials write it; `mask` (H,) multiplies the weights of each head."""

    def __init__(self, output="W_o", count="num_heads"):
        super().__init__()
        self.W_q, self.W_k, self.W_v = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.linears = nn.ModuleList([nn.Linear(C, C), nn.Linear(C, C)])
        if not output.startswith("linears"):
            setattr(self, output, nn.Linear(C, C))
        if count:
            setattr(self, count, C // H if count in ("d_k", "head_dim") else H)
        self.last, self.mask = output, torch.ones(H)

    def forward(self, x):
        q, k, v = (part(x).view(len(x), -1, H, C // H).transpose(1, 2) for part in (self.W_q, self.W_k, self.W_v))
        weights = torch.softmax(q @ k.transpose(-2, -1) / (C // H) ** 0.5, dim=-1) * self.mask[:, None, None]
        joined = (weights @ v).transpose(1, 2).contiguous().view(len(x), -1, C)
        return self.get_submodule(self.last)(joined)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList(MultiHead(**options) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model, x):
    generator = torch.Generator().manual_seed(4)
    return (model(x) * torch.randn(x.shape, generator=generator)).mean().tanh()


def by_mask(model, batches):
    """|d loss / d mask|, (layers, H): the definition of Michel et al. on the weights themselves."""
    for layer in model.layers:
        layer.mask = torch.ones(H, requires_grad=True)
    masks = [layer.mask for layer in model.layers]
    slopes = [torch.stack(torch.autograd.grad(loss(model, x), masks)).abs() for x in batches]
    for layer in model.layers:
        layer.mask = torch.ones(H)
    return torch.stack(slopes).mean(0)


def assert_importance(model, **told):
    batches = list(torch.randn(2, 1, T, C))
    found = rg.importance(model, loss, batches, **told)
    expected = by_mask(model, batches)
    assert expected.min() > 1e-7
    assert list(found.values) == ["layers.0", "layers.1"] and not found.missing
    torch.testing.assert_close(torch.stack(list(found.values.values())), expected, atol=1e-7, rtol=1e-4)
    return found


@pytest.mark.parametrize("output", ["W_o", "W_O", "fc_out", "wo", "out", "o_proj", "fc", "output"])
def test_the_output_projection_is_known_by_its_usual_names(output):
    assert_importance(Model(output=output))


@pytest.mark.parametrize("count", ["num_heads", "n_heads", "n_head", "nhead", "heads", "h", "d_k", "head_dim"])
def test_the_number_of_heads_is_known_by_its_usual_names(count):
    assert_importance(Model(count=count))


def test_an_unusual_name_can_be_told():
    model = Model(output="linears.1", count=None)
    found = assert_importance(model, output="linears.1", num_heads=H)
    x = torch.randn(1, T, C)
    curve = rg.hf.pruning_curve(model, lambda model: -float(loss(model, x)), found, shares=[0, 1])
    for layer in model.layers:
        layer.mask = torch.zeros(H)
    assert curve.qualities("importance")[1.0] == pytest.approx(-float(loss(model, x).detach()), abs=1e-6)


def test_the_told_name_counts_before_known_ones():
    model = Model(output="linears.1")
    for layer in model.layers:
        layer.out = nn.Linear(C, C)  # is not called
    assert_importance(model, output="linears.1")


def test_gates_of_a_head_are_a_mask_of_its_weights():
    model, x = Model(output="W_last"), torch.randn(2, T, C)
    with torch.no_grad(), rg.hf.gated(model, {"layers.1": [1.0, 0.0, 0.5]}, output="W_last"):
        found = model(x)
    reversed_array = numpy.array([0.5, 0.0, 1.0])[::-1]  # no tensor has its strides
    with torch.no_grad(), rg.hf.gated(model, {"layers.1": reversed_array}, output="W_last"):
        assert torch.equal(model(x), found)
    model.layers[1].mask = torch.tensor([1.0, 0.0, 0.5])
    torch.testing.assert_close(found, model(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("made", "told", "message"),
    [
        ({"output": "W_last"}, {}, r"no output projection of a known name .*Give its path in MultiHead: output='...'"),
        ({"count": None}, {}, "does not say how .* 12 inputs divides into heads. Give num_heads="),
        (
            {"count": None},
            {"num_heads": 5},
            r"importance\(num_heads=5\).* must divide the 12 inputs .*: 1, 2, 3, 4, 6, 12",
        ),
        ({"count": None}, {"num_heads": 0}, r"importance\(num_heads=0\): num_heads must be an integer of at least 1"),
        ({"count": None}, {"num_heads": -3}, r"importance\(num_heads=-3\): num_heads must be an integer of at least 1"),
        ({"count": None}, {"num_heads": 3.0}, r"importance\(num_heads=3.0\): num_heads must be an integer"),
        ({"count": None}, {"num_heads": True}, r"importance\(num_heads=True\): num_heads must be an integer"),
        ({}, {"num_heads": 4}, r"importance\(num_heads=4\): layers.0 has 3 heads.*leave it out"),
        ({"count": "d_k"}, {"num_heads": 4}, r"importance\(num_heads=4\): layers.0 has 3 heads"),
        ({}, {"output": "W_p"}, "no attention module has an output projection 'W_p'. Did you mean 'W_"),
    ],
)
def test_heads_that_are_not_known_say_what_to_tell(made, told, message):
    with pytest.raises(rg.RegardError, match=message):
        rg.importance(Model(**made), loss, [torch.randn(1, T, C)], **told)


class Packed(MultiHead):
    """One projection to queries, keys and values."""

    def __init__(self, name):
        super().__init__()
        setattr(self, name, nn.Linear(C, 3 * C))
        self.packed = name

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.get_submodule(self.packed)(x).chunk(3, -1)
        )
        return self.W_o((torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", ["qkv", "to_qkv", "in_proj", "c_attn", "Wqkv", "QKV_proj"])
def test_the_packed_input_projection_is_no_output_projection(name):
    model = nn.Sequential(Packed(name))
    message = rf"importance: 0.{name}, a Linear with a weight of shape \(36, 12\), .*concatenated heads.*'W_o'"
    with pytest.raises(rg.RegardError, match=message):
        rg.importance(model, loss, [torch.randn(1, T, C)], output=name)
    with pytest.raises(rg.RegardError, match=f"gated: 0.{name}, a Linear"), rg.hf.gated(model, {}, output=name):
        pass


@pytest.mark.parametrize("name", ["W_q", "W_k", "W_v", "query", "key_proj", "v_lin", "q.linear"])
def test_names_of_input_projections_are_refused(name):
    model = Model()
    for layer in model.layers:
        place, _, last = name.rpartition(".")
        if place:
            layer.add_module(place, nn.Module())
        layer.get_submodule(place).add_module(last, nn.Linear(C, C))
    with pytest.raises(rg.RegardError, match=f"layers.0.{name}, a Linear .* concatenated heads"):
        rg.importance(model, loss, [torch.randn(1, T, C)], output=name)


class Numbered(MultiHead):
    """As the Annotated Transformer: four layers of one list, the last of which is the output projection."""

    def __init__(self, change):
        super().__init__()
        self.change, self.linears = change, nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        x = self.change(x)
        q, k, v = (part(x).unflatten(-1, (H, -1)).transpose(1, 2) for part in self.linears[:3])
        weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
        return self.linears[3]((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x[:, :], lambda x: x.view(1, 2 * T, C)])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_reads_the_input_of_the_module_is_refused_when_it_runs(layer, change):
    model, x = nn.Sequential(Numbered(change)), torch.randn(3, T, C)[1:]
    message = (
        rf"importance: 0.linears.{layer}, .*\(12, 12\), reads an input of Numbered.*concatenated heads.*'linears.3'"
    )
    with pytest.raises(rg.RegardError, match=message):
        rg.importance(model, loss, [x], output=f"linears.{layer}")
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    rg.importance(model, lambda model, x: model(x).mean(), [x], output="linears.3")


def test_names_of_output_projections_are_not_refused():
    names = (*OUTPUTS, *BY_HAND, "linears.3", "value_out", "attn.out_proj", "to_out.0", "layers.1")
    assert not any(map(sides_of, names))


def test_numbers_of_numpy_are_numbers_of_heads():
    assert_importance(Model(count=None), num_heads=numpy.int64(H))


def test_weights_written_by_hand_are_not_pruned_but_gated():
    with pytest.raises(rg.RegardError, match=r"MultiHead \(layers.0\) cannot be pruned.*regard.hf.gated"):
        rg.prune(Model(), {"layers.0": [1]})


def test_every_name_stands_once():
    assert len({*OUTPUTS, *BY_HAND}) == len(OUTPUTS) + len(BY_HAND)
