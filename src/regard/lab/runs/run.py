"""`Run` and `load_run`: the folder of a training run, with everything to translate, to resume and to repeat it."""

from __future__ import annotations

import csv
import hashlib
import json
import platform
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.base.texts.text_files import read_json
from regard.base.whole_files import append, write_whole
from regard.lab.data.tokenizer import Tokenizer, load_tokenizer
from regard.lab.decoding import Search, Translation, TranslationOptions, translate
from regard.lab.models.sharding import sharded_like
from regard.lab.runs.tensor_files import read_tensors, write_tensors
from regard.version import __version__

if TYPE_CHECKING:
    from regard.lab.models.translator import Translator

#: The version of the folder; increase it when older folders cannot be read.
FORMAT = 1
WEIGHTS, SETTINGS, CONFIG = "model.safetensors", "settings.json", "config.toml"
#: The file of a comparison of runs; no run may be written into its folder.
COMPARISON = "comparison.json"
METRICS, ENVIRONMENT, STATE = "metrics.csv", "environment.json", "state/state.safetensors"
SOURCE, TARGET = "source.tokenizer", "target.tokenizer"
#: Columns of metrics.csv; all are there from the first row, so later rows can be appended.
COLUMNS = ("step", "epoch", "minutes", "learning_rate", "train_loss", "tokens_per_second", "pairs_per_second")
COLUMNS += ("valid_loss", "perplexity", "bleu")
#: Packages whose versions a run records.
PACKAGES = ("torch", "numpy", "lightning", "sentencepiece", "sacrebleu", "pydantic", "safetensors")
#: The trained runs that come with the package.
PRETRAINED = Path(__file__).parent.parent / "pretrained"


@dataclass(frozen=True, eq=False)
class Run:
    """A trained system, read from its folder.

    Args:
        path: The folder.
        model: The `Translator` with the averaged weights, in evaluation mode.
        source_tokenizer: From text to source ids.
        target_tokenizer: From target ids to text.
        config: The sections of config.toml as dictionaries.
        settings: The arguments of `build`, and "source_language", "target_language", "corpus", "hash",
            "bleu_tokenizer".
        metrics: The rows of metrics.csv.

    >>> from regard.lab import load_pretrained
    >>> run = load_pretrained("bahdanau-en-fr")
    >>> run.settings["source_language"], run.settings["target_language"], run.config["model"]["system"]
    ('en', 'fr', 'bahdanau')
    >>> run.model.target_size == len(run.target_tokenizer)
    True
    """

    path: Path
    model: Translator
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    config: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    metrics: list[dict[str, float | None]] = field(default_factory=list)

    @property
    def bleu_tokenizer(self) -> str | None:
        """The tokenizer of sacrebleu for its BLEU; None for older runs, which do not name one."""
        return self.settings.get("bleu_tokenizer")

    def search(self, **changes: Any) -> Search:
        """The search of the run's configuration, with `changes`; a change to None keeps the configured value.

        >>> load_pretrained("bahdanau-en-fr").search(beam=1).beam
        1
        """
        settings: dict[str, Any] = dict(self.config.get("decoding", {}))
        keys = [field.name for field in fields(Search)]
        for name, value in settings.items():
            if name not in keys:
                raise RegardError(f"{self.path / CONFIG}: there is no key decoding.{name}. {nearest(name, keys)}")
            types, expected = ((int, float), "a number") if name == "length_penalty" else ((int,), "a whole number")
            # not isinstance, because True is an int
            if type(value) not in types:
                raise RegardError(f"{self.path / CONFIG}: decoding.{name} must be {expected}, got {value!r}.")
        settings["max_length"] = settings.get("max_length") or None  # 0 in a configuration means the default
        return Search(**settings | {name: value for name, value in changes.items() if value is not None})

    def translate(self, sentences: Iterable[str], options: TranslationOptions | None = None) -> Iterator[Translation]:
        """Translate sentences in their order, by default as the run is configured; see `regard.lab.translate`.

        >>> run = load_pretrained("bahdanau-en-fr")
        >>> for translation in run.translate(["Peace be with you.", ""]):
        ...     print(translation.source, bool(translation.text), translation.skipped)
        Peace be with you. True
         False empty
        """
        options = options or TranslationOptions(self.search())
        return translate(self.model, self.source_tokenizer, self.target_tokenizer, sentences, options)


