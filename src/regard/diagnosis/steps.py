"""The steps of a known attention, as plain formulas, with the mistakes that each step is known for.

A `Reference` is a list of steps. Each step adds a tensor to the values, computed right or with one of its mistakes. So
a mistake is named if the steps with it give the user's numbers, and the right ones do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

#: The values so far, by name: inputs, matrices, and the results of steps. `of_no_keys` is the weight in a row without
#: any visible key: NaN or 0.
Values = SimpleNamespace
Formula = Callable[[Values], Tensor]


@dataclass(frozen=True)
class Matrix:
    """A matrix (out, in) of the user's module, and its bias; `name` says where it was found."""

    name: str
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Step:
    """`right` computes the value `into`; `mistakes` are wrong formulas by their names. `matrix` is the one it needs.

    `others` are steps that are right in its place, each with its `convention` in words. `formula` is what users read.
    With `takes_mask` the step is right in a function that takes a mask, and gets none.
    """

    name: str
    into: str
    right: Formula
    mistakes: Mapping[str, Formula] = field(default_factory=dict)
    matrix: str = ""
    convention: str = ""
    takes_mask: bool = False
    others: tuple[Step, ...] = ()
    formula: str = ""


@dataclass(frozen=True)
class Reference:
    """Steps from the inputs `query`, `key` and `value` to `output`, one list for each order of steps that is right.

    `matrices` are the axes (out, in) of the matrices that it needs, in letters: C, K and V are the widths of query,
    key and value, any other letter has one size in all of them. `scale` is the factor of the scores, None for
    1 / sqrt(width of a head). With `has_heads` the width is divided into heads.
    """

    name: str
    orders: Mapping[str, tuple[Step, ...]]
    matrices: Mapping[str, str] = field(default_factory=dict)
    scale: float | None = None
    has_heads: bool = False

    @property
    def is_attention(self) -> bool:
        """Whether it returns weights times values, alone: then everything else about attention is checked too.

        The values after its steps have a `context`, and no `down`, the output of a feed-forward layer.
        """
        return all(any(step.into == "context" for step in steps) for steps in self.orders.values()) and not any(
            step.into == "down" for steps in self.orders.values() for step in steps
        )


def run(steps: Iterable[Step], values: Values, wrong: Mapping[str, str] | None = None) -> Values:
    """All values after the steps; `wrong` names mistakes by the names of their steps."""
    values = Values(**vars(values))
    for step in steps:
        mistake = None if wrong is None else wrong.get(step.name)
        formula = step.right if mistake is None else step.mistakes[mistake]
        setattr(values, step.into, formula(values))
    return values


@dataclass(frozen=True)
class Mistake:
    """What is said of it, and the wrong formula of each step that has it."""

    text: str
    wrong: Mapping[str, str]


def mistakes_of(steps: Iterable[Step]) -> list[Mistake]:
    """Mistakes of several inputs at once, such as a missing bias of all their projections; then each one of each step.

    Mistakes are one if their texts differ only in the name of the matrix: "the bias of the query is missing", and
    "... of the key ...", are "the bias of each input is missing". They come first: of two that explain the numbers
    equally well the first is named.
    """
    steps = list(steps)
    single = [Mistake(mistake, {step.name: mistake}) for step in steps for mistake in step.mistakes]
    together: dict[str, dict[str, str]] = {}
    for step in steps:
        for mistake in step.mistakes if step.matrix and not step.matrix.endswith("output") else ():
            shared_text = mistake.replace(f"the {step.matrix}", "each input")
            together.setdefault(shared_text, {})[step.name] = mistake
    return [*(Mistake(text, wrong) for text, wrong in together.items() if len(wrong) > 1), *single]


# Parts that references share. Values are (B, H, n, D) inside, with one head where a function has none.


def projection(
    role: str,
    source: str,
    into: str,
    more: Mapping[str, Formula],
    arrange: Callable[[Values, Tensor], Tensor] = lambda x, y: y,
) -> Step:
    """The value `source` times the matrix of a role, with the mistakes of every matrix, and `more`.

    `arrange` gets all values and the product, and divides its width into heads, for example.
    """

    def formula(product: Callable[[Matrix, Tensor], Tensor]) -> Formula:
        return lambda x: arrange(x, product(x.matrices[role], getattr(x, source)))

    mistakes = {
        f"the {role} is not projected": formula(lambda matrix, y: y),
        f"the bias of the {role} is missing": formula(lambda matrix, y: functional.linear(y, matrix.weight)),
        f"the matrix of the {role} is transposed": formula(
            lambda matrix, y: functional.linear(y, matrix.weight.mT, matrix.bias)
        ),
        **more,
    }
    return Step(f"projection of the {role}", into, formula(lambda matrix, y: matrix(y)), mistakes, role)


