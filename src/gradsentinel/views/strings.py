"""The words of the pictures, which the report as text uses too."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from gradsentinel.errors import ConfigurationError

LANGUAGES = ("en", "zh")


def asset(name: str) -> str:
    """Return the text of a file that the pages are made of."""
    return (files("gradsentinel.views") / "assets" / name).read_text(encoding="utf-8")


class Strings:
    """The table of one language; raises ConfigurationError for a language there is none of."""

    def __init__(self, lang: str) -> None:
        if lang not in LANGUAGES:
            raise ConfigurationError(f"unknown language {lang!r}; choose one of: {', '.join(LANGUAGES)}")
        self.lang = lang
        self._table = _table(lang)

    def __call__(self, key: str, **values: Any) -> str:
        """Return the string of that key, with `{name}` replaced by values."""
        text = self._table[key]
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    def label(self, group: str, value: object) -> str:
        """Return the word for a value that comes from a run; a strange one as it is."""
        if value is None or value == "":
            return "–"  # noqa: RUF001 - what the pages show too
        return self._table.get(f"{group}.{value}", str(value).replace("_", " "))


@cache
def _table(lang: str) -> dict[str, str]:
    table: dict[str, str] = json.loads(asset(f"strings.{lang}.json"))
    return table
