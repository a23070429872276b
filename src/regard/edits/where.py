"""What an edit selects: heads, queries and keys, by numbers, ranges and words."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError, first_few, nearest
from regard.base.spans import INFINITY, Spans
from regard.stats.numbering import LayerPath, head_name, layer_number
from regard.stats.roles import MEANINGS, RoleTable
from regard.stats.text_reading import places_of

# `Indices`: a set of numbers of heads, queries or keys, as ranges, of which the last may have no end.


@dataclass(frozen=True)
class Indices:
    """Ranges (start, stop, step) of numbers from 0 on, in the order in which they were given.

    >>> import torch
    >>> some = Indices(((3, 4, 1), (0, 2, 1)))
    >>> some.contain(torch.arange(5)).int().tolist(), some.among(range(5)), some.rank(torch.tensor([3, 1])).tolist()
    ([1, 1, 0, 1, 0], [0, 1, 3], [0, 2])
    """

    ranges: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(*numbers: int) -> Indices:
        """These numbers in their order; numbers that follow each other are one range."""
        ranges: list[tuple[int, int, int]] = []
        for number in numbers:
            follows = bool(ranges) and ranges[-1][1] == number
            start = ranges.pop()[0] if follows else number
            ranges.append((start, number + 1, 1))
        return Indices(tuple(ranges))

    @property
    def is_everything(self) -> bool:
        """Whether a range holds all numbers, as that of `EVERY`."""
        return (0, INFINITY, 1) in self.ranges

    @property
    def is_finite(self) -> bool:
        """Whether no range is without an end."""
        return all(stop < INFINITY for _, stop, _ in self.ranges)

    @property
    def last(self) -> int:
        """The greatest number; -1 if there is none."""
        return max((range(*one)[-1] for one in self.ranges if range(*one)), default=-1)

    def contain(self, numbers: Tensor) -> Tensor:
        """For each of these numbers, whether it is in the set."""
        is_member = torch.zeros_like(numbers, dtype=torch.bool)
        for start, stop, step in self.ranges:
            is_member |= (numbers >= start) & (numbers < stop) & ((numbers - start) % step == 0)
        return is_member

    def among(self, numbers: range) -> list[int]:
        """Those of consecutive numbers that are in the set, ascending."""
        every = torch.arange(numbers.start, numbers.stop, device="cpu")
        return every[self.contain(every)].tolist()

    def rank(self, numbers: Tensor) -> Tensor:
        """The place of each number in the order of the ranges, the first one if several have it; 0 if none has it."""
        rank, is_found, num_before = torch.zeros_like(numbers), torch.zeros_like(numbers, dtype=torch.bool), 0
        for start, stop, step in self.ranges:
            inside = Indices(((start, stop, step),)).contain(numbers) & ~is_found
            rank = torch.where(inside, num_before + (numbers - start) // step, rank)
            is_found, num_before = is_found | inside, num_before + len(range(start, stop, step))
        return rank

    def hull(self) -> Spans:
        """Intervals that hold all the numbers, and others if a range has steps."""
        return Spans.union((start, stop) for start, stop, _ in self.ranges)

    def core(self) -> Spans:
        """Intervals that hold only numbers of the set: the ranges without steps."""
        return Spans.union((start, stop) for start, stop, step in self.ranges if step == 1)


#: All numbers.
EVERY = Indices(((0, INFINITY, 1),))


# Words and slices of a selection as numbers of tokens.


#: A part of a selection: a number, a name or a word, a slice, or a list of them. None: all.
Choice = int | str | slice | Sequence[int | str | slice] | None
#: Queries or keys: one part for all batch entries; a list with a list for each entry, or a tensor with a row for each.
TokenChoice = Choice | Tensor | Sequence[int | str | slice | Sequence[int | str | slice]]
#: The tokens of one text, or of each text of a batch.
Texts = Sequence[str] | Sequence[Sequence[str]]
#: The occurrence of a word: it#2 is the second "it".
NUMBERED = re.compile(r"(.+)#(\d+)", re.DOTALL)


def listed(value: Any) -> Sequence[int | str | slice]:
    """The values of a part of a selection; none for None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str | slice) else value


