"""Asks `npu-smi`, the tool of the Ascend driver, for the health of a card.

`npu-smi info` prints a table with two rows per chip. Its columns grow with what stands in them; there is one
layout without and one with the physical number of the chip, and a later one where number and name of the
card have a column each. `npu-smi info -t ecc -i N` prints one counter per line, chip after chip.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradsentinel.cann import TOOL, find_npu_smi
from gradsentinel.devices.health import HealthUnavailable, Reading
from gradsentinel.incident import now

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_LARGEST = 1 << 20
"""So many bytes of an answer are read."""
_LONGEST = 200
_CARD = re.compile(r"(\d+)\s+(\S*[A-Za-z]\S*)")
_CHIP = re.compile(r"(\d+)(?:\s+(\d+))?")
_BUS = re.compile(r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COUNTER = re.compile(r"\s*([A-Za-z][\w /()-]*?)\s*:\s*(\d+)\s*")
_COUNTED = re.compile(r"\b(ecc|bit|error|err|page|pages)\b", re.IGNORECASE)
_LARGEST_COUNT = (1 << 32) - 1
"""What a counter shows that has run full, or that the driver could not read."""


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


def parse_table(text: str) -> list[Chip]:
    """Return the chips of `npu-smi info`, in its order; rows that make no sense are left out."""
    found: list[Chip] = []
    open_card = False  # the last row named a card, and its second row may follow
    for line in text.splitlines():
        if "process id" in line.lower():
            break  # from here on the table is about processes
        cells = _cells(line)
        if cells is None:
            continue
        card = _CARD.fullmatch(cells[0])
        if card is not None:
            power, temperature = _power_and_temperature(cells[2])
            found.append(
                Chip(
                    npu=int(card[1]),
                    name=card[2],
                    health=cells[1],
                    power=power,
                    temperature=temperature,
                )
            )
        elif open_card and (not cells[0] or _CHIP.fullmatch(cells[0])):
            numbers = _CHIP.fullmatch(cells[0])
            chip, physical = (None, None) if numbers is None else numbers.groups()
            bus = cells[1] if _BUS.fullmatch(cells[1]) else ""
            found[-1] = replace(
                found[-1],
                chip=int(chip or 0),
                physical=None if physical is None else int(physical),
                bus=bus,
            )
        open_card = card is not None
    return found


def parse_ecc(text: str) -> dict[int, dict[str, int]]:
    """Return the counters of `npu-smi info -t ecc -i N` by chip; a card that names no chip has chip 0.

    The number of a chip stands below its counters, in some versions above them.
    """
    found: dict[int, dict[str, int]] = {}
    block: dict[str, int] = {}
    announced: int | None = None
    for line in text.splitlines():
        match = _COUNTER.fullmatch(line)
        if match is None:
            continue
        name, value = " ".join(match[1].split()), int(match[2])
        if name.lower() == "chip id":
            if block and announced is None:
                found.setdefault(value, {}).update(block)
            else:
                if block and announced is not None:
                    found.setdefault(announced, {}).update(block)
                announced = value
            block = {}
        elif _COUNTED.search(name) and value < _LARGEST_COUNT:
            block[name] = value
    if block:
        found.setdefault(announced or 0, {}).update(block)
    return found


class NpuSmi:
    """The health of one NPU.

    Args:
        index: of the device, as in "npu:3". It is the row of the table at this place, counted among the
            devices that ASCEND_RT_VISIBLE_DEVICES leaves; if there are not so many rows, the chip of this
            physical number.
        tool: the program; None looks for `npu-smi` where the driver puts it.
        timeout: seconds that one answer may take.
    """

    def __init__(self, index: int, *, tool: str | None = None, timeout: float = 20.0) -> None:
        self.place = _place(index, os.environ)
        self.tool = tool
        self.timeout = timeout
        self.card = f"npu {self.place}"

    def read(self) -> Reading:
        """Return what the card says of itself.

        Raises:
            HealthUnavailable: if the tool is missing, fails, takes too long, or says nothing of this card.
        """
        tool = self.tool or find_npu_smi()
        if tool is None:
            raise HealthUnavailable(f"{TOOL} was not found; it comes with the Ascend driver")
        text = ask((tool, "info"), self.timeout)
        chip = self._mine(parse_table(text))
        if chip is None:
            raise HealthUnavailable(
                f"{TOOL} info shows nothing of device {self.place}: {_first_line(text) or 'it is silent'}"
            )
        notes = [f"npu {chip.npu} chip {chip.chip}" + (f", bus {chip.bus}" if chip.bus else "")]
        counters: Mapping[str, int] = {}
        try:
            by_chip = parse_ecc(ask((tool, "info", "-t", "ecc", "-i", str(chip.npu)), self.timeout))
            counters = by_chip.get(chip.chip, {})
            if not counters:
                notes.append("no ECC counters")
        except HealthUnavailable as error:
            notes.append(f"no ECC counters: {error}")
        return Reading(
            card=self.card,
            name=chip.name,
            time=now(),
            temperature=chip.temperature,
            power=chip.power,
            health=chip.health,
            counters=counters,
            notes=tuple(notes),
        )

    def _mine(self, chips: Sequence[Chip]) -> Chip | None:
        if self.place < len(chips):
            return chips[self.place]
        numbered = ((chip.npu if chip.physical is None else chip.physical, chip) for chip in chips)
        return next((chip for number, chip in numbered if number == self.place), None)


def ask(command: Sequence[str], timeout: float) -> str:
    """Run a command and return what it printed.

    Its output goes to a file: a pipe would be held open by a child of it that hangs in the driver.

    Raises:
        HealthUnavailable: if it cannot be run, fails, or takes longer than `timeout` seconds.
    """
    name = Path(command[0]).name
    try:
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(  # noqa: S603 - the driver's own tool, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise HealthUnavailable(f"{name} did not answer within {timeout:g} s") from None
            output.seek(0)
            text = output.read(_LARGEST).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise HealthUnavailable(f"{name} cannot be run: {error}") from error
    if status:
        raise HealthUnavailable(f"{name} failed with status {status}: {_first_line(text)}")
    return text


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and its children; one that hangs in the driver stays, and is waited for no longer."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    if process.returncode is None:
        # Python would warn of it when the object goes; the system takes the rest when this process ends.
        process.returncode = -signal.SIGKILL


def _place(index: int, environment: Mapping[str, str]) -> int:
    """Return which of the machine's devices this is, where only some are visible to the process."""
    visible = list(_numbers(environment.get(VISIBLE, "")))
    return visible[index] if index < len(visible) else index


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as 0,2,4-7, up to the first entry that is none."""
    for part in filter(None, (entry.strip() for entry in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            return
        yield from range(int(match[1]), int(match[2] or match[1]) + 1)


def _cells(line: str) -> list[str] | None:
    """Return the three cells of a row; None for whatever is no row."""
    stripped = line.strip().lstrip("> ").strip()
    if not stripped.startswith("|") or stripped.count("|") < 3:
        return None
    cells = [cell.strip() for cell in stripped.strip("|").split("|")]
    if len(cells) == 4:  # number and name of the card stand in a column each
        cells = [f"{cells[0]} {cells[1]}".strip(), *cells[2:]]
    return cells if len(cells) == 3 else None


def _power_and_temperature(text: str) -> tuple[float | None, float | None]:
    words = text.split("/", maxsplit=1)[0].split()
    power, temperature = (*map(_number, words[:2]), None, None)[:2]
    if temperature is not None and not -50 <= temperature <= 200:
        temperature = None  # what the driver shows for a sensor that it could not read
    return power, temperature


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if re.search(r"\w", line)), "")[:_LONGEST]
