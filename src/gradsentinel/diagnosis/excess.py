"""A gradient that is finite, far too large, and the same again: data, or a state that was hit?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.fingerprint import what_is_different
from gradsentinel.diagnosis.lone_weight import LoneWeight, find_lone_weight
from gradsentinel.diagnosis.remedy import for_device, for_records
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.spiked import explain_spike, norm_of
from gradsentinel.evidence import Diagnosis, Sample
from gradsentinel.incident import Incident, fold
from gradsentinel.run import Run

_CURED = 8.0
"""So many times smaller without some samples, and they are to blame."""
_SAME = "run again the step gives the same values, bit for bit: no device failed in it"


def explain_excess(
    replay: Replay,
    microbatches: Sequence[MicroBatch],
    computed: Sequence[Computed],
    incident: Incident,
    time_left: Callable[[], bool],
) -> tuple[Diagnosis, int | None, tuple[Sample, ...]]:
    """Return the diagnosis, the micro-batch and the samples; call it inside `Replay.sheltered`.

    Args:
        replay: of the step.
        microbatches: of the step, in the order of `computed`.
        computed: what they came to; all finite.
        incident: what it is about.
        time_left: whether there is time for one more run.
    """
    run = replay.run
    lone = find_lone_weight(run)
    if lone is not None:
        return by_lone_weight(lone, run, (_SAME,)), None, ()
    worst = max(range(len(computed)), key=lambda number: norm_of(computed[number]))
    guilty, before = microbatches[worst], norm_of(computed[worst])
    healthy = [m.batch for m in run.scene.healthy]
    text = what_is_different(guilty.batch, healthy)
    facts = (_SAME, text) if text else (_SAME,)
    size = swap.batch_size(guilty.batch)
    outliers = {} if size is None else swap.outlier_rows(guilty.batch, size)
    for path, rows in outliers.items():
        if size is None or not time_left():
            break
        after = swap.compute_without(replay, guilty, rows, size, path)
        if after is None or norm_of(after) * _CURED > before:
            continue
        ids = guilty.ids
        who = fold([f"sample {row}" + (f" (id {ids[row]})" if row in ids else "") for row in rows])
        cure = f"without it the gradient norm is {norm_of(after):.4g} instead of {before:.4g}"
        fact = f"{path or 'the batch'}: {who} is over 1000 times larger than the others; {cure}"
        diagnosis = Diagnosis(
            cause="data",
            confidence=0.7,
            phase="input",
            evidence=(fact, *facts),
            remedy=for_records(rows, ids, path),
        )
        samples = tuple(Sample(position=row, id=ids.get(row), field=path) for row in rows)
        return diagnosis, guilty.index, samples
    spiked = explain_spike(replay, microbatches, computed, worst, incident, facts, time_left)
    if spiked is not None:
        return spiked, guilty.index if spiked.cause == "data" else None, ()
    return Diagnosis(cause="unknown", confidence=0.0, phase="backward", evidence=facts), None, ()


def by_lone_weight(lone: LoneWeight, run: Run, facts: tuple[str, ...] = ()) -> Diagnosis:
    """Return what a single weight that is far from all others means.

    Hardware only if a known-good state shows that it alone has jumped, and if the optimizer's own memory says
    that it cannot have moved it there: one gradient of one row of an embedding moves one weight, too.
    """
    if lone.jumped:
        why = (
            f"since then its optimizer can have moved it by {lone.reach:.4g} at most, and its neighbours are "
            "as they were: a bit of it was flipped"
        )
        cause, confidence = "hardware", 0.7
    else:
        why = (
            "a flipped bit leaves a weight like that, and so does one huge gradient of one row, or somebody "
            "who writes to it"
        )
        cause, confidence = "unknown", 0.4
    back = "roll back to before it jumped: dropping steps leaves it as it is"
    return Diagnosis(
        cause=cause,
        confidence=confidence,
        phase="forward",
        module=lone.name.rpartition(".")[0],
        evidence=(str(lone), why, *facts),
        remedy=(back, *for_device(run)),
    )
