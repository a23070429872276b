"""What `regard view` opens: a saved run, or from the lab a trained translator or a comparison of several."""

from __future__ import annotations

from pathlib import Path

from regard.data.words import cut
from regard.errors import RegardError
from regard.seq2seq.comparison.curves import curves
from regard.seq2seq.evaluation.pair_maps import read_alignments, read_pair
from regard.seq2seq.models.systems import system
from regard.seq2seq.runs.run import CONFIG, SETTINGS
from regard.seq2seq.runs.run import load_run as load_translator
from regard.viewer.report.folder import COMPARISON, read_study, read_trial
from regard.viewer.report.numbers import title
from regard.viewer.saved import MANIFEST, load_run
from regard.viewer.sheet import Sheet


def open_folder(folder: Path) -> list[Sheet]:
    """The texts of a folder that `regard see --save`, `regard train` or `regard compare` wrote."""
    if (folder / MANIFEST).exists():
        return load_run(folder)
    if (folder / COMPARISON).exists():
        return comparison_sheets(folder)
    if (folder / SETTINGS).exists():
        return translator_sheets(folder)
    raise RegardError(
        f"view: {folder} holds nothing to look at. Give a folder that `regard see TEXT --save DIR`, `regard train` or "
        "`regard compare` wrote."
    )


def translator_sheets(folder: Path) -> list[Sheet]:
    """Some test sentences of a run, all its attentions exact, and its curves."""
    try:
        from regard.seq2seq.comparison.study import chosen_sentences
        from regard.seq2seq.runs.config import make_config
        from regard.seq2seq.training.preparation import read_corpus
    except ModuleNotFoundError as error:
        raise RegardError(f"view: a run needs {error.name}. Install it: pip install 'regard[lab,view]'.") from None

    run = load_translator(folder)
    if not run.config:
        raise RegardError(f"view: {folder / CONFIG} is missing, so there is no corpus to take sentences from.")
    name, pairs = system(run.model.settings()["name"]).title, read_corpus(make_config(run.config).data).test
    chosen = chosen_sentences([0.0] * len(pairs), [len(cut(pair.source)) for pair in pairs])
    charts = curves({name: [read_trial(folder, name, 0)]})
    return [Sheet.of(*looked, charts) for n in chosen for looked in read_pair({name: run}, pairs[n], parts=True)]


def comparison_sheets(folder: Path) -> list[Sheet]:
    """The sentences that all systems of a comparison were made to say, side by side as its trials wrote them."""
    study = read_study(folder)
    trials = {title(about): study.of(about["label"], finished=False) for about in study.about["systems"]}
    written = {name: next(filter(None, (t.looking.get("alignments") for t in of)), None) for name, of in trials.items()}
    seen = {name: alignments for name, alignments in written.items() if alignments}
    if not seen:
        raise RegardError(
            f"view: no trial with attention in {folder} has come to its alignments yet. Go on with it: `regard compare "
            f"--out {folder}`."
        )
    sentences = (dict(zip(seen, each, strict=True)) for each in zip(*seen.values(), strict=True))
    return [Sheet.of(*read_alignments(sentence), curves(trials)) for sentence in sentences]
