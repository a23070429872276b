"""`Study`: systems and seeds to compare on the same pairs with the same budget; and the folder of a comparison."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from regard.base.errors import RegardError
from regard.base.texts.text_files import read_json
from regard.base.whole_files import write_json, write_whole
from regard.lab.comparison.processes import this_machine
from regard.lab.data.corpus import Corpus
from regard.lab.data.retrieval import NOVEL, nearest_pairs, without_near
from regard.lab.models.systems import build, find_system
from regard.lab.runs.config import Config, Model, differences, make_config
from regard.lab.runs.run import COMPARISON, PACKAGES, SOURCE, TARGET
from regard.lab.training.preparation import counted_by, learn_tokenizer, read_corpus
from regard.version import __version__

#: The version of the folder; increase it when older comparisons cannot be continued.
VERSION = 1
STUDY, RETRIEVAL, TEST, TRIALS = COMPARISON, "retrieval.json", "test.json", "trials"
#: Written last; a trial with this file is finished.
EVALUATION = "evaluation.json"
#: The tokenizer of older comparisons, which do not name one.
OLD_TOKENIZER = "13a"
#: The systems of a comparison by default.
DEFAULT = ("none", "bahdanau", "luong_dot", "luong_general", "luong_concat", "hybrid", "transformer")
#: Settings that must not change when a comparison is continued.
FIXED = (
    *("data", "data_hash", "systems", "seeds", "budget", "sweep", "train_words", "without_near", "beam"),
    *("bleu_tokenizer", "config"),
)


@dataclass(frozen=True)
class Entry:
    """A system of a comparison: its name in `SYSTEMS`, its label in the comparison, and its options.

    >>> Entry("bahdanau", "bahdanau").title
    'Bahdanau'
    >>> variants = [Entry("transformer", f"heads-{count}", {"num_heads": count}) for count in (1, 4)]
    >>> [variant.title for variant in variants]
    ['1 head', '4 heads']
    """

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title in tables: that of the system, or the value of the sweep.

        >>> Entry("bahdanau", "bahdanau").title, Entry("transformer", "heads-4").title
        ('Bahdanau', '4 heads')
        >>> Entry("transformer", "heads-1").title
        '1 head'
        """
        if self.label == self.name:
            return find_system(self.name).title
        sweep, _, value = self.label.rpartition("-")
        if sweep == "heads":
            return "1 head" if value == "1" else f"{value} heads"
        return value.replace("_", " ")

    def to_json(self) -> dict[str, Any]:
        """The entry as it is written to comparison.json."""
        return {"name": self.name, "label": self.label, "title": self.title, "settings": dict(self.settings)}


@dataclass(frozen=True)
class Trial:
    """One system with one seed, and the folder of its run."""

    entry: Entry
    seed: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def finished(self) -> bool:
        """Whether the trial is trained and evaluated."""
        return (self.path / EVALUATION).exists()


