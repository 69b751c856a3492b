"""What detectors, diagnosis and recovery wrote in English, in the language of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from gradsentinel.views.strings import asset
from gradsentinel.views.words import language

_LIST = re.compile(", | > ")
_HOLE = re.compile(r"\{\d+\}")
_WIDE = re.compile("[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")
_IDEOGRAPH = re.compile("[\u4e00-\u9fff]")
_NARROW = re.compile("[A-Za-z0-9]")
_CODE = re.compile(r"(?:, | \()[^\s,()]+:\d+: ")
"""Where a line of the user's program begins."""
_LONGEST = 4_000
"""Characters of a sentence; what is longer is no sentence of ours."""
_DEEPEST = 8
_HEAD = 4
"""Characters at the beginning of a text by which phrases are looked up."""
_MOST_STOPS = 8
_TELLING = 12
"""Letters of a phrase that is not met by chance; the holes of a shorter one hold names, no sentences."""
_NAMED = 2
"""Words of such a name, as in "id 13"."""
_MOST_LOOKS = 300
"""Parts of one text that are looked at; text of a run that is made to be ambiguous stays English."""
_STRONG = {"; ": "；", ". ": "。"}
_WEAK = {", and ": "，并且", ": ": "：", ", ": "，"}
"""What may stand between parts that mean something each."""


def said(text: str, lang: str) -> str:
    """Return a sentence in a language; in English where there is no other wording of it.

    Names, numbers and code in it are carried over as they are.
    """
    return text if language(lang) == "en" or len(text) > _LONGEST else _chinese(text)


def all_said(texts: Iterable[str], lang: str) -> list[str]:
    """Return each of several sentences in a language."""
    return [said(text, lang) for text in texts]


@lru_cache(maxsize=1 << 15)
def _chinese(text: str) -> str:
    code = _CODE.search(text)
    if code is not None:
        before = _Reader().read(text[: code.start()])
        if not before.left and before.text != text[: code.start()]:
            return before.text + text[code.start() :]  # no word in a line of code is one of ours
    return _Reader().read(text).text


class _Phrase(NamedTuple):
    """A sentence with holes: what stands between them in English, and all of it in Chinese."""

    english: tuple[str, ...]
    chinese: tuple[str, ...]
    order: tuple[int, ...]
    """Which hole of the English sentence goes between the parts of the Chinese one."""

    @property
    def weight(self) -> int:
        """How much of it is fixed."""
        return sum(map(len, self.english))

    @property
    def letters(self) -> int:
        """How many letters of it are fixed."""
        return sum(one.isalpha() for part in self.english for one in part)

    def may_be(self, holes: list[str], left: int) -> bool:
        """Return False for a phrase that is met by chance: there must be no sentence of strangers in it."""
        if self.letters >= _TELLING:
            return True
        return left <= _NAMED if self.english[0] else all(_english(hole) <= _NAMED for hole in holes)

    @property
    def is_tail(self) -> bool:
        """True if it goes on from something else, such as `, in blocks.3`."""
        return bool(self.english[0]) and not self.english[0][0].isalnum()

    def holes(self, text: str) -> list[str] | None:
        """Return what fills the holes if a text is this sentence; looks at each part of it once."""
        if not self.order:
            return [] if text == self.english[0] else None
        first, *inner, last = self.english
        if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
            return None
        at, end = len(first), len(text) - len(last)
        found = []
        for number, part in enumerate(inner):
            # Where nothing stands between two holes the first one has it all.
            fixed = next((one for one in inner[number:] if one), None)
            until = end if fixed is None else text.find(fixed, at, end)
            if until < 0:
                return None
            found.append(text[at:until])
            at = until + len(part)
        return [*found, text[at:end]]

    def fill(self, holes: list[str]) -> str:
        """Return the Chinese sentence, with a space between Chinese and Latin, and none within Chinese."""
        made = self.chinese[0]
        for hole, after in zip(self.order, self.chinese[1:], strict=True):
            made = _joined(_joined(made, holes[hole]), after)
        return made


def _english(text: str) -> int:
    """Return how many words may be English; names, and lists and chains of them, are not."""
    return 0 if all(" " not in part for part in _LIST.split(text)) else len(text.split())


def _joined(left: str, right: str) -> str:
    if left.endswith(" ") and _WIDE.match(left[-2:-1]) and _WIDE.match(right):
        left = left[:-1]
    elif right.startswith(" ") and _WIDE.match(right[1:2]) and _WIDE.match(left[-1:]):
        right = right[1:]
    elif (_IDEOGRAPH.match(left[-1:]) and _NARROW.match(right)) or (
        _NARROW.match(left[-1:]) and _IDEOGRAPH.match(right)
    ):
        return f"{left} {right}"
    return left + right


