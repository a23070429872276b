"""Every number of a piece may be of any kind: of Python or NumPy, or a tensor, which may be learned or is refused.

A new piece with a number fails the first test until it is in `PIECES`.
"""

from __future__ import annotations

import inspect
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

import regard as rg
from regard.base.checks import fits
from regard.engine.plan import ENGINES

encodings, normalizers = rg.encodings, rg.normalizers
H, G, D, n = 4, 2, 8, 7
PLACES = torch.arange(2 * n).view(2, n)


def _rope(**scaling):
    (name, arguments), *_ = scaling.items()
    return rg.Attention(position=rg.RoPE(D, base=100.0, scaling=getattr(encodings, name)(**arguments)))


def _axial(make, *arguments, **numbers):
    return rg.Attention(position=make(PLACES, *arguments, **numbers))


#: Of each piece and number: an attention with this number, and a value that all kinds hold exactly.
PIECES = {
    "Dot.scale": (lambda x: rg.Attention(rg.Dot(x), mask=rg.causal()), 2.0),
    "Cosine.factor": (lambda x: rg.Attention(rg.scores.Cosine(x)), 2.0),
    "ShawBias.scale": (lambda x: rg.Attention(bias=rg.biases.ShawBias(D, 3, scale=x)), 2.0),
    "Softcap.cap": (lambda x: rg.Attention(bias=rg.biases.Softcap(x), mask=rg.causal()), 2.0),
    "TransformerXLBias.base": (lambda x: rg.Attention(bias=rg.biases.TransformerXLBias(H, D, base=x)), 96.0),
    "Softmax.temperature": (lambda x: rg.Attention(normalizer=normalizers.Softmax(x, sink=0.5)), 2.0),
    "Softmax.sink": (lambda x: rg.Attention(normalizer=normalizers.Softmax(sink=x), mask=rg.causal()), 2.0),
    "Sigmoid.offset": (lambda x: rg.Attention(normalizer=normalizers.Sigmoid(offset=x), mask=rg.causal()), 2.0),
    "Decay.log_decay": (lambda x: rg.Attention(transition=rg.transitions.Decay(x)), -2.0),
    "RoPE.base": (lambda x: rg.Attention(position=rg.RoPE(D, base=x)), 96.0),
    "LinearScaling.factor": (lambda x: _rope(LinearScaling={"factor": x}), 2.0),
    "NTKScaling.factor": (lambda x: _rope(NTKScaling={"factor": x}), 2.0),
    "Llama3Scaling.factor": (lambda x: _rope(Llama3Scaling={"factor": x, "trained_length": 16}), 2.0),
    "Llama3Scaling.low": (lambda x: _rope(Llama3Scaling={"low": x, "trained_length": 16}), 2.0),
    "Llama3Scaling.high": (lambda x: _rope(Llama3Scaling={"high": x, "trained_length": 16}), 3.0),
    "LongRoPEScaling.factors": (lambda x: _rope(LongRoPEScaling={"factors": [x, 2, 3, 4]}), 2.0),
    "LongRoPEScaling.extension": (lambda x: _rope(LongRoPEScaling={"factors": [1, 2, 3, 4], "extension": x}), 2.0),
    "ProportionalScaling.share": (lambda x: _rope(ProportionalScaling={"share": x}), 1.0),
    "ProportionalScaling.factor": (lambda x: _rope(ProportionalScaling={"share": 0.5, "factor": x}), 2.0),
    "YaRNScaling.factor": (lambda x: _rope(YaRNScaling={"factor": x, "trained_length": 16}), 2.0),
    "YaRNScaling.fast": (lambda x: _rope(YaRNScaling={"factor": 2.0, "trained_length": 16, "fast": x}), 3.0),
    "YaRNScaling.slow": (lambda x: _rope(YaRNScaling={"factor": 2.0, "trained_length": 16, "slow": x}), 2.0),
    "YaRNScaling.attention_factor": (
        lambda x: _rope(YaRNScaling={"factor": 2.0, "trained_length": 16, "attention_factor": x}),
        2.0,
    ),
    "Sinusoidal.base": (lambda x: rg.Attention(position=encodings.Sinusoidal(base=x)), 96.0),
    "PoPE.base": (lambda x: rg.Attention(rg.Dot(0.5), position=encodings.PoPE(G, D, base=x)), 96.0),
    "QKNorm.eps": (lambda x: rg.Attention(position=encodings.QKNorm(D, eps=x)), 2.0),
    "PositionTemperature.factor": (lambda x: rg.Attention(position=encodings.PositionTemperature(2, x)), 2.0),
    "AxialRoPE.rates": (lambda x: _axial(encodings.AxialRoPE, (0, 1, 0, 1), [x, 1.0, 0.5, 0.2]), 2.0),
    "AxialRoPE.sections": (lambda x: _axial(encodings.AxialRoPE.sections, (2, 2), base=x), 96.0),
    "AxialRoPE.grid": (lambda x: _axial(encodings.AxialRoPE.grid, D, base=x), 96.0),
}
KINDS = {
    "integer": int,
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "int64": np.int64,
    "fraction": Fraction,
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64),
    "tensor of float32": torch.tensor,
    "tensor of bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "tensor of integers": lambda x: torch.tensor(int(x)),
}
#: What is refused, with a remedy, because it would have no meaning or no gradient: a number, and the rule.
NO_TENSOR = {"Softmax.sink": "the sink is one number"}
NO_INTEGERS = "a tensor must hold one floating-point number"


