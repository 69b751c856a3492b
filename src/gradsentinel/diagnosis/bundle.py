"""The bundle of an incident on disk: what its files are called, writing them, finding and reading them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradsentinel.diagnosis.collect import Level, Parts
from gradsentinel.diagnosis.operator import OperatorCall
from gradsentinel.diagnosis.stored_call import OPERATOR_KIND, call_from_tree
from gradsentinel.errors import StoreError
from gradsentinel.incident import Incident
from gradsentinel.state.archive import read_archive, write_archive
from gradsentinel.state.tree import UnsupportedStateError
from gradsentinel.store import check_schema, read_incident, write_json, write_text

SCHEMA = 1
KINDS = {
    "scene": "scene",
    "state": "bundle-state",
    "gradients": "bundle-gradients",
    "known-good": "bundle-known-good",
    "operator": OPERATOR_KIND,
}
"""The kinds of the archives, by the beginnings of their names."""
_MANIFEST = re.compile(r"bundle(?:-rank(\d+))?\.json")
_SCENE = re.compile(r"scene(?:-microbatch(\d+))?(?:-rank\d+)?")


@dataclass(slots=True, kw_only=True)
class BundleFacts:
    """What bundle.json says: which part of the evidence one rank has kept."""

    incident: str
    step: int
    level: Level
    rank: int
    world_size: int
    parts: dict[str, str] = field(default_factory=dict)
    """What each file or directory holds, by its name."""
    left_out: list[str] = field(default_factory=list)
    """What is not there, and why."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": SCHEMA,
            "incident": self.incident,
            "step": self.step,
            "level": self.level.name.lower(),
            "rank": self.rank,
            "world_size": self.world_size,
            "parts": self.parts,
            "left_out": self.left_out,
        }


_HOLDS = {
    "scene": "micro-batches and random states",
    "state": "weights, buffers and optimizer state",
    "gradients": "the gradients as they were found",
    "known-good": "weights of the last known-good state",
    "operator": "the bad operator and its inputs",
}


class BundleWriter:
    """Writes one rank's part of one bundle; called in a background thread, one call after the other."""

    def __init__(self, directory: Path, facts: BundleFacts) -> None:
        self.directory = directory
        self.facts = facts
        self.suffix = f"-rank{facts.rank}" if facts.world_size > 1 else ""

    def write(self, parts: Parts) -> None:
        """Write what was collected.

        Raises:
            OSError, ArchiveError: if the disk refuses; what was written before stays.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.facts.left_out += parts.left_out
        for name, data in (("environment", parts.environment), ("statistics", parts.statistics)):
            if data:
                self._note(
                    f"{name}{self.suffix}.json",
                    f"{name} of the process" if name[0] == "e" else "norms, counts and ranges",
                )
                write_json(self.directory / f"{name}{self.suffix}.json", data)
        for name, (state, meta) in parts.archives.items():
            self._archive(name, state, meta)
        self._finish()

    def write_operator(self, state: Any, meta: Mapping[str, Any], program: str) -> None:
        """Write the bad operator and the program that runs it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._archive("operator", state, meta) and program:
            name = f"repro{self.suffix}.py"
            write_text(self.directory / name, program)
            self._note(name, "runs the bad operator on its saved inputs; needs torch and safetensors only")
        self._finish()

    def leave_out(self, what: str) -> None:
        """Note something that could not be kept."""
        self.facts.left_out.append(what)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._finish()

    def _archive(self, name: str, state: Any, meta: Mapping[str, Any]) -> bool:
        base = "scene" if name.startswith("scene") else name
        path = self.directory / f"{name}{self.suffix}"
        try:
            # repro.py reads a single file.
            write_archive(path, state, dict(meta), kind=KINDS[base], max_file_bytes=1 << 62)
        except UnsupportedStateError as error:
            self.facts.left_out.append(f"{_HOLDS[base]}: {error}")
            return False
        self._note(f"{name}{self.suffix}/", _HOLDS[base])
        return True

    def _note(self, name: str, what: str) -> None:
        self.facts.parts[name] = what

    def _finish(self) -> None:
        write_json(self.directory / f"bundle{self.suffix}.json", self.facts.as_dict())