@dataclass(frozen=True)
class Study:
    """The settings of a comparison; all results depend on them.

    Args:
        name: The name of the comparison.
        config: The configuration of all trials; each has its own system and seed.
        systems: The compared systems; the baseline is "none", or else the first one.
        seeds: One trial for each system and seed.
        sweep: The difference between the systems, if they are variants of one: "heads", "positions", "attention",
            "prune" or "scaled".
        train_words: Longer pairs are left out of training and validation, but not of the test.
        without_near: Whether to leave out test pairs whose source is nearly the same as a training source.
        bleu_tokenizer: Tokenizer of sacrebleu for every BLEU; None takes that of the configuration.
        beam: Beam width of the test translations; 1 is greedy search.

    >>> from pathlib import Path
    >>> from regard.lab import make_config
    >>> config = make_config({"data": {"corpus": "copy"}, "training": {"steps": 9}})
    >>> study = Study("copy", config, (Entry("bahdanau", "bahdanau"), Entry("none", "none")), seeds=(1, 2))
    >>> [trial.name for trial in study.trials(Path("comparisons/copy"))]
    ['bahdanau-1', 'none-1', 'bahdanau-2', 'none-2']
    >>> study.baseline, study.config_of(study.systems[0], seed=2).training.seed
    ('none', 2)
    """

    name: str
    config: Config
    systems: tuple[Entry, ...] = tuple(Entry(name, name) for name in DEFAULT)
    seeds: tuple[int, ...] = (1,)
    sweep: str | None = None
    train_words: int | None = None
    beam: int = 1
    without_near: bool = False
    bleu_tokenizer: str | None = None

    @property
    def baseline(self) -> str:
        labels = [entry.label for entry in self.systems]
        return "none" if "none" in labels else labels[0]

    @property
    def equal(self) -> str:
        """A sentence about the budget that is equal for all trials, and what it does not include."""
        unit, amount = self.config.training.budget
        budget = f"{amount:g} {unit if amount != 1 else unit[:-1]}"
        if unit == "minutes":
            return (
                f"Equal time: every trial trains for {budget} of processor time, in one thread; start, validation and "
                "test, and the time of other programs, are not counted."
            )
        return f"Equal {unit}: every trial trains for {budget}, however long it takes."

    def trials(self, folder: Path) -> list[Trial]:
        """All trials in their order: every system with the first seed, then every system with the second, ..."""
        return [
            Trial(entry, seed, folder / TRIALS / f"{entry.label}-{seed}")
            for seed in self.seeds
            for entry in self.systems
        ]

    def config_of(self, entry: Entry, seed: int) -> Config:
        """The configuration of a trial."""
        sections = copy.deepcopy(self.config.model_dump())
        model = sections["model"]
        model["system"] = entry.name
        for key, value in entry.settings.items():
            (model if key in Model.model_fields else model["options"])[key] = value  # a common option or its own
        sections["training"]["seed"] = seed
        if self.bleu_tokenizer is not None:
            sections["validation"]["bleu_tokenizer"] = self.bleu_tokenizer
        return make_config(sections)

    def corpus(self) -> Corpus:
        """The sentence pairs of all trials."""
        corpus = self._short(read_corpus(self.config.data))
        return without_near(corpus) if self.without_near else corpus

    def _short(self, corpus: Corpus) -> Corpus:
        """The corpus without long pairs in training and validation."""
        most = self.train_words
        if most is None:
            return corpus
        train, valid = (tuple(p for p in split if p.words <= most) for split in (corpus.train, corpus.valid))
        if not train or not valid:
            raise RegardError(f"compare: no pair of {corpus.name} has at most {most} words. Raise --train-words.")
        left_out = len(corpus.train) + len(corpus.valid) - len(train) - len(valid)
        reason = f"longer than {most} words, in training and validation"
        return replace(corpus, train=train, valid=valid, skipped={**corpus.skipped, reason: left_out})

    def settings(self, corpus: Corpus) -> dict[str, Any]:
        """The settings on which results depend, as they are written to comparison.json."""
        unit, amount = self.config.training.budget
        return {
            "version": VERSION,
            "name": self.name,
            "data": corpus.name,
            "data_hash": corpus.hash,
            "languages": [corpus.source_language, corpus.target_language],
            "pairs": {split: len(getattr(corpus, split)) for split in ("train", "valid", "test")},
            "left_out": {reason: count for reason, count in corpus.skipped.items() if count},
            "systems": [entry.to_json() for entry in self.systems],
            "seeds": list(self.seeds),
            "budget": {"kind": unit, "amount": amount},
            "equal": self.equal,
            "sweep": self.sweep,
            "train_words": self.train_words,
            "without_near": self.without_near,
            "beam": self.beam,
            "bleu_tokenizer": self.bleu_tokenizer or counted_by(self.config, corpus),
            "baseline": self.baseline,
            "config": self.config.model_dump(),
        }


def check_study(study: Study) -> None:
    """Build every system once, small, so that mistakes are found before hours of training."""
    labels = [entry.label for entry in study.systems]
    doubled = sorted({label for label in labels if labels.count(label) > 1})
    if doubled or not labels:
        raise RegardError(f"compare: {', '.join(doubled) or 'no system'} cannot be compared. Give each system once.")
    if len(set(study.seeds)) != len(study.seeds) or not study.seeds:
        raise RegardError(f"compare: seeds {list(study.seeds)} are not all different. Give each seed once.")
    for entry in study.systems:
        section = study.config_of(entry, study.seeds[0]).model
        options = {key: getattr(section, key) for key in ("layers", "num_heads", "dropout")}
        options = {key: value for key, value in options.items() if value != "auto"} | section.options
        build(entry.name, source_size=8, target_size=8, width=section.width, **options)


def open_study(study: Study, folder: Path, *, command: str = "", hardware: Mapping[str, Any] | None = None) -> Corpus:
    """Make the folder of a comparison, or check that it holds the same comparison. Then every trial can run.

    It writes what all trials share: the vocabularies, the retrieval baseline and the test pairs. `command` is the line
    that the user typed, which the folder keeps.
    """
    check_study(study)
    corpus = study.corpus()
    settings = json.loads(json.dumps(study.settings(corpus)))  # as read from a file: tuples become lists
    if (folder / STUDY).exists():
        _check_same(read_json(folder / STUDY), settings, folder)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RegardError(f"compare: {folder} exists and is not a comparison. Give --out a new folder.")
    else:
        write_json(folder / STUDY, settings | {"novel_below": NOVEL, "command": command} | _surroundings(hardware))
    try:
        _share(study, corpus, folder, settings["bleu_tokenizer"])
    except RegardError:
        if not (folder / TRIALS).exists():  # for example a wrong vocabulary size: leave an empty folder
            for name in (STUDY, SOURCE, TARGET, TEST, RETRIEVAL):
                (folder / name).unlink(missing_ok=True)
        raise
    return corpus


