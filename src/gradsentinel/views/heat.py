"""Which ranks an incident is about, laid out by their coordinates."""

from __future__ import annotations

import re
from typing import Any

from gradsentinel.incident import Incident
from gradsentinel.views.phrases import said
from gradsentinel.views.run_files import RunFiles
from gradsentinel.views.words import pick

_MOST_CELLS = 16_384
_MOST_REASONS = 64
"""So many hot ranks are told why; the others are so for the same reason."""
_NO_AXES = frozenset({"rank", "host", "device", "node"})
_ORDER = ("pp", "dp", "cp", "ep", "etp", "tp")
"""Axes from the outermost to the innermost, as the ranks of a job are usually laid out."""
_STRETCH = re.compile(r"(\d+)(?:-(\d+))?(?: in steps of (\d+))?")


def ranks(run: RunFiles, incident: Incident, lang: str) -> dict[str, Any]:
    """Return axes with their sizes, and a cell for each rank that is known; of very many the first ones.

    `hot` is 1 for the ranks that the incident is about. All of those are among the cells.
    """
    places = dict(run.places())
    for rank in incident.ranks:
        places[rank.rank] = rank.as_dict()
    concerned = _concerned(incident)
    told = run.history.first.get("world_size")
    total = max([told if isinstance(told, int) else 1, len(places), *(rank + 1 for rank in places)])
    shown = sorted(concerned)[:_MOST_CELLS]
    shown += [
        rank for rank in sorted(places.keys() | set(range(min(total, _MOST_CELLS)))) if rank not in concerned
    ]
    cells = [_cell(rank, places.get(rank, {}), hot=rank in concerned) for rank in shown[:_MOST_CELLS]]
    cells.sort(key=lambda cell: cell["rank"])
    message = said(incident.message, lang)
    for cell in [cell for cell in cells if cell["hot"]][:_MOST_REASONS]:
        cell["why"] = pick(lang, f"it is about this rank: {incident.message}", f"涉及该 rank：{message}")
    return {"axes": _axes(cells), "cells": cells, "total": total}


def _concerned(incident: Incident) -> set[int]:
    """Return the ranks that the incident is about, the unlisted ones too."""
    found = {rank.rank for rank in incident.ranks}
    if not incident.unlisted:
        return found
    for first, last, stride in _STRETCH.findall(incident.ranks_folded):
        low, high = int(first), int(last or first)
        if high - low < 1 << 20:  # a larger job than there is
            found.update(range(low, high + 1, int(stride or 1)))
    return found


def _axes(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sizes: dict[str, int] = {}
    for cell in cells:
        for name, position in cell["coordinates"].items():
            sizes[name] = max(sizes.get(name, 0), position + 1)
    names = [name for name in _ORDER if name in sizes] + sorted(name for name in sizes if name not in _ORDER)
    return [{"name": name, "size": sizes[name]} for name in names]


def _cell(rank: int, place: dict[str, Any], *, hot: bool) -> dict[str, Any]:
    coordinates = {
        str(name): position
        for name, position in place.items()
        if name not in _NO_AXES
        and isinstance(position, int)
        and not isinstance(position, bool)
        and position >= 0
    }
    return {
        "rank": rank,
        "coordinates": coordinates,
        "host": str(place.get("host", "")),
        "device": str(place.get("device", "")),
        "hot": 1.0 if hot else 0.0,
        "why": "",
    }