def _takes_a_number(annotation):
    return fits(2.5, annotation) or fits([2.5], annotation)


def test_every_number_of_a_piece_is_here():
    rooms = rg.scores, rg.biases, rg.masks, encodings, normalizers, rg.selections, rg.transitions
    found = set()
    for kind in {getattr(room, name) for room in rooms for name in room.__all__}:
        if not isinstance(kind, type) or inspect.isabstract(kind):
            continue
        annotations = inspect.get_annotations(inspect.unwrap(kind.__init__))
        names = vars(inspect.getmodule(kind))
        found |= {
            f"{kind.__name__}.{name}"
            for name, annotation in annotations.items()
            if any(word in str(annotation) for word in ("float", "Number", "Positive", "Constant"))
            if name != "return" and _takes_a_number(eval(annotation, names))
        }
    assert found and found == {name for name in PIECES if name not in ("AxialRoPE.sections", "AxialRoPE.grid")}


def _made(name, number):
    """The attention with this number, in float64."""
    torch.manual_seed(0)
    return PIECES[name][0](number).double()


def _inputs():
    generator = torch.Generator().manual_seed(1)
    shapes = (2, H, n, D), (2, G, n, D), (2, G, n, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@cache
def _expected(name):
    """Output and weights by definition, with the number as Python's."""
    with torch.no_grad():
        return _made(name, PIECES[name][1])(*_inputs(), engine="reference")


def _engines(attention):
    """The engines that can run a call of this attention; a refusal says why another cannot."""
    for engine in ("auto", *ENGINES):
        try:
            rg.plan(*_inputs(), attention=attention, engine=engine)
        except rg.RegardError:
            continue
        yield engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PIECES)
@torch.no_grad()
def test_any_kind_of_number_counts_as_its_value(name, kind):
    _, value = PIECES[name]
    number = KINDS[kind](value)
    expected = _expected(name)
    refusal = NO_TENSOR.get(name) if isinstance(number, torch.Tensor) and number.is_floating_point() else None
    if name in ("Dot.scale", "Cosine.factor") and kind == "tensor of integers":
        refusal = NO_INTEGERS
    if refusal is not None:
        with pytest.raises(rg.RegardError, match=refusal):
            _made(name, number)(*_inputs())
        return
    attention = _made(name, number)
    for engine in _engines(attention):
        seen = attention(*_inputs(), engine=engine)
        torch.testing.assert_close(seen.output, expected.output)
        torch.testing.assert_close(seen.weights.dense(), expected.weights.dense())