@checked
def load_run(path: str | Path) -> Run:
    """Read the folder of a run. Raises an error that names the file if it is truncated, changed or of another version.

    Only model.safetensors, settings.json and the two tokenizers are required.

    >>> from regard.lab import load_pretrained, load_run
    >>> run = load_run(load_pretrained("bahdanau-en-fr").path)
    >>> run.model.training, run.model.source_size == len(run.source_tokenizer)
    (False, True)
    """
    path = Path(path)
    settings = read_settings(path)
    check_sums(path, settings)
    model = _built(path, settings)
    load_weights(model, path / WEIGHTS)
    source, target = (load_tokenizer(_there(tokenizer_file(path, name))) for name in (SOURCE, TARGET))
    for name, tokenizer, size in ((SOURCE, source, model.source_size), (TARGET, target, model.target_size)):
        if len(tokenizer) != size:
            raise RegardError(
                f"{path / name} has {len(tokenizer)} pieces and the model {size}, so they are from different runs."
            )
    return Run(path, model.eval(), source, target, read_sections(path), settings, read_metrics(path / METRICS))


@checked
def pretrained_runs() -> list[str]:
    """The names of the runs that come with the package, in alphabetical order; [] if it was installed without them.

    >>> from regard.lab import pretrained_runs
    >>> pretrained_runs()
    ['bahdanau-en-fr', 'none-en-fr', 'transformer-en-fr']
    """
    if not PRETRAINED.is_dir():
        return []
    return sorted(folder.name for folder in PRETRAINED.iterdir() if (folder / SETTINGS).exists())


@checked
def load_pretrained(name: str) -> Run:
    """A run that comes with the package, such as "bahdanau-en-fr".

    Raises an error for an unknown name; it suggests the nearest known one. `pretrained_runs` lists all names.

    >>> from regard.lab import load_pretrained
    >>> run = load_pretrained("bahdanau-en-fr")
    >>> next(run.translate(["Jesus wept."])).text != ""
    True
    """
    names = pretrained_runs()
    if name not in names:
        raise RegardError(f"There is no model {name!r} in the package. {nearest(name, names)}")
    return load_run(PRETRAINED / name)


def read_settings(path: Path) -> dict[str, Any]:
    """settings.json of a run; raises an error for another format."""
    if not path.is_dir():
        raise RegardError(f"{path} is not the folder of a run. Give the folder that `regard train` wrote.")
    settings = read_json(path / SETTINGS)
    if settings.get("format") != FORMAT:
        raise RegardError(
            f"{path} was written by regard {settings.get('regard', 'of an unknown version')} in format "
            f"{settings.get('format')}; regard {__version__} reads format {FORMAT}. Train it again with this version, "
            "or use the older version."
        )
    return settings


