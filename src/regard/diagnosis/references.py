"""The references of `regard.check(..., like=...)`: attention functions and blocks of the lectures, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from regard.diagnosis.steps import (
    ALL_VISIBLE,
    CAUSAL,
    CONTEXT,
    DOT,
    DOT_MISTAKES,
    NO_SCALE,
    SCALE,
    SOFTMAX,
    Formula,
    Reference,
    Step,
    Values,
    in_heads,
    joined,
    norm,
    projection,
    residual,
    split_by_view,
)


def _of_heads(what: str, into: str) -> Step:
    """The input `what`, "key" or "value", as the value `into`, k or v, in as many heads as the queries have.

    Each of fewer heads is repeated for query heads in a row.
    """

    def repeats(x: Values) -> int:
        return x.query.shape[1] // max(1, getattr(x, what).shape[1])

    return Step(
        f"{what}s",
        into,
        lambda x: getattr(x, what).repeat_interleave(repeats(x), 1),
        {
            f"the heads of the {what}s are repeated one after the other": lambda x: getattr(x, what).repeat(
                1, repeats(x), 1, 1
            )
        },
    )


_INPUTS = (Step("queries", "q", lambda x: x.query), _of_heads("key", "k"), _of_heads("value", "v"))
_LAST = Step("output", "output", lambda x: x.context)
_SCORED = (ALL_VISIBLE, SOFTMAX, CONTEXT, _LAST)
_CAUSAL = (CAUSAL, SOFTMAX, CONTEXT, _LAST)


# Additive scores: v . tanh(W q + U k)


def _pairs(x: Values) -> tuple[Tensor, Tensor]:
    """What queries and keys add to the energies, (B, 1, I, 1, A) and (B, 1, 1, J, A)."""
    return x.from_query[:, :, :, None], x.from_key[:, :, None]


def _sum(x: Values) -> Tensor:
    """The sum for each pair, (B, 1, I, J, A)."""
    query, key = _pairs(x)
    return query + key


_SUM_MISTAKES: dict[str, Formula] = {
    "the query is not used": lambda x: torch.zeros_like(_sum(x)) + _pairs(x)[1],
    "the keys are not used": lambda x: torch.zeros_like(_sum(x)) + _pairs(x)[0],
    "a product in place of the sum": lambda x: _pairs(x)[0] * _pairs(x)[1],
    "a difference in place of the sum": lambda x: _pairs(x)[0] - _pairs(x)[1],
    "the keys are added twice": lambda x: torch.zeros_like(_sum(x)) + 2 * _pairs(x)[1],
    "the keys stand in place of the query too": lambda x: x.matrices["query"](x.key)[:, :, None] + _pairs(x)[1],
    "all batch entries have the query of the first": lambda x: _pairs(x)[0][:1] + _pairs(x)[1],
    "all batch entries have the keys of the first": lambda x: _pairs(x)[0] + _pairs(x)[1][:1],
}


_TANH = Step(
    "tanh",
    "energies",
    lambda x: x.sum.tanh(),
    {
        "tanh is missing": lambda x: x.sum,
        "relu in place of tanh": lambda x: x.sum.relu(),
        "sigmoid in place of tanh": lambda x: x.sum.sigmoid(),
        "gelu in place of tanh": lambda x: functional.gelu(x.sum),
        "leaky relu in place of tanh": lambda x: functional.leaky_relu(x.sum),
        "tanh is applied twice": lambda x: x.sum.tanh().tanh(),
        "tanh of each summand in place of tanh of the sum": lambda x: _pairs(x)[0].tanh() + _pairs(x)[1].tanh(),
        "softmax in place of tanh": lambda x: x.sum.softmax(-1),
    },
    formula="tanh(W q + U k)",
)
_SCORE = Step(
    "scores",
    "scores",
    lambda x: x.matrices["score"](x.energies)[..., 0],
    {
        "the vector of the scores is missing: the energies are summed": lambda x: x.energies.sum(-1),
        "the vector of the scores is missing: the energies are averaged": lambda x: x.energies.mean(-1),
        "tanh of the scores": lambda x: x.matrices["score"](x.energies)[..., 0].tanh(),
    },
    "score",
    formula="v . tanh(W q + U k)",
)
_ADDITIVE_CONTEXT = replace(
    CONTEXT,
    mistakes={
        "the projected keys are summed in place of the values": lambda x: x.weights @ x.from_key,
        **CONTEXT.mistakes,
    },
)


def _added(role: str) -> Step:
    """The projection of the query or the key for additive scores, `from_query` or `from_key`, (B, 1, n, A)."""
    tanh: Formula = lambda x: x.matrices[role](getattr(x, role)).tanh()  # noqa: E731
    return projection(role, role, f"from_{role}", {f"tanh of the projected {role}": tanh})


_ADDITIVE = (
    *_INPUTS,
    _added("query"),
    _added("key"),
    Step("sum", "sum", _sum, _SUM_MISTAKES),
    _TANH,
    _SCORE,
    NO_SCALE,
    ALL_VISIBLE,
    SOFTMAX,
    _ADDITIVE_CONTEXT,
    _LAST,
)


# Luong's general score: q . W k


def _general(of: str) -> tuple[Step, ...]:
    """The steps of Luong's general score, with the matrix applied to `of`: the keys or the queries."""
    step = Step(
        "projection",
        of[0],  # the projected keys replace k, or the queries q
        lambda x: x.matrices["general"](getattr(x, of)),
        {
            "the matrix is missing": lambda x: getattr(x, of),
            "the matrix is transposed": lambda x: functional.linear(getattr(x, of), x.matrices["general"].weight.mT),
            "tanh of the projection": lambda x: x.matrices["general"](getattr(x, of)).tanh(),
        },
        "general",
    )
    projected_sum: Formula = lambda x: x.weights @ x.matrices["general"](x.key)  # noqa: E731
    context = replace(
        CONTEXT, mistakes={"the projected keys are summed in place of the values": projected_sum, **CONTEXT.mistakes}
    )
    scores = replace(DOT, mistakes={**DOT_MISTAKES, "tanh of the scores": lambda x: (x.q @ x.k.mT).tanh()})
    return *_INPUTS, step, scores, NO_SCALE, ALL_VISIBLE, SOFTMAX, context, _LAST


