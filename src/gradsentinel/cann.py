"""Which CANN and which npu-smi are on this machine, and which CANN belongs to which torch_npu.

Nothing is loaded for it, not even torch, whose import may be what fails.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOOL = "npu-smi"
_TOOL_PLACES = ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi")
_VARIABLES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
"""What set_env.sh sets; the first one that is set counts."""
_ROOTS = ("/usr/local/Ascend", "~/Ascend")
_PLACES = ("ascend-toolkit/latest", "cann", "latest")
_NOTES = ("ascend_toolkit_install.info", "ascend_cann_toolkit_install.info", "version.cfg", "version.info")
_VERSION = re.compile(r"(?<![\d.])(\d+\.\d+(?:\.[A-Za-z]*\d+)*(?:\.?[A-Za-z]+\d*)?)")
_STATED = re.compile(r"^\s*\[?\w*version\w*\s*=\s*\[?\"?v?(\d[^\s\"\],:]*)", re.IGNORECASE | re.MULTILINE)
_LARGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Release:
    """Versions that belong together."""

    torch: str
    torch_npu: str
    cann: str


RELEASES = tuple(
    Release(*row.split())
    for row in """
        2.14.0 2.14.0 9.2.0
        2.13.0 2.13.0 9.2.0
        2.12.0 2.12.0.post3 9.2.0
        2.12.0 2.12.0 9.1.0
        2.11.0 2.11.0.post3 9.2.0
        2.11.0 2.11.0 9.1.0
        2.10.0 2.10.0.post7 9.2.0
        2.10.0 2.10.0.post4 9.1.0
        2.10.0 2.10.0 9.0.0
        2.9.0 2.9.0.post9 9.2.0
        2.9.0 2.9.0.post6 9.1.0
        2.9.0 2.9.0.post2 9.0.0
        2.9.0 2.9.0 8.5.0
        2.8.0 2.8.0.post4 9.0.0
        2.8.0 2.8.0.post2 8.5.0
        2.8.0 2.8.0 8.3.RC1
        2.7.1 2.7.1.post11 9.2.0
        2.7.1 2.7.1.post8 9.1.0
        2.7.1 2.7.1.post4 9.0.0
        2.7.1 2.7.1.post2 8.5.0
        2.7.1 2.7.1 8.3.RC1
        2.6.0 2.6.0.post5 8.5.0
        2.6.0 2.6.0.post3 8.3.RC1
        2.6.0 2.6.0 8.2.RC1
    """.strip().splitlines()
)
"""The newest first. Source: the version tables in the release notes of torch_npu 7.3.0 to 26.2.0."""


@dataclass(frozen=True, slots=True)
class Cann:
    """An installation of CANN."""

    home: str
    version: str | None
    """None if it does not say."""
    active: bool
    """True if set_env.sh was sourced: without that, torch_npu does not find it."""

    @property
    def script(self) -> str:
        """The set_env.sh to source."""
        home = Path(self.home)
        places = (home / "set_env.sh", home.parent / "set_env.sh")
        return str(next((place for place in places if place.is_file()), places[0]))


def find_cann(environment: Mapping[str, str]) -> Cann | None:
    """Return the CANN that this process would use, or else one that lies in a usual place."""
    for variable in _VARIABLES:
        stated = environment.get(variable, "")
        if stated:
            home = Path(stated)
            return Cann(stated, _version_in(home), active=True) if home.is_dir() else None
    for home in _usual_places():
        if home.is_dir():
            return Cann(str(home), _version_in(home), active=False)
    return None


def find_npu_smi() -> str | None:
    """Return where the driver's npu-smi is; None if it is nowhere."""
    places = (shutil.which(TOOL), *_TOOL_PLACES)
    return next((place for place in places if place is not None and os.access(place, os.X_OK)), None)


def cann_for(torch_npu: str) -> str | None:
    """Return the version of CANN that a torch_npu was released with; None if that is not known."""
    wanted = torch_npu.partition("+")[0]
    return next((release.cann for release in RELEASES if release.torch_npu == wanted), None)


def releases_for(torch: str) -> list[Release]:
    """Return the torch_npu of a torch, by its first two numbers, the newest first."""
    minor = re.match(r"\d+\.\d+", torch)
    return [] if minor is None else [r for r in RELEASES if r.torch.startswith(f"{minor[0]}.")]


def _usual_places() -> Iterator[Path]:
    for root in (Path(root).expanduser() for root in _ROOTS):
        yield from (root / place for place in _PLACES)
        yield from sorted(root.glob("cann-*"), reverse=True)
        yield from sorted(root.glob("ascend-toolkit/[0-9]*"), reverse=True)


def _version_in(home: Path) -> str | None:
    """Return the version that the installation states, or the one that its directory is named after."""
    for name in _NOTES:
        for path in (home / name, *sorted(home.glob(f"*/{name}"))):
            try:
                with path.open(encoding="utf-8", errors="replace") as notes:
                    stated = _STATED.search(notes.read(_LARGEST))
            except OSError:
                continue
            if stated is not None:
                return stated[1]
    try:
        named = _VERSION.search(home.resolve().name)
    except (OSError, RuntimeError):  # links that lead in a circle
        return None
    return None if named is None else named[1]