def write_settings(path: Path, model: Translator, facts: Mapping[str, Any]) -> None:
    """Write settings.json: the arguments of `build`, facts about the data, and the sums of the files."""
    settings = {"format": FORMAT, "regard": __version__, "model": model.settings(), **facts, "sums": sums(path)}
    write_whole(path / SETTINGS, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def sums(path: Path) -> dict[str, str]:
    """The sha256 of the tokenizers and of the configuration of a run."""
    files = {name: tokenizer_file(path, name) for name in (SOURCE, TARGET)}
    contents = {name: file.read_bytes() for name, file in files.items() if file.exists()}
    if (path / CONFIG).exists():  # comments and line endings may change
        contents[CONFIG] = json.dumps(read_sections(path), sort_keys=True).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def tokenizer_file(path: Path, name: str) -> Path:
    """The tokenizer in the folder of a run. Runs of the package that have none of their own share that beside them."""
    own, shared = path / name, PRETRAINED / name
    return shared if not own.exists() and path.resolve().parent == PRETRAINED.resolve() else own


def check_sums(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise an error if a file was changed after the run was written."""
    known, now = settings.get("sums") or {}, sums(path)
    # a file without a recorded sum is not checked
    changed = [name for name in now if known.get(name, now[name]) != now[name]]
    if changed:
        raise RegardError(
            f"{path}: {' and '.join(changed)} changed after the run was written (the sum in settings.json "
            "differs). Restore the files. For another search use options such as --beam; to resume with other "
            "settings give the keys to `regard train --resume`."
        )


def write_environment(path: Path) -> None:
    """Write environment.json: the versions and threads of the training, without names of machines or persons."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts = {
        "regard": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "packages": versions,
    }
    write_whole(path / ENVIRONMENT, json.dumps(facts, indent=1) + "\n")


def read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """config.toml without checks, so translating does not need pydantic; {} without the file."""
    if not (path / CONFIG).exists():
        return {}
    try:
        return tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RegardError(f"{path / CONFIG} cannot be read or is truncated ({error}).") from None


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones only once, and the buffers that are saved."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return parameters | {name: value for name, value in model.state_dict().items() if name not in every}


def save_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path, facts: Mapping[str, Any]) -> None:
    """model.safetensors: the given parameters with the buffers of the model."""
    write_tensors(path, named_weights(model) | dict(weights), {"format": FORMAT, **facts})


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> dict[str, Any]:
    """Load the weights of a file into a model of the same settings, in the model's dtype; returns the file's facts."""
    weights, facts = read_tensors(path)
    put_weights(model, weights, path)
    return facts


@torch.no_grad()
def put_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors into a model. The error for missing, extra and misshapen tensors names them."""
    own = named_weights(model)
    wrong = sorted(own.keys() ^ weights.keys())
    wrong += [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if wrong:
        raise RegardError(f"{path} holds the weights of another model: {', '.join(wrong[:5])} do not fit the settings.")
    for name, tensor in own.items():
        tensor.copy_(sharded_like(tensor, weights[name]))


class MetricsFile:
    """Writes metrics.csv: appends new rows, and rewrites the file only if a written row changed.

    Args:
        path: The file; the first write replaces the rows of another training.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0  # rows in the file
        self._last: Mapping[str, float | None] = {}  # the last of them

    def write(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Write all rows; of the rows of the last call only the last one may have changed."""
        if self._count and rows[self._count - 1] == self._last:
            append(self.path, "".join(_line(row, COLUMNS) for row in rows[self._count :]))
        elif rows or self.path.exists():
            write_metrics(self.path, rows)
        self._count, self._last = len(rows), dict(rows[-1]) if rows else {}


def write_metrics(path: Path, rows: Sequence[Mapping[str, float | None]]) -> None:
    """Write all rows of metrics.csv; a number that was not measured at a step is an empty cell."""
    columns = dict.fromkeys((*COLUMNS, *(name for row in rows for name in row)))
    write_whole(path, ",".join(columns) + "\n" + "".join(_line(row, columns) for row in rows))


def _line(row: Mapping[str, float | None], columns: Iterable[str]) -> str:
    """A row of a CSV file; numbers have all their digits, and None is an empty cell."""
    return ",".join("" if row.get(name) is None else repr(row[name]) for name in columns) + "\n"


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The rows of metrics.csv; none without a file. A last row without a line feed is incomplete and left out."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        complete = [line for line in lines if line.endswith("\n")]
        return [{name: float(cell) if cell else None for name, cell in row.items()} for row in csv.DictReader(complete)]
    except (OSError, ValueError, TypeError) as error:
        raise RegardError(f"{path} is truncated, or not a table of metrics ({error}).") from None


def _built(path: Path, settings: Mapping[str, Any]) -> Translator:
    """The model that settings.json describes, with random weights."""
    from regard.lab.models.systems import build

    try:
        return build(**settings["model"])
    except (KeyError, TypeError) as error:
        raise RegardError(f"{path / SETTINGS} does not say how the model is built ({error}).") from None


def _there(path: Path) -> Path:
    """The path; an error if no file is there."""
    if not path.exists():
        raise RegardError(f"{path} is missing, so the folder of the run is incomplete.")
    return path
