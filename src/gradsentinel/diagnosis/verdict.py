"""The diagnosis of a traced step: the cause, where it is, and the evidence in plain sentences."""

from __future__ import annotations

from gradsentinel.diagnosis.cause import sample_name
from gradsentinel.diagnosis.findings import Findings, custom_of
from gradsentinel.diagnosis.operands import bad_index, equation, place
from gradsentinel.diagnosis.record import Call, Event
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.diagnosis.rules import RULES
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.walk import Path, call_of
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import fold

_LONGEST = 8
"""Steps of the spread that are told."""


def decide(found: Findings) -> Diagnosis:
    """Return the diagnosis of a micro-batch whose bad values were traced to an operator."""
    cause = next(c for c in (rule(found) for rule in RULES) if c is not None)
    origin, call, node = found.origin, found.call, found.node
    if found.lost is not None and cause.name == "precision":
        origin, call, node = found.lost, found.lost.call, None
    line = call.line
    return Diagnosis(
        cause=cause.name,
        confidence=cause.confidence,
        phase="backward" if origin.backward else "forward",
        module=call.module,
        op=origin.op,
        node=node,
        source=None if line is None else str(line),
        evidence=(_headline(found), cause.why, *_details(found)),
        remedy=cause.remedies,
    )


def came_in(trace: Trace, path: Path, computed: Computed) -> Diagnosis:
    """Return the diagnosis of a bad value that no operator of the step made."""
    leaf = path.leaves[0].leaf if path.leaves else ""
    event = path.reader
    custom = None if event is None else custom_of(event, computed)
    if leaf == "constant" and event is not None and (custom is not None or event.backward):
        return _put_in(trace, event, custom)
    if leaf == "constant" and event is not None:
        leaf, event = _before_it_left_torch(trace, event) or (leaf, event)
    call = Call(None, None) if event is None else call_of(trace, event)
    if leaf.startswith("batch"):
        cause, confidence, fix = "data", 0.9, "repair or filter the records that hold it"
    elif leaf == "constant":
        cause, confidence, fix = "math", 0.5, "look at how these numbers are computed, without torch"
    elif leaf:
        cause, confidence, fix = "setup", 0.6, "look at where this tensor is computed, before the step"
    else:
        cause, confidence, fix = "unknown", 0.1, "use the standard tensor layouts to have the step traced"
    fact = f"{leaf} was not finite before any operator ran" if leaf else "the bad values could not be traced"
    if leaf == "constant":
        fact = (
            "a tensor that is made of numbers from outside of torch (NumPy, plain numbers) is not finite; no "
            "batch, parameter, buffer or attribute holds it"
        )
    where = "" if event is None else f"{event.op} takes it in"
    if call.line is not None:
        where += f", {call.line}: {call.line.text}"
    return Diagnosis(
        cause=cause,
        confidence=confidence,
        phase="input" if cause == "data" else "forward",
        module=call.module,
        op=None if event is None else event.op,
        source=None if call.line is None else str(call.line),
        evidence=(fact, where) if where else (fact,),
        remedy=(fix,),
    )


def _before_it_left_torch(trace: Trace, reader: Event) -> tuple[str, Event] | None:
    """Return the bad tensor of the program that was read before, and by what: NumPy may have passed it on."""
    for event in trace.events[: reader.index]:
        for edge in event.edges:
            if edge.writer is None and not edge.lawful and edge.leaf != "constant":
                return edge.leaf, event
    return None


def _put_in(trace: Trace, event: Event, custom: str | None) -> Diagnosis:
    """The user's own operator, or a hook in the backward pass, writes a number that is not finite."""
    call = call_of(trace, event)
    who = f"custom operator {custom}" if custom is not None else "a hook of the backward pass"
    fact = f"{who} puts a number into its result that is not finite, and that no operator of the step made"
    return Diagnosis(
        cause="operator",
        confidence=0.8 if custom is not None else 0.5,
        phase="backward" if event.backward else "forward",
        module=call.module,
        op=event.op,
        node=event.node,
        source=None if call.line is None else str(call.line),
        evidence=(fact,),
        remedy=(f"check {custom or 'the hooks on tensors and modules'}, or do without meanwhile",),
    )


# -- words -----------------------------------------------------------------------------------------


def _headline(found: Findings) -> str:
    origin = found.origin
    what = "NaN" if origin.badness.nan else "Inf"
    of = "infinities alone" if origin.edges else "finite inputs"
    phase = "backward" if origin.backward else "forward"
    text = f"{origin.op} made {what} of {of} in the {phase} pass"
    if origin.recomputed:
        text += " (recomputed for activation checkpointing)"
    if found.call.module:
        text += f", in {found.call.module}"
    if found.node and origin.backward:
        text += f", autograd node {found.node}"
    line = found.call.line
    return text if line is None else f"{text}, {line}: {line.text}"


def _details(found: Findings) -> list[str]:
    said = []
    formula, where = equation(found.origin), bad_index(found.origin)
    if where is not None:
        index, result = where
        text = f"first bad element {place(index, tuple(result.shape), found.size)} of {list(result.shape)}"
        said.append(f"{text}: {formula}" if formula else text)
    if found.operands:
        said.append(f"inputs: {'; '.join(map(str, found.operands))}")
    return [*said, *_circumstances(found)]


def _circumstances(found: Findings) -> list[str]:
    said = []
    nan = found.path.first_nan
    if nan is not None and nan is not found.origin:
        said.append(f"the first NaN was made of those infinities by {_operator(nan)}")
    if found.path.reentry is not None:
        said.append(f"it came back in the backward pass through {found.path.reentry.node}")
    if found.finite_without_rows and found.rows:
        who = fold([sample_name(found, row) for row in found.rows])
        said.append(f"with {who} replaced by another one the step is finite")
    if found.finite_in_wide is False and found.half is not None:
        said.append("computed in float32 it is not finite either")
    if found.finite_others:
        said.append(f"the other {len(found.finite_others)} micro-batch(es) of the step are finite")
    if found.bad_others:
        numbers = fold(list(map(str, found.bad_others)), len(found.bad_others))
        said.append(f"micro-batch {numbers} of the step is not finite either, each by itself")
    if found.finite_with_healthy is not None:
        how = "finite" if found.finite_with_healthy else "not finite either"
        said.append(f"with the same weights the batch of the last healthy step is {how}")
    if len(found.path.origins) > 1:
        more = dict.fromkeys(_operator(event) for event in found.path.origins[1:])
        said.append(f"further origins: {fold(list(more))}")
    if found.path.reached:
        said.append(_spread(found))
    return said


def _spread(found: Findings) -> str:
    names = (e.node or e.op for e in found.path.route)
    shown = list(dict.fromkeys(name for name in names if not name.endswith("AccumulateGrad")))
    if len(shown) > _LONGEST:
        shown = [*shown[: _LONGEST - 2], "...", shown[-1]]
    return f"spread: {' > '.join([*shown, fold(list(found.path.reached))])}"


def _operator(event: Event) -> str:
    return f"{event.op} in {event.node}" if event.node else event.op