def read_study(folder: Path) -> Study:
    """The comparison that a folder holds."""
    data = read_json(folder / STUDY)
    _check_version(data, folder)
    try:
        systems = tuple(Entry(entry["name"], entry["label"], entry["settings"]) for entry in data["systems"])
        parts = {name: data[name] for name in ("name", "sweep", "train_words", "beam")}
        parts |= {"without_near": data.get("without_near", False), "config": make_config(data["config"])}
        parts |= {"bleu_tokenizer": data.get("bleu_tokenizer", OLD_TOKENIZER)}
        return Study(systems=systems, seeds=tuple(data["seeds"]), **parts)
    except (KeyError, TypeError) as error:
        raise RegardError(f"{folder / STUDY} is incomplete ({error!r}). Compare into a new folder.") from None


def similarities_of(folder: Path) -> list[float]:
    """The similarity of every test source to the nearest training source."""
    return read_json(folder / RETRIEVAL)["similarities"]


def _check_version(data: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if comparison.json was written in another format."""
    if data.get("version") != VERSION:
        raise RegardError(
            f"{folder} holds a comparison of version {data.get('version')}; regard {__version__} reads {VERSION}. "
            "Compare into a new folder."
        )


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise an error for settings that differ from those in the folder.

    `before` are the settings in comparison.json, `now` those of `Study.settings`.
    """
    _check_version(before, folder)
    # settings that older comparisons do not have, with the values that they used
    before = {
        "without_near": False,
        "bleu_tokenizer": OLD_TOKENIZER,
        **before,
        "config": make_config(before.get("config") or {}).model_dump(),
    }
    names = [name for name in FIXED if before.get(name) != now[name]]
    if len(names) > 1 and "data_hash" in names:
        names.remove("data_hash")  # follows from the others
    if names:
        changed = [_change(name, before.get(name), now[name]) for name in names]
        raise RegardError(
            f"compare: {folder} holds another comparison: {'; '.join(changed)}. "
            f"Continue it with `regard compare --out {folder}`, or give another --out."
        )


def _change(name: str, before: Any, now: Any) -> str:
    """The change of one setting, in words; for the configuration, the changed keys."""
    if name == "config":
        changed = differences(make_config(before), make_config(now))
        return ", ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
    if name == "systems":
        before, now = ([entry["label"] for entry in side or ()] for side in (before, now))
        if before == now:
            return "systems were built with other settings"
    return f"{name} was {before}, now {now}"


def _share(study: Study, corpus: Corpus, folder: Path, tokenizer: str) -> None:
    """Write the files that all trials share, unless they exist."""
    section = study.config.tokenizer
    for file, side, size in ((SOURCE, "source", section.source_size), (TARGET, "target", section.target_size)):
        if not (folder / file).exists():
            sentences = [getattr(pair, side) for pair in corpus.train]
            write_whole(folder / file, learn_tokenizer(sentences, study.config.tokenizer_kind, size).to_bytes())
    if not (folder / TEST).exists():
        texts = {"sources": [p.source for p in corpus.test], "references": [p.target for p in corpus.test]}
        write_json(folder / TEST, texts | {"ids": [p.id for p in corpus.test]})
    if not (folder / RETRIEVAL).exists():
        write_json(folder / RETRIEVAL, retrieval(corpus, tokenizer))


def retrieval(corpus: Corpus, tokenizer: str | None = None) -> dict[str, Any]:
    """The retrieval baseline: the BLEU of copying the target of the most similar training source.

    `tokenizer` is the one of sacrebleu that BLEU uses.
    """
    from regard.lab.evaluation.scores import Training, score

    neighbors = nearest_pairs([pair.source for pair in corpus.train], [pair.source for pair in corpus.test])
    copies = neighbors.copies([pair.target for pair in corpus.train])
    similarities = neighbors.similarity.tolist()
    texts = [pair.target for pair in corpus.test], [pair.source for pair in corpus.test]
    measured = score(copies, *texts, Training(similarities=similarities), tokenizer)
    novel = measured.novel
    return {
        "bleu": measured.bleu.score,
        "bleu_novel": None if novel is None else novel.bleu,
        "novel": 0 if novel is None else novel.count,
        "similarities": similarities,
        "translations": copies,
    }


def chosen_sentences(similarities: Sequence[float], lengths: Sequence[int], count: int = 6) -> list[int]:
    """The numbers of test sentences for the report: unlike any training source, of 6 to 14 words, evenly distributed.

    If no sentence is like that, they are chosen from all. `similarities` and `lengths` (in words) are of test sources.

    >>> chosen_sentences([0.1, 0.9, 0.2, 0.1], [7, 7, 30, 8])
    [0, 3]
    """
    fit = [n for n, (s, w) in enumerate(zip(similarities, lengths, strict=True)) if s < NOVEL and 6 <= w <= 14]
    fit = fit or list(range(len(lengths)))
    distance = max(1, len(fit) // count)
    return fit[: distance * count : distance]


def _surroundings(hardware: Mapping[str, Any] | None) -> dict[str, Any]:
    """The versions of packages and the hardware, by default one process of this machine, for the report."""
    versions = {"regard": __version__, "python": platform.python_version()} | dict(_versions(PACKAGES))
    return {"versions": versions, "hardware": dict(hardware or this_machine().hardware)}


def _versions(packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    """The names and versions of the packages that are installed."""
    for package in packages:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
