"""Runs an invented failure under a sentinel, and says what is wrong with what it was told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import failures_architectures  # noqa: F401 - fills FAILURES
import failures_eighteenth  # noqa: F401 - likewise
import failures_eleventh  # noqa: F401 - likewise
import failures_formulas  # noqa: F401 - likewise
import failures_fresh  # noqa: F401 - likewise
import failures_graphs  # noqa: F401 - likewise
import failures_kinds  # noqa: F401 - likewise
import failures_last  # noqa: F401 - likewise
import failures_narrow  # noqa: F401 - likewise
import failures_nineteenth  # noqa: F401 - likewise
import failures_optimizers  # noqa: F401 - likewise
import failures_outside  # noqa: F401 - likewise
import failures_pairs  # noqa: F401 - likewise
import failures_records  # noqa: F401 - likewise
import failures_seventeenth  # noqa: F401 - likewise
import failures_thirteenth  # noqa: F401 - likewise
import failures_transient  # noqa: F401 - likewise
import failures_traps  # noqa: F401 - likewise
from failures import FAILURES, Failure

from gradsentinel import Incident, NanCallback, Sentinel, TrainingAborted

__all__ = ["FAILURES", "Failure", "line_of", "run_failure", "wrong_in"]


def run_failure(case: Failure, run_dir: Path, *, clock: Callable[[], Any] = lambda: None) -> Incident | None:
    """Run the step and return its incident; `clock` is called before the step and before it is judged."""
    model = case.model()
    if case.prepare is not None:
        case.prepare(model)
    batches = case.batch() if case.accumulate > 1 else [case.batch()]
    loop = case.loop or case.forward
    sentinel = Sentinel(
        model,
        case.optimizer(model),
        callbacks=[NanCallback()],
        run_dir=run_dir,
        forward=case.forward,
        scaler=case.scaler() if case.scaler else None,
        diagnosis_budget=600,  # what a verdict is does not depend on how busy the machine is
    )
    try:
        with sentinel:
            for batch in sentinel.steps(batches, accumulate=case.accumulate):
                clock()
                with case.device():
                    loss = loop(model, batch)
                with case.backward_device():
                    sentinel.backward(loss)
                clock()
                if case.after_backward is not None:
                    case.after_backward(model)
                sentinel.step()
    except TrainingAborted:  # a bad state, and no Rollback to undo it
        pass
    assert len(sentinel.incidents) <= 1
    return sentinel.incidents[0] if sentinel.incidents else None


def wrong_in(case: Failure, incident: Incident | None) -> list[str]:
    """Return what of the verdict is not what is really wrong."""
    if incident is None:
        return ["no incident"]
    found = incident.diagnosis
    causes = (case.cause,) if isinstance(case.cause, str) else case.cause
    operators = case.op if isinstance(case.op, tuple) else (case.op,)
    wanted = {
        "cause": (found.cause, causes),
        "phase": (found.phase, (case.phase,)),
        "op": (found.op, operators),
        "node": (found.node, (case.node,)),
        "module": (found.module, (case.module,)),
        "microbatch": (incident.microbatch, (case.microbatch,)),
        "source": (found.source, (None if case.line is None else line_of(case.forward, case.line),)),
    }
    if case.samples is not None:
        wanted["samples"] = (tuple(s.position for s in incident.samples), (case.samples,))
    if case.field is not None:
        wanted["fields"] = ({s.field for s in incident.samples}, ({case.field},))
    field = case.field if case.look is None else case.look
    if field:
        wanted["the field in the remedy"] = (any(field in text for text in found.remedy), (True,))
    wrong = [
        f"{what} is {got}, not {expected[0] if len(expected) == 1 else expected}"
        for what, (got, expected) in wanted.items()
        if got not in expected and expected != (None,)
    ]
    return wrong + [f"no {name}" for name in ("remedy", "evidence") if not getattr(found, name)]


def line_of(function: Any, text: str) -> str:
    """Return 'file:number' of the first line of a function that holds the text."""
    code = function.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    start = code.co_firstlineno
    while not lines[start - 1].lstrip().startswith("def "):  # decorators may hold the text too
        start += 1
    for number in range(start + 1, len(lines) + 1):
        if text in lines[number - 1]:
            return f"{Path(code.co_filename).name}:{number}"
    raise AssertionError(f"{text!r} is not in {function}")