def in_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, 1, n, H D) -> (B, H, n, D)."""
    return x[:, 0].unflatten(-1, (num_heads, -1)).transpose(1, 2)


def split_by_view(x: Tensor, num_heads: int) -> Tensor:
    """`in_heads` with a mistake, .view without .transpose: a head (B, H, n, D) has numbers of different tokens."""
    B, _, n, width = x.shape
    return x.reshape(B, num_heads, n, width // num_heads)


def joined(x: Tensor) -> Tensor:
    """(B, H, n, D) -> (B, 1, n, H D)."""
    return x.transpose(1, 2).flatten(2)[:, None]


#: Mistakes of a dot product of q and k.
DOT_MISTAKES: dict[str, Formula] = {
    "query and key are swapped": lambda x: x.k @ x.q.mT,
    "the queries are normalized": lambda x: functional.normalize(x.q, dim=-1) @ x.k.mT,
    "the keys are normalized": lambda x: x.q @ functional.normalize(x.k, dim=-1).mT,
    "queries and keys are normalized": lambda x: (
        functional.normalize(x.q, dim=-1) @ functional.normalize(x.k, dim=-1).mT
    ),
    "queries are compared with queries": lambda x: x.q @ x.q.mT,
    "keys are compared with keys": lambda x: x.k @ x.k.mT,
    "queries are compared with values": lambda x: x.q @ x.v.mT,
    "all batch entries have the keys of the first": lambda x: x.q @ x.k[:1].mT,
    "all batch entries have the queries of the first": lambda x: x.q[:1] @ x.k.mT,
    "all heads have the keys of the first": lambda x: x.q @ x.k[:, :1].mT,
    "the scores are distances, not products": lambda x: -torch.cdist(x.q, x.k),
}
DOT = Step("scores", "scores", lambda x: x.q @ x.k.mT, DOT_MISTAKES, formula="scores = q @ k.mT")


def _factor(factor: Callable[[Values], float]) -> Formula:
    """The formula of scores times a number, which may depend on the values so far."""
    return lambda x: x.scores * factor(x)


#: Wrong factors of the scores.
_FACTORS: dict[str, Callable[[Values], float]] = {
    "the scores are not scaled": lambda x: 1.0,
    "the scores are divided by the root of the width of all heads": lambda x: (x.q.shape[-1] * x.q.shape[1]) ** -0.5,
    "the scores are divided by the width in place of its root": lambda x: 1 / x.q.shape[-1],
    "the scores are multiplied by the root of the width": lambda x: x.q.shape[-1] ** 0.5,
    "the scores are divided by the root of the number of heads": lambda x: x.q.shape[1] ** -0.5,
    "the scores are divided by the root of the number of keys": lambda x: x.k.shape[2] ** -0.5,
    "the scores are divided by the number of keys": lambda x: 1 / x.k.shape[2],
    # with one head, 1 / D is "the width in place of its root"; the root and the root of the root are tried there
    "the scores are scaled twice": lambda x: 1 / x.q.shape[-1] if x.q.shape[1] > 1 else x.q.shape[-1] ** -0.75,
    "the scores have the opposite sign": lambda x: -(x.q.shape[-1] ** -0.5),
    "the scores are divided by the root of the width of all heads, twice": lambda x: 1 / (x.q.shape[-1] * x.q.shape[1]),
}
SCALE = Step(
    "scaling",
    "scaled",
    _factor(lambda x: x.q.shape[-1] ** -0.5),
    {mistake: _factor(factor) for mistake, factor in _FACTORS.items()},
    formula="scores / math.sqrt(q.shape[-1]), with the width of a head",
)
#: Luong's scores have no factor.
NO_SCALE = Step(
    "scaling",
    "scaled",
    _factor(lambda x: 1.0),
    {
        "the scores are scaled": _factor(lambda x: x.k.shape[-1] ** -0.5),
        "the scores have the opposite sign": _factor(lambda x: -1.0),
        "the scores are divided by the number of keys": _factor(lambda x: 1 / x.k.shape[2]),
    },
    formula="no factor",
)


def _distances(x: Values) -> Tensor:
    """j - i, (I, J)."""
    I, J = x.scaled.shape[-2:]
    return torch.arange(J) - torch.arange(I)[:, None]


def _newest_first(x: Values, tokens: Tensor) -> Tensor:
    """What each query reads from a cache to which tokens (B, H, J, D) are added in front: (B, H, I, J, D).

    Query i finds token i - j in the place j.
    """
    return tokens[:, :, (-_distances(x)) % tokens.shape[2]]


def _hiding(hidden: Callable[[Values], Tensor]) -> Formula:
    """The formula of scaled scores with -inf where `hidden` is True."""
    return lambda x: x.scaled.masked_fill(hidden(x), -torch.inf)


def _all_ways_of_hiding(mistake: str, hidden: Callable[[Values], Tensor]) -> dict[str, Formula]:
    """A mistake that leaves a query without any key, with each way of hiding keys, because they differ there.

    `hidden` gives the hidden pairs.
    """
    return {
        mistake: _hiding(hidden),
        f"{mistake}, with a large number": lambda x: x.scaled.masked_fill(hidden(x), -1e9),
        f"{mistake}, by a sum with a large number": lambda x: x.scaled - 1e9 * hidden(x),
    }


#: Keys that are hidden where all should be visible, (I, J) or (J,).
_HIDDEN: dict[str, Callable[[Values], Tensor]] = {
    "later keys are hidden": lambda x: _distances(x) > 0,
    "earlier keys are hidden": lambda x: _distances(x) < 0,
    "the mask hides the own token": lambda x: _distances(x) == 0,
    "the last key is hidden": lambda x: torch.arange(x.k.shape[2]) == x.k.shape[2] - 1,
    "the first key is hidden": lambda x: torch.arange(x.k.shape[2]) == 0,
    "scores of 0 and less are hidden": lambda x: x.scaled <= 0,
}
for _size in (2, 3, 4, 8, 16, 32):
    _HIDDEN[f"keys at a distance of {_size} and more are hidden"] = lambda x, n=_size: _distances(x).abs() >= n  # type: ignore[misc]
for _size in (4, 8, 16, 32):
    _HIDDEN[f"keys from number {_size} on are hidden"] = lambda x, n=_size: torch.arange(x.k.shape[2]) >= n  # type: ignore[misc]
ALL_VISIBLE = Step(
    "mask",
    "masked",
    lambda x: x.scaled,
    {mistake: _hiding(hidden) for mistake, hidden in _HIDDEN.items()},
    formula="no mask",
)


def _causal(after: Callable[[Values], Tensor]) -> Step:
    """A causal mask; `after` is how many places a key stands after its query, (I, J)."""
    return Step(
        "mask",
        "masked",
        _hiding(lambda x: after(x) > 0),
        {
            "the causal mask is missing": lambda x: x.scaled,
            "the causal mask is reversed: it hides earlier keys": _hiding(lambda x: after(x) < 0),
            "the causal mask shows the next token": _hiding(lambda x: after(x) > 1),
            **_all_ways_of_hiding("the causal mask hides the token itself", lambda x: after(x) >= 0),
            "the causal mask is added as 0 and 1": lambda x: x.scaled + (after(x) <= 0),
            "the causal mask multiplies the scores": lambda x: x.scaled * (after(x) <= 0),
            **_all_ways_of_hiding("the causal mask shows the hidden keys alone", lambda x: after(x) <= 0),
            "the causal mask is that of the first head alone": lambda x: x.scaled.masked_fill(
                (after(x) > 0) & (torch.arange(x.scaled.shape[1]) == 0)[:, None, None], -torch.inf
            ),
        },
        formula="scores.masked_fill(j > i, -torch.inf), for query i and key j",
    )


def _behind_the_end(x: Values) -> Tensor:
    """How many places a key stands after its query, (I, J), if the last query stands at the last key.

    A query alone stands at the first key: at the last one it would see all keys, as without a mask.
    """
    I, J = x.scaled.shape[-2:]
    return _distances(x) - (J - I if I > 1 else 0)


#: With fewer queries than keys the first query stands at the first key, as in torch, or the last one at the last key.
CAUSAL = replace(
    _causal(_distances),
    others=(replace(_causal(_behind_the_end), convention="the last query is aligned with the last key"),),
)


def _softmax(x: Tensor) -> Tensor:
    """The softmax over the keys."""
    return x.softmax(-1)


def _over_sum(x: Tensor) -> Tensor:
    """Numbers divided by their sum over the keys."""
    return x / x.sum(-1, keepdim=True)


def _exponentials(x: Values) -> Tensor:
    """exp of the masked scores, minus the largest one of the row."""
    return (x.masked - x.masked.amax(-1, keepdim=True)).exp()


SOFTMAX = Step(
    "softmax",
    "weights",
    lambda x: _softmax(x.masked).nan_to_num(x.of_no_keys),
    {
        "large scores overflow: the softmax does not subtract the largest one": lambda x: _over_sum(x.masked.exp()),
        "the softmax is over an axis of one number: all weights are 1": lambda x: torch.ones_like(x.masked),
        "the softmax is over the queries": lambda x: x.masked.softmax(-2),
        "the largest score is that of the keys, and the sum is over the queries": lambda x: (
            _exponentials(x) / _exponentials(x).sum(-2, keepdim=True)
        ),
        "the largest score is that of the queries, and the sum is over the keys": lambda x: _over_sum(
            (x.masked - x.masked.amax(-2, keepdim=True)).exp()
        ),
        "the softmax is over the heads": lambda x: x.masked.softmax(1),
        "the softmax is over the batch": lambda x: x.masked.softmax(0),
        "the softmax is over everything together": lambda x: x.masked.flatten().softmax(0).view_as(x.masked),
        "the softmax is over queries and keys together": lambda x: x.masked.flatten(-2).softmax(-1).view_as(x.masked),
        "sigmoid in place of softmax": lambda x: x.masked.sigmoid(),
        "relu before the softmax": lambda x: _softmax(x.masked.relu()),
        "relu in place of exp": lambda x: x.masked.relu() / x.masked.relu().sum(-1, keepdim=True).clamp(min=1e-9),
        "absolute scores": lambda x: _softmax(x.masked.abs()),
        "the scores are divided by their sum, without exp": lambda x: _over_sum(x.masked),
        "the softmax is missing": lambda x: x.masked,
        "the exponentials are not divided by their sum": lambda x: x.masked.exp(),
        "the softmax is applied twice": lambda x: _softmax(_softmax(x.masked)),
        "the softmax keeps the largest score alone": lambda x: functional.one_hot(
            x.masked.argmax(-1), x.masked.shape[-1]
        ).to(x.masked),
        "log_softmax in place of softmax": lambda x: x.masked.log_softmax(-1),
        "the weights are scaled after the softmax": lambda x: _softmax(x.scores) * x.q.shape[-1] ** -0.5,
        "the mask is applied after the softmax": lambda x: _softmax(x.scaled) * (x.masked == x.scaled),
        "the first key counts twice": lambda x: _over_sum(x.masked.exp() * (1 + (torch.arange(x.k.shape[2]) == 0))),
        "one is added to the sum of exponentials": lambda x: (
            x.masked.exp() / (1 + x.masked.exp().sum(-1, keepdim=True))
        ),
        "the softmax subtracts the largest score of all": lambda x: _over_sum((x.masked - x.masked.max()).exp()),
        "the softmax of base 2": lambda x: _softmax(x.masked * math.log(2)),
        "each query has the weights of the first": lambda x: _softmax(x.masked)[:, :, :1].expand_as(x.masked),
        "all heads have the weights of the first": lambda x: _softmax(x.masked)[:, :1].expand_as(x.masked),
        "all weights are equal": lambda x: torch.full_like(x.masked, 1 / x.masked.shape[-1]),
    },
    formula="scores.softmax(-1), over the keys",
)
CONTEXT_MISTAKES: dict[str, Formula] = {
    "the weights are transposed": lambda x: x.weights.mT @ x.v,
    "the mean of the values, without weights": lambda x: x.v.mean(2, keepdim=True).expand(*x.weights.shape[:3], -1),
    "the values are shifted by one token": lambda x: x.weights @ x.v.roll(1, 2),
    "the values are shifted by one token to the left": lambda x: x.weights @ x.v.roll(-1, 2),
    "the values are in reverse order": lambda x: x.weights @ x.v.flip(2),
    "the cache joins keys and values in different orders": lambda x: (
        x.weights[..., None, :] @ _newest_first(x, x.v)
    ).squeeze(-2),
    "the keys are summed in place of the values": lambda x: x.weights @ x.k,
    "the queries are summed in place of the values": lambda x: x.weights @ x.q,
    "the weighted values are averaged, not summed": lambda x: x.weights @ x.v / x.v.shape[2],
    "the first head is zero": lambda x: _without_heads(x, slice(0, 1)),
    "the last head is zero": lambda x: _without_heads(x, slice(-1, None)),
    "half of the heads are zero": lambda x: _without_heads(x, slice(x.v.shape[1] // 2, None)),
    "all batch entries have the values of the first": lambda x: x.weights @ x.v[:1],
    "all heads have the values of the first": lambda x: x.weights @ x.v[:, :1],
    "the values of all heads are averaged": lambda x: x.weights @ x.v.mean(1, keepdim=True),
    "the mean of the values is subtracted": lambda x: x.weights @ (x.v - x.v.mean(2, keepdim=True)),
    "the query is added to the output": lambda x: x.weights @ x.v + x.q,
    "the values are added to the output": lambda x: x.weights @ x.v + x.v,
    "the output is normalized": lambda x: functional.normalize(x.weights @ x.v, dim=-1),
}
CONTEXT = Step("context", "context", lambda x: x.weights @ x.v, CONTEXT_MISTAKES, formula="weights @ v")


def _without_heads(x: Values, heads: slice) -> Tensor:
    """The context with zeros in these heads."""
    kept = torch.ones(x.v.shape[1], 1, 1, dtype=x.v.dtype)
    kept[heads] = 0
    return (x.weights @ x.v) * kept


def residual(name: str, before: str, added: str, into: str) -> Step:
    """The residual connection before + added, of two values by their names, as the value `into`."""
    return Step(
        name,
        into,
        lambda x: getattr(x, before) + getattr(x, added),
        {
            f"the {name} is missing": lambda x: getattr(x, added),
            f"the {name} is added twice": lambda x: 2 * getattr(x, before) + getattr(x, added),
            f"the {name} is averaged": lambda x: (getattr(x, before) + getattr(x, added)) / 2,
            f"the {name} is subtracted": lambda x: getattr(x, before) - getattr(x, added),
            f"only the {name} is returned": lambda x: getattr(x, before),
        },
    )


def norm(role: str, source: str, into: str) -> Step:
    """Layer norm of the last axis; its weight and bias are the matrix `role`.

    Some divide by torch's `std` instead, as the Annotated Transformer does.
    """
    biased = _norm(role, source, into, lambda y, axes: y.square().mean(axes, keepdim=True) + 1e-5)
    unbiased = _norm(role, source, into, lambda y, axes: y.var(axes, keepdim=True))
    return replace(biased, others=(replace(unbiased, convention="unbiased deviations"),))


def _norm(role: str, source: str, into: str, variance: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Step:
    """A layer norm of the value `source`, with the weight of this role, which divides by the root of a variance.

    Its result is the value `into`. `variance` gets centered numbers and the axes to average over, and keeps these axes
    with size 1.
    """

    def scaled(x: Values, y: Tensor) -> Tensor:
        """Normalized numbers times the weight, plus the bias if there is one."""
        matrix = x.matrices[role]
        return y * matrix.weight + (0 if matrix.bias is None else matrix.bias)

    def normed(x: Values, axes: tuple[int, ...] = (-1,), power: float = 0.5) -> Tensor:
        y = getattr(x, source)
        y = y - y.mean(axes, keepdim=True)
        return scaled(x, y / variance(y, axes) ** power)

    name = f"{role.replace('_', ' ')}"
    return Step(
        name,
        into,
        normed,
        {
            f"the {name} is missing": lambda x: getattr(x, source),
            f"the {name} is over the tokens": lambda x: normed(x, (-2,)),
            f"the {name} is over tokens and channels": lambda x: normed(x, (-2, -1)),
            f"the {name} divides by the variance in place of its root": lambda x: normed(x, power=1.0),
            f"the {name} does not subtract the mean": lambda x: scaled(
                x, getattr(x, source) * (getattr(x, source).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            ),
        },
        role,
    )
