"""One script of the pages' modules, for a file that may ask nobody for anything."""

from __future__ import annotations

import re
from collections.abc import Callable

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)


def bundle(entry: str, read: Callable[[str], str]) -> str:
    """Return the module `entry` and all it imports as one strict script that defines `gradsentinel`.

    Knows the forms of import and export that these modules keep to (one line, by name, from `./`), not
    JavaScript in general.

    Args:
        entry: the name of a file.
        read: gives the text of a file by its name.

    Raises:
        ValueError: if a module uses another form, or modules import each other in a circle.
    """
    done: list[str] = []
    texts: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{' > '.join((*above, name))} is a circle")
        if name in done:
            return
        source = read(name)
        for _, imported in _IMPORT.findall(source):
            visit(imported, (*above, name))
        done.append(name)
        texts.append(_as_function(name, source))

    visit(entry, ())
    return '"use strict";\n' + "\n".join(texts) + f"\nconst gradsentinel = {_variable(entry)};\n"


def _as_function(name: str, source: str) -> str:
    exported = _EXPORT.findall(source)
    body = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {_variable(found[2])};\n", source)
    body = _EXPORT.sub("", body)
    left = re.search(r"^(import|export)\b.*$|\bimport\(|\bimport\.meta|</script|<!--", body, re.MULTILINE)
    if left is not None:
        raise ValueError(f"{name}: cannot bundle {left[0]!r}")
    return f"const {_variable(name)} = (() => {{\n{body}return {{ {', '.join(exported)} }};\n}})();"


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"
