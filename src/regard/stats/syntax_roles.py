"""Heads that follow grammar: from a verb to its subject, from an object to its verb, from a pronoun to its noun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError, nearest
from regard.maps import AttentionMap
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import SYNTAX_KINDS, Measured, RoleTable, roles_of_kind

#: Characters that are not part of a word.
PUNCTUATION = '.,;:!?"“”()'


@dataclass(frozen=True)
class SyntaxSentence:
    """A sentence with its gold pairs: relation -> (query word, key word), as indices into `text.split()`.

    >>> from regard.stats import SyntaxSentence
    >>> SyntaxSentence.of("Dogs chase the cat.", subject=["chase>Dogs"], object=["cat>chase"]).pairs
    {'subject': ((1, 0),), 'object': ((3, 1),)}
    """

    text: str
    pairs: dict[str, tuple[tuple[int, int], ...]]

    @property
    def words(self) -> list[str]:
        return _words(self.text)

    @staticmethod
    def of(text: str, **pairs: Sequence[str]) -> SyntaxSentence:
        """A sentence from pairs of words, `query>key`; each word must occur once in the sentence."""
        for relation in pairs:
            check_relation(relation)
        found = {relation: tuple(_indices(text, pair) for pair in given) for relation, given in pairs.items()}
        return SyntaxSentence(text, found)


def _words(text: str) -> list[str]:
    """The words of a text without punctuation; `SyntaxSentence.pairs` are indices into them."""
    return [word.strip(PUNCTUATION) for word in text.split()]


def _indices(text: str, pair: str) -> tuple[int, int]:
    """The numbers of the two words of a pair `query>key` in the text."""
    words = _words(text)
    parts = pair.split(">")
    if len(parts) != 2 or any(words.count(part) != 1 for part in parts) or parts[0] == parts[1]:
        raise RegardError(
            f"SyntaxSentence: {pair!r} is no pair of {text!r}. A pair is query>key, two words that occur once each."
        )
    return words.index(parts[0]), words.index(parts[1])


def check_relation(relation: str) -> None:
    """Refuse a relation that is not known."""
    if relation not in SYNTAX_KINDS:
        raise RegardError(f"syntax_roles: there is no relation {relation!r}. {nearest(str(relation), SYNTAX_KINDS)}")


@cache
def syntax_sentences() -> tuple[SyntaxSentence, ...]:
    """The 72 annotated sentences of the package, with a subject, an object and a pronoun each.

    They were written for Regard. Verbs and subjects, and objects and verbs, are 1 to 6 words apart, 12 pairs each, so
    a head that attends at a fixed offset is right for a sixth of them.

    >>> sentence = syntax_sentences()[0]
    >>> sentence.text, sentence.pairs["subject"]
    ('Farmers sell milk because they need money.', ((1, 0),))
    """
    lines = files("regard.base.texts").joinpath("syntax.tsv").read_text(encoding="utf-8").splitlines()
    _, *relations = lines[0].split("\t")
    sentences = []
    for line in lines[1:]:
        text, *cells = line.split("\t")
        pairs = {relation: cell.split() for relation, cell in zip(relations, cells, strict=True)}
        sentences.append(SyntaxSentence.of(text, **pairs))
    return tuple(sentences)


@dataclass(frozen=True, eq=False)
class WatchedSentence:
    """A sentence as a model read it: its maps, and for each token the number of its word in `sentence.words`, or -1.

    The words may have been read in another order, as in the null of `syntax_roles`.

    >>> import torch, regard as rg
    >>> from regard.stats import SyntaxSentence, WatchedSentence
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> sentence = SyntaxSentence.of("Dogs bark.", subject=["bark>Dogs"])
    >>> WatchedSentence(sentence, [-1, 0, 1, -1], {"layer": rg.Attention()(x, x, x).weights}).word_of
    [-1, 0, 1, -1]
    """

    sentence: SyntaxSentence
    word_of: Sequence[int]
    maps: Mapping[str, AttentionMap]


@checked
def syntax_roles(
    watched: Sequence[WatchedSentence],
    *,
    null: Sequence[WatchedSentence],
    relations: Sequence[str] = tuple(SYNTAX_KINDS),
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
) -> RoleTable:
    """Score every head for grammatical relations, on annotated sentences and on the same words in random order.

    The score of a head for a relation is the share of gold pairs (query word, key word) for which the head attends
    more to the key word than to any other word (Clark et al. 2019, arXiv:1906.04341). Weights of tokens become those of
    words as there: the sum over the tokens of a key word, the mean over the tokens of a query word. The query word
    itself, special tokens and the first token, which is a sink, are no candidates; a pair whose key word has the first
    token is left out.

    There are two things to compare with. `null` is the score on the same sentences with their words shuffled: a head
    that finds words by what they mean, without grammar, has the same score there. `chance` is the score of the best
    fixed offset in words: a head that goes by position has no more. A head has a role if its score is at least 0.4, and
    0.2 above both, over at least 25 pairs. The relations are "subject" (from its verb), "object" (to its verb) and
    "pronoun" (to its noun); all go back in the text, so that causal models can follow them.

    `batch` is the entry of each map that is read. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`).

    `TextReader.syntax()` reads the sentences of the package (`syntax_sentences`) with a model.

    >>> import torch, regard as rg
    >>> from regard.stats import SyntaxSentence, WatchedSentence, syntax_roles
    >>> sentence = SyntaxSentence.of("Old dogs often bark.", subject=["bark>dogs"])
    >>> scores = torch.zeros(4, 4)
    >>> scores[3, 1] = 9.0                                               # bark attends to dogs
    >>> x = rg.Attention(score=rg.Dot(scale=1.0))(scores[None, None], *[torch.eye(4)[None, None]] * 2)
    >>> watched = [WatchedSentence(sentence, [0, 1, 2, 3], {"layers.0": x.weights})]
    >>> (role,) = syntax_roles(watched, null=watched, relations=["subject"]).roles
    >>> role.score, role.null, role.chance, role.queries
    (1.0, 1.0, 1.0, 1)
    """
    for relation in relations:
        check_relation(relation)
    _check(watched, null)
    names = list(watched[0].maps)
    gold = [_counted_pairs(sentence, relations) for sentence in watched]
    head_roles = []
    for number, name in zip(layer_numbers(names, numbers), names, strict=True):
        words, shuffled = ([_between_words(each, name, batch) for each in read] for read in (watched, null))
        for relation in relations:
            pairs = [of_sentence[relation] for of_sentence in gold]
            all_pairs = [pair for of_sentence in pairs for pair in of_sentence]
            scores = _hits(words, pairs), _hits(shuffled, pairs)
            count = torch.tensor(len(all_pairs)).expand(len(scores[0]))
            chance = torch.tensor(best_offset(all_pairs)).expand(len(scores[0]))
            head_roles += roles_of_kind(relation, number, *(Measured(score, chance, count) for score in scores))
    return RoleTable(head_roles)


def _check(watched: Sequence[WatchedSentence], null: Sequence[WatchedSentence]) -> None:
    """Refuse a null of other sentences, other layers or sizes, and sentences with a word that no token belongs to."""
    if not watched or [one.sentence for one in watched] != [one.sentence for one in null]:
        raise RegardError(
            f"syntax_roles: {len(watched)} watched sentences and {len(null)} of the null; both must be the same "
            "sentences in the same order, at least one, the null with its words shuffled."
        )
    names = list(watched[0].maps)
    for one in (*watched, *null):
        num_words = len(one.sentence.words)
        sizes = {weights.shape[2:] for weights in one.maps.values()}
        if list(one.maps) != names or not names or sizes != {(len(one.word_of), len(one.word_of))}:
            raise RegardError(
                f"syntax_roles: the maps of {one.sentence.text!r} have (queries, keys) {sorted(map(tuple, sizes))}, "
                f"and word_of names {len(one.word_of)} tokens. Every sentence needs the same layers, of self-attention "
                "over all its tokens."
            )
        if set(range(num_words)) - set(one.word_of) or max(one.word_of) >= num_words:
            raise RegardError(
                f"syntax_roles: {one.sentence.text!r} has the words 0 to {num_words - 1}, and word_of is "
                f"{list(one.word_of)}. Each word needs a token; -1 is for tokens of no word."
            )


def _counted_pairs(watched: WatchedSentence, relations: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """The gold pairs of each relation without those whose key is the first token's word."""
    return {
        relation: [(query, key) for query, key in watched.sentence.pairs.get(relation, ()) if key != watched.word_of[0]]
        for relation in relations
    }


def _between_words(watched: WatchedSentence, name: str, batch: int) -> Tensor:
    """The weights of a layer between words, (H, words, words); -1 for words that are no candidates.

    The key word of a query is found as the largest of its row, so -1 can never be chosen.
    """
    weights = one_text("syntax_roles", watched.maps[name], batch).dense()[0].double().cpu()
    is_in_word = torch.tensor(list(watched.word_of))[:, None] == torch.arange(len(watched.sentence.words))
    keys = is_in_word.clone()
    keys[0] = False  # the first token is a sink
    queries = is_in_word.double() / is_in_word.sum(0)  # the mean over the tokens of a query word
    words = queries.T @ weights @ keys.double()
    words[:, :, ~keys.any(0)] = -1.0
    return words.masked_fill(torch.eye(words.shape[-1], dtype=torch.bool), -1.0)


def _hits(words: Sequence[Tensor], pairs: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """The share of pairs whose key word receives the largest weight, (H,); NaN without pairs.

    `words` are the weights between the words of each sentence, (H, words, words), and `pairs` the pairs of each.
    """
    hits = [each[:, query].argmax(-1) == key for each, own in zip(words, pairs, strict=True) for query, key in own]
    return torch.stack(hits).double().mean(0) if hits else torch.full((len(words[0]),), torch.nan)


def best_offset(pairs: Sequence[tuple[int, int]]) -> float:
    """The largest share of pairs that have the same offset.

    >>> best_offset([(3, 1), (5, 3), (4, 1)]) == 2 / 3
    True
    """
    offsets = Counter(key - query for query, key in pairs)
    return max(offsets.values()) / len(pairs) if pairs else float("nan")