def is_by_entry(choice: Any) -> bool:
    """Whether a part of a selection has a part of its own for each batch entry."""
    return isinstance(choice, tuple) and any(isinstance(one, tuple) for one in choice)


def flat(choice: Any) -> Sequence[int | str | slice]:
    """The values of a part of a selection, of all batch entries."""
    return [value for one in choice for value in listed(one)] if is_by_entry(choice) else listed(choice)


def numbers(choice: Choice, tokens: Sequence[str] | None) -> Choice:
    """The choice with numbers of tokens in place of words, and in place of numbers that count from the end.

    Without tokens it stays as it is.
    """
    if choice is None or tokens is None:
        return choice
    token_numbers = [number for one in listed(choice) for number in _numbers(one, tokens)]
    return token_numbers[0] if len(token_numbers) == 1 else token_numbers


def _numbers(one: int | str | slice, tokens: Sequence[str]) -> Sequence[int | slice]:
    """`numbers` for a single value: a word of several tokens becomes several numbers."""
    if isinstance(one, str):
        return occurrence(one, tokens)
    if isinstance(one, int):
        return [one + len(tokens) if -len(tokens) <= one < 0 else one]
    start, stop = (n if n is None or n >= 0 else max(n + len(tokens), 0) for n in (one.start, one.stop))
    return [slice(start, stop, one.step)]


def occurrence(word: str, tokens: Sequence[str]) -> range:
    """The numbers of the tokens of a word that is there once, or of the one that is meant (it#2).

    >>> occurrence("it", ["and", "it", "is"]), occurrence("it#2", ["it", "was", "it"])
    (range(1, 2), range(2, 3))
    """
    found, numbered = _places_of(word, tokens), NUMBERED.fullmatch(word)
    if not found and numbered is not None:
        same = _places_of(numbered[1], tokens)
        if 1 <= int(numbered[2]) <= len(same):
            return same[int(numbered[2]) - 1]
        raise RegardError(f"edit: {numbered[1]!r} is {_times(len(same))} in the text, so there is no {word!r}.")
    if not found:
        raise RegardError(f"edit: the text has no word {word!r}. Its tokens are: {first_few(tokens, 40)}.")
    if len(found) > 1:
        which = " or ".join(f"{word}#{n + 1}" for n in range(min(len(found), 3)))
        at = ", ".join(str(place.start) for place in found)
        raise RegardError(f"edit: {word!r} is {_times(len(found))} in the text (tokens {at}). Write {which}.")
    return found[0]


def _places_of(word: str, tokens: Sequence[str]) -> list[range]:
    """Where a word is in a text; if it is not there, the tokens that are written so, such as ##mal."""
    return places_of(word, tokens) or [range(n, n + 1) for n, token in enumerate(tokens) if token == word]


def range_of(one: int | slice) -> tuple[int, int, int]:
    """A number or a slice as (start, stop, step); a slice without an end has the stop `INFINITY`."""
    start, stop, step = (one, one + 1, 1) if isinstance(one, int) else (one.start or 0, one.stop, one.step or 1)
    stop = INFINITY if stop is None else stop
    if start < 0 or stop < 0:
        raise RegardError(
            f"edit: {one!r} counts from the end, which moves while a model generates. Count from 0, or give tokens: "
            "rg.edit(model, edit, tokens=[...])."
        )
    if max(start, stop, step) > INFINITY:
        raise RegardError(f"edit: {one!r} is larger than any number of a token, a head or a layer.")
    if step < 1 or start >= stop:
        raise RegardError(
            f"edit: {one!r} selects nothing. A slice has a stop above its start, and a step of at least 1."
        )
    return start, stop, step


def _times(count: int) -> str:
    """`not`, `once`, `2 times`."""
    return "not" if count == 0 else "once" if count == 1 else f"{count} times"


# `Where`: the layers, heads, queries and keys that an edit selects, by numbers, names, words or roles.


#: The parts of a selection that are numbers of tokens.
OF_TOKENS = ("queries", "keys")
#: Role -> heads (layer, head), or the table that `roles` made.
Roles = RoleTable | Mapping[str, Iterable[tuple[int, int]]]
#: The names of a head, L5.H3, and of a layer, L5.
HEAD = re.compile(r"[Ll](\d+)\.[Hh](\d+)")
LAYER = re.compile(r"[Ll](\d+)")
#: The short form of a selection, for messages.
SHORT = "'L5.H3: it -> animal' (heads: queries -> keys)"