# -- reading -------------------------------------------------------------------------------------------


class Bundle:
    """One rank's part of a bundle, to be read.

    Args:
        directory: of the incident.
        rank: whose part; None takes that of the rank that the incident names, or the first there is.

    Raises:
        StoreError: if the incident cannot be read.
    """

    def __init__(self, directory: Path, rank: int | None = None) -> None:
        self.directory = directory
        self.incident: Incident = read_incident(directory)
        ranks = ranks_in(directory)
        named = [entry.rank for entry in self.incident.ranks if entry.rank in ranks]
        self.rank = rank if rank is not None else next(iter(named or ranks), 0)
        if ranks and self.rank not in ranks:
            raise StoreError(f"{directory} has no part of rank {self.rank}, {_whose(ranks)}")
        several = (directory / f"bundle-rank{self.rank}.json").exists()
        self.suffix = f"-rank{self.rank}" if several else ""

    def why_no_operator(self) -> str | None:
        """Return why there is no operator to be run alone, None if there is one."""
        if self.has("operator"):
            return None
        facts = self.facts()
        if facts.get("level") == "light":
            return "it holds no operator to run: its level is light"
        left_out = (str(text) for text in facts.get("left_out", ()))
        reasons = [text for text in left_out if "operator" in text or "inputs of" in text]
        return f"it holds no operator to run: {reasons[0] if reasons else self._why_none()}"

    def _why_none(self) -> str:
        diagnosis = self.incident.diagnosis
        facts = () if diagnosis is None else diagnosis.evidence
        told = [text for text in facts if "no operator for repro.py" in text]
        if told:
            return told[0]
        blamed = diagnosis is not None and diagnosis.op is not None
        return "what it was given was not kept" if blamed else "the diagnosis blames none"

    def path(self, name: str) -> Path:
        """Return where one of the archives is, or would be."""
        return self.directory / f"{name}{self.suffix}"

    @property
    def program(self) -> Path | None:
        """Where repro.py is, if there is one."""
        path = self.directory / f"repro{self.suffix}.py"
        return path if path.is_file() else None

    def has(self, name: str) -> bool:
        """Return True if an archive is there; whether it is whole shows when it is read."""
        return self.path(name).is_dir()

    def facts(self) -> dict[str, Any]:
        """Return what bundle.json says; empty if there is none.

        Raises:
            StoreError: if it is damaged or too new.
        """
        path = self.directory / f"bundle{self.suffix}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path} is truncated or not JSON: {error}") from error
        check_schema(data, path)
        return dict(data)

    def scene(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the micro-batches with their random states, and what is known of the step.

        Raises:
            ArchiveError: if it is not there, or damaged.
        """
        state, meta = read_archive(self.path("scene"), kind=KINDS["scene"])
        found = {int(entry["index"]): entry for entry in state["microbatches"]}
        for path in sorted(self.directory.iterdir()):
            match = _SCENE.fullmatch(path.name)
            if match is not None and match[1] is not None and path.name.endswith(self.suffix or match[1]):
                more, _ = read_archive(path, kind=KINDS["scene"])
                found.update({int(entry["index"]): entry for entry in more["microbatches"]})
        return {**state, "microbatches": [found[index] for index in sorted(found)]}, meta

    def read(self, name: str) -> tuple[Any, dict[str, Any]]:
        """Return state and meta of one of the archives.

        Raises:
            ArchiveError: if it is not there, or damaged.
        """
        return read_archive(self.path(name), kind=KINDS[name])

    def operator(self, *, device: torch.device, dtype: torch.dtype | None = None) -> OperatorCall:
        """Return the bad operator with its inputs.

        Raises:
            ArchiveError: if it is not there, or damaged.
            CannotRun: if it is not one.
        """
        state, meta = self.read("operator")
        return call_from_tree(state["operator"], meta, device=device, dtype=dtype)


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have a part in a bundle; a job of one process is rank 0."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return sorted({int(match[1] or 0) for name in names if (match := _MANIFEST.fullmatch(name))})


def _whose(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"only that of rank {ranks[0]}: leave --rank out"
    return f"but those of ranks {', '.join(map(str, ranks))}"