# Heads


def _in_heads(role: str, source: str, into: str, others: Iterable[str]) -> Step:
    """The projection of the value `source` in heads (B, H, n, D), as the value `into`.

    `role` is that of its matrix, such as "query". The values `others` may be taken by mistake in place of `source`.
    """
    more: dict[str, Formula] = {
        f"the heads of the {role} are split by .view without .transpose": lambda x: split_by_view(
            x.matrices[role](getattr(x, source)), x.num_heads
        )
    }
    for other in others:
        more[f"the {role} is projected by the matrix of the {other}"] = lambda x, other=other: in_heads(  # type: ignore[misc]
            x.matrices[other](getattr(x, source)), x.num_heads
        )
    return projection(role, source, into, more, lambda x, y: in_heads(y, x.num_heads))


def _multi_head(
    mask: Step, cross: bool = False, prefix: str = "", source: str = "query", memory: str = "key"
) -> tuple[Step, ...]:
    """The steps of multi-head attention; `source` and `memory` are the names of the inputs of queries and keys.

    `mask` is the step of the mask. With `cross` the memory gives the values too. `prefix` begins the roles of the
    matrices, "cross_" in a decoder. The steps give q, k and v in heads (B, H, n, D), and `output` (B, 1, I, C).
    """
    inputs = (source, memory, memory if cross or source == memory else "value")
    *of_inputs, output = (f"{prefix}{role}" for role in ("query", "key", "value", "output"))
    projections = [
        _in_heads(role, given, role.removeprefix(prefix)[0], [other for other in of_inputs if other != role])
        for role, given in zip(of_inputs, inputs, strict=True)
    ]
    join = Step(
        "join of the heads",
        "joined",
        lambda x: joined(x.context),
        {
            "the heads are joined by .view without .transpose": lambda x: x.context.reshape(joined(x.context).shape),
            "the heads are joined in reverse order": lambda x: joined(x.context.flip(1)),
            "channels of all heads alternate": lambda x: x.context.permute(0, 2, 3, 1).flatten(2)[:, None],
            "the mean of the heads is repeated": lambda x: joined(x.context.mean(1, keepdim=True).expand_as(x.context)),
        },
    )
    last = projection(
        output,
        "joined",
        "output",
        {
            "the output is projected twice": lambda x: x.matrices[output](x.matrices[output](x.joined)),
            "the input is added to the output": lambda x: x.matrices[output](x.joined) + getattr(x, source),
        },
    )
    return *projections, DOT, SCALE, mask, SOFTMAX, CONTEXT, join, last