class _Table(NamedTuple):
    whole: dict[str, str]
    phrases: tuple[_Phrase, ...]
    tails: tuple[_Phrase, ...]


@cache
def _table() -> _Table:
    data: dict[str, dict[str, str]] = json.loads(asset("phrases.zh.json"))
    whole, phrases = dict(data["words"]), []
    for english, chinese in data["sentences"].items():
        order = tuple(int(hole[1:-1]) for hole in _HOLE.findall(chinese))
        phrase = _Phrase(tuple(_HOLE.split(english)), tuple(_HOLE.split(chinese)), order)
        if order or phrase.is_tail:
            phrases.append(phrase)
        if not order:
            whole[english.removeprefix("; ")] = chinese.removeprefix("；")
    # What is fixed most fits best; what begins with a hole fits too easily.
    phrases.sort(key=lambda one: (one.letters >= _TELLING, bool(one.english[0]), one.weight), reverse=True)
    return _Table(whole, tuple(phrases), tuple(phrase for phrase in phrases if phrase.is_tail))


@lru_cache(maxsize=4096)
def _candidates(head: str) -> tuple[_Phrase, ...]:
    """Return the phrases that a text may be which begins so."""
    return tuple(one for one in _table().phrases if head.startswith(one.english[0][:_HEAD]))


class _Read(NamedTuple):
    """A text in Chinese, as far as that goes."""

    text: str
    left: int
    """Words that are still English; one that stands alone is a name."""


class _Reader:
    """Reads one text: of all ways to understand it the one that leaves the least in English."""

    def __init__(self) -> None:
        self._known: dict[str, _Read] = {}
        self._table = _table()

    def read(self, text: str, depth: int = 0) -> _Read:
        """Return a text in Chinese, or as it is if it is not known."""
        whole = self._table.whole.get(text)
        if whole is not None:
            return _Read(whole, 0)
        as_it_is = _Read(text, _english(text))
        if " " not in text:
            return as_it_is
        if text in self._known:
            return self._known[text]
        if depth > _DEEPEST or len(self._known) > _MOST_LOOKS:
            return as_it_is
        best = self._known[text] = as_it_is
        for read in self._ways(text, depth):
            if read.left < best.left or (best is as_it_is and read.left <= best.left):
                best = read
            if not best.left and best is not as_it_is:
                break
        self._known[text] = best
        return best

    def _ways(self, text: str, depth: int) -> Iterator[_Read]:
        yield from self._split(text, _STRONG, depth)
        for phrase in _candidates(text[:_HEAD]):
            read = self._filled(phrase, text, depth)
            if read is not None:
                yield read
        for phrase in self._table.tails:
            start = phrase.english[0]
            for at in sorted({text.find(start), text.rfind(start)}):
                tail = self._filled(phrase, text[at:], depth) if at > 0 else None
                if tail is not None:
                    head = self.read(text[:at], depth + 1)
                    yield _Read(_joined(head.text, tail.text), head.left + tail.left)
        yield from self._split(text, _WEAK, depth)

    def _split(self, text: str, stops: dict[str, str], depth: int) -> Iterator[_Read]:
        """Yield what a text means in two parts."""
        for stop, chinese in stops.items():
            parts = text.split(stop)
            for number in range(1, min(len(parts), _MOST_STOPS if stops is _STRONG else 2)):
                first, rest = stop.join(parts[:number]), stop.join(parts[number:])
                left, right = self.read(first, depth + 1), self.read(rest, depth + 1)
                if not (first.strip() and rest.strip()) or (left.text, right.text) == (first, rest):
                    continue
                # A stranger's sentence may hold a few words that look like ours.
                if stops is _STRONG or 3 * (left.left + right.left) <= len(text.split()):
                    yield _Read(f"{left.text}{chinese}{right.text}", left.left + right.left)

    def _filled(self, phrase: _Phrase, text: str, depth: int) -> _Read | None:
        """Return what a text means if it is that phrase."""
        holes = phrase.holes(text)
        if holes is None:
            return None
        parts = [self.read(hole, depth + 1) for hole in holes]
        left = sum(part.left for part in parts)
        return _Read(phrase.fill([part.text for part in parts]), left) if phrase.may_be(holes, left) else None
