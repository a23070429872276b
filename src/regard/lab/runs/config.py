"""`Config`: the configuration of a training run, a TOML file of flat sections; every key is explained and checked."""

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

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.lab.data.synthetic import TASKS
from regard.lab.evaluation.metrics import Name

Auto = Literal["auto"]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
#: The budget if none is set.
MINUTES = 16.0


class Section(BaseModel):
    """Base of all sections: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class Data(Section):
    """The sentence pairs."""

    corpus: str = Field(
        default="bible-en-fr",
        description="Name of a corpus, a .tsv, a .jsonl or a folder of `datasets`; unused with source and target.",
    )
    source: str = Field(default="", description="A text file of source sentences, one on each line.")
    target: str = Field(default="", description="Their translations, line by line.")
    source_language: str = Field(
        default="source", description="Name of the source language; named corpora set it themselves."
    )
    target_language: str = Field(
        default="target", description="Name of the target language; named corpora set it themselves."
    )
    source_field: str = Field(
        default="source", description="Field of the source in a .jsonl or a folder of `datasets`."
    )
    target_field: str = Field(
        default="target", description="Field of the target in a .jsonl or a folder of `datasets`."
    )
    max_words: Count | Auto = Field(
        default="auto", description="Most words of a side; longer pairs are left out. auto: 1,000."
    )
    valid: Count | Auto = Field(
        default="auto", description="Pairs held out for validation; auto: a tenth, at most 1,000."
    )
    test: Count | Auto = Field(
        default="auto", description="Pairs held out for evaluation; auto: a tenth, at most 1,000."
    )
    size: int = Field(default=20_000, ge=3, description="Pairs of a generated corpus: copy, reverse, grammar.")
    seed: int = Field(default=0, ge=0, description="Seed of the choice of held-out pairs, and of generated corpora.")

    @model_validator(mode="after")
    def _both_files(self) -> Data:
        if bool(self.source) != bool(self.target):
            raise ValueError("source and target are two files that belong together. Give both, or a corpus")
        return self


class Tokenizer(Section):
    """Pieces of words, learned from the training split alone."""

    kind: Literal["auto", "bpe", "unigram", "words"] = Field(
        default="auto",
        description="Subwords of sentencepiece, or whole words between spaces; auto: words for the generated corpora "
        "copy, reverse and grammar, bpe for all others.",
    )
    source_size: Count | Auto = Field(
        default="auto", description="Size of the source vocabulary; auto: 2,000 pieces, or all words."
    )
    target_size: Count | Auto = Field(
        default="auto", description="Size of the target vocabulary; auto: as for the source."
    )
    sampling: bool = Field(default=False, description="Split words into other random pieces in each epoch (Kudo 2018).")


class Model(Section):
    """The system that translates."""

    system: str = Field(default="bahdanau", description="One of regard.lab.SYSTEMS.")
    width: int = Field(default=128, ge=1, description="Width of embeddings and states.")
    layers: Count | Auto = Field(
        default="auto", description="Layers of encoder and of decoder; auto: the default of the system."
    )
    num_heads: Count | Auto = Field(default="auto", description="Attention heads; auto: the default of the system.")
    dropout: Share | Auto = Field(
        default="auto", description="Dropout; auto: 0.1 for the Transformer, else 0. Longer trainings need more."
    )
    options: dict[str, Any] = Field(
        default={}, description="Options of this system only, as a table: {cell = 'gru'} or model.options.cell=gru."
    )

    @model_validator(mode="after")
    def _options_are_others(self) -> Model:
        for name in ("system", "name", "width", "source_size", "target_size"):
            if name in self.options:
                where = f"model.{name}" if name in type(self).model_fields else "the size of the tokenizer instead"
                raise ValueError(f"options.{name} is not an option of a system. Set {where}")
        return self


class Training(Section):
    """The training. One of minutes, steps and epochs is the budget, the others are 0; all 0: 16 minutes."""

    minutes: float = Field(
        default=0.0,
        ge=0,
        description="Budget: minutes of processor time, without validation and without the time of other programs.",
    )
    steps: int = Field(default=0, ge=0, description="Budget: updates of the weights.")
    epochs: int = Field(default=0, ge=0, description="Budget: passes over the training pairs.")
    seed: int = Field(
        default=1, ge=0, description="Seed of the initial weights, of dropout and of the order of batches."
    )
    sentences: int = Field(default=32, ge=1, description="Sentence pairs in a batch of one process.")
    tokens: int = Field(
        default=0, ge=0, description="Tokens in a batch of one process, with padding; 0: use sentences."
    )
    accumulate: int = Field(default=1, ge=1, description="Batches whose gradients make one update.")
    learning_rate: Positive | Auto = Field(
        default="auto", description="Peak; auto: 0.007, for hybrid and Transformer 0.005; with noam 1, as in the paper."
    )
    schedule: Literal["trapezoid", "cosine", "inverse_square_root", "noam", "plateau", "constant"] = Field(
        default="trapezoid",
        description="Schedule of the rate; trapezoid falls to 0 over the last fifth of the budget, cosine over all.",
    )
    warmup: int = Field(default=100, ge=0, description="Steps over which the learning rate rises to its peak.")
    plateau_patience: int = Field(default=3, ge=1, description="With plateau: validations without a better loss ...")
    plateau_decay: float = Field(
        default=0.5, gt=0, lt=1, description="... after which the learning rate is multiplied by this."
    )
    label_smoothing: float = Field(default=0.1, ge=0, lt=1, description="Share of each target spread over all pieces.")
    clip: float = Field(default=1.0, ge=0, description="Largest norm of the gradient; 0: no limit.")
    average: float = Field(
        default=0.995,
        ge=0,
        lt=1,
        description="Decay of the averaged weights, which are used to translate; 0: the last weights.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of matrix products; with bfloat16 weights and sums stay in float32."
    )
    accelerator: Literal["cpu", "gpu", "auto"] = Field(default="cpu", description="Device of the training.")
    devices: int = Field(
        default=1, ge=1, description="Processes on each machine that train together, each with its own batches."
    )
    machines: int = Field(default=1, ge=1, description="Machines that train together; each runs the same command.")
    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="With several processes: ddp keeps all weights in each process, fsdp shards them (FSDP2).",
    )
    timeout_minutes: float = Field(
        default=30.0, gt=0, description="Minutes to wait for a process that does not answer."
    )
    threads: int = Field(
        default=1, ge=1, description="Threads of a process. On a busy machine two are slower than one."
    )
    save_minutes: float = Field(default=1.0, ge=0, description="Minutes between two saved states; 0: see save_steps.")
    save_steps: int = Field(default=0, ge=0, description="Steps between two saved states; 0: see save_minutes.")
    log_steps: int = Field(default=50, ge=1, description="Steps between two lines of metrics.csv.")
    tensorboard: bool = Field(default=False, description="Also write events for TensorBoard.")

    @model_validator(mode="after")
    def _one_budget(self) -> Training:
        given = [name for name in ("minutes", "steps", "epochs") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are set, but only one can be the budget. Set the others to 0")
        return self

    @property
    def budget(self) -> tuple[str, float]:
        """The unit of the budget, "minutes", "steps" or "epochs", and its amount."""
        given = [(name, float(getattr(self, name))) for name in ("minutes", "steps", "epochs")]
        return next(((unit, amount) for unit, amount in given if amount), ("minutes", MINUTES))


class Validation(Section):
    """Validation during the training, with the averaged weights."""

    steps: int = Field(default=500, ge=0, description="Steps between two validations; 0: only at the end.")
    sentences: int = Field(
        default=300, ge=0, description="Validation pairs that are translated by greedy search for BLEU; 0: none."
    )
    batch: int = Field(default=100, ge=1, description="Pairs in a batch.")
    bleu_tokenizer: Name | Auto = Field(
        default="auto",
        description="Tokenizer of sacrebleu for every BLEU of the run; auto: by the script of the training targets.",
    )
    monitor: Literal["bleu", "loss"] = Field(
        default="bleu", description="The number that decides which weights are best."
    )
    patience: int = Field(
        default=0, ge=0, description="Stop after this many validations without improvement; 0: never."
    )
    keep: Literal["best", "last"] = Field(
        default="best", description="The averaged weights for translation: of the best validation, or the last."
    )


class Decoding(Section):
    """The default search of translations with this run."""

    beam: int = Field(default=5, ge=1, le=1000, description="Beam width; 1: greedy search.")
    length_penalty: float = Field(default=1.5, ge=0, le=10, description="Exponent of ((5 + length) / 6).")
    min_length: int = Field(default=0, ge=0, description="Fewest pieces of a translation.")
    max_length: int = Field(default=0, ge=0, description="Most pieces of a translation; 0: twice the source and 10.")
    no_repeat: int = Field(default=0, ge=0, description="Forbid repeated n-grams of this length; 0: allow all.")

    @model_validator(mode="after")
    def _room_for_the_shortest(self) -> Decoding:
        if 0 < self.max_length <= self.min_length:
            raise ValueError(
                f"max_length = {self.max_length} steps (with the end of the sentence) leave no room for min_length = "
                f"{self.min_length} pieces. Raise max_length above min_length"
            )
        return self


class Config(Section):
    """The configuration of a training run: `Config()` is the default, `read_config` reads a file, `write` returns TOML.

    >>> Config().training.label_smoothing
    0.1
    """

    data: Data = Data()
    tokenizer: Tokenizer = Tokenizer()
    model: Model = Model()
    training: Training = Training()
    validation: Validation = Validation()
    decoding: Decoding = Decoding()

    @property
    def tokenizer_kind(self) -> str:
        """The kind of the tokenizers: "bpe", "unigram" or "words".

        >>> make_config({"data": {"corpus": "copy"}}).tokenizer_kind, Config().tokenizer_kind
        ('words', 'bpe')
        """
        if self.tokenizer.kind != "auto":
            return self.tokenizer.kind
        return "words" if self.data.corpus in TASKS and not self.data.source else "bpe"

    def with_explicit_kind(self) -> Config:
        """The same configuration, with the kind of the tokenizers in place of "auto"."""
        tokenizer = self.tokenizer.model_copy(update={"kind": self.tokenizer_kind})
        return self.model_copy(update={"tokenizer": tokenizer})

    def write(self) -> str:
        """The configuration as TOML, with an explanation of every key.

        >>> "label_smoothing = 0.1" in Config().write().splitlines()
        True
        """
        return "\n".join(_section(name, getattr(self, name)) for name in type(self).model_fields)


@checked
def read_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), sections: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of a TOML file, or else of `sections`, changed by overrides `section.key=value`.

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
            raise RegardError(
                f"config: {path} is not TOML: {error}. `regard train --template` prints an example."
            ) from None
        if not data:
            raise RegardError(
                f"config: {path} sets no key. Leave it out to train with the defaults; `regard train --template` "
                "prints them with their comments."
            )
    for override in overrides:
        _put(data, override)
    return make_config(data)


@checked
def make_config(data: Mapping[str, Any]) -> Config:
    """The configuration of nested dictionaries; missing keys have their defaults.

    >>> make_config({"model": {"widht": 64}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    regard.RegardError: config: there is no key model.widht. Did you mean 'width'? Known names: ...
    """
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        sentences = dict.fromkeys(_sentence(mistake) for mistake in error.errors())  # a union reports all its members
        raise RegardError("config: " + " ".join(sentences)) from None


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configurations differ, with both values.

    >>> differences(Config(), make_config({"model": {"width": 64}}))
    {'model.width': (128, 64)}
    """
    old, new = (
        {f"{section}.{key}": value for section, keys in config.model_dump().items() for key, value in keys.items()}
        for config in (before, after)
    )
    return {key: (old[key], value) for key, value in new.items() if old[key] != value}


def _put(data: dict[str, Any], override: str) -> None:
    """Set one key of nested dictionaries to the value of an override `section.key=value`."""
    name, equals, value = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise RegardError(f"config: {override!r} sets no key. Write section.key=value, as in training.steps=1000.")
    place = data
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise RegardError(f"config: {name} cannot be set, because {part} is a value and not a section.")
    place[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """A text read as a TOML value; as a string, if it is not one."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(error: Any) -> str:
    """A sentence about one mistake, an entry of pydantic's `errors()`."""
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":  # an unknown section or key
        known = Config.model_fields if len(place) == 1 else Config.model_fields[place[0]].annotation.model_fields  # type: ignore[union-attr]
        kind = "section" if len(place) == 1 else "key"
        return f"there is no {kind} {'.'.join(place)}. {nearest(place[-1], known)}"
    if error["type"] == "value_error":  # from a validator of a section
        return f"[{'.'.join(place)}] {error['ctx']['error']}."
    if len(place) == 1:
        return f"{place[0]} is a section and not a value. Write [{place[0]}] and its keys below."
    field = Config.model_fields[place[0]].annotation.model_fields[place[1]]  # type: ignore[union-attr]
    return f"{'.'.join(place[:2])} = {toml(error['input'])} is wrong: it must be {_rule(field)}."


_KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
_SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _rule(field: FieldInfo) -> str:
    """The allowed values of a key, in words."""
    return f"{_kind(field.annotation)} {_bounds(field.metadata)}".strip()


def _bounds(metadata: Iterable[Any]) -> str:
    """The limits of a number in words, from the metadata of its field."""
    limits = (f"{w} {getattr(bound, s):g}" for bound in metadata for s, w in _SIGNS.items() if _bounded(bound, s))
    return " and ".join(limits)


def _bounded(bound: Any, sign: str) -> bool:
    """Whether a piece of metadata is a limit of this sign, one of `_SIGNS`."""
    return getattr(bound, sign, None) is not None


def _kind(annotation: Any) -> str:
    """The allowed values of a type in words, such as "a whole number at least 1 or "auto""."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        inside = [bound for item in metadata for bound in getattr(item, "metadata", [item])]
        return f"{_kind(kind)} {_bounds(inside)}"
    if get_origin(annotation) is Literal:
        return ("one of " if len(get_args(annotation)) > 1 else "") + ", ".join(map(json.dumps, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_kind, get_args(annotation)))
    return _KINDS.get(annotation, "a table")


def _section(name: str, section: Section) -> str:
    """A section as TOML: its docstring and the description of each key are comments above them."""
    lines = [f"# {section.__doc__}", f"[{name}]"]
    for key, field in type(section).model_fields.items():
        choices = f" ({_kind(field.annotation)})" if get_origin(field.annotation) is Literal else ""
        lines += [f"# {line}" for line in textwrap.wrap((field.description or "") + choices, 110)]
        lines += [f"{key} = {toml(getattr(section, key))}"]
    return "\n".join([*lines, ""])


def toml(value: Any) -> str:
    """A value as TOML writes it; JSON writes numbers, texts and lists the same way."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items())
        return "{ " + inside + " }" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # json would write inf as Infinity
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
