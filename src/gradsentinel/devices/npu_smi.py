"""Asks `npu-smi`, the tool of the Ascend driver, for the health of a card."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gradsentinel.cann import TOOL, find_npu_smi
from gradsentinel.devices.health import HealthUnavailable, Reading
from gradsentinel.devices.npu_tables import Chip, Numbers, parse_ecc, parse_numbers, parse_table
from gradsentinel.incident import now

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_LARGEST = 1 << 20
"""So many bytes of an answer are read."""
_LONGEST = 200


class NpuSmi:
    """The health of one NPU.

    Args:
        index: of the device, as in "npu:3"; counted among those that ASCEND_RT_VISIBLE_DEVICES leaves. Which
            card and chip that is, `npu-smi info -m` tells; of a driver that does not, it is the one at this
            place among the numbers of the table, or the one of this physical number if there are fewer.
        tool: the program; None looks for `npu-smi` where the driver puts it.
        timeout: seconds that one answer may take.
    """

    def __init__(self, index: int, *, tool: str | None = None, timeout: float = 20.0) -> None:
        self.place = _place(index, os.environ)
        self.tool = tool
        self.timeout = timeout
        self.card = f"npu {self.place}"
        self._numbers: Sequence[Numbers] = ()
        """What the driver calls each device, once it has said so."""

    def read(self) -> Reading:
        """Return what the card says of itself.

        Raises:
            HealthUnavailable: if the tool is missing, fails, takes too long, or says nothing of this card.
        """
        tool = self.tool or find_npu_smi()
        if tool is None:
            raise HealthUnavailable(f"{TOOL} was not found; it comes with the Ascend driver")
        text = ask((tool, "info"), self.timeout)
        chips = parse_table(text)
        if chips and not self._numbers:
            with contextlib.suppress(HealthUnavailable):  # an older tool does not know the question
                self._numbers = parse_numbers(ask((tool, "info", "-m"), self.timeout))
        chip = self._mine(chips)
        if chip is None:
            raise HealthUnavailable(
                f"{TOOL} info shows nothing of device {self.place}: {_first_line(text) or 'it is silent'}"
            )
        notes = [f"npu {chip.npu} chip {chip.chip}" + (f", bus {chip.bus}" if chip.bus else "")]
        if not self._numbers:
            notes.append("its number was taken from the order of the cards")
        counters: Mapping[str, int] = {}
        try:
            answer = ask((tool, "info", "-t", "ecc", "-i", str(chip.npu)), self.timeout)
            counters = parse_ecc(answer, npu=chip.npu).get(chip.chip, {})
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
        """Return the row of this device, whichever order they came in."""
        known = {numbers.physical: numbers for numbers in self._numbers}
        known.update({numbers.logic: numbers for numbers in self._numbers})
        if known:
            mine = known.get(self.place)
            named = ((chip.npu, chip.chip) for chip in chips)
            rows = dict(zip(named, chips, strict=True))
            return None if mine is None else rows.get((mine.npu, mine.chip))
        numbered = {chip.npu if chip.physical is None else chip.physical: chip for chip in chips}
        if self.place < len(chips):
            return sorted(chips, key=_number_of)[self.place]
        return numbered.get(self.place)


def _number_of(chip: Chip) -> tuple[int, int, int]:
    """What the driver counts devices by."""
    return (-1 if chip.physical is None else chip.physical, chip.npu, chip.chip)


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


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if re.search(r"\w", line)), "")[:_LONGEST]
