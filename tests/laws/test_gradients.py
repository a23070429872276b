"""Gradients reach every tensor that a piece depends on, belong to the forward pass, or are refused in words."""

from __future__ import annotations

import collections
import functools
import sys

import pytest
import torch
from torch.nn import functional as F

import regard as rg
from kernels import needs_kernel
from slopes import CLOSE, inputs, learned

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own, in forward mode
]


class PairBias(rg.biases.AdditiveBias):
    """A number for each head and pair, held as a plain tensor."""

    def __init__(self, table):
        self.table = table

    def term(self, grid, rows, cols):
        return self.table[grid.h, grid.i, grid.j]


class Tempered(rg.scores.Score):
    """Dot products over a learned temperature, which lies in a list in a dictionary."""

    def __init__(self, temperature):
        self.settings = {"temperatures": [temperature]}

    def check(self, sizes, key_dim):
        """Any size is right."""

    def tile(self, query, key, grid):
        return query @ key.mT / self.settings["temperatures"][0]


class Sharpened(rg.biases.Bias):
    """A bias that keeps its tensor in another piece."""

    def __init__(self, inner):
        self.inner = inner

    def transform(self, score, grid, rows, cols):
        return self.inner.transform(score, grid, rows, cols) * 0.5


def by_hand(q, k, v, change):
    """Causal attention in plain operations."""
    n = q.shape[2]
    scores = change(q @ k.mT)
    return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ v


def pieces(name: str, tensor: torch.Tensor) -> rg.Attention:
    mask = rg.causal()

    class Closed(rg.biases.AdditiveBias):
        def term(self, grid, rows, cols):
            return tensor[grid.h, grid.i, grid.j]

    class OfClass(rg.biases.AdditiveBias):
        table = tensor

        def term(self, grid, rows, cols):
            return self.table[grid.h, grid.i, grid.j]

    return {
        "pair bias": lambda: rg.Attention(bias=PairBias(tensor), mask=mask),
        "two biases": lambda: rg.Attention(bias=(rg.ALiBi(2), Sharpened(PairBias(tensor))), mask=mask),
        "closed over": lambda: rg.Attention(bias=Closed(), mask=mask),
        "of the class": lambda: rg.Attention(bias=OfClass(), mask=mask),
        "temperature of a score": lambda: rg.Attention(Tempered(tensor), mask=mask),
        "scale": lambda: rg.Attention(rg.Dot(scale=tensor), mask=mask),
        "factor": lambda: rg.Attention(rg.scores.Cosine(tensor), mask=mask),
        "temperature": lambda: rg.Attention(
            rg.Dot(scale=1.0), normalizer=rg.normalizers.Softmax(temperature=tensor), mask=mask
        ),
        "cap": lambda: rg.Attention(rg.Dot(scale=1.0), bias=rg.biases.Softcap(tensor), mask=mask),
    }[name]()


def expected(name: str, tensor: torch.Tensor, q, k, v) -> torch.Tensor:
    distance = (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs()
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)[:, None, None]
    scale = q.shape[-1] ** -0.5
    change = {
        "pair bias": lambda s: s * scale + tensor,
        "two biases": lambda s: (s * scale - slopes * distance + tensor) * 0.5,
        "closed over": lambda s: s * scale + tensor,
        "of the class": lambda s: s * scale + tensor,
        "temperature of a score": lambda s: s / tensor,
        "scale": lambda s: s * tensor,
        "factor": lambda s: s * tensor,
        "temperature": lambda s: s / tensor,
        "cap": lambda s: (s / tensor).tanh() * tensor,
    }[name]
    if name == "factor":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return by_hand(q, k, v, change)


HELD = {
    "pair bias": (2, 9, 9),
    "two biases": (2, 9, 9),
    "closed over": (2, 9, 9),
    "of the class": (2, 9, 9),
    "temperature of a score": (),
    "scale": (2, 1, 1),
    "factor": (2, 1, 1),
    "temperature": (),
    "cap": (),
}


@pytest.mark.parametrize("engine", ["auto", "dense", "blocked"])
@pytest.mark.parametrize("name", HELD)
def test_gradients_reach_tensors_of_pieces_that_are_no_modules(name, engine):
    tensor, leaves = learned(*HELD[name]), inputs()
    attention = pieces(name, tensor)
    output = attention(*leaves, engine=engine).output
    by_definition = expected(name, tensor, *leaves)
    torch.testing.assert_close(output, by_definition, **CLOSE)
    along = torch.randn_like(output)
    mine, theirs = (torch.autograd.grad(o, (tensor, *leaves), along) for o in (output, by_definition))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


FUSED = ["fused", pytest.param("kernel", marks=needs_kernel)]


