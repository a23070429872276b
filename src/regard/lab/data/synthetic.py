"""Three synthetic tasks with known word alignments: copy, reverse, and a grammar that changes the word order.

The grammar translates a small English into an invented language with another word order:

    source    the old red dog sees a bird near the river today
    target    todan nir lo sivo lo kano rubo belo una pila vido
    that is   today near the river the dog red old a bird sees

1. Adjectives follow their noun, in reverse order.
2. Articles and adjectives agree with their noun in class and number, and the verb agrees with its subject: each
   has one of the endings o, oi, a, ai.
3. Adverbs and prepositional phrases move to the front.
4. The verb comes last, after the object.

Every target word translates exactly one source word, so the gold alignment is one to one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.lab.data.corpus import Pair

__all__ = ["LEXICON", "TASKS", "synthetic_pairs"]

#: Endings by the class and the number of the noun.
ENDINGS = {("sun", "one"): "o", ("sun", "many"): "oi", ("moon", "one"): "a", ("moon", "many"): "ai"}


def _table(text: str) -> tuple[tuple[str, ...], ...]:
    """Entries between commas, each cut into its words."""
    return tuple(tuple(entry.split()) for entry in text.strip().split(","))


#: Living beings: singular, plural, stem in the target language, class.
BEINGS = _table("""
    dog dogs kan sun, cat cats mir moon, bird birds pil moon, horse horses tar sun, child children nin moon,
    man men vor sun, woman women sel moon, king kings rik sun, queen queens ren moon, teacher teachers lek sun,
    doctor doctors med moon, farmer farmers gron sun, soldier soldiers bat sun, friend friends kor moon
""")
#: Places: singular, plural, stem, class.
PLACES = _table("""
    tree trees drev sun, house houses dom moon, river rivers siv sun, boat boats nav sun, road roads strad moon,
    garden gardens hort sun, stone stones pet moon, tower towers tur sun, bridge bridges pon moon, wall walls mur sun
""")
#: Adjective, stem.
ADJECTIVES = _table("""
    old bel, young jun, big grav, small pik, red rub, blue laz, white alv, black nog, quiet tis, happy fel,
    sad trist, tired fas, clever sap, brave fort, strange mirt, heavy pond
""")
#: Verbs: singular, plural, stem.
VERBS = _table("""
    sees see vid, finds find trov, loves love am, knows know kon, follows follow sek, helps help jut,
    hears hear od, watches watch gar, calls call vok, carries carry port, remembers remember mem, thanks thank grat
