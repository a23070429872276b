"""Arguments are what their annotations say: types, unions, collections, literals, and the words of a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from regard.base.checks import Count, Number, Positive, checked, fits, words
from regard.base.errors import RegardError

FITS = {
    "an integer": (
        int,
        [0, -3, np.int64(3), torch.tensor(1)],
        [True, 1.0, "1", None, torch.tensor(1.0), torch.ones(2).int(), int],
    ),
    "a number": (
        float,
        [1, 0.5, np.float32(2), np.int8(1), torch.tensor(0.5)],
        [torch.ones(2), True, "1", None, 1j, 2**63, -(10**400)],
    ),
    "a finite number": (
        Number,
        [-1, 0.5, 3e38, torch.tensor(math.nan)],
        [math.nan, -math.inf, 1e39, 10**20, True, "1"],
    ),
    "a finite number above 0": (Positive, [1, 0.5, torch.tensor(-1.0)], [0, -1.0, math.nan, math.inf, 2**63]),
    "a list of finite numbers above 0": (Sequence[Positive], [[1, 0.5], []], [[1, 0.0], [math.nan], 1.0]),
    "a list of integers of at least 0": (Sequence[Count], [[0, 1], []], [[-1], [0.5]]),
    "True or False": (bool, [True, False], [0, 1, "yes", None]),
    "a text": (str, ["", "a"], [b"a", 1, None]),
    "an integer or None": (int | None, [None, 2], ["", 2.5]),
    "a list of integers": (Sequence[int], [[], (1, 2), range(3), [np.int64(1)]], ["12", [1.5], {1: 2}, 3]),
    "a list of numbers": (Iterable[float], [[1], iter("ab")], ["12", 3]),
    "a list of texts": (tuple[str, str], [("a", "b")], [("a",), ("a", 1), "ab"]),
    "a dict": (Mapping[str, int], [{}, {"a": 1}], [{"a": "b"}, {1: 1}, [("a", 1)]]),
    "'pre' or 'post'": (Literal["pre", "post"], ["pre"], ["middle", None]),
    "a function": (Callable[[int], int], [len, lambda x: x], [3, "len"]),
    "a Tensor": (torch.Tensor, [torch.ones(2)], [np.ones(2), [1.0], torch.Tensor]),
    "an Any": (Any, [object(), None], []),
}


@pytest.mark.parametrize("name", FITS)
def test_values_fit_or_do_not(name):
    expected, right, wrong = FITS[name]
    assert all(fits(value, expected) for value in right)
    assert not any(fits(value, expected) for value in wrong)
    assert name == "an Any" or words(expected) == name


@checked
def cut(text: str, at: int = 0, *, keep: Sequence[int] | None = None) -> str:
    """Some text from a place on."""
    return text[at:] + str(keep or "")


def test_a_checked_function_is_itself():
    assert (
        cut("abc", 1) == cut("abc", np.int8(1)) == cut("abc", torch.tensor(1)) == "bc"
        and cut(text="abc", keep=[1]) == "abc[1]"
    )
    assert cut.__name__ == "cut" and cut.__doc__ == "Some text from a place on."


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda: cut(3), r"cut\(text=3\): text must be a text, got int\. cut\(text: str, at: int = 0"),
        (lambda: cut("a", keep="12"), "keep must be a list of integers or None, got str"),
        (lambda: cut("a", at=int), "at must be an integer, got the class int"),
        (lambda: cut("a", form=2), "unexpected keyword argument 'form'"),
        (lambda: cut(), "missing a required argument: 'text'"),
    ],
)
def test_a_mistake_names_the_argument_and_the_signature(mistake, said):
    with pytest.raises(RegardError, match=said):
        mistake()


@checked
def scaled(gates: Mapping[int | str, torch.Tensor | Sequence[float]], pair: tuple[str, int] | None = None) -> None:
    """A function with nested annotations."""


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda: scaled({0: [1.0], 1: "half"}), r"gates\[1\] must be a Tensor or a list of numbers, got 'half'"),
        (lambda: scaled({0: [1.0, "half"]}), r"gates\[0\]\[1\] must be a number, got 'half'"),
        (lambda: scaled({(0, 1): [1.0]}), r"the key \(0, 1\) of gates must be an integer or a text, got \(0, 1\)"),
        (lambda: scaled({}, ("a", "b")), r"pair\[1\] must be an integer, got 'b'"),
        (lambda: cut("a", keep=[1, 2.5]), r"keep\[1\] must be an integer, got 2\.5"),
        (lambda: scaled([1.0]), "gates must be a dict, got list"),
    ],
)
def test_a_wrong_item_is_named_and_not_its_dict(mistake, said):
    with pytest.raises(RegardError, match=said):
        mistake()


def test_a_signature_shows_no_address_and_no_long_default():
    @checked
    def reduction(
        size: int, also: Callable[[int], int] = lambda n: n, names: tuple[str, ...] = ("abcdefgh",) * 9
    ) -> None:
        """A function with such defaults."""

    with pytest.raises(RegardError, match=r"also: .* = \.\.\., names: .* = \.\.\.\)") as error:
        reduction("x")
    assert " at 0x" not in str(error.value)
