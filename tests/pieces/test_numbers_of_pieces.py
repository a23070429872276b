"""Numbers that no piece can compute with: every factory refuses them in words, and a call never gets NaN from them."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import regard as rg

ROOMS = ("scores", "biases", "normalizers", "encodings", "transitions", "composites")
#: Right values of the arguments without a default.
SIZES = {"num_heads": 4, "head_dim": 8, "factor": 2.0, "trained_length": 16, "share": 0.5, "extension": 2.0}
SIZES |= {"coordinates": torch.arange(6)[:, None], "axes": [0, 0, 0, 0], "rates": [1.0, 0.5, 0.2, 0.1], "reach": 2}
SIZES |= {"parts": [rg.Attention()], "factors": [1.0, 1.0], "query_dim": 8, "key_dim": 8, "k": 2, "sections": [2, 2]}
#: What no factor, base, temperature or decay can be: in float32 arithmetic 1e39 is infinite too.
NUMBERS = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf, "1e39": 1e39}
HUGE = {"10^20": 10**20, "10^400": 10**400, "-10^20": -(10**20)}
#: Arguments that may be tensors are read by the call: a learned number has no value to refuse when it is made.
X = torch.randn(2, 4, 6, 8)


def factories():
    """Each factory of a piece with each of its arguments that is a number."""
    for room in ROOMS:
        for name in getattr(rg, room).__all__:
            made = getattr(getattr(rg, room), name)
            if not isinstance(made, type) or inspect.isabstract(made):
                continue
            parameters = inspect.signature(made).parameters
            for argument, parameter in parameters.items():
                if {"Number", "Positive", "Constant", "PositiveConstant", "float"} & set(
                    str(parameter.annotation).replace("[", " ").split()
                ):
                    yield made, argument


FACTORIES = list(factories())


def call(made, argument, value):
    parameters = inspect.signature(made).parameters
    needed = {n: SIZES[n] for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
        return made(value)
    return made(**needed | {argument: value})


def test_the_factories_with_numbers_are_found():
    assert len(FACTORIES) >= 25
    assert {made.__name__ for made, _ in FACTORIES} >= {"Dot", "Softcap", "Softmax", "RoPE", "Decay", "ConstantFactors"}


@pytest.mark.parametrize(("made", "argument"), FACTORIES, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("number", [*NUMBERS, *HUGE])
def test_a_number_that_is_not_finite_is_refused(made, argument, number):
    with pytest.raises(rg.RegardError, match=rf"{made.__name__}.*{argument}"):
        call(made, argument, (NUMBERS | HUGE)[number])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.RoPE(8, base=0.0), r"RoPE\(base=0.0\): base must be a finite number above 0, got float"),
        (lambda: rg.encodings.Sinusoidal(base=-2), r"Sinusoidal\(base=-2\): base must be a finite number above 0"),
        (lambda: rg.encodings.LongRoPEScaling([1.0, 0.0]), r"factors\[1\] must be a finite number above 0, got 0.0"),
        (
            lambda: rg.encodings.LongRoPEScaling([1.0], trained_length=1),
            r"trained_length must be an integer of at leas",
        ),
        (lambda: rg.biases.Softcap(0), r"Softcap\(cap=0\): cap must be a finite number above 0"),
        (lambda: rg.encodings.QKNorm(8, eps=-1.0), r"QKNorm\(eps=-1.0\): eps must be a finite number of at least 0"),
        (lambda: rg.Dot(10**20), r"Dot\(scale=10+\): scale must be a finite number or .*got a number beyond 64 bits"),
        (lambda: rg.encodings.AxialRoPE(torch.arange(6)[:, None], [0], [math.nan]), r"a list of finite numbers"),
        (lambda: rg.biases.T5Bias(10**15), r"T5Bias\(num_heads=10+\): torch cannot make a tensor of such a size"),
        (lambda: rg.nn.MultiHeadAttention(10**12, 1), r"MultiHeadAttention\(embed_dim=10+\): torch cannot make"),
        (lambda: rg.attend(X, X, X, scale=math.nan), "finite number"),
        (lambda: rg.attend(X, X, X, scale=1e39), "finite number"),
    ],
)
def test_the_error_names_the_rule(make, words):
    with pytest.raises(rg.RegardError, match=words):
        make()


@pytest.mark.parametrize("number", [2, 2.5, torch.tensor(2.0), torch.tensor(2.0, requires_grad=True)])
def test_right_numbers_are_taken(number):
    for piece in ({"score": rg.Dot(number)}, {"bias": rg.biases.Softcap(number)}):
        assert rg.Attention(**piece)(X, X, X).output.isfinite().all()
