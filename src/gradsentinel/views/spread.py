"""How a bad value went from the operator that made it to the parameters."""

from __future__ import annotations

import re
from typing import Any

from gradsentinel.incident import Incident

_BEGIN = "spread: "
_MORE = re.compile(r"(.*) and (\d+) more")
_MOST_TENSORS = 8


def path(incident: Incident) -> list[dict[str, Any]]:
    """Return the stations of the value: operators, then the tensors that it reached.

    They are those of the diagnosis' own sentence that begins with "spread:"; without one, what the diagnosis
    names, and the tensors that were found bad.
    """
    diagnosis = incident.diagnosis
    told = [] if diagnosis is None else [fact for fact in diagnosis.evidence if fact.startswith(_BEGIN)]
    if told:
        found = _from_sentence(told[0].removeprefix(_BEGIN))
        if diagnosis is not None and found and diagnosis.op and found[0]["name"] == diagnosis.op:
            place = ", ".join(part for part in (diagnosis.module, diagnosis.source) if part)
            found[0]["detail"] = place or found[0]["detail"]
        return found
    found = []
    if diagnosis is not None and diagnosis.module:
        found.append(_station("module", diagnosis.module, diagnosis.source or ""))
    name = None if diagnosis is None else diagnosis.op or diagnosis.node
    if diagnosis is not None and name:
        found.append(_station("operator", name, "" if diagnosis.module else diagnosis.source or ""))
    for tensor in incident.tensors[:_MOST_TENSORS]:
        share = f"{tensor.nonfinite} / {tensor.numel}" if tensor.nonfinite else ""
        found.append(_station("parameter", tensor.name, share))
    count = incident.details.get("tensor_count")
    total = max(len(incident.tensors), count if isinstance(count, int) else 0)
    if total > _MOST_TENSORS:
        found.append(_station("gap", "...", str(total - _MOST_TENSORS)))
    return found


def _from_sentence(sentence: str) -> list[dict[str, Any]]:
    *operators, reached = sentence.split(" > ")
    found = [
        _station("gap", "...", "") if name == "..." else _station("operator", name, "") for name in operators
    ]
    more = _MORE.fullmatch(reached)
    names = (more[1] if more else reached).split(", ")
    found += [_station("parameter", name, "") for name in names if name]
    if more:
        found.append(_station("gap", "...", more[2]))
    return found


def _station(kind: str, name: str, detail: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "detail": detail}
