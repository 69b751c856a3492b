"""Values as people read them in a terminal."""

from __future__ import annotations

import math
import unicodedata

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What a wrapper calls the module inside it."""


def printable(value: object) -> str:
    r"""Return a value as one line of text that a terminal shows and does not obey.

    Line breaks and tabs become spaces; control, formatting and other invisible characters are written as
    escapes, such as `\x1b`.
    """
    return "".join(_visible(character) for character in str(value))


def plain_name(name: str) -> str:
    """Return a module's or parameter's name as its author knows it, without the parts that wrappers add.

    They are those of torch.compile, of activation checkpointing and of FSDP.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `0.4 ms`, `31 ms`, `1.2 s`, `95 s`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def size_of(size: float) -> str:
    """Return a number of bytes for people: `512 B`, `1.5 KiB`, `2.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    blank = character in "\n\t" or unicodedata.category(character) == "Zs"
    return " " if blank else character.encode("unicode_escape").decode("ascii")


def id_order(incident_id: str) -> tuple[int, str, int]:
    """Return what sorts ids by step, then kind, then number: '000123-spike-10' comes after '000123-spike-2'.

    By their ids incidents are in the order of their steps. A rollback makes steps anew, so that is not always
    the order in which they happened, which `time` and `iteration` tell.
    """
    step, _, kind = incident_id.partition("-")
    base, _, number = kind.rpartition("-")
    numbered = bool(base) and number.isdecimal()
    return int(step) if step.isdecimal() else 0, base if numbered else kind, int(number) if numbered else 1
