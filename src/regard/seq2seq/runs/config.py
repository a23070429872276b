"""What a training run is: a TOML file of flat sections, every key explained, checked, and open to the command line."""

from __future__ import annotations

import copy
import json
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from regard.errors import RegardError, nearest
from regard.seq2seq.evaluation.metrics import Name

Auto = Literal["auto"]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
#: The budget when none is set.
MINUTES = 16.0


class Section(BaseModel):
    """What all sections share: unknown keys and values of another type are mistakes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class Data(Section):
    """The sentence pairs."""

    corpus: str = Field(
        default="bible-en-fr",
        description="A corpus by name, a .tsv, a .jsonl or a folder of `datasets`; source and target come before it.",
    )
    source: str = Field(default="", description="A text file of source sentences, one a line.")
    target: str = Field(default="", description="Their translations, line by line.")
    source_language: str = Field(default="source", description="What the source is called; named corpora know it.")
    target_language: str = Field(default="target", description="What the target is called; named corpora know it.")
    source_field: str = Field(
        default="source", description="Where the source is in a .jsonl or a folder of `datasets`."
    )
    target_field: str = Field(
        default="target", description="Where the target is in a .jsonl or a folder of `datasets`."
    )
    max_words: Count | Auto = Field(
        default="auto", description="Most words of a side, longer pairs are left out; auto: 1,000."
    )
    valid: Count | Auto = Field(
        default="auto", description="Pairs held out for validation; auto: a tenth, at most 1,000."
    )
    test: Count | Auto = Field(
        default="auto", description="Pairs held out for evaluation; auto: a tenth, at most 1,000."
    )
    size: int = Field(default=20_000, ge=3, description="Pairs of a generated corpus: copy, reverse, grammar.")
    seed: int = Field(default=0, ge=0, description="Seed of what is held out, and of generated corpora.")

    @model_validator(mode="after")
    def _both_files(self) -> Data:
        if bool(self.source) != bool(self.target):
            raise ValueError("source and target are two files that belong together. Give both, or a corpus")
        return self


class Tokenizer(Section):
    """Pieces of words, learned from the training split alone."""

    kind: Literal["bpe", "unigram", "words"] = Field(
        default="bpe", description="Subwords of sentencepiece, or whole words between spaces."
    )
    source_size: Count | Auto = Field(
        default="auto", description="Of the source vocabulary; auto: 2,000 pieces, all words."
    )
    target_size: Count | Auto = Field(default="auto", description="Of the target vocabulary; auto: as for the source.")
    sampling: bool = Field(default=False, description="Draw another cut into pieces each epoch (Kudo 2018).")


class Model(Section):
    """The system that translates."""

    system: str = Field(default="bahdanau", description="One of regard.seq2seq.SYSTEMS.")
    width: int = Field(default=128, ge=1, description="Width of embeddings and states.")
    layers: Count | Auto = Field(default="auto", description="Layers a side; auto: the system's own.")
    num_heads: Count | Auto = Field(default="auto", description="Attention heads; auto: the system's own.")
    dropout: Share | Auto = Field(
        default="auto", description="auto: 0.1 for the Transformer, else 0; longer trainings want more."
    )
    options: dict[str, Any] = Field(
        default={}, description="What this system alone takes, as a table: {cell = 'gru'} or model.options.cell=gru."
    )

    @model_validator(mode="after")
    def _options_are_others(self) -> Model:
        for name in ("system", "name", "width", "source_size", "target_size"):
            if name in self.options:
                where = f"model.{name}" if name in type(self).model_fields else "the tokenizer, which decides about it"
                raise ValueError(f"options.{name} is no option of a system. Set {where}")
        return self


class Training(Section):
    """How it learns. One of minutes, steps and epochs is the budget, the others are 0; all 0: 16 minutes."""

    minutes: float = Field(
        default=0.0,
        ge=0,
        description="Budget: minutes of a processor's time; validation, and what other programs take, do not count.",
    )
    steps: int = Field(default=0, ge=0, description="Budget: updates of the weights.")
    epochs: int = Field(default=0, ge=0, description="Budget: passes over the training pairs.")
    seed: int = Field(default=1, ge=0, description="Seed of the first weights, of dropout and of the order of batches.")
    sentences: int = Field(default=32, ge=1, description="Sentence pairs of a batch of one process.")
    tokens: int = Field(
        default=0, ge=0, description="Tokens of a batch of one process, padding counted; 0: sentences counts."
    )
    accumulate: int = Field(default=1, ge=1, description="Batches whose gradients make one update.")
    learning_rate: Positive | Auto = Field(
        default="auto", description="Peak; auto: 0.007, hybrid and Transformer 0.005, and 1 (the paper's) with noam."
    )
    schedule: Literal["trapezoid", "cosine", "inverse_square_root", "noam", "plateau", "constant"] = Field(
        default="trapezoid",
        description="Of the learning rate; trapezoid falls to 0 over the last fifth of the budget, cosine over it all.",
    )
    warmup: int = Field(default=100, ge=0, description="Steps over which the learning rate rises to its peak.")
    plateau_patience: int = Field(default=3, ge=1, description="With plateau: validations without a better loss ...")
    plateau_decay: float = Field(
        default=0.5, gt=0, lt=1, description="... after which the learning rate is multiplied by this."
    )
    label_smoothing: float = Field(default=0.1, ge=0, lt=1, description="Share of each target spread over all pieces.")
    clip: float = Field(default=1.0, ge=0, description="Longest norm of the gradient; 0: any.")
    average: float = Field(
        default=0.995, ge=0, lt=1, description="Decay of the averaged weights, which translate; 0: the last."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of products of matrices; bfloat16 keeps weights and sums in float32."
    )
    accelerator: Literal["cpu", "gpu", "auto"] = Field(default="cpu", description="Where it runs.")
    devices: int = Field(
        default=1, ge=1, description="Processes of a machine that train together, each with its batches."
    )
    machines: int = Field(default=1, ge=1, description="Machines that train together; each runs the same command.")
    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="What each of several processes holds: all weights, or its share of them (FSDP2)."
    )
    timeout_minutes: float = Field(
        default=30.0, gt=0, description="Minutes that processes wait for a process that does not answer."
    )
    threads: int = Field(default=1, ge=1, description="Threads of a process. Two under contention are slower than one.")
    save_minutes: float = Field(default=1.0, ge=0, description="Minutes between two saved states; 0: see save_steps.")
    save_steps: int = Field(default=0, ge=0, description="Steps between two saved states; 0: see save_minutes.")
    log_steps: int = Field(default=50, ge=1, description="Steps between two lines of metrics.csv.")
    tensorboard: bool = Field(default=False, description="Write events for TensorBoard, too.")

    @model_validator(mode="after")
    def _one_budget(self) -> Training:
        given = [name for name in ("minutes", "steps", "epochs") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are set, and only one can be the budget. Set the others to 0")
        return self

    @property
    def budget(self) -> tuple[str, float]:
        """What ends the training, "minutes", "steps" or "epochs", and at how many."""
        given = [(name, float(getattr(self, name))) for name in ("minutes", "steps", "epochs")]
        return next((one for one in given if one[1]), ("minutes", MINUTES))


class Validation(Section):
    """What is measured while it learns, with the averaged weights."""

    steps: int = Field(default=500, ge=0, description="Steps between two validations; 0: at the end alone.")
    sentences: int = Field(
        default=300, ge=0, description="Validation pairs that are translated, greedily, for BLEU; 0: none."
    )
    batch: int = Field(default=100, ge=1, description="Pairs of a batch.")
    bleu_tokenizer: Name | Auto = Field(
        default="auto",
        description="Tokenizer of sacrebleu for every BLEU of the run; auto: by the script of the training targets.",
    )
    monitor: Literal["bleu", "loss"] = Field(default="bleu", description="What says which weights are best.")
    patience: int = Field(default=0, ge=0, description="Stop after so many validations without a better one; 0: never.")
    keep: Literal["best", "last"] = Field(default="best", description="Which averaged weights the run translates with.")


class Decoding(Section):
    """How the run translates unless it is told otherwise."""

    beam: int = Field(default=5, ge=1, le=1000, description="Hypotheses that are kept; 1: greedy.")
    length_penalty: float = Field(default=1.5, ge=0, le=10, description="Exponent of ((5 + length) / 6).")
    min_length: int = Field(default=0, ge=0, description="Fewest pieces of a translation.")
    max_length: int = Field(default=0, ge=0, description="Most pieces of a translation; 0: twice the source and 10.")
    no_repeat: int = Field(default=0, ge=0, description="Block pieces that would repeat so many in a row; 0: do not.")

    @model_validator(mode="after")
    def _room_for_the_shortest(self) -> Decoding:
        if 0 < self.max_length <= self.min_length:
            raise ValueError(
                f"max_length = {self.max_length} steps (the end of the sentence is one) leave no room for min_length = "
                f"{self.min_length} pieces. Raise max_length above min_length"
            )
        return self


class Config(Section):
    """A training run, whole: `Config()` is the default, `read_config` reads a file, `write` gives the TOML back.

    >>> Config().training.label_smoothing
    0.1
    """

    data: Data = Data()
    tokenizer: Tokenizer = Tokenizer()
    model: Model = Model()
    training: Training = Training()
    validation: Validation = Validation()
    decoding: Decoding = Decoding()

    def write(self) -> str:
        """As TOML, every key with its explanation.

        >>> "label_smoothing = 0.1" in Config().write().splitlines()
        True
        """
        return "\n".join(_section(name, getattr(self, name)) for name in type(self).model_fields)


def read_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), sections: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of a TOML file, or of `sections` without one, with `section.key=value` on top.

    >>> read_config(overrides=["model.width=64", "training.schedule=noam"]).model.width
    64
    """
    data: dict[str, Any] = copy.deepcopy(dict(sections or {}))
    if path is not None:
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RegardError(f"config: {path} cannot be read: {error.strerror or error}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RegardError(f"config: {path} is no TOML: {error}. `regard train --template` prints one.") from None
    for override in overrides:
        _put(data, override)
    return make_config(data)


def make_config(data: Mapping[str, Any]) -> Config:
    """The configuration of nested dictionaries; what is missing has its default.

    >>> make_config({"model": {"widht": 64}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    regard.errors.RegardError: config: there is no key model.widht. Did you mean 'width'? Known names: ...
    """
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        said = dict.fromkeys(_said(one) for one in error.errors())  # each once: a union complains for all its members
        raise RegardError("config: " + " ".join(said)) from None


def differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configurations differ, with the value of each.

    >>> differences(Config(), make_config({"model": {"width": 64}}))
    {'model.width': (128, 64)}
    """
    old, new = (
        {f"{section}.{key}": value for section, keys in config.model_dump().items() for key, value in keys.items()}
        for config in (before, now)
    )
    return {key: (old[key], value) for key, value in new.items() if old[key] != value}


def _put(data: dict[str, Any], override: str) -> None:
    """Set one key of nested dictionaries, as `section.key=value` says."""
    name, equals, value = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise RegardError(f"config: {override!r} sets nothing. Write section.key=value, as in training.steps=1000.")
    place = data
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise RegardError(f"config: {name} cannot be set, since {part} is a value and no section.")
    place[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """A value as TOML reads it, and what TOML cannot read as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _said(error: Any) -> str:
    """What is wrong with one key, in a sentence."""
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        known = Config.model_fields if len(place) == 1 else Config.model_fields[place[0]].annotation.model_fields  # type: ignore[union-attr]
        kind = "section" if len(place) == 1 else "key"
        return f"there is no {kind} {'.'.join(place)}. {nearest(place[-1], known)}"
    if error["type"] == "value_error":
        return f"[{'.'.join(place)}] {error['ctx']['error']}."
    if len(place) == 1:
        return f"{place[0]} is a section and no value. Write [{place[0]}] and its keys below."
    field = Config.model_fields[place[0]].annotation.model_fields[place[1]]  # type: ignore[union-attr]
    return f"{'.'.join(place[:2])} = {_toml(error['input'])} is not right: it must be {_rule(field)}."


_KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
_SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _rule(field: FieldInfo) -> str:
    """What a key may be, in words."""
    return f"{_kind(field.annotation)} {_bounds(field.metadata)}".strip()


def _bounds(metadata: Iterable[Any]) -> str:
    found = (f"{w} {getattr(bound, s):g}" for bound in metadata for s, w in _SIGNS.items() if _bounded(bound, s))
    return " and ".join(found)


def _bounded(bound: Any, sign: str) -> bool:
    return getattr(bound, sign, None) is not None


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        inside = [bound for one in metadata for bound in getattr(one, "metadata", [one])]
        return f"{_kind(kind)} {_bounds(inside)}"
    if get_origin(annotation) is Literal:
        return ("one of " if len(get_args(annotation)) > 1 else "") + ", ".join(map(json.dumps, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_kind, get_args(annotation)))
    return _KINDS.get(annotation, "a table")


def _section(name: str, section: Section) -> str:
    lines = [f"# {section.__doc__}", f"[{name}]"]
    for key, field in type(section).model_fields.items():
        choices = f" ({_kind(field.annotation)})" if get_origin(field.annotation) is Literal else ""
        lines += [f"# {line}" for line in textwrap.wrap((field.description or "") + choices, 110)]
        lines += [f"{key} = {_toml(getattr(section, key))}"]
    return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    """A value as TOML writes it; JSON writes numbers, texts and lists the same way."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items())
        return "{ " + inside + " }" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # json would write inf as Infinity
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
