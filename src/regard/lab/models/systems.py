"""`SYSTEMS`, the encoder-decoders by name, and `build`, which makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from regard.base.checks import Size, checked
from regard.base.errors import RegardError, nearest
from regard.hf import prune
from regard.lab.models.hybrid import HybridTranslator
from regard.lab.models.recurrent import BahdanauTranslator, FixedVectorTranslator, LuongTranslator
from regard.lab.models.transformer import TransformerTranslator
from regard.lab.models.translator import Translator
from regard.nn import MultiHeadAttention, TransformerConfig

#: Options of every system, so one configuration fits all; systems without heads ignore `num_heads`.
COMMON = ("source_size", "target_size", "width", "layers", "dropout", "num_heads")


@dataclass(frozen=True)
class System:
    """A named encoder-decoder: `make(source_size=, target_size=, width=, layers=, dropout=, **options)`.

    `title` is its name in reports, `meaning` describes it in one sentence, and `options` names its further options.
    `learning_rate` (the peak) and `dropout` stand for "auto" in a configuration: the best values in trainings of
    minutes.

    >>> from regard import lab
    >>> hybrid = lab.SYSTEMS["hybrid"]
    >>> hybrid.title, hybrid.has_heads, hybrid.build(source_size=9, target_size=9, width=8).settings()["name"]
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
        """A new model with random weights. Raises an error for options that the system does not have.

        `source_size` and `target_size` are the sizes of the two vocabularies, and `width` is that of the states.
        """
        heads_left = options.pop("heads_left", {})
        names = (*COMMON, *self.options)
        for option in options:
            if option not in names:
                raise RegardError(f"build({self.name!r}): there is no option {option!r}. {nearest(option, names)}")
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

    All systems have the options `layers`, `dropout` and `num_heads`; systems without heads ignore `num_heads`.
    `SYSTEMS[name].options` names the others. `heads_left` gives the number of heads that remain in pruned attention
    modules, by module path. It does not matter which heads remain, because weights are loaded into them.

    >>> model = build("luong_general", source_size=20, target_size=30, width=16, input_feeding=False)
    >>> model.settings()
    {'name': 'luong_general', 'source_size': 20, 'target_size': 30, 'width': 16, 'input_feeding': False}
    """
    return find_system(name).build(source_size, target_size, width, **options)


@checked
def find_system(name: str) -> System:
    """The system with this name; the error for an unknown name suggests the nearest known one.

    >>> find_system("luong_concat").title
    'Luong concat'
    >>> find_system("luong_conkat")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    regard.RegardError: build: there is no system 'luong_conkat'. Did you mean 'luong_concat'? ...
    """
    if name not in SYSTEMS:
        raise RegardError(f"build: there is no system {name!r}. {nearest(str(name), SYSTEMS)}")
    return SYSTEMS[name]


def _with_heads(model: Translator, left: Mapping[str, int]) -> Translator:
    """The model, pruned to the number of heads in `left` for each attention module there, by path."""
    modules = dict(model.named_modules())
    for name, count in left.items():
        module = modules.get(name)
        if not isinstance(module, MultiHeadAttention):
            heads = [known for known, module in modules.items() if isinstance(module, MultiHeadAttention)]
            raise RegardError(f"build(heads_left): {name!r} has no attention heads. {nearest(name, heads)}")
        prune(model, {name: range(count, module.num_heads)})
    return model


def _check_numbers(name: str, given: dict[str, Any]) -> None:
    """Raise an error for a size or a number of heads that is no positive integer; `given` are the options."""
    for option in ("source_size", "target_size", "width", "layers", "num_heads", "num_key_value_heads", "bridge_heads"):
        value = given.get(option)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RegardError(f"build({name!r}, {option}={value!r}): it must be an integer of at least 1.")


def _options(constructor: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments of a constructor that not every system has."""
    names = inspect.signature(constructor).parameters
    return tuple(name for name in names if name not in (*COMMON, "self", "options", "name"))


def _luong(kind: str, meaning: str) -> System:
    """The system with Luong's score "dot", "general" or "concat"; `meaning` describes it."""
    name = f"luong_{kind}"
    make = partial(LuongTranslator, attention=name)
    return System(name, f"Luong {kind}", make, meaning, _options(LuongTranslator))


_TRANSFORMER = tuple(
    name
    for name in dict.fromkeys((*_options(TransformerTranslator.of), *_options(TransformerConfig)))
    if name != "embed_dim"  # which is the width of a translator
)

#: The systems by name: `SYSTEMS["bahdanau"]`. A further system is one more entry.
SYSTEMS: dict[str, System] = {
    entry.name: entry
    for entry in (
        System(
            "none",
            "No attention",
            FixedVectorTranslator,
            "A recurrent encoder-decoder; the decoder sees the source only through one vector.",
            _options(FixedVectorTranslator),
        ),
        System(
            "bahdanau",
            "Bahdanau",
            BahdanauTranslator,
            "A small network scores the decoder's previous state against every encoder state.",
            _options(BahdanauTranslator),
        ),
        _luong("dot", "The score is the dot product of the decoder's current state and an encoder state."),
        _luong("general", "The score is a bilinear form of the decoder's current state and an encoder state."),
        _luong("concat", "A small network scores the decoder's current state against every encoder state."),
        System(
            "hybrid",
            "Hybrid",
            HybridTranslator,
            "A recurrent encoder and decoder with multi-head self- and cross-attention.",
            _options(HybridTranslator),
            has_heads=True,
            learning_rate=0.005,
        ),
        System(
            "transformer",
            "Transformer",
            TransformerTranslator.of,
            "Only attention and feed-forward layers, without recurrence.",
            _TRANSFORMER,
            has_heads=True,
            learning_rate=0.005,
            dropout=0.1,
        ),
    )
}
