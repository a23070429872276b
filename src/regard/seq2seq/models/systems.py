"""The encoder-decoders that are compared, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from regard.checks import Size, checked
from regard.errors import RegardError, nearest
from regard.hf import prune
from regard.nn import Blueprint, MultiHeadAttention
from regard.seq2seq.models.hybrid import HybridTranslator
from regard.seq2seq.models.recurrent import BahdanauTranslator, FixedVectorTranslator, LuongTranslator
from regard.seq2seq.models.transformer import TransformerTranslator
from regard.seq2seq.models.translator import Translator

#: What every system may be asked for, so that one configuration serves all; `num_heads` is dropped by those without.
COMMON = ("source_size", "target_size", "width", "layers", "dropout", "num_heads")


@dataclass(frozen=True)
class System:
    """A named encoder-decoder: `make(source_size=, target_size=, width=, layers=, dropout=, **options)`.

    `title` is what reports call it, `meaning` one sentence on what it is, `options` what else it takes.
    `learning_rate` (a peak) and `dropout` are what trainings of minutes did best with, "auto" in a configuration.

    >>> from regard import seq2seq
    >>> made = seq2seq.SYSTEMS["hybrid"]
    >>> made.title, made.has_heads, made.build(source_size=9, target_size=9, width=8).settings()["name"]
    ('Hybrid', True, 'hybrid')
    """

    name: str
    title: str
    make: Callable[..., Translator]
    meaning: str
    options: tuple[str, ...]
    has_heads: bool = False
    learning_rate: float = 0.007
    dropout: float = 0.0

    def build(self, source_size: int, target_size: int, width: int = 128, **options: Any) -> Translator:
        """A fresh model. Options the system does not have are refused."""
        heads_left = options.pop("heads_left", {})
        known = (*COMMON, *self.options)
        for option in options:
            if option not in known:
                raise RegardError(f"build({self.name!r}): it has no option {option!r}. {nearest(option, known)}")
        given = {"source_size": source_size, "target_size": target_size, "width": width, **options}
        _check_numbers(self.name, given)
        if not self.has_heads:
            given.pop("num_heads", None)
        model = self.make(**given)
        model._settings = {"name": self.name, **given}
        return _with_heads(model, heads_left)


@checked
def build(name: str, *, source_size: Size, target_size: Size, width: Size = 128, **options: Any) -> Translator:
    """A translator by its name, such as "bahdanau"; `build(**model.settings())` builds an equal one.

    Options of all: `layers`, `dropout`, and `num_heads`, which means nothing where there are no heads;
    `SYSTEMS[name].options` are the others. `heads_left` is how many heads are left in attention modules that
    were pruned, by module path; any of the same number will do, since weights are loaded into them.

    >>> model = build("luong_general", source_size=20, target_size=30, width=16, input_feeding=False)
    >>> model.settings()
    {'name': 'luong_general', 'source_size': 20, 'target_size': 30, 'width': 16, 'input_feeding': False}
    """
    return system(name).build(source_size, target_size, width, **options)


@checked
def system(name: str) -> System:
    """One system; an unknown name is answered with the nearest known one.

    >>> system("luong_concat").title
    'Luong concat'
    >>> system("luong_conkat")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    regard.errors.RegardError: build: there is no system 'luong_conkat'. Did you mean 'luong_concat'? ...
    """
    if name not in SYSTEMS:
        raise RegardError(f"build: there is no system {name!r}. {nearest(str(name), SYSTEMS)}")
    return SYSTEMS[name]


def _with_heads(model: Translator, left: Mapping[str, int]) -> Translator:
    """The model with only so many heads in some of its attention modules."""
    modules = dict(model.named_modules())
    for name, count in left.items():
        module = modules.get(name)
        if not isinstance(module, MultiHeadAttention):
            heads = [known for known, each in modules.items() if isinstance(each, MultiHeadAttention)]
            raise RegardError(f"build(heads_left): there are no heads in {name!r}. {nearest(name, heads)}")
        prune(model, {name: range(count, module.num_heads)})
    return model


def _check_numbers(name: str, given: dict[str, Any]) -> None:
    for option in ("source_size", "target_size", "width", "layers", "num_heads", "num_key_heads", "bridge_heads"):
        value = given.get(option)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RegardError(f"build({name!r}, {option}={value!r}): it is an integer of at least 1.")


def _options(made: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments of a model besides those that all have."""
    names = inspect.signature(made).parameters
    return tuple(name for name in names if name not in (*COMMON, "self", "options", "name"))


def _luong(kind: str, meaning: str) -> System:
    name = f"luong_{kind}"
    make = partial(LuongTranslator, attention=name)
    return System(name, f"Luong {kind}", make, meaning, _options(LuongTranslator))


_TRANSFORMER = tuple(dict.fromkeys((*_options(TransformerTranslator.of), *_options(Blueprint))))

SYSTEMS: dict[str, System] = {
    made.name: made
    for made in (
        System(
            "none",
            "No attention",
            FixedVectorTranslator,
            "A recurrent encoder-decoder that passes the whole source on as one vector.",
            _options(FixedVectorTranslator),
        ),
        System(
            "bahdanau",
            "Bahdanau",
            BahdanauTranslator,
            "The decoder's previous state is compared with every encoder state by a small network.",
            _options(BahdanauTranslator),
        ),
        _luong("dot", "The decoder's current state is multiplied with every encoder state."),
        _luong("general", "The decoder's current state is multiplied with every encoder state through a matrix."),
        _luong("concat", "The decoder's current state is compared with every encoder state by a small network."),
        System(
            "hybrid",
            "Hybrid",
            HybridTranslator,
            "Recurrent encoder and decoder with multi-head self- and cross-attention.",
            _options(HybridTranslator),
            has_heads=True,
            learning_rate=0.005,
        ),
        System(
            "transformer",
            "Transformer",
            TransformerTranslator.of,
            "Attention and feed-forward layers alone.",
            _TRANSFORMER,
            has_heads=True,
            learning_rate=0.005,
            dropout=0.1,
        ),
    )
}
