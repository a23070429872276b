"""`profile_corpus` reads many documents with a model and merges their statistics into one profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from regard.base.checks import Size, checked
from regard.base.cluster import check_engine
from regard.base.errors import RegardError
from regard.hf.text_reader import TextReader
from regard.profiling.corpus_profile import CorpusKey, CorpusProfile, DocumentResult, measure_document
from regard.profiling.documents import Documents, open_corpus

#: Documents between two saves.
EVERY = 20


class Engine(Protocol):
    """Measures documents: in this process, or in workers."""

    def results(self, documents: Iterable[str], key: CorpusKey) -> Iterator[DocumentResult]:
        """The result of each document, in the order of the documents."""
        ...


@dataclass(frozen=True)
class ThisProcess:
    """Measures the documents one after the other in this process."""

    reader: TextReader

    def results(self, documents: Iterable[str], key: CorpusKey) -> Iterator[DocumentResult]:
        return (measure_document(self.reader, document, key.layers, key.length) for document in documents)


class NotSaved(RegardError):
    """A finished profile that could not be saved, for example because the disk is full; `profile` holds it."""

    profile: CorpusProfile


@checked
def profile_corpus(
    model: TextReader | str | Path,
    documents: Documents | str | Path | Iterable[str],
    layers: Iterable[int] | None = None,
    length: Size | None = None,
    folder: str | Path | None = None,
    *,
    field: str = "text",
    engine: str = "local",
    workers: Size | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> CorpusProfile:
    """Read every document with a model, and merge the statistics of all heads into one profile.

    `documents` are texts, or the name of a corpus: a UTF-8 file of one document per line, a .jsonl or .parquet file,
    or a folder of `datasets`, with the text in `field`. A document of more than `length` tokens, or of more than the
    model takes, is truncated. A document that cannot be read is listed in the profile and does not end the run.

    With a `folder` the profile is saved every 20 documents and at the end. The same call continues a run that was
    stopped, and counts no document twice. `engine="ray"` reads with several `workers` of a Ray cluster (None: as many
    as there are processors for); each loads the model by its name. The profile is the same to the last bit.
    `progress(done, count)` is called at the start and after each document.

    >>> import regard as rg
    >>> result = rg.profile_corpus("minilm", ["The cat sat on the mat.", "A dog barks."], layers=[0])
    >>> result.table.documents, result.table.values("entropy").shape
    (2, torch.Size([1, 12]))
    """
    check_engine("profile_corpus", engine)
    if workers is not None and engine == "local":
        raise RegardError("profile_corpus: --workers are those of --engine ray. Leave it out, or name that engine.")
    opened = documents if isinstance(documents, Documents) else open_corpus(documents, field)
    reader = model if isinstance(model, TextReader) else TextReader.load(model)
    reader.check_length(length)
    numbers = None if layers is None else sorted(set(layers))
    key = CorpusKey(opened.hash, reader.name, length, numbers, reader.fingerprint())
    folder = None if folder is None else Path(folder)
    profile = CorpusProfile.resume(key, folder)
    count = progress or (lambda done, of: None)
    count(profile.done, opened.count)
    with closing(_engine(engine, reader, workers).results(opened.start_at(profile.done), key)) as results:  # type: ignore[type-var]
        profile = merge_results(results, profile, folder, lambda done: count(done, opened.count))
    try:
        profile.save(folder)
    except RegardError as error:
        unsaved = NotSaved(str(error))
        unsaved.profile = profile
        raise unsaved from error
    return profile


def merge_results(
    results: Iterable[DocumentResult],
    profile: CorpusProfile,
    folder: Path | None,
    progress: Callable[[int], object] = lambda done: None,
) -> CorpusProfile:
    """The profile after all results. It is saved every `EVERY` documents, and when an error or interrupt ends it."""
    try:
        for result in results:
            profile = profile.with_document(result)
            progress(profile.done)
            if profile.done % EVERY == 0:
                profile.save(folder)
    except BaseException:
        profile.save(folder)
        raise
    return profile


def _engine(name: str, reader: TextReader, workers: int | None) -> Engine:
    """What measures the documents: this process with the `reader`, or `workers` that load the model themselves."""
    if name == "local":
        return ThisProcess(reader)
    from regard.profiling.workers import RayWorkers

    return RayWorkers(workers)