_THREE = {"query": "D C", "key": "D K", "value": "E V"}
_FOUR = {"query": "D C", "key": "D K", "value": "D V", "output": "C D"}


# Blocks

_Steps = tuple[Step, ...]
_ORDINALS = ("first", "second", "third")
_ACTIVATION = Step(
    "activation",
    "active",
    lambda x: x.wide.relu(),
    {
        "the activation is missing": lambda x: x.wide,
        "tanh as activation": lambda x: x.wide.tanh(),
        "sigmoid as activation": lambda x: x.wide.sigmoid(),
    },
    convention="relu",
)
_ACTIVATION = replace(
    _ACTIVATION,
    others=(
        replace(_ACTIVATION, right=lambda x: functional.gelu(x.wide), convention="gelu"),
        replace(_ACTIVATION, right=lambda x: functional.gelu(x.wide, approximate="tanh"), convention="gelu, by tanh"),
        replace(_ACTIVATION, right=lambda x: functional.silu(x.wide), convention="silu"),
    ),
)


def _feed_forward(source: str) -> tuple[Step, ...]:
    """The feed-forward layer of a block, which reads the value `source` and gives `down`."""
    return (
        Step(
            "feed-forward, up",
            "wide",
            lambda x: x.matrices["up"](getattr(x, source)),
            {
                "the feed-forward layer sees the mean of the tokens": lambda x: x.matrices["up"](
                    getattr(x, source).mean(2, keepdim=True).expand_as(getattr(x, source))
                ),
            },
            "up",
        ),
        _ACTIVATION,
        Step(
            "feed-forward, down",
            "down",
            lambda x: x.matrices["down"](x.active),
            {
                "the feed-forward layer is activated again": lambda x: x.matrices["down"](x.active).relu(),
                "the feed-forward layer is missing": lambda x: getattr(x, source),
            },
            "down",
        ),
    )


def _attended(mask: Step, source: str, memory: str, prefix: str = "") -> _Steps:
    """The attention of a block, from `source` to `memory`; its output is `attended`.

    The names of its steps have the prefix, because a mistake is found by the name of its step, and a decoder has two
    attentions.
    """
    steps = _multi_head(mask, True, prefix, source, memory)
    named = [step if step.matrix else replace(step, name=f"{prefix.replace('_', ' ')}{step.name}") for step in steps]
    return (*named[:-1], replace(named[-1], into="attended"))


def _block(is_pre: bool, parts: Mapping[str, Callable[[str], _Steps]]) -> _Steps:
    """The steps of a block, with norms before its parts (`is_pre`), or after the residual sums.

    Each part is a function that takes the name of the value that it reads. The last value is `output`.
    """
    steps: list[Step] = []
    before = "query"
    for number, (name, part) in enumerate(parts.items()):
        role, after = f"{_ORDINALS[number]}_norm", f"after_{number}"
        if is_pre:
            steps += [norm(role, before, f"normed_{number}"), *part(f"normed_{number}")]
        else:
            steps += part(before)
        steps.append(residual(f"residual connection of the {name}", before, steps[-1].into, after))
        if not is_pre:
            steps.append(norm(role, after, f"normed_{number}"))
        before = steps[-1].into
    last = steps.pop()
    return (*steps, replace(last, into="output", others=tuple(replace(x, into="output") for x in last.others)))


