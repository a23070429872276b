"""`prepare`: makes corpus, vocabularies, batches and model from a configuration, and writes the folder of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.lab.data.batches import Batches, Encoded
from regard.lab.data.corpus import Corpus, Pair, encode_pairs
from regard.lab.data.length_limits import limit_pieces
from regard.lab.data.loading import load_corpus
from regard.lab.data.tokenizer import ImpossibleSize, Tokenizer, load_tokenizer, train_tokenizer
from regard.lab.decoding.translation import LIMIT
from regard.lab.evaluation.metrics import bleu_tokenizer, check_tokenizer
from regard.lab.evaluation.validation import bleu_of
from regard.lab.models.systems import build, find_system
from regard.lab.runs.config import Config, Data, Training, differences, make_config
from regard.lab.runs.guards import LOCK
from regard.lab.runs.run import (
    CONFIG,
    SOURCE,
    STATE,
    TARGET,
    WEIGHTS,
    check_sums,
    read_sections,
    read_settings,
    write_environment,
    write_settings,
)
from regard.lab.training.loop import Task
from regard.lab.training.ranks import process_number
from regard.lab.training.stream import Epochs

#: Sizes of a vocabulary that "auto" tries in turn: small corpora have fewer pieces, and some scripts have more
#: characters.
SIZES = (2000, 1000, 500, 250, 125, 60, 30, 4000, 8000, 16000)
#: Keys of the section training that must not change when a run is resumed.
FIXED = ("seed", "sentences", "tokens", "accumulate", "average")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A training task with its corpus and tokenizers.

    `changes` are the keys of the configuration with another value than in the folder, each with the old and the new
    value. `bleu_tokenizer` is the tokenizer of sacrebleu.
    """

    task: Task
    corpus: Corpus
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    bleu_tokenizer: str
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def prepare(
    config: Config,
    folder: Path | None = None,
    *,
    corpus: Corpus | None = None,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
) -> Prepared:
    """Make everything that training needs. The first process writes it to the folder, so that a run can be resumed.

    A folder with a saved state keeps its vocabularies.

    Args:
        config: Of the run.
        folder: Of the run; None writes nothing.
        corpus: The sentence pairs; by default those that the configuration names.
        tokenizers: Of the source and the target, for a new run; by default they are learned from the corpus.
    """
    rank = process_number(config.training)
    corpus = corpus or read_corpus(config.data)
    resumed = folder is not None and (folder / STATE).exists()
    saved_tokenizers = None
    if folder is not None and resumed:
        _check_same_corpus(corpus, folder)
        saved_tokenizers = _tokenizers_of(folder)
    source, target = (
        saved_tokenizers
        or tokenizers
        or (
            learn_tokenizer([getattr(pair, side) for pair in corpus.train], config.tokenizer_kind, size)
            for side, size in (("source", config.tokenizer.source_size), ("target", config.tokenizer.target_size))
        )
    )
    torch.manual_seed(config.training.seed)
    model = _model(config, len(source), len(target))
    if rank:  # all processes start from the same weights, but draw different dropout
        torch.manual_seed(config.training.seed + rank)
    short = limit_pieces(corpus, source, target, LIMIT)
    task = _task(config, short, source, target, model, folder, rank)
    changes = differences(make_config(read_sections(folder)), config) if folder is not None and resumed else {}
    prepared = Prepared(task, short, source, target, counted_by(config, corpus), changes)
    if folder is not None and rank == 0:
        if saved_tokenizers is None:
            source.save(folder / SOURCE)
            target.save(folder / TARGET)
        _write_run(folder, prepared, corpus)
    return prepared


def _write_run(folder: Path, prepared: Prepared, corpus: Corpus) -> None:
    """Write the configuration, the environment and the settings of a run, before its first step."""
    write_whole(folder / CONFIG, prepared.task.config.write())
    write_environment(folder)
    facts = {"source_language": corpus.source_language, "target_language": corpus.target_language}
    facts |= {"corpus": corpus.name, "hash": corpus.hash, "bleu_tokenizer": prepared.bleu_tokenizer}
    write_settings(folder, prepared.task.model, facts)


