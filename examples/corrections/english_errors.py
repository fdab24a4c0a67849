"""Synthetic errors in correct English, to train and evaluate a model that corrects them.

``make_errors.py`` writes pairs to files. The kinds of errors, ``KINDS``, are frequent ones of
typists and learners of English (those categories of ERRANT, Bryant et al. 2017, that rules can
make without a parser). A word is a run of letters between spaces, with punctuation around it;
options, numbers, paths and placeholders (``%s``) stay as they are.

A text's errors depend only on the text, the seed, the copy's number and the settings.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from spec_t5x.errors import InputError

# Shares of words with an error, from occasional slips to a beginner's text.
RATES = (0.04, 0.08, 0.12, 0.2, 0.3)
# Default share of texts that get no errors.
RIGHT = 0.25
# Number of attempts to make at least one error in a text.
_TRIES = 8

_WORD = re.compile(r"""([("'\[“‘]*)([A-Za-z]+(?:['’][A-Za-z]+)?)([)"'\],.;:!?…”’]*)""")
# Marks a word that is to be joined with the next one.
_JOINED = "\0"
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Word in its context; ``before`` and ``after`` are the punctuation around it."""

    before: str
    word: str
    after: str
    # Neighbouring words in lower case; empty at the text's ends and if the neighbour is no word.
    previous: str
    following: str
    last: bool

    @property
    def lower(self) -> str:
        return self.word.lower().replace("’", "'")

    def with_word(self, word: str) -> str:
        """Returns text with ``word`` in place of this word, capitalised as this word is."""
        if self.word[0].isupper() and word:
            word = word[0].upper() + word[1:]
        return self.before + word + self.after


# A kind of error: returns the text that replaces a word; None if the error cannot be made there.
Kind = Callable[[_Place, random.Random], str | None]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    """Splits a comma-separated list of groups of words that are mistaken for one another."""
    return tuple(tuple(group.split()) for group in text.split(","))


# Slips of the fingers


def _at(word: str, rng: random.Random) -> int:
    """Draws the index of the letter to change: the first one in 5 % of the cases."""
    return 0 if rng.random() < 0.05 else rng.randrange(1, len(word))


def _neighbours(letter: str) -> str:
    """Returns the letters next to ``letter`` on a QWERTY keyboard; "" if it is no letter."""
    for number, row in enumerate(_ROWS):
        if (at := row.find(letter)) >= 0:
            # Each row of keys is shifted to the right of the row above.
            above = _ROWS[number - 1][at : at + 2] if number else ""
            below = _ROWS[number + 1][max(at - 1, 0) : at + 1] if number < 2 else ""
            return row[max(at - 1, 0) : at] + row[at + 1 : at + 2] + above + below
    return ""


def _dropped(place: _Place, rng: random.Random) -> str | None:
    if len(place.word) < 4:
        return None
    at = _at(place.word, rng)
    return place.with_word(place.word[:at] + place.word[at + 1 :])


def _doubled_letter(place: _Place, rng: random.Random) -> str | None:
    if len(place.word) < 4:
        return None
    at = _at(place.word, rng)
    return place.with_word(place.word[: at + 1] + place.word[at].lower() + place.word[at + 1 :])


def _swapped(place: _Place, rng: random.Random) -> str | None:
    if len(place.word) < 3:
        return None
    at = min(_at(place.word, rng), len(place.word) - 2)
    one, other = place.word[at], place.word[at + 1]
    if one.lower() == other.lower() or "'" in (one, other):
        return None
    return place.with_word(place.word[:at] + other.lower() + one.lower() + place.word[at + 2 :])


def _beside(place: _Place, rng: random.Random) -> str | None:
    """Types a neighbouring key instead of the letter, or (1 in 4) before it."""
    if len(place.word) < 4:
        return None
    at = _at(place.word, rng)
    keys = _neighbours(place.word[at].lower())
    if not keys:
        return None
    return place.with_word(
        place.word[:at] + rng.choice(keys) + place.word[at + (rng.random() < 0.75) :]
    )


# Spelling by ear

_SOUNDS = (
    *(("ie", "ei"), ("ei", "ie"), ("ance", "ence"), ("ence", "ance"), ("ant", "ent")),
    *(("ent", "ant"), ("able", "ible"), ("ible", "able"), ("ph", "f"), ("tion", "sion")),
    *(("sion", "tion"), ("ough", "ouf"), ("ight", "ite"), ("ous", "us"), ("ful", "full")),
    *(("ally", "aly"), ("ely", "ly"), ("ar", "er"), ("er", "ar"), ("or", "er"), ("ea", "ee")),
    *(("ee", "ea"), ("ai", "ay"), ("ou", "ow"), ("c", "s"), ("s", "c"), ("k", "c"), ("c", "k")),
    *(("a", "e"), ("e", "a"), ("e", "i"), ("i", "e"), ("o", "u"), ("u", "o"), ("y", "i")),
    *((2 * letter, letter) for letter in "bcdfglmnprst"),
)


def _by_ear(place: _Place, rng: random.Random) -> str | None:
    if len(place.word) < 5:
        return None
    sounds = [(old, new) for old, new in _SOUNDS if old in place.word[1:]]
    if not sounds:
        return None
    # Confusions of longer spellings are more frequent.
    old, new = rng.choices(sounds, [len(old) ** 2 for old, _ in sounds])[0]
    starts = [m.start() + 1 for m in re.finditer(old, place.word[1:])]
    at = rng.choice(starts)
    return place.with_word(place.word[:at] + new + place.word[at + len(old) :])


# Spaces and repetitions


def _joined(place: _Place, rng: random.Random) -> str | None:
    if place.after or not place.following:
        return None
    return place.before + place.word + _JOINED


def _split(place: _Place, rng: random.Random) -> str | None:
    if len(place.word) < 5:
        return None
    at = rng.randrange(2, len(place.word) - 1)
    return place.before + place.word[:at] + " " + place.word[at:] + place.after


def _repeated(place: _Place, rng: random.Random) -> str | None:
    again = place.word if place.word == "I" else place.word.lower()
    return place.before + place.word + " " + again + place.after


# Case and punctuation


def _cased(place: _Place, rng: random.Random) -> str | None:
    if place.word.isupper() and len(place.word) > 1:
        return None
    if place.word[0].isupper():
        return place.before + place.word[0].lower() + place.word[1:] + place.after
    # Rarely, because few people write a superfluous capital.
    if rng.random() < 0.8:
        return None
    return place.before + place.word[0].upper() + place.word[1:] + place.after


def _punctuated(place: _Place, rng: random.Random) -> str | None:
    if place.after in (".", "?", "!") and place.last:
        stop = "" if place.after == "." else "."
        return place.before + place.word + rng.choice(("", " " + place.after, stop))
    if place.after in (",", ";", ":"):
        return place.before + place.word + rng.choice(["", "", " " + place.after, "."])
    if not place.after and place.following and rng.random() < 0.2:
        return place.before + place.word + ","
    return None


def _apostrophe(place: _Place, rng: random.Random) -> str | None:
    if "'" not in place.word and "’" not in place.word:
        return None
    return place.with_word(re.sub("['’]", "", place.word))


# Grammar

_ARTICLES = ("a", "an", "the")
_PREPOSITIONS = (
    *("at", "in", "on", "to", "for", "of", "with", "from", "by", "about", "into", "during"),
    *("since", "until", "between", "among", "over", "under", "through", "against"),
)
_DETERMINERS = _words("a an the this that these those my your his her its our their no any some")
_PRONOUNS = _words("i you he she it we they who there")
_MANY = _words("i you we they")
_OF_ONE = _words("a an this that each every one another")
_MODALS = _words(
    "to can could will would shall should may might must cannot can't won't don't doesn't didn't "
    "couldn't wouldn't shouldn't let's"
)
# Words that never get an ending.
_FIXED = _words(
    "be been being is are was were am not never always often also just still already only even "
    "ever soon too very so as and or but if when while because than then now here there all both "
    "had did will would can could may might must shall should cannot"
)
_AGREE = _groups(
    "is are,was were,has have,does do,isn't aren't,wasn't weren't,hasn't haven't,doesn't don't,"
    "am is,this these,that those"
)
_FORMS = _groups(
    "be been being,become became becoming,begin began begun beginning,bring brought bringing,"
    "break broke broken breaking,build built building,buy bought buying,catch caught,"
    "choose chose chosen choosing,come came coming,cut cutting,do did done doing,draw drew "
    "drawn,drink drank drunk drinking,drive drove driven driving,eat ate eaten eating,fall "
    "fell fallen falling,feel felt feeling,find found finding,forget forgot forgotten,get got "
    "getting,give gave given giving,go went gone going,grow grew grown,have had having,hear "
    "heard hearing,hold held holding,keep kept keeping,know knew known knowing,leave left "
    "leaving,let letting,lose lost losing,make made making,mean meant meaning,meet met "
    "meeting,pay paid paying,put putting,read reading,run ran running,say said saying,see saw "
    "seen seeing,sell sold,send sent sending,sit sat sitting,sleep slept sleeping,speak spoke "
    "spoken speaking,spend spent spending,stand stood standing,swim swam swimming,take took "
    "taken taking,teach taught teaching,tell told telling,think thought thinking,understand "
    "understood,wear wore worn wearing,win won winning,write wrote written writing"
)
_CONFUSED = _groups(
    "their there they're,its it's,your you're,to too two,then than,affect effect,lose loose,"
    "whose who's,of off,quite quiet,accept except,advice advise,weather whether,much many,"
    "few little,good well,since for,say tell,make do,were where,here hear,know no now,buy by,"
    "peace piece,week weak,right write,see sea,wait weight,hole whole,than that,as like,"
    "which who,other another,some any,borrow lend,bring take,learn teach,"
    "remember remind,fun funny,hard hardly,late lately,later latter,beside besides,desert "
    "dessert,principal principle,passed past,brake break,our are,him his,he him,she her,they "
    "them,we us,me my,i me,interested interesting,bored boring,excited exciting,tired tiring,"
    "everyday every,maybe may,sometime sometimes,alot lot"
)


def _other(groups: Sequence[Sequence[str]]) -> Kind:
    """Returns a kind of error that replaces a word by another word of its group."""
    others: dict[str, list[str]] = {}
    for group in groups:
        for word in group:
            others.setdefault(word, []).extend(other for other in group if other != word)

    def replaced(place: _Place, rng: random.Random) -> str | None:
        choices = others.get(place.lower)
        if not choices:
            return None
        word = rng.choice(choices)
        return place.with_word("I" if word == "i" else word)

    return replaced


def _article(place: _Place, rng: random.Random) -> str | None:
    """Removes or replaces an article, or inserts one after a preposition; None elsewhere."""
    if place.lower in _ARTICLES:
        if place.following and not place.after and rng.random() < 0.6:
            return ""
        return place.with_word(rng.choice([word for word in _ARTICLES if word != place.lower]))
    bare = place.word.islower() and len(place.word) > 3 and place.previous in _PREPOSITIONS
    if not bare or place.lower in _DETERMINERS or place.lower.endswith(("ing", "ly")):
        return None
    return place.before + rng.choice(("the", "the", "a")) + " " + place.word + place.after


def _preposition(place: _Place, rng: random.Random) -> str | None:
    """Removes or replaces a preposition; returns None for other words."""
    if place.lower not in _PREPOSITIONS or place.after:
        return None
    if place.following and rng.random() < 0.35:
        return ""
    # Only the ten most frequent prepositions replace another one.
    return place.with_word(rng.choice([p for p in _PREPOSITIONS[:10] if p != place.lower]))


def _one_of_many(word: str) -> str | None:
    """Removes the -s of a plural or of a verb's third person; None if there is none."""
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is", "'s", "’s")):
        return None
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("sses", "xes", "ches", "shes")) else word[:-1]


def _with_s(word: str) -> str | None:
    if len(word) < 3 or not word.isalpha() or word.endswith("s") or word in _FIXED:
        return None
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("x", "ch", "sh")) else "s")


