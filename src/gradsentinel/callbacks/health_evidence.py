"""The health of a card in the words of an incident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsentinel.callbacks.silent_check import Alarm
from gradsentinel.callbacks.suspicion import Suspect
from gradsentinel.callbacks.worries import Worry
from gradsentinel.decision import Action, Kind
from gradsentinel.devices.health import Reading
from gradsentinel.diagnosis.self_test import SelfTest
from gradsentinel.evidence import Diagnosis, Evidence
from gradsentinel.incident import Incident

_ASSUMED = (
    "that holds if cards with the same part of the model get alike data: a rank that always gets the same "
    "bad records would look the same"
)


def of_worries(reading: Reading, worries: Sequence[Worry]) -> Evidence:
    """Return the warning of a card that is not well."""
    serious = any(worry.serious for worry in worries)
    words = "; ".join(worry.words for worry in worries)
    return Evidence(
        kind=Kind.DEVICE_HEALTH,
        action=Action.WARN,
        message=f"{reading.card}: {words}",
        diagnosis=Diagnosis(
            cause="hardware",
            confidence=0.7 if serious else 0.4,
            evidence=(reading.words,),
            remedy=(
                f"move the job off {reading.card} and have it tested"
                if serious
                else f"look after the cooling of {reading.card}, and whether its errors go on",
            ),
        ),
        details={"subject": ", ".join([reading.card, *(worry.what for worry in worries)])},
    )


def of_alarm(alarm: Alarm) -> Evidence:
    """Return the warning of torch_npu's own check."""
    return Evidence(
        kind=Kind.DEVICE_HEALTH,
        action=Action.WARN,
        message=f"torch_npu's silent check: {alarm.message}",
        diagnosis=Diagnosis(
            cause="hardware" if alarm.checksum else "unknown",
            confidence=0.9 if alarm.checksum else 0.3,
            evidence=(alarm.message,),
            remedy=("have the card tested or replaced: a matrix product on it came out wrong",)
            if alarm.checksum
            else ("NPU_ASD_CONFIG=enable:true,with_checksum:true has it check matrix products on an alarm",),
        ),
        details={"subject": "checksum" if alarm.checksum else "spike"},
    )


def of_suspect(suspect: Suspect) -> Evidence:
    """Return the warning of a card that has more incidents than chance explains."""
    return Evidence(
        kind=Kind.DEVICE_HEALTH,
        action=Action.WARN,
        message=f"{suspect.card} is a suspect: {suspect.words}",
        diagnosis=Diagnosis(
            cause="hardware",
            confidence=round(min(0.9, 1 - suspect.chance), 3),
            evidence=(suspect.words, _ASSUMED),
            remedy=(
                f"move the job off {suspect.card}, or swap it with another: does trouble follow the card?",
                "on Ascend, DeviceHealthCallback(self_test='aic') has it test itself at the next fault",
            ),
        ),
        details={"subject": suspect.card, "hits": suspect.hits, "tries": suspect.tries},
    )


def add_tests(incident: Incident, tests: Sequence[SelfTest]) -> None:
    """Add the outcome of self-tests, and believe one that found a fault."""
    if not tests:
        return
    incident.notes += tuple(dict.fromkeys(test.words for test in tests))
    failed = tuple(test.words for test in tests if test.passed is False)
    if failed:
        before = incident.diagnosis
        base = before if before is not None else Diagnosis(cause="hardware", confidence=0.95)
        incident.diagnosis = replace(
            base,
            cause="hardware",
            confidence=0.95,
            evidence=(*failed, *base.evidence),
            remedy=("take the card out of the job and have it replaced", *base.remedy),
        )
