"""An incident as a short Markdown page."""

from __future__ import annotations

from gradsentinel.incident import Incident
from gradsentinel.wording import printable

_MARKUP = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "`": "\\`"})


def markdown(incident: Incident) -> str:
    """Return the incident as a short Markdown page; what comes from the run is text in it, never markup."""
    kind = str(incident.kind).replace("_", " ")
    lines = [
        f"### Step {incident.step}: {kind}, {str(incident.outcome).replace('_', ' ')}",
        "",
        _text(incident.message) + ".",
        "",
        "| what | |",
        "|---|---|",
        f"| severity | {incident.severity.label} |",
        f"| where | {_text(incident.where) or 'unknown'} |",
        f"| action | {incident.action.label} |",
        f"| recovery | {_text(incident.recovery) or 'none'} |",
        f"| bundle | {_text(incident.id)} |",
    ]
    if incident.microbatch is not None:
        lines.append(f"| micro-batch | {incident.microbatch} |")
    if incident.ranks:
        lines.append(f"| ranks | {incident.who.split(' ', 1)[1]} |")
    if incident.tensors:
        lines += ["", "| tensor | non-finite | elements | norm |", "|---|---|---|---|"]
        lines += [
            f"| {_text(t.name)} | {t.nonfinite} | {t.numel} | {t.norm:.4g} |" for t in incident.tensors[:10]
        ]
        if len(incident.tensors) > 10:
            lines.append(f"| and {len(incident.tensors) - 10} more | | | |")
    if incident.diagnosis is not None:
        diagnosis = incident.diagnosis
        sure = f" ({diagnosis.confidence:.0%} sure)" if diagnosis.confidence else ""
        lines += ["", f"**Cause**: {_text(diagnosis.cause)}{sure}", ""]
        lines += [f"- {_text(fact)}" for fact in diagnosis.evidence]
        lines += [f"- **do**: {_text(remedy)}" for remedy in diagnosis.remedy]
    lines += ["", *(f"- {_text(note)}" for note in incident.notes)]
    return "\n".join(lines)


def _text(text: str) -> str:
    return printable(text).translate(_MARKUP)