def _number(place: _Place, rng: random.Random) -> str | None:
    """Adds or removes the -s of a noun's plural or of a verb's third person."""
    if place.previous in _MANY or place.previous in _OF_ONE or place.previous in _MODALS:
        other = None if place.lower.endswith(("ly", "ed", "ing")) else _with_s(place.lower)
    else:
        other = _one_of_many(place.lower)
    return other and place.with_word(other)


def _form(place: _Place, rng: random.Random) -> str | None:
    """Replaces a verb by another form of it."""
    if replaced := _OTHER_FORM(place, rng):
        return replaced
    word = place.lower
    if place.previous in _MODALS and word.isalpha() and len(word) > 3 and word not in _FIXED:
        stem = word.removesuffix("e")
        return place.with_word(rng.choice((stem + "ing", stem + "ed")))
    if word.endswith("ied") and len(word) > 5:
        return place.with_word(word[:-3] + "y")
    for ending, shortest in (("ing", 6), ("ed", 5)):
        if word.endswith(ending) and len(word) >= shortest and not word.endswith("eed"):
            stem = word.removesuffix(ending)
            if len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "sl":
                stem = stem[:-1]
            other = {"ing": "ed", "ed": "ing"}[ending]
            return place.with_word(rng.choice((stem, stem + other)))
    return None


