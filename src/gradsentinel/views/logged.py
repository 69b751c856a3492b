"""Incidents as the event log alone tells them, where their files cannot be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradsentinel.errors import StoreError
from gradsentinel.incident import SCHEMA, Incident

_ID = re.compile(r"\w[\w.-]*")
_TENSOR = {"nonfinite": 0, "numel": 0, "norm": "nan", "counted": False}
_ABORTED = {"severity": "critical", "action": "abort"}
"""The line was written when it was found; that nothing helped showed later."""
_NOTE = "Only the event log tells of it: its incident.json is missing or cannot be read"


def logged_incident(id_: str, told: Mapping[str, Any]) -> Incident:
    """Return an incident from its lines in the event log.

    Args:
        id_: its id.
        told: its lines, by their event: `incident`, and `diagnosis` and `recovery` if there are any.

    Raises:
        StoreError: if the lines do not tell enough.
    """
    begun, end = told.get("incident"), told.get("recovery", {})
    if begun is None or not _ID.fullmatch(id_):
        raise StoreError("the event log tells too little of it")
    where = begun.get("where")
    named = isinstance(where, str) and where
    notes = [_NOTE, f"Where: {where}"] if named else [_NOTE]
    return Incident.from_dict(
        {
            "seconds": {},
            **begun,
            "schema": SCHEMA,
            "parameters": [{**_TENSOR, "name": where}] if named and " " not in where else [],
            "ranks": [],
            "microbatch": None,
            "samples": [],
            "outcome": end.get("outcome", "reported"),
            **(_ABORTED if end.get("outcome") == "aborted" else {}),
            "recovery": end.get("message", ""),
            "diagnosis": told.get("diagnosis"),
            "notes": notes,
        }
    )
