"""What a campaign consists of, in its short form and in its long one."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from gradsentinel.campaign.trial import Trial
from gradsentinel.errors import ConfigurationError

LOOP = ("clean", "gradsentinel", "skip", "checkpoint", "nothing")
WITH_HEALTHY = ("clean", "healthy", *LOOP[1:])
FRAMEWORK = ("clean", "gradsentinel", "nothing")
MEGATRON = ("clean", "gradsentinel", "megatron", "nothing")


@dataclass(frozen=True)
class Share:
    """The trials of one workload."""

    workload: str
    trials: int
    count: int
    """Faults in each."""
    every: int
    """Steps from one to the next."""
    policies: tuple[str, ...]


FORMS: dict[str, tuple[Share, ...]] = {
    "tiny": (
        Share("plain", 1, 4, 16, LOOP),
        Share("bits", 1, 3, 8, FRAMEWORK),
    ),
    "small": (
        Share("megatron", 1, 6, 10, MEGATRON),
        Share("plain", 2, 10, 100, LOOP),
        Share("scaler", 1, 10, 100, LOOP),
        Share("lightning", 1, 5, 100, FRAMEWORK),
        Share("bits", 4, 24, 16, FRAMEWORK),
    ),
    "short": (
        Share("megatron", 1, 12, 10, MEGATRON),  # first: it has the machine for itself
        Share("plain", 14, 10, 100, LOOP),
        Share("scaler", 3, 10, 100, LOOP),
        Share("lightning", 2, 10, 100, FRAMEWORK),
        Share("bits", 4, 24, 16, FRAMEWORK),
    ),
    "long": (
        Share("megatron", 10, 12, 10, MEGATRON),
        Share("plain", 140, 10, 100, LOOP),
        Share("scaler", 30, 10, 100, LOOP),
        Share("lightning", 18, 10, 100, FRAMEWORK),
        Share("bits", 12, 24, 16, FRAMEWORK),
    ),
}
_HEALTHY_EVERY = 4
"""Of so many plain trials one is run guarded and without faults, too."""


def trials(form: str, seed: int, *, only: tuple[str, ...] = ()) -> list[Trial]:
    """Return the trials of a form of the campaign, of all workloads or of some.

    Raises:
        ConfigurationError: there is no such form or workload.
    """
    if form not in FORMS:
        raise ConfigurationError(f"form {form!r}: choose one of {', '.join(FORMS)}")
    known = [share.workload for share in FORMS[form]]
    for workload in only:
        if workload not in known:
            raise ConfigurationError(f"workload {workload!r}: the {form} form has {', '.join(known)}")
    return [
        Trial(
            workload=share.workload,
            number=number,
            seed=seed,
            first=number * share.count,
            count=share.count,
            every=share.every,
            policies=WITH_HEALTHY
            if share.policies is LOOP and number % _HEALTHY_EVERY == 0
            else share.policies,
        )
        for share in FORMS[form]
        if not only or share.workload in only
        for number in range(share.trials)
    ]


def cuda_on_cpu() -> Path | None:
    """Return what lets Megatron-Core run on CPUs, which a checkout has among its examples."""
    path = Path(__file__).resolve().parents[3] / "examples" / "cuda_on_cpu.py"
    return path if path.is_file() else None


def impossible(workload: str) -> str | None:
    """Say why a workload cannot be run here; None if it can."""
    if workload == "lightning" and importlib.util.find_spec("lightning") is None:
        return "Lightning is not installed: pip install 'gradsentinel[lightning]'"
    if workload == "megatron":
        if importlib.util.find_spec("megatron") is None:
            return "Megatron-Core is not installed: pip install 'gradsentinel[megatron]'"
        if cuda_on_cpu() is None:
            return "Megatron-Core runs on CPUs with examples/cuda_on_cpu.py, which only a checkout has"
    return None