def _check_same_corpus(corpus: Corpus, folder: Path) -> None:
    """Raise an error for another corpus, before anything is written: its test pairs may have been trained on."""
    if read_settings(folder).get("hash") != corpus.hash:
        raise RegardError(
            f"{folder / STATE} is the state of a run with another corpus. Give the corpus of that run, "
            "or another --out."
        )


def read_corpus(data: Data) -> Corpus:
    """The corpus that a configuration names."""
    spec: Any = [data.source, data.target] if data.source else data.corpus
    valid, test, words = (None if n == "auto" else n for n in (data.valid, data.test, data.max_words))
    return load_corpus(
        spec,
        size=data.size,
        valid=valid,
        test=test,
        max_words=words,
        seed=data.seed,
        fields=(data.source_field, data.target_field),
        languages=(data.source_language, data.target_language),
    )


def counted_by(config: Config, corpus: Corpus) -> str:
    """The tokenizer of sacrebleu for every BLEU of a run."""
    chosen = config.validation.bleu_tokenizer
    return bleu_tokenizer(pair.target for pair in corpus.train) if chosen == "auto" else check_tokenizer(chosen)


def learn_tokenizer(sentences: Sequence[str], kind: str, size: int | str) -> Tokenizer:
    """A vocabulary of the training sentences.

    The size "auto" is all words, or the first of `SIZES` that is possible. If none is, it is the size that the last
    error names as possible.
    """
    if isinstance(size, int):
        try:
            return train_tokenizer(sentences, size, kind)
        except RegardError as error:
            keys = "tokenizer.source_size, tokenizer.target_size"
            raise RegardError(f'{error} The keys are {keys}; "auto" takes a size that fits.') from None
    if kind == "words":
        return train_tokenizer(sentences, None, kind)
    possible = SIZES[0]
    for number in SIZES:
        try:
            return train_tokenizer(sentences, number, kind)
        except ImpossibleSize as error:
            possible = error.possible
    return train_tokenizer(sentences, possible, kind)  # a text of few different words has a narrow range of sizes


def is_unsaved(folder: Path) -> bool:
    """Whether a training in this folder was stopped before its first save."""
    return (folder / LOCK).exists() and not (folder / STATE).exists() and not (folder / WEIGHTS).exists()


def reconfigured(folder: Path, overrides: Callable[[dict[str, Any]], Config]) -> Config:
    """The configuration of a run that is resumed. Raises an error for changes that its state does not allow.

    The number of processes may change if the new ones can share the pairs of a step evenly. Batches and their order
    stay the same; only dropout is drawn again.

    Args:
        folder: Of the run.
        overrides: A function from the sections of the run's configuration to the new configuration.
    """
    check_sums(folder, read_settings(folder))
    if not (folder / STATE).exists():
        raise RegardError(f"train: {folder} has no saved state. Leave --resume out and give another --out.")
    before = make_config(read_sections(folder))
    after = _redistributed(before, overrides(before.model_dump()))
    changed = [name for name in ("data", "tokenizer", "model") if getattr(before, name) != getattr(after, name)]
    sizes = _pairs_of_step(before.training), _pairs_of_step(after.training)
    # the size for one process may change if that of all processes together does not
    of_step = () if sizes[0] != sizes[1] else ("sentences", "tokens")
    fixed = [key for key in FIXED if key not in of_step]
    changed += [f"training.{key}" for key in fixed if getattr(before.training, key) != getattr(after.training, key)]
    if changed:
        raise RegardError(
            f"train: {', '.join(changed)} cannot change when a run is resumed, because its state depends on it. "
            "Begin a new training with another --out."
        )
    return after


def _pairs_of_step(training: Training) -> tuple[str, int]:
    """The size of one batch over all processes, and its unit: sentences or tokens."""
    name = "tokens" if training.tokens else "sentences"
    return name, getattr(training, name) * training.devices * training.machines