@pytest.mark.parametrize("name", PIECES)
def test_a_learned_number_has_its_gradient_or_is_refused(name):
    _, value = PIECES[name]
    number = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    try:
        attention = _made(name, number)
    except rg.RegardError as error:
        assert "item()" in str(error)
        return
    after, before = (_made(name, value + step)(*_inputs(), engine="dense" if attention.transition is None else "auto")
                     for step in (1e-5, -1e-5))  # fmt: skip
    expected = (after.output.sin().sum() - before.output.sin().sum()) / 2e-5
    for engine in _engines(attention):
        if engine == "reference":
            continue  # it has no gradients
        (found,) = torch.autograd.grad(attention(*_inputs(), engine=engine).output.sin().sum(), number)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)


def _chosen(ids):
    rows = torch.as_tensor(ids.copy() if isinstance(ids, np.ndarray) else ids)
    return rg.masks.chosen_keys(rows.expand(1, 1, n, -1))


def _turned(axes):
    return rg.Attention(position=encodings.AxialRoPE(torch.arange(3 * n).view(3, n), axes, [1.0, 2.0, 0.5, 0.1]))


#: Of each piece with a list of integers: an attention with this list, and a list.
LISTS = {
    "padding": (rg.padding, [6, 3]),
    "documents": (rg.documents, [3, 4]),
    "documents of keys": (lambda x: rg.documents([3, 4], x), [3, 4]),
    "global_tokens": (lambda x: rg.masks.global_tokens(x) | rg.window(2), [0, 5]),
    "tree": (lambda x: rg.masks.tree(x, 3), [-1, 0, 0, 1]),
    "shared_prefix": (lambda x: rg.masks.shared_prefix(2, x), [2, 3]),
    "neighborhood.shape": (lambda x: rg.masks.neighborhood(x, (3, 1)), [7, 1]),
    "neighborhood.size": (lambda x: rg.masks.neighborhood((7, 1), x), [3, 1]),
    "neighborhood.dilation": (lambda x: rg.masks.neighborhood((7, 1), (3, 1), x), [2, 1]),
    "sliding_tiles.tile": (lambda x: rg.masks.sliding_tiles((7, 1), x, 1), [1, 1]),
    "chosen_keys": (_chosen, [2, 1, 5, -1]),
    "AxialRoPE.axes": (_turned, [2, 1, 1, 0]),
    "AxialRoPE.sections": (lambda x: _axial(encodings.AxialRoPE.sections, x), [3, 1]),
}
OF_LISTS = {
    "tuple": tuple,
    "array": np.array,
    "array of int8": lambda x: np.array(x, np.int8),
    "reversed array": lambda x: np.array(x[::-1])[::-1],
    "tensor": torch.tensor,
    "tensor of int8": lambda x: torch.tensor(x, dtype=torch.int8),
    "every second": lambda x: torch.tensor([[number, 99] for number in x]).flatten()[::2],
    "numbers of NumPy": lambda x: [np.int32(number) for number in x],
    "tensors": lambda x: [torch.tensor(number) for number in x],
}


@pytest.mark.parametrize("kind", OF_LISTS)
@pytest.mark.parametrize("name", LISTS)
@torch.no_grad()
def test_any_kind_of_list_counts_as_its_integers(name, kind):
    make, numbers = LISTS[name]
    expected, found = (
        made if isinstance(made, rg.Attention) else rg.Attention(mask=made)
        for made in (make(numbers), make(OF_LISTS[kind](numbers)))
    )
    for engine in _engines(found):
        one, other = (attention(*_inputs(), engine=engine).output for attention in (expected, found))
        torch.testing.assert_close(one, other)