def _blocks(mask: Step, has_memory: bool = False) -> dict[str, _Steps]:
    """The steps of a block in both orders; one with a memory (a decoder) attends to the input `key` too."""
    parts = {
        "attention": lambda source: _attended(mask, source, source),
        **({"cross-attention": lambda source: _attended(ALL_VISIBLE, source, "key", "cross_")} if has_memory else {}),
        "feed-forward layer": _feed_forward,
    }
    return {"norms before": _block(True, parts), "norms after": _block(False, parts)}


#: A decoder may get its causal mask as an argument.
_CAUSAL_OR_GIVEN = replace(
    CAUSAL,
    others=(
        *CAUSAL.others,
        replace(ALL_VISIBLE, convention="without the mask that it takes", takes_mask=True),
    ),
)
_OF_BLOCK = {"query": "D C", "key": "D C", "value": "D C", "output": "C D", "up": "F C", "down": "C F"}
_OF_BLOCK |= {"first_norm": "C", "second_norm": "C"}
_OF_DECODER = _OF_BLOCK | {"third_norm": "C"}
_OF_DECODER |= {"cross_query": "D C", "cross_key": "D C", "cross_value": "D C", "cross_output": "C D"}


# Positions


def _angles(x: Values, base: float = 10_000.0, first: int = 0, step: float = 2.0) -> Tensor:
    """The angle of each token for each pair of channels, (n, D / 2): position times base^(-step m / D) for pair m.

    `first` is the first position. Other arguments than the defaults are mistakes.
    """
    n, width = x.query.shape[2:]
    rates = base ** (-torch.arange(width // 2, dtype=torch.float64) * step / width)
    return (torch.arange(n, dtype=torch.float64) + first)[:, None] * rates


#: Ways to join the channels of two tensors (..., D / 2): in turns, or one after the other, (..., D).
_ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "channels in pairs": lambda first, second: torch.stack((first, second), -1).flatten(-2),
    "channels in halves": lambda first, second: torch.cat((first, second), -1),
}
_WRONG_ANGLES: dict[str, Formula] = {
    "the first position is 1": lambda x: _angles(x, first=1),
    "the base is 1,000": lambda x: _angles(x, 1_000.0),
    "the base is 100,000": lambda x: _angles(x, 100_000.0),
    "the exponent of the angles is i / width in place of 2 i / width": lambda x: _angles(x, step=1.0),
    "the exponent of the angles is 4 i / width in place of 2 i / width": lambda x: _angles(x, step=4.0),
    "the angles are multiplied, not divided, by the rates": lambda x: _angles(x, 1e-4),
    "all channels have the same angle": lambda x: _angles(x, 1.0),
}
_ANGLES = Step("angles", "angles", _angles, _WRONG_ANGLES)


def _encoding(order: str) -> Step:
    """The sines and cosines of the angles, (n, D), with the channels in an order of `_ORDERS`."""
    arrange = _ORDERS[order]
    return Step(
        "sines and cosines",
        "encoding",
        lambda x: arrange(x.angles.sin(), x.angles.cos()),
        {
            "sine and cosine are swapped": lambda x: arrange(x.angles.cos(), x.angles.sin()),
            "there are sines alone": lambda x: arrange(x.angles.sin(), x.angles.sin()),
            "there are cosines alone": lambda x: arrange(x.angles.cos(), x.angles.cos()),
        },
        convention=order,
    )


def _added_positions(factor: Callable[[Values], float]) -> Step:
    """The sum of the positions (n, D) and of the input times a factor, which depends on its width."""
    return Step(
        "sum with the positions",
        "output",
        lambda x: factor(x) * x.query + x.encoding,
        {
            "the input is not added": lambda x: x.encoding.expand_as(x.query),
            "the positions are multiplied, not added": lambda x: factor(x) * x.query * x.encoding,
            "all tokens get the first position": lambda x: factor(x) * x.query + x.encoding[:1],
            "the positions are not added": lambda x: factor(x) * x.query,
            "the positions are in reverse order": lambda x: factor(x) * x.query + x.encoding.flip(0),
            "batch entries are counted in place of tokens": lambda x: (
                factor(x) * x.query + x.encoding[: x.query.shape[0], None, None]
            ),
        },
    )


_SCALED_INPUT = replace(
    _added_positions(lambda x: x.query.shape[-1] ** 0.5), convention="the input times the root of the width"
)
_SUM_OF_POSITIONS = replace(_added_positions(lambda x: 1.0), others=(_SCALED_INPUT,))
_LEARNED = Step(
    "positions",
    "encoding",
    lambda x: x.matrices["positions"].weight[: x.query.shape[2]],
    {"the first position is 1": lambda x: x.matrices["positions"].weight[1 : x.query.shape[2] + 1]},
    "positions",
)


def _rotation(order: str, sign: int) -> Step:
    """RoPE: pairs of channels are rotated by the angles, backwards if `sign` is -1.

    A pair are neighbors, if `order` is "channels in pairs", or else channels of the two halves.
    """

    def halves(x: Values) -> tuple[Tensor, Tensor]:
        if order == "channels in pairs":
            return x.query[..., 0::2], x.query[..., 1::2]
        first, second = x.query.chunk(2, -1)
        return first, second

    def rotated(x: Values, plus: int = 1, minus: int = 1) -> Tensor:
        """The rotated input; `plus` and `minus` are factors of the two sines, 1 in a rotation."""
        (a, b), cos, sin = halves(x), x.angles.cos(), sign * x.angles.sin()
        return _ORDERS[order](a * cos - minus * b * sin, b * cos + plus * a * sin)

    return Step(
        "rotation",
        "output",
        rotated,
        {
            "no sine has a minus: it is no rotation": lambda x: rotated(x, minus=-1),
            "both sines have a minus: it is no rotation": lambda x: rotated(x, plus=-1),
            "the cosine alone": lambda x: rotated(x, 0, 0),
            "the input is returned as it is": lambda x: x.query,
            "the positions are added, not rotated": lambda x: x.query + _ORDERS[order](x.angles.sin(), x.angles.cos()),
        },
        convention=f"{order}{', backwards' * (sign < 0)}",
    )


def _either(*steps: Step) -> Step:
    """The first step; the others are right too."""
    return replace(steps[0], others=steps[1:])


REFERENCES = {
    reference.name: reference
    for reference in (
        Reference("scaled_dot_product", {"": (*_INPUTS, DOT, SCALE, *_SCORED)}),
        Reference("causal_dot_product", {"": (*_INPUTS, DOT, SCALE, *_CAUSAL)}),
        Reference("luong_dot", {"": (*_INPUTS, DOT, NO_SCALE, *_SCORED)}, scale=1.0),
        Reference(
            "luong_general",
            {"matrix of the keys": _general("key"), "matrix of the queries": _general("query")},
            {"general": "A B"},
            scale=1.0,
        ),
        Reference("luong_concat", {"": _ADDITIVE}, {"query": "A C", "key": "A K", "score": "1 A"}, scale=1.0),
        Reference("bahdanau", {"": _ADDITIVE}, {"query": "A C", "key": "A K", "score": "1 A"}, scale=1.0),
        Reference("self_attention", {"": (*_multi_head(ALL_VISIBLE)[:-2], _LAST)}, _THREE),
        Reference("causal_self_attention", {"": (*_multi_head(CAUSAL)[:-2], _LAST)}, _THREE),
        Reference("multi_head", {"": _multi_head(ALL_VISIBLE)}, _FOUR, has_heads=True),
        Reference("causal_multi_head", {"": _multi_head(CAUSAL)}, _FOUR, has_heads=True),
        Reference("sinusoidal", {"": (_ANGLES, _either(*map(_encoding, _ORDERS)), _SUM_OF_POSITIONS)}),
        Reference("learned_positions", {"": (_LEARNED, _SUM_OF_POSITIONS)}, {"positions": "L C"}),
        Reference("rope", {"": (_ANGLES, _either(*(_rotation(order, sign) for order in _ORDERS for sign in (1, -1))))}),
        Reference("encoder_block", _blocks(ALL_VISIBLE), _OF_BLOCK, has_heads=True),
        Reference("causal_block", _blocks(CAUSAL), _OF_BLOCK, has_heads=True),
        Reference("decoder_block", _blocks(_CAUSAL_OR_GIVEN, has_memory=True), _OF_DECODER, has_heads=True),
    )
}
