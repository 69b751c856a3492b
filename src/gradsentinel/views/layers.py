"""Norms of the parameters' gradients before an incident: layers by steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradsentinel.incident import Incident
from gradsentinel.store import SCHEMA
from gradsentinel.views.files import ViewError
from gradsentinel.views.run_files import RunFiles
from gradsentinel.views.series import number, shown
from gradsentinel.views.words import pick

_MOST_ROWS = 80
_MOST_HOT = 24
_FILE = re.compile(r"norms(?:-rank(\d+))?\.json")


def layers(run: RunFiles, folder: str, incident: Incident, lang: str) -> dict[str, Any]:
    """Return rows of log10 norms over the steps before the incident; see the names in `hot`.

    What is hot has a row of its own (of very many the first ones), other parameters are put together by
    module until there are few enough rows: the norm of a row is that of its parameters together.
    """
    empty: dict[str, Any] = {
        "names": [],
        "iterations": [],
        "steps": [],
        "values": [],
        "counts": [],
        "hot": [],
    }
    name = _file(run, folder, incident)
    if name is None:
        why = pick(lang, "the norms of the steps before it were not kept", "没有保存此前各步的梯度范数")
        return {**empty, "why": why}
    try:
        names, iterations, steps, columns, told = _read(run.files.json("incidents", folder, name))
    except ViewError as error:
        return {**empty, "why": str(error)}
    hot = _hot(names, columns, incident)
    rows = _rows(names, hot)
    return {
        "names": list(rows),
        "counts": [len(members) for members in rows.values()],
        "iterations": iterations,
        "steps": steps,
        "values": [[_together(column, members) for column in columns] for members in rows.values()],
        "hot": [name for name, members in rows.items() if hot & set(members)],
        "parameters": len(names),
        "local": bool(told.get("local")),
        "rank": told.get("rank"),
    }


def _file(run: RunFiles, folder: str, incident: Incident) -> str | None:
    """Return the name of the file to look at: that of a rank the incident names, or the first there is."""
    found = {
        int(match[1] or 0): name
        for name in run.files.entries("incidents", folder)
        if (match := _FILE.fullmatch(name))
    }
    named = [found[rank.rank] for rank in incident.ranks if rank.rank in found]
    return next(iter([*named, *(found[rank] for rank in sorted(found))]), None)


Column = Sequence[float | None]


def _read(data: Any) -> tuple[list[str], list[int], list[int], list[Column], Mapping[str, Any]]:
    """Return names, iterations, steps and a column of norms for each; raises ViewError."""
    damaged = ViewError("norms.json is damaged")
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise damaged
    if data["schema"] > SCHEMA:
        raise ViewError("norms.json was written by a newer GradSentinel; upgrade it")
    names, iterations, values = data.get("names"), data.get("iterations"), data.get("values")
    if not (isinstance(names, list) and isinstance(iterations, list) and isinstance(values, list)):
        raise damaged
    if len(iterations) != len(values) or not all(isinstance(x, int) for x in iterations):
        raise damaged
    if not all(isinstance(column, list) and len(column) == len(names) for column in values):
        raise damaged
    steps = data.get("steps")
    usable = (
        isinstance(steps, list) and len(steps) == len(iterations) and all(isinstance(s, int) for s in steps)
    )
    columns: list[Column] = [[number(value) for value in column] for column in values]
    return [str(name) for name in names], iterations, steps if usable else iterations, columns, data  # type: ignore[return-value]


def _hot(names: Sequence[str], columns: Sequence[Column], incident: Incident) -> set[int]:
    """Return which parameters the incident is about: named in it, or of the module that is to blame.

    If nearly all of them are, those say nothing, and only what the diagnosis names is hot.
    """
    place = {name: index for index, name in enumerate(names)}
    module = None if incident.diagnosis is None else incident.diagnosis.module
    blamed = {
        index for name, index in place.items() if module and (name == module or name.startswith(f"{module}."))
    }
    named = {place[tensor.name] for tensor in incident.tensors if tensor.name in place}
    if not named and columns:
        named = {i for i, value in enumerate(columns[-1]) if value is not None and not math.isfinite(value)}
    if blamed and (not named or len(named) > len(names) // 2):
        return blamed
    return named


def _rows(names: Sequence[str], hot: set[int]) -> dict[str, list[int]]:
    """Return the rows: a name and which parameters it stands for, in the order of the parameters."""
    if len(names) <= _MOST_ROWS:
        return _grouped([(name,) for name in names])
    alone = set(sorted(hot)[:_MOST_HOT])
    room = _MOST_ROWS - len(alone)
    parts = [name.split(".") for name in names]
    deepest = max(map(len, parts))
    for depth in range(deepest, 0, -1):
        keys = [
            (name,) if index in alone else _shortened(part, depth)
            for index, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
        if len(set(keys)) <= room + len(alone):
            return _grouped(keys)
    stretch = -(-len(names) // room)  # flat names: neighbours together
    keys = [
        (name,) if index in alone else (f"{names[index // stretch * stretch]} ...",)
        for index, name in enumerate(names)
    ]
    return _grouped(keys)


def _shortened(parts: Sequence[str], depth: int) -> tuple[str, ...]:
    return (".".join(parts),) if len(parts) <= depth else (f"{'.'.join(parts[:depth])}.*",)


def _grouped(keys: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for index, (key,) in enumerate(keys):
        rows.setdefault(key, []).append(index)
    return rows


def _together(column: Column, members: Sequence[int]) -> float | str | None:
    """Return log10 of the norm of several parameters together; None if none of them had a gradient."""
    values = [value for index in members if (value := column[index]) is not None]
    if not values:
        return None
    norm = math.hypot(*values) if not any(value != value for value in values) else math.nan  # noqa: PLR0124 - NaN
    return shown(round(math.log10(norm), 4) if 0.0 < norm < math.inf else -math.inf if norm == 0.0 else norm)