""")
#: Articles: singular, plural, stem.
ARTICLES = _table("the the l, a some un, this these ist, my my m, every all omn")
#: Preposition, translation.
PREPOSITIONS = _table("near nir, behind hint, under sub, beside kost, before vant, past tras")
#: Adverb, translation.
ADVERBS = _table("today todan, yesterday gestan, often oftan, slowly lentan, again reran, always semran")


def _lexicon() -> dict[str, frozenset[str]]:
    """All translations of every source word. They can verify an alignment."""
    translations: dict[str, set[str]] = {word: {translation} for word, translation in (*PREPOSITIONS, *ADVERBS)}
    for one, many, stem, kind in (*BEINGS, *PLACES):
        translations |= {one: {stem + ENDINGS[kind, "one"]}, many: {stem + ENDINGS[kind, "many"]}}
    agreeing = [(word, word, stem) for word, stem in ADJECTIVES]
    for one, many, stem in (*agreeing, *VERBS, *ARTICLES):
        for (_, number), ending in ENDINGS.items():
            translations.setdefault(one if number == "one" else many, set()).add(stem + ending)
    return {word: frozenset(targets) for word, targets in translations.items()}


LEXICON = _lexicon()


@dataclass(frozen=True)
class Phrase:
    """Source words, and target words with the number of the source word that each of them translates."""

    source: tuple[str, ...]
    target: tuple[tuple[int, str], ...]


def _word(source: str, target: str) -> Phrase:
    """The phrase of one word and its translation."""
    return Phrase((source,), ((0, target),))


def _joined(parts: Sequence[Phrase], order: Sequence[int]) -> Phrase:
    """The phrases side by side in the source, and in the given `order` in the target."""
    starts = [sum(len(part.source) for part in parts[:number]) for number in range(len(parts))]
    source = tuple(word for part in parts for word in part.source)
    target = tuple((starts[number] + place, word) for number in order for place, word in parts[number].target)
    return Phrase(source, target)


def _noun_phrase(draw: random.Random, nouns: Sequence[tuple[str, ...]]) -> tuple[Phrase, str, str]:
    """A phrase such as "the old red dog", "lo kano rubo belo"; and its ending and number, for agreement."""
    number = draw.choice(("one", "many"))
    one, many, stem, kind = draw.choice(nouns)
    ending = ENDINGS[kind, number]
    noun = _word(one if number == "one" else many, stem + ending)
    for_one, for_many, stem = draw.choice(ARTICLES)
    article = _word(for_one if number == "one" else for_many, stem + ending)
    chosen = draw.sample(ADJECTIVES, draw.choice((0, 0, 1, 1, 2, 3)))
    adjectives = [_word(adjective, stem + ending) for adjective, stem in chosen]
    parts = [article, *adjectives, noun]
    return _joined(parts, [0, *reversed(range(1, len(parts)))]), ending, number


def _place(draw: random.Random) -> Phrase:
    """A phrase such as "near the river", "nir lo sivo"."""
    return _joined([_word(*draw.choice(PREPOSITIONS)), _noun_phrase(draw, PLACES)[0]], [0, 1])


def _sentence(draw: random.Random) -> Phrase:
    """A random sentence of the grammar.

    Source order: subject, verb, object, places, adverb. Target order: adverb, places, subject, object, verb.
    """
    subject, ending, number = _noun_phrase(draw, BEINGS)
    one, many, stem = draw.choice(VERBS)
    verb = _word(one if number == "one" else many, stem + ending)
    places = [_place(draw) for _ in range(draw.choice((0, 1, 1, 2)))]
    adverbs = [_word(*draw.choice(ADVERBS))] if draw.random() < 0.5 else []
    parts = [subject, verb, _noun_phrase(draw, (*BEINGS, *PLACES))[0], *places, *adverbs]
    fronted = [*range(3 + len(places), len(parts)), *range(3, 3 + len(places))]
    return _joined(parts, [*fronted, 0, 2, 1])


def _letters(draw: random.Random) -> tuple[str, ...]:
    """3 to 15 random letters."""
    return tuple(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 15)))


def _copy(draw: random.Random) -> Phrase:
    """Random letters, and the same letters as target."""
    letters = _letters(draw)
    return Phrase(letters, tuple(enumerate(letters)))


def _reverse(draw: random.Random) -> Phrase:
    """Random letters, and the same letters in reverse order as target."""
    letters = _letters(draw)
    return Phrase(letters, tuple(enumerate(letters))[::-1])


#: Tasks by name: the function that draws one pair.
TASKS: dict[str, Callable[[random.Random], Phrase]] = {"copy": _copy, "reverse": _reverse, "grammar": _sentence}


@checked
def synthetic_pairs(task: str, size: int = 20_000, seed: int = 0) -> list[Pair]:
    """`size` pairs with different sources and gold alignments. The same seed gives the same pairs.

    >>> pair = synthetic_pairs("grammar", 1, seed=0)[0]
    >>> print(pair.source, "|", pair.target)
    my red young clever doctor sees every road | ma meda sapa juna ruba omna strada vida
    >>> sorted(pair.gold)
    [(0, 0), (1, 4), (2, 3), (3, 2), (4, 1), (5, 7), (6, 5), (7, 6)]
    >>> pair = synthetic_pairs("reverse", 1)[0]
    >>> pair.source.split() == pair.target.split()[::-1]
    True
    """
    if task not in TASKS:
        raise RegardError(f"synthetic_pairs: there is no task {task!r}. {nearest(task, TASKS)}")
    if size < 1:
        raise RegardError(f"synthetic_pairs: {size} pairs cannot be drawn. Give at least 1.")
    pairs: dict[str, Pair] = {}
    draw = random.Random(f"{task} {seed}")
    while len(pairs) < size:
        phrase = TASKS[task](draw)
        source = " ".join(phrase.source)
        if source not in pairs:
            gold = frozenset((place, j) for j, (place, _) in enumerate(phrase.target))
            target = " ".join(word for _, word in phrase.target)
            pairs[source] = Pair(source, target, f"{task}-{len(pairs)}", gold)
    return list(pairs.values())