def _left_out(place: _Place, rng: random.Random) -> str | None:
    """Removes a pronoun or another short function word; returns None for other words."""
    small = place.lower in _PRONOUNS or place.lower in ("to", "is", "are", "be", "and", "that")
    return "" if small and place.following and not (place.after or place.before) else None


_OTHER_FORM = _other(_FORMS)

# Kinds of errors by name, with their relative frequency among the kinds possible for a word.
# ``MISSPELLING`` names slips and spelling by ear.
KINDS: dict[str, tuple[Kind, float]] = {
    "drop": (_dropped, 4),
    "double": (_doubled_letter, 2),
    "swap": (_swapped, 4),
    "beside": (_beside, 4),
    "ear": (_by_ear, 5),
    "join": (_joined, 1),
    "split": (_split, 1),
    "repeat": (_repeated, 1),
    "case": (_cased, 4),
    "punctuation": (_punctuated, 6),
    "apostrophe": (_apostrophe, 8),
    "article": (_article, 12),
    "preposition": (_preposition, 10),
    "agreement": (_other(_AGREE), 14),
    "number": (_number, 7),
    "form": (_form, 7),
    "confusion": (_other(_CONFUSED), 8),
    "leave_out": (_left_out, 2),
}
MISSPELLING = ("drop", "double", "swap", "beside", "ear")