@checked
@dataclass(frozen=True)
class Where:
    """The pairs that an edit changes: layers x heads x queries x keys. A part that is None selects all.

    Every part is a number, a slice, a name, or a list of them. `layers` are numbers of layers, or module paths (with *
    and ?). `heads` are numbers, or names such as "L5.H3", which select their layer too, as do pairs (layer, head) in a
    list. `queries` and `keys` are numbers of tokens in the whole sequence, from 0 on, or words of the text; the second
    "it" is "it#2". A word of several tokens selects all of them. A slice without an end also selects tokens that are
    generated later. `batch` are numbers of batch entries. `queries` and `keys` may differ between entries: a list with
    a list for each entry that `batch` selects, a tensor (B,) or (B, n), or a word that is looked up in the text of each
    entry. `roles` are names of roles ("induction"): the heads that have one. Words and roles are looked up when the
    edit begins: `rg.edit(model, edit, tokens=..., roles=...)`. `rg.Where.parse` reads the same from a short text.

    Padding on the left counts: the first token of a padded text has the number of its column.

    >>> import regard as rg
    >>> rg.Where(layers=5, heads=[3, 4], queries="it", keys=slice(0, 4))
    Where(layers=5, heads=[3, 4], queries='it', keys=slice(0, 4))
    >>> rg.Where.parse("L5.H3: it -> animal", tokens=["the", "animal", "was", "tired", "and", "it", "slept"])
    Where(heads='L5.H3', queries=5, keys=1)
    >>> rg.Where(queries="it", batch=[0, 2]).found([["it", "ran"], ["so"], ["so", "it"]])
    Where(queries=[[0], [1]], batch=[0, 2])
    """

    layers: Choice = None
    heads: Choice | Sequence[tuple[int, int]] = None
    queries: TokenChoice = None
    keys: TokenChoice = None
    roles: Choice = None
    batch: Choice | Tensor = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _plain_choice(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check(field.name, value)

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"Where({', '.join(f'{name}={_typed(value)}' for name, value in given if value is not None)})"

    def __hash__(self) -> int:
        return hash(repr(self))  # slices have no hash before Python 3.12

    @classmethod
    @checked
    def parse(
        cls,
        text: str,
        tokens: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        roles: RoleTable | Mapping[str, Any] | None = None,
    ) -> Where:
        """Read a selection from a short text: "heads: queries -> keys".

        Heads are L5.H3, L5 (a whole layer), a role (induction), several of them with commas, or * for all. Queries and
        keys are words of the text, numbers of tokens (#4), several of them with commas, or * for all. A part may be
        left out. The second "it" is it#2. With `tokens` words become numbers at once; `targets` are the tokens of the
        queries, if they differ. With `roles`, a table of `regard.roles` or a mapping, roles become heads.

        >>> import regard as rg
        >>> rg.Where.parse("L5.H3, L6.H1: it -> *"), rg.Where.parse("L2"), rg.Where.parse("#4 -> #0, #1")
        (Where(heads=['L5.H3', 'L6.H1'], queries='it'), Where(layers=2), Where(queries=4, keys=[0, 1]))
        """
        heads, colon, pairs = text.partition(":")
        if not colon and "->" in text:
            heads, pairs = "", text
        queries, arrow, keys = pairs.partition("->")
        if "->" in keys or (colon and not arrow and pairs.strip()):
            raise RegardError(f"Where.parse({text!r}): a selection is {SHORT}.")
        selected = replace(_selected_heads(text, _parts(heads)), queries=_words(queries), keys=_words(keys))
        if not any(getattr(selected, field.name) is not None for field in fields(selected)) and "*" not in text:
            raise RegardError(f"Where.parse({text!r}): a selection is {SHORT}; * selects all.")
        return selected.found(tokens, targets, roles)

    def found(self, tokens: Texts | None = None, targets: Texts | None = None, roles: Roles | None = None) -> Where:
        """The same selection with numbers in place of words, if there are tokens, and with heads in place of roles.

        `targets` are the tokens of the queries, if they differ from those of the keys. Either are those of one text, or
        a list for each batch entry.
        """
        if tokens is None and targets is None and roles is None:
            return self
        of_queries = tokens if targets is None else targets
        selection = replace(self, queries=self._found(self.queries, of_queries), keys=self._found(self.keys, tokens))
        if self.roles is None or roles is None:
            return selection
        return replace(selection, roles=None, heads=_of_roles(self, roles))

    def _found(self, choice: Any, tokens: Texts | None) -> Any:
        """The numbers of queries or keys, of each batch entry if these or the texts differ."""
        if choice is None or tokens is None:
            return choice
        if not has_texts(tokens) and not is_by_entry(choice):
            return numbers(choice, cast(Sequence[str], tokens))
        entries = self.entries(len(tokens)) if has_texts(tokens) else range(len(choice))
        texts = [cast(Sequence[str], tokens[entry] if has_texts(tokens) else tokens) for entry in entries]
        return [list(listed(numbers(*one))) for one in zip(self._of_entries(choice, entries), texts, strict=True)]

    def entries(self, num_batch: int) -> list[int]:
        """The selected ones of so many batch entries, in the order of the selection."""
        every = range(num_batch)
        if self.batch is None:
            return list(every)
        ranges = [range_of(one) for one in listed(self.batch) if not isinstance(one, str)]
        last = Indices(tuple(ranges)).last
        if last >= num_batch and all(stop < INFINITY for _, stop, _ in ranges):
            raise RegardError(
                f"edit: {self!r} selects batch entry {last}, and the batch has entries 0 to {num_batch - 1}."
            )
        return list(dict.fromkeys(n for one in ranges for n in every[slice(*one)]))

    def _of_entries(self, choice: Any, entries: Sequence[int]) -> Sequence[Any]:
        """The choice of each of these batch entries: its own, or the same for all."""
        if not is_by_entry(choice):
            return [choice] * len(entries)
        if len(choice) != len(entries):
            raise RegardError(
                f"edit: {self!r} has tokens for {len(choice)} batch entries, and selects {len(entries)} of this run. "
                "Give a list for each entry that is selected; Where(batch=...) selects some."
            )
        return choice

    @property
    def names_entries(self) -> bool:
        """Whether batch entries are treated differently."""
        return self.batch is not None or is_by_entry(self.queries) or is_by_entry(self.keys)

    def token_sets(self, num_batch: int) -> list[tuple[Indices, Indices, Indices]]:
        """(batch entries, queries, keys) for each set of entries that have the same queries and keys."""
        entries = EVERY if self.batch is None else Indices.of(*self.entries(num_batch))
        if not is_by_entry(self.queries) and not is_by_entry(self.keys):
            return [(entries, self.indices("queries"), self.indices("keys"))]
        sets: dict[tuple[Indices, Indices], list[int]] = {}
        chosen = self.entries(num_batch)
        queries, keys = (self._of_entries(choice, chosen) for choice in (self.queries, self.keys))
        for entry, i, j in zip(chosen, queries, keys, strict=True):
            sets.setdefault((_indices(i), _indices(j)), []).append(entry)
        return [(Indices.of(*own), i, j) for (i, j), own in sets.items()]

    @property
    def _heads(self) -> Sequence[int | str | slice]:
        """The heads as numbers, slices and names; `__post_init__` has made pairs (layer, head) names."""
        return listed(cast(Choice, self.heads))

    def heads_in(self, path: str) -> Indices | None:
        """The heads that are selected in the layer with this module path; None if no head of it is."""
        if self.layers is not None and not any(is_layer(layer, path) for layer in listed(self.layers)):
            return None
        if self.roles is not None:
            raise RegardError(
                f"edit: {self!r} names roles. Give the heads that have them: rg.edit(model, edit, roles=table)."
            )
        if self.heads is None:
            return EVERY
        number, ranges = _number(path), []
        for head in self._heads:
            if isinstance(head, str):
                layer, head = _head(head)
                ranges += [(head, head + 1, 1)] if layer == number else []
            else:
                ranges.append(range_of(head))
        return Indices(tuple(ranges)) if ranges else None

    @property
    def names_layers(self) -> list[int | str]:
        """The layers that are named one by one, by number, by path or by a head; not slices and patterns.

        A run that does not edit one of them is an error.
        """
        named = [_head(head)[0] for head in self._heads if isinstance(head, str)]
        by_name = [layer for layer in listed(self.layers) if not isinstance(layer, slice)]
        exact = [layer for layer in by_name if not re.search(r"[*?]", str(layer))]
        return [*exact, *named]

    def indices(self, part: str) -> Indices:
        """The numbers of a part, "queries" or "keys", for all batch entries together."""
        value = getattr(self, part)
        if any(isinstance(one, str) for one in flat(value)):
            raise RegardError(
                f"edit: {self!r} names words. Give the tokens of the text: rg.edit(model, edit, tokens=[...]), or "
                "rg.Where.parse('L5.H3: it -> animal', tokens)."
            )
        return EVERY if value is None else _indices(flat(value))


def with_fields(one: Any, **values: Any) -> Any:
    """A copy of a selection or an edit with other values of some fields, which are known to be right: no checks."""
    changed = copy.copy(one)
    vars(changed).update(values)
    return changed


def has_texts(tokens: Texts) -> bool:
    """Whether these are the tokens of several texts."""
    return bool(tokens) and not isinstance(tokens[0], str)


def _indices(choice: Choice) -> Indices:
    """The numbers of a choice without words."""
    if choice is None:
        return EVERY
    return Indices(tuple(range_of(one) for one in listed(choice) if not isinstance(one, str)))


def _selected_heads(text: str, parts: list[str]) -> Where:
    """The part of a short text before the colon: heads, whole layers, or roles."""
    parts = [] if parts == ["*"] else parts
    heads = [part.upper() for part in parts if HEAD.fullmatch(part)]
    layers = [int(found[1]) for part in parts if (found := LAYER.fullmatch(part))]
    roles = [part for part in parts if part in MEANINGS]
    unknown = [part for part in parts if not HEAD.fullmatch(part) and not LAYER.fullmatch(part) and part not in roles]
    if unknown:
        raise RegardError(
            f"Where.parse({text!r}): {unknown[0]!r} is no head (L5.H3), no layer (L5) and no role. "
            f"{nearest(unknown[0], MEANINGS)}"
        )
    if bool(heads) + bool(layers) + bool(roles) > 1:
        raise RegardError(
            f"Where.parse({text!r}): give heads, or layers, or roles. Edits join with &: KnockOut(Where.parse('L5')) & "
            "AddToScores(...)."
        )
    return Where(layers=_single(layers), heads=_single(heads), roles=_single(roles))


def _words(text: str) -> Choice:
    """Words and numbers (#4) of one side of the arrow; None for all."""
    parts = _parts(text)
    named = [int(part[1:]) if re.fullmatch(r"#\d+", part) else part for part in parts]
    return None if parts in ([], ["*"]) else _single(named)


def _parts(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _single(values: list[Any]) -> Any:
    """One value alone, several as they are, and None for none."""
    return values[0] if len(values) == 1 else values or None


def _of_roles(where: Where, roles: Roles) -> list[str]:
    """The names of the heads that have the roles, among the heads and layers that are selected beside them."""
    heads = [head for role in listed(where.roles) for head in _with_role(role, roles)]
    beside = replace(where, roles=None)
    chosen = [(head, beside.heads_in(str(head[0]))) for head in heads]  # "3" is a path whose layer has the number 3
    kept = [head for head, own in chosen if own is not None and own.among(range(head[1], head[1] + 1))]
    if not kept:
        raise RegardError(f"edit: no head has the role {where.roles!r} among those that {where!r} selects.")
    return [head_name(*head) for head in dict.fromkeys(kept)]


def _with_role(role: Any, roles: Roles) -> list[tuple[int, int]]:
    """The heads (layer, head) that have a role."""
    if isinstance(roles, RoleTable):
        return [(found.layer, found.head) for found in roles.of(role) if found.label]
    if role not in roles:
        raise RegardError(
            f"edit: there is no role {role!r} in the mapping that was given. {nearest(str(role), map(str, roles))}"
        )
    return [(int(layer), int(head)) for layer, head in roles[role]]


def _number(path: str) -> int | None:
    """The number of the layer; a sweep asks this thousands of times, so a path that knows it is read directly."""
    return path.number if isinstance(path, LayerPath) else layer_number(path)


def is_layer(layer: int | str | slice, path: str) -> bool:
    """Whether a value of `Where.layers` selects the layer with this module path."""
    number = _number(path)
    if isinstance(layer, str):
        named = LAYER.fullmatch(layer)
        return fnmatchcase(path, layer) or (named is not None and int(named[1]) == number)
    start, stop, step = range_of(layer)
    return number is not None and number in range(start, stop, step)


def _head(name: str) -> tuple[int, int]:
    """The layer and the head of a name."""
    named = HEAD.fullmatch(name)
    assert named is not None, "checked when the selection was made"
    return int(named[1]), int(named[2])


def _check(part: str, value: Any) -> None:
    """Refuse values of a field of `Where`, `part`, that select nothing, or that name no head."""
    for one in flat(value):
        if isinstance(one, bool) or not isinstance(one, int | str | slice):
            raise RegardError(f"Where({part}={value!r}): give numbers, names, slices or a list of them, got {one!r}.")
        if isinstance(one, slice) and (one.step == 0 or not all(_is_whole(n) for n in (one.start, one.stop, one.step))):
            raise RegardError(
                f"Where({part}={one!r}): start, stop and step of a slice are integers or None; the step is at least 1."
            )
        if part == "heads" and isinstance(one, str) and not HEAD.fullmatch(one):
            raise RegardError(f"Where(heads={one!r}): a head is a number, or a name with its layer, such as 'L5.H3'.")
        if part == "roles" and not isinstance(one, str):
            raise RegardError(f"Where(roles={one!r}): roles are names. {nearest(str(one), MEANINGS)}")
        if part == "batch" and isinstance(one, str):
            raise RegardError(f"Where(batch={one!r}): batch entries are numbers from 0 on.")
        if part in ("layers", "heads", "batch") and not isinstance(one, str):
            range_of(one)
    if isinstance(value, Sequence) and not value:
        raise RegardError(
            f"Where({part}={value!r}): an empty {'text' if value == '' else 'list'} selects nothing. None selects all."
        )


def _is_whole(number: Any) -> bool:
    """Whether a part of a slice is an integer, or left out."""
    return number is None or (isinstance(number, int) and not isinstance(number, bool))


def _plain_choice(part: str, value: Any) -> Any:
    """A part of a selection as one value or a tuple of values; as a tuple of tuples if batch entries differ.

    A tensor of tokens has a row for each batch entry.
    """
    of_tokens = part in OF_TOKENS
    if isinstance(value, Tensor):
        if value.is_meta:
            raise RegardError(f"Where({part}=...): the tensor is on the meta device and holds no numbers.")
        if value.ndim > 2:
            raise RegardError(f"Where({part}=...): a tensor of tokens is (B,) or (B, n), got {tuple(value.shape)}.")
        value = (value[:, None] if of_tokens and value.ndim == 1 else value).tolist()
    if isinstance(value, str) or not isinstance(value, Sequence | Set):
        return value
    values = sorted(value) if isinstance(value, Set) else value
    plain = tuple(map(_plain_tokens if of_tokens else _plain, values))
    return tuple(one if isinstance(one, tuple) else (one,) for one in plain) if is_by_entry(plain) else plain


def _plain(one: Any) -> Any:
    """An integer of NumPy or of torch as Python's own; a pair (layer, head) as the name of the head."""
    if isinstance(one, tuple):
        return head_name(*map(int, one))
    return int(one) if isinstance(one, Integral) and not isinstance(one, bool) else one


def _plain_tokens(one: Any) -> Any:
    """A value of queries or keys; the list of one batch entry as a tuple."""
    return tuple(map(_plain, one)) if isinstance(one, Sequence) and not isinstance(one, str) else _plain(one)


def _typed(value: Any) -> str:
    """A part of a selection as one would type it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_typed, value))}]"
    if isinstance(value, slice) and value.step is None:
        return f"slice({value.start}, {value.stop})"
    return repr(value)