def _redistributed(before: Config, after: Config) -> Config:
    """The new configuration `after`, with the pairs of a step of `before` divided among its number of processes.

    It stays as it is if that number is the old one, or if the user gave another batch size.
    """
    old, new = before.training, after.training
    (name, total), world = _pairs_of_step(old), new.devices * new.machines
    if old.devices * old.machines == world or getattr(old, name) != getattr(new, name):
        return after
    if total % world:
        possible = [str(count) for count in range(1, 65) if not total % count]
        raise RegardError(
            f"train: {world} processes cannot resume this run: a step has {total} {name}, which they cannot share "
            f"evenly, so batches and results would change. Resume with {', '.join(possible)} processes "
            "(training.devices x training.machines), or begin a new training."
        )
    training = new.model_copy(update={name: total // world})
    return after.model_copy(update={"training": training})


def _model(config: Config, source_size: int, target_size: int) -> Any:
    """The model of a configuration, with random weights; "auto" takes the default of the system."""
    section = config.model
    options = {name: getattr(section, name) for name in ("layers", "num_heads", "dropout")}
    if options["dropout"] == "auto":
        options["dropout"] = find_system(section.system).dropout
    options = {name: value for name, value in options.items() if value != "auto"} | section.options
    return build(section.system, source_size=source_size, target_size=target_size, width=section.width, **options)


def _task(
    config: Config, corpus: Corpus, source: Tokenizer, target: Tokenizer, model: Any, folder: Path | None, rank: int
) -> Task:
    """The training task of process `rank`, with its share of the pairs.

    `corpus` has no pairs that are too long to train on.
    """
    training, validation = config.training, config.validation
    shard = (rank, training.devices * training.machines)
    valid = encode_pairs(corpus.valid, source, target)
    score = None
    if validation.sentences and valid:
        distance = max(1, len(valid) // validation.sentences)  # evenly over the split, which may be in book order
        chosen = slice(0, distance * validation.sentences, distance)
        references = [pair.target for pair in corpus.valid[chosen]]
        score = bleu_of(target, valid[chosen], references, counted_by(config, corpus), validation.batch)
    held_out = Batches(valid, sentences=validation.batch, shard=shard, shuffle=False).epoch(0) if valid else ()
    facts = (("corpus", corpus.hash), ("vocabulary", [len(source), len(target)]))
    return Task(model, config, _epochs(config, corpus.train, source, target, shard), held_out, score, folder, facts)


def _epochs(
    config: Config, pairs: Sequence[Pair], source: Tokenizer, target: Tokenizer, shard: tuple[int, int]
) -> Epochs:
    """The batches of each epoch; with sampling, words are split into new pieces in each epoch.

    `shard` is the number of this process and the number of processes.
    """
    training = config.training
    size: dict[str, Any] = {"tokens": training.tokens} if training.tokens else {"sentences": training.sentences}
    options = size | {"seed": training.seed, "shard": shard}
    if not config.tokenizer.sampling:
        return Batches(encode_pairs(pairs, source, target), **options).epoch
    return lambda epoch: Batches(_sampled(pairs, source, target, (training.seed, epoch)), **options).epoch(epoch)


def _sampled(pairs: Sequence[Pair], source: Tokenizer, target: Tokenizer, key: tuple[int, int]) -> list[Encoded]:
    """The pairs as ids, with words split at random. `key` (seed, epoch) decides the pieces."""
    first = (key[0] * 1_000_003 + key[1]) * 2 * len(pairs)  # a different number for each epoch and sentence
    return [
        (source.encode(pair.source, True, first + 2 * n), target.encode(pair.target, True, first + 2 * n + 1))
        for n, pair in enumerate(pairs)
    ]


def _tokenizers_of(folder: Path) -> tuple[Tokenizer, Tokenizer] | None:
    """The source and the target tokenizer in a folder; None if one is missing."""
    paths = folder / SOURCE, folder / TARGET
    return (load_tokenizer(paths[0]), load_tokenizer(paths[1])) if all(path.exists() for path in paths) else None