@pytest.mark.parametrize("name", ["scale", "factor"])
@pytest.mark.parametrize("engine", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_of_the_score_gets_its_gradient_from_fused_kernels(name, engine, dtype):
    tensor, leaves = learned(*HELD[name]), [x.detach().to(dtype).requires_grad_() for x in inputs()]
    output = pieces(name, tensor)(*leaves, engine=engine).output
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    by_definition, along = expected(name, tensor, *doubles), torch.randn_like(output)
    mine = torch.autograd.grad(output, (tensor, *leaves), along)
    theirs = torch.autograd.grad(by_definition, (tensor, *doubles), along.double())
    unit = torch.finfo(dtype).eps
    for one, other in zip((output, *mine), (by_definition, *theirs), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2 * unit + 1e-5, atol=20 * unit)


@pytest.mark.parametrize("name", [name for name in HELD if name not in ("scale", "factor")])
@pytest.mark.parametrize("engine", FUSED)
def test_an_engine_refuses_what_would_not_get_its_gradient(name, engine):
    tensor, leaves = learned(*HELD[name]).float(), (x.float() for x in inputs())
    with pytest.raises(rg.RegardError, match=f"the {engine} engine cannot run"):
        pieces(name, tensor)(*leaves, engine=engine)


class Read(rg.biases.AdditiveBias):
    """A number for each head, which `self.read()` gives."""

    def term(self, grid, rows, cols):
        return self.read()[grid.h]


class Slotted:
    __slots__ = ("__numbers",)

    def __init__(self, tensor):
        self.__numbers = tensor

    def __call__(self):
        return self.__numbers


class Slots(Read):
    def __init__(self, tensor):
        self.read = Slotted(tensor)


class Default(Read):
    def __init__(self, tensor):
        self.lists = collections.defaultdict(list, first=[tensor])

    def read(self):
        return self.lists["first"][0]


class Queue(Read):
    def __init__(self, tensor):
        self.queue = collections.deque([tensor], maxlen=1)

    def read(self):
        return self.queue[0]


class Many(Read):
    def __init__(self, tensor):
        self.numbers, self.tensors = dict.fromkeys(range(1000)), [{tensor}]

    def read(self):
        return next(iter(self.tensors[0]))


def closed_over(tensor):
    """Pieces that reach a tensor through what Python looks up in a class."""

    class Property(Read):
        @property
        def numbers(self):
            return tensor

        def read(self):
            return self.numbers

    class Static(Read):
        @staticmethod
        def read():
            return tensor

    class OfClass(Read):
        kept = (tensor,)

        @classmethod
        def read(cls):
            return cls.kept[0]

    class Item(Read):
        def __getitem__(self, index):
            return tensor

        def read(self):
            return self[0]

    @functools.cache
    def numbers():
        return tensor * 1

    class Cached(Read):
        def read(self):
            return numbers()

    class Again(Static):
        def read(self):
            return -super().read()

    return Property, Static, OfClass, Item, Cached, Again


HOLDERS = (Slots, Default, Queue, Many, "Property", "Static", "OfClass", "Item", "Cached", "Again")


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_is_found_wherever_python_lets_a_piece_keep_it(holder, is_learned):
    tensor, leaves, original = learned(2), inputs(), None
    tensor.requires_grad_(is_learned)
    original = tensor.detach().clone().requires_grad_()
    if isinstance(holder, str):
        piece = next(kind for kind in closed_over(tensor) if kind.__name__ == holder)()
    else:
        piece = holder(tensor)
    sign = -1 if holder == "Again" else 1
    attention = rg.Attention(bias=(piece, rg.biases.Softcap(1.0)))
    if holder == "Again" and is_learned:  # what a class overrides cannot be exchanged
        with pytest.raises(rg.RegardError, match="none of its attributes"):
            attention(*leaves, engine="blocked")
        return
    seen = attention(*leaves, engine="blocked")
    q, k, v = leaves
    weights = (q @ k.mT * q.shape[-1] ** -0.5 + sign * original[:, None, None]).tanh().softmax(-1)
    torch.testing.assert_close(seen.output, weights @ v, **CLOSE)
    if holder == "Again":
        return
    with torch.no_grad():
        tensor.mul_(-3)
    torch.testing.assert_close(seen.weights.dense(), weights.detach(), **CLOSE)
    wanted = (tensor, *leaves) if is_learned else leaves
    mine = torch.autograd.grad(seen.output.sum(), wanted)
    theirs = torch.autograd.grad((weights @ v).sum(), (original, *leaves))
    for one, other in zip(mine, theirs[-len(wanted) :], strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


OUTSIDE = {"temperature": learned()}


class Hiding(rg.scores.Score):
    """A temperature that no attribute leads to."""

    def check(self, sizes, key_dim):
        """Any size is right."""

    def tile(self, query, key, grid):
        return query @ key.mT / OUTSIDE["temperature"]


def test_a_tensor_that_cannot_be_found_is_refused_by_engines_with_a_backward_pass_of_their_own(monkeypatch):
    attention, leaves = rg.Attention(Hiding(), mask=rg.causal()), inputs()
    with pytest.raises(rg.RegardError, match="requires gradients and is none of its attributes"):
        attention(*leaves, engine="blocked")
    output = attention(*leaves).output  # dense: torch's own operations
    by_definition = by_hand(*leaves, lambda s: s / OUTSIDE["temperature"])
    mine, theirs = (torch.autograd.grad(o.sum(), OUTSIDE["temperature"]) for o in (output, by_definition))
    torch.testing.assert_close(mine, theirs, **CLOSE)
    monkeypatch.setattr(sys.modules["regard.engine.plan"], "DENSE_BYTES", 0)
    with pytest.raises(rg.RegardError, match="none of its attributes"):
        attention(*leaves)
    with torch.no_grad():
        assert attention(*leaves, engine="blocked").output.shape == output.shape


def test_a_learned_sink_is_no_number():
    with pytest.raises(rg.RegardError, match="LearnedSink"):
        rg.normalizers.Softmax(sink=torch.tensor(0.0, requires_grad=True))
