"""Reads the folders that `regard view` opens: a saved run, a trained translator or a comparison of translators."""

from __future__ import annotations

from pathlib import Path

from regard.base.errors import MissingPackage, RegardError, nearest
from regard.lab.comparison.curves import curves
from regard.lab.data.words import cut
from regard.lab.evaluation.pair_maps import read_alignments, read_pair
from regard.lab.models.systems import find_system
from regard.lab.report.folder import COMPARISON, read_study, read_trial
from regard.lab.report.numbers import title
from regard.lab.runs.run import CONFIG, PRETRAINED, SETTINGS, pretrained_runs
from regard.lab.runs.run import load_run as load_translator
from regard.viewer.saved import MANIFEST, load_run
from regard.viewer.sheet import Sheet


def folder_of(place: Path) -> Path:
    """The folder itself, or the folder of the packaged translator that a name means; an error for an unknown name."""
    if place.exists() or len(place.parts) > 1 or not pretrained_runs():
        return place
    if str(place) in pretrained_runs():
        return PRETRAINED / place
    raise RegardError(
        f"view: there is no folder {place}, and the package has no translator of that name. "
        f"{nearest(str(place), pretrained_runs())}"
    )


def open_folder(folder: Path) -> list[Sheet]:
    """The texts of a folder that `regard analyze --save`, `regard train` or `regard compare` wrote."""
    if (folder / MANIFEST).exists():
        return load_run(folder)
    if (folder / COMPARISON).exists():
        return comparison_sheets(folder)
    if (folder / SETTINGS).exists():
        return translator_sheets(folder)
    problem = "is a file" if folder.is_file() else "has nothing to show"
    rule = f"{folder} {problem}" if folder.exists() else f"there is no folder {folder}"
    raise RegardError(
        f"view: {rule}. Give a folder that `regard analyze TEXT --save DIR`, `regard train` or `regard compare` wrote."
    )


def translator_sheets(folder: Path) -> list[Sheet]:
    """Some test sentences of a trained translator, with all its attention maps and its training curves."""
    try:
        from regard.lab.comparison.study import chosen_sentences
        from regard.lab.runs.config import make_config
        from regard.lab.training.preparation import read_corpus
    except ModuleNotFoundError as error:
        raise MissingPackage(f"view of {folder}", error.name or "", "lab") from None

    run = load_translator(folder)
    if not run.config:
        raise RegardError(f"view: {folder / CONFIG} is missing, so the corpus is not known.")
    name, pairs = find_system(run.model.settings()["name"]).title, read_corpus(make_config(run.config).data).test
    chosen = chosen_sentences([0.0] * len(pairs), [len(cut(pair.source)) for pair in pairs])
    charts = curves({name: [read_trial(folder, name, 0)]})  # a run alone has no label and no seed, and needs none
    return [Sheet.of(*arguments, charts) for n in chosen for arguments in read_pair({name: run}, pairs[n], parts=True)]


def comparison_sheets(folder: Path) -> list[Sheet]:
    """The sentences that every system of a comparison aligned, side by side, from the files of its trials."""
    study = read_study(folder)
    trials = {title(about): study.of(about["label"], finished=False) for about in study.about["systems"]}
    # the alignments of the first seed that has written them; None for a system without attention
    written = {
        name: next(filter(None, (trial.looking.get("alignments") for trial in of_system)), None)
        for name, of_system in trials.items()
    }
    aligned = {name: alignments for name, alignments in written.items() if alignments}
    if not aligned:
        raise RegardError(
            f"view: no trial with attention in {folder} has written its alignments yet. Continue the comparison: "
            f"`regard compare --out {folder}`."
        )
    sentences = (dict(zip(aligned, alignments, strict=True)) for alignments in zip(*aligned.values(), strict=True))
    return [Sheet.of(*read_alignments(sentence), curves(trials)) for sentence in sentences]
