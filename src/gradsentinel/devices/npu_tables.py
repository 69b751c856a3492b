"""Reads what `npu-smi` prints, by the numbers that stand in it and never by the order of its rows.

`npu-smi info` prints a table with two rows per chip. Its columns grow with what stands in them; there is one
layout without and one with the physical number of the chip, and a later one where number and name of the
card have a column each. `npu-smi info -m` tells which chip of which card is which device, and
`npu-smi info -t ecc -i N` prints one counter per line, chip after chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CARD = re.compile(r"(\d+)\s+(\S*[A-Za-z].*)")
_CHIP = re.compile(r"(\d+)(?:\s+(\d+|-))?")
_BUS = re.compile(r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_USE = re.compile(r"(\d+)\s*/\s*(\d+)")
"""Used and total of something: two numbers in one column."""
_COUNTER = re.compile(r"\s*([A-Za-z][\w /()-]*?)\s*:\s*(\d+)\s*")
_COUNTED = re.compile(r"\b(ecc|bit|error|err|page|pages)\b", re.IGNORECASE)
_LARGEST_COUNT = (1 << 32) - 1
"""What a counter shows that has run full, or that the driver could not read."""
_MAPPED = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)(?:\s+(\d+|-))?\s+(\S*[A-Za-z].*?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One chip of the table, which is one device of torch_npu."""

    npu: int
    name: str
    health: str
    chip: int = 0
    physical: int | None = None
    bus: str = ""
    power: float | None = None
    """Watts; of a card with two chips only the first shows any."""
    temperature: float | None = None
    """Degrees Celsius."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers of one device, as `npu-smi info -m` tells them."""

    npu: int
    chip: int
    logic: int
    """The number that programs know it by: 3 of "npu:3"."""
    physical: int | None = None


def parse_table(text: str) -> list[Chip]:
    """Return the chips of `npu-smi info`, in its order; rows that make no sense are left out.

    A chip is told by its second row, so one whose second row is missing is left out, too.
    """
    found: list[Chip] = []
    columns = (0, 1)  # where power and temperature stand in the last cell
    card: tuple[int, str, list[str]] | None = None  # of the last row, whose second row may follow
    for line in text.splitlines():
        if "process id" in line.lower():
            break  # from here on the table is about processes
        cells = _cells(line)
        if cells is None:
            continue
        named, before = _CARD.fullmatch(cells[0]), card
        card = None
        if named is not None:
            card = int(named[1]), named[2].strip(), cells
        elif before is None:
            columns = _columns(cells[2]) or columns
        elif not cells[0] or _CHIP.fullmatch(cells[0]):
            found.append(_chip(before, cells, columns))
    return found


def parse_ecc(text: str, *, npu: int | None = None) -> dict[int, dict[str, int]]:
    """Return the counters of `npu-smi info -t ecc -i N` by chip; a card that names no chip has chip 0.

    The number of a chip stands below its counters, in some versions above them. With `npu` the counters of
    a card that says that it is another one are left out.
    """
    found: dict[int, dict[str, int]] = {}
    for card, lines in _cards(text):
        if npu in (None, card) or card is None:
            for chip, counters in _by_chip(lines).items():
                found.setdefault(chip, {}).update(counters)
    return found


def parse_numbers(text: str) -> list[Numbers]:
    """Return the devices of `npu-smi info -m`; what computes nothing, as a card's controller, is left out."""
    matches = filter(None, map(_MAPPED.fullmatch, text.splitlines()))
    return [
        Numbers(
            npu=int(match[1]),
            chip=int(match[2]),
            logic=int(match[3]),
            physical=int(match[4]) if (match[4] or "-") != "-" else None,
        )
        for match in matches
    ]


# -- rows of the table ---------------------------------------------------------------------------------


def _cells(line: str) -> list[str] | None:
    """Return the three cells of a row; None for whatever is no row."""
    stripped = line.strip().lstrip("> ").strip()
    if not stripped.startswith("|") or stripped.count("|") < 3:
        return None
    cells = [cell.strip() for cell in stripped.strip("|").split("|")]
    if len(cells) == 4:  # number and name of the card stand in a column each
        cells = [f"{cells[0]} {cells[1]}".strip(), *cells[2:]]
    return cells if len(cells) == 3 else None


def _columns(heading: str) -> tuple[int, int] | None:
    """Return where a heading has power and temperature; None if it is none of theirs."""
    words = [word.lower() for word in re.sub(r"\s+\(", "(", heading).split()]
    places = [
        next((place for place, word in enumerate(words) if word.startswith(start)), None)
        for start in ("power", "temp")
    ]
    power, temperature = places
    return None if power is None or temperature is None else (power, temperature)


def _chip(card: tuple[int, str, list[str]], second: list[str], columns: tuple[int, int]) -> Chip:
    npu, name, first = card
    numbers = _CHIP.fullmatch(second[0])
    chip, physical = (None, None) if numbers is None else numbers.groups()
    words = _USE.sub(r"\1/\2", first[2]).split()
    power, temperature = (_number(words[place]) if place < len(words) else None for place in columns)
    if temperature is not None and not -50 <= temperature <= 200:
        temperature = None  # what the driver shows for a sensor that it could not read
    return Chip(
        npu=npu,
        name=name,
        health=first[1],
        chip=int(chip or 0),
        physical=None if physical in (None, "-") else int(physical),
        bus=second[1] if _BUS.fullmatch(second[1]) else "",
        power=power,
        temperature=temperature,
    )


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


# -- counters ------------------------------------------------------------------------------------------


def _cards(text: str) -> list[tuple[int | None, list[tuple[str, int]]]]:
    """Return names and numbers of the lines by card; None: before one was named."""
    found: list[tuple[int | None, list[tuple[str, int]]]] = [(None, [])]
    for match in filter(None, map(_COUNTER.fullmatch, text.splitlines())):
        name, value = " ".join(match[1].split()), int(match[2])
        if name.lower() == "npu id":
            found.append((value, []))
        else:
            found[-1][1].append((name, value))
    return found


def _by_chip(lines: list[tuple[str, int]]) -> dict[int, dict[str, int]]:
    """Return the counters of one card by chip; those whose chip was cut off are nobody's."""
    kinds = [name.lower() == "chip id" for name, _ in lines]
    first = kinds.index(True) if True in kinds else None
    below = first is not None and any(_COUNTED.search(name) for name, _ in lines[:first])
    found: dict[int, dict[str, int]] = {}
    chip = 0 if first is None else None
    for name, value in reversed(lines) if below else lines:
        if name.lower() == "chip id":
            chip = value
        elif chip is not None and _COUNTED.search(name) and value < _LARGEST_COUNT:
            found.setdefault(chip, {})[name] = value
    if below:  # they were read from the end
        found = {chip: dict(reversed(counters.items())) for chip, counters in reversed(found.items())}
    return found