def corrupt(
    text: str, rng: random.Random, *, rate: float, kinds: Collection[str] = tuple(KINDS)
) -> str:
    """Returns the text with an error of ``kinds`` in each word with chance ``rate``, if possible.

    Raises:
      InputError: the rate is not in [0, 1], or a kind is unknown.
    """
    _check(rate, kinds)
    chunks = text.split(" ")
    found = [_WORD.fullmatch(chunk) for chunk in chunks]
    words = [match[2].lower() if match else "" for match in found] + [""]
    changed = []
    for at, (chunk, match) in enumerate(zip(chunks, found, strict=True)):
        if match and rng.random() < rate:
            around = {"previous": words[at - 1], "following": words[at + 1]}
            place = _Place(*match.groups(), **around, last=at == len(chunks) - 1)
            chunk = _with_error(place, rng, list(kinds), chunk)
            if not chunk:
                continue
        changed.append(chunk)
    return " ".join(changed).replace(_JOINED + " ", "").replace(_JOINED, "") or text


def _check(rate: float | None, kinds: Collection[str]) -> None:
    if rate is not None and not 0 <= rate <= 1:
        raise InputError(f"rate is {rate}: give the share of words with an error, 0 to 1")
    if not kinds or not set(kinds) <= set(KINDS):
        raise InputError(f"kinds are {' '.join(kinds)}: use some of {', '.join(KINDS)}")


def _with_error(place: _Place, rng: random.Random, kinds: list[str], otherwise: str) -> str:
    """Draws kinds until one can be made here; returns its text, or ``otherwise`` if none can."""
    while kinds:
        kind = rng.choices(kinds, [KINDS[name][1] for name in kinds])[0]
        error = KINDS[kind][0](place, rng)
        if error is not None and error != otherwise:
            return error
        kinds.remove(kind)
    return otherwise


def pairs(
    texts: Iterable[str],
    *,
    seed: int = 0,
    copies: int = 1,
    rate: float | None = None,
    right: float = RIGHT,
    kinds: Collection[str] = tuple(KINDS),
) -> Iterator[tuple[str, str]]:
    """Yields (text with errors, text) ``copies`` times for each distinct text.

    A share ``right`` of the pairs has no errors. If ``rate`` is None, each pair draws one of
    ``RATES``, and gets at least one error if repeated attempts can make one.

    Raises:
      InputError: a share is not in [0, 1], or a kind is unknown.
    """
    if not 0 <= right <= 1:
        raise InputError(f"right is {right}: give the share of texts without errors, 0 to 1")
    _check(rate, kinds)
    for text in dict.fromkeys(texts):
        for copy in range(copies):
            rng = random.Random(f"{seed}\t{copy}\t{text}")
            if rng.random() < right:
                yield text, text
            elif rate is not None:
                yield corrupt(text, rng, rate=rate, kinds=kinds), text
            else:
                yield _wrong(text, rng, kinds), text


def _wrong(text: str, rng: random.Random, kinds: Collection[str]) -> str:
    rate = min(max(rng.choice(RATES), 1 / len(text.split(" "))), 1.0)
    # An attempt may change nothing, since many words allow few kinds of errors.
    for _ in range(_TRIES):
        if (found := corrupt(text, rng, rate=rate, kinds=kinds)) != text:
            return found
    return text
