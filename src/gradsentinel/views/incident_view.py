"""The incidents of a run as a list, and one of them with all that is known of it."""

from __future__ import annotations

from typing import Any

from gradsentinel.incident import Incident, jsonable
from gradsentinel.views import heat, layers, next_steps, spread, story
from gradsentinel.views.phrases import all_said, said
from gradsentinel.views.run_files import RunFiles
from gradsentinel.views.words import word

_MOST_FILES = 500


def incident_rows(run: RunFiles, lang: str) -> list[dict[str, Any]]:
    """Return the list; see `Views.incidents`."""
    return [_row(run, incident, lang) for incident in run.incidents()[0]]


def incident_page(run: RunFiles, name: str, lang: str) -> dict[str, Any]:
    """Return one incident; see `Views.incident`."""
    found = run.incident(name)
    folder = run.folder_of(found)
    ids = [one.id for one in run.incidents()[0]]
    at = ids.index(found.id)
    diagnosis = found.diagnosis
    return {
        "incident": found.as_dict(),
        "row": _row(run, found, lang),
        "place": run.place_of(found),
        "story": story.sentences(found, lang),
        "evidence": [] if diagnosis is None else all_said(diagnosis.evidence, lang),
        "todo": [] if diagnosis is None else all_said(diagnosis.remedy, lang),
        "cause_label": word("cause", "unknown" if diagnosis is None else diagnosis.cause, lang),
        "heat": {"ranks": heat.ranks(run, found, lang), "layers": layers.layers(run, folder, found, lang)},
        "spread": spread.path(found),
        "commands": next_steps.commands(run, folder, lang, read=run.was_read(found)),
        "files": [
            {"name": name, "bytes": size}
            for name, size in run.files.sizes("incidents", folder, most=_MOST_FILES)
        ]
        if run.files.is_directory("incidents", folder)
        else [],
        "neighbours": {
            "previous": ids[at - 1] if at else None,
            "next": ids[at + 1] if at + 1 < len(ids) else None,
        },
    }


def _row(run: RunFiles, incident: Incident, lang: str) -> dict[str, Any]:
    diagnosis = incident.diagnosis
    cause = "unknown" if diagnosis is None else diagnosis.cause
    row = {
        "id": incident.id,
        "step": incident.step,
        "iteration": run.place_of(incident),
        "time": incident.time,
        "severity": incident.severity.label,
        "kind": str(incident.kind),
        "kind_label": word("kind", incident.kind, lang),
        "cause": cause,
        "cause_label": word("cause", cause, lang),
        "confidence": 0.0 if diagnosis is None else diagnosis.confidence,
        "where": said(incident.where, lang),
        "who": incident.who if incident.ranks else "",
        "action": incident.action.label,
        "outcome": str(incident.outcome),
        "outcome_label": word("outcome", incident.outcome, lang),
        "message": said(incident.message, lang),
        "seconds": sum(incident.seconds.values()),
    }
    found: dict[str, Any] = jsonable(row)
    return found
