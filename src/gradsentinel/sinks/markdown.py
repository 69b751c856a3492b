"""An incident as a short Markdown page."""

from __future__ import annotations

from gradsentinel.incident import Incident


def markdown(incident: Incident) -> str:
    """Return the incident as a short Markdown page."""
    lines = [
        f"### Step {incident.step}: {str(incident.kind).replace('_', ' ')}, {incident.outcome}".replace(
            "_", " "
        ),
        "",
        incident.message + ".",
        "",
        "| what | |",
        "|---|---|",
        f"| severity | {incident.severity.label} |",
        f"| where | {_cell(incident.where) or 'unknown'} |",
        f"| action | {incident.action.label} |",
        f"| recovery | {_cell(incident.recovery) or 'none'} |",
        f"| bundle | {incident.id} |",
    ]
    if incident.microbatch is not None:
        lines.append(f"| micro-batch | {incident.microbatch} |")
    if incident.ranks:
        lines.append(f"| ranks | {incident.who.split(' ', 1)[1]} |")
    if incident.tensors:
        lines += ["", "| tensor | non-finite | elements | norm |", "|---|---|---|---|"]
        lines += [f"| {t.name} | {t.nonfinite} | {t.numel} | {t.norm:.4g} |" for t in incident.tensors[:10]]
        if len(incident.tensors) > 10:
            lines.append(f"| and {len(incident.tensors) - 10} more | | | |")
    if incident.diagnosis is not None:
        diagnosis = incident.diagnosis
        sure = f" ({diagnosis.confidence:.0%} sure)" if diagnosis.confidence else ""
        lines += ["", f"**Cause**: {diagnosis.cause}{sure}", ""]
        lines += [f"- {fact}" for fact in diagnosis.evidence]
        lines += [f"- **do**: {remedy}" for remedy in diagnosis.remedy]
    lines += ["", *(f"- {note}" for note in incident.notes)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
