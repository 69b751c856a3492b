"""Writes repro.py: a program of its own that runs the bad operator on its saved inputs.

Whatever comes from the run (names, messages, paths) goes into it as comments of visible characters, or as
literals that `repr` made. It can never become code.
"""

from __future__ import annotations

import json
import keyword
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsentinel._version import __version__
from gradsentinel.diagnosis.custom import FunctionCall
from gradsentinel.diagnosis.lost import Lost
from gradsentinel.diagnosis.operands import places_of_statistics
from gradsentinel.diagnosis.operator import STANDARD, CannotRun, OperatorCall, find
from gradsentinel.diagnosis.repro_template import PROGRAM
from gradsentinel.diagnosis.stored_call import NAMED, VIEW
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident
from gradsentinel.state.tree import flatten
from gradsentinel.wording import printable

_WIDTH = 100


def write_program(
    incident: Incident,
    diagnosis: Diagnosis,
    call: OperatorCall,
    state: Mapping[str, Any],
    *,
    folder: str,
    function: FunctionCall | None = None,
    function_state: Mapping[str, Any] | None = None,
    lost: Lost | None = None,
    lost_state: Mapping[str, Any] | None = None,
    allocation: bool = False,
) -> str:
    """Return the source of repro.py.

    Args:
        incident: goes into the header.
        diagnosis: likewise.
        call: the operator.
        state: its arguments as `call_to_tree` returned them.
        folder: name of the archive beside the program that holds them.
        function: the custom autograd.Function around the operator, if there is one that can be imported.
        function_state: its arguments.
        lost: the operator of a narrow type before it that lost what it stumbles over, if there is one.
        lost_state: its arguments as `call_to_tree` returned them.
        allocation: True if the operator only hands out memory.

    Raises:
        CannotRun: if an argument has no form in Python.
    """
    whole = {"operator": state, "function": function_state, "lost": lost_state}
    _, skeleton = flatten(whole, copy_views=False)
    operator = skeleton["operator"]
    operator_called = find(call.name)
    constants = {
        "TITLE": f"{call.name.replace('::', '.')}, step {incident.step}",
        "FOLDER": folder,
        "OPERATOR": call.name,
        "MODULES": list(call.modules),
        "SCRIPT": call.script,
        "LIBRARIES": list(call.libraries),
        "EXPECTED": None
        if call.expected is None
        else (call.expected.output, call.expected.index, "NaN" if call.expected.nan else "Inf"),
        "FILL": allocation or (function is not None and function.unwritten),
        "RAN_ON": call.device,
        "POINTWISE": torch.Tag.pointwise in operator_called.tags,
        "WRITTEN": _written(operator_called),
        "STATISTICS": places_of_statistics(operator_called, call.args),
        "FUNCTION": None if function is None else (function.module, function.qualname),
        "IN_SCRIPT": function is not None and function.in_script,
        "BACKWARD": function is not None and function.backward,
        "AUTOCAST": [] if function is None else list(function.autocast),
        "LOST": None if lost is None else (lost.call.name, lost.index, "Inf" if lost.overflow else "0"),
    }
    header = "\n".join(_comments(_header(incident, diagnosis, call, function, allocation=allocation)))
    values = "\n".join(f"{name} = {literal(value)}" for name, value in constants.items())
    args = f"{_lines(operator['args'])}, {_code(operator['kwargs'])}"
    if function_state is None:
        more = "[], None"
    else:
        given = skeleton["function"]
        more = f"{_lines(given['args'])}, {_code(given['grads'])}"
    before = "[], {}"
    if lost_state is not None:
        given = skeleton["lost"]
        before = f"{_lines(given['args'])}, {_code(given['kwargs'])}"
    places = {"header": header, "values": values, "arguments": args, "function": more, "lost": before}
    # In one go: what is put in may look like a place itself.
    return re.sub(r"#@(\w+)@#", lambda place: places[place[1]], PROGRAM)


def literal(value: Any) -> str:
    """Return Python source of a plain value; raises CannotRun for anything else."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return ascii(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value)) if value - value == 0 else f"float({str(float(value))!r})"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    raise CannotRun(f"{type(value).__name__} has no form in Python source")


# -- the arguments, from the archive's skeleton --------------------------------------------------------


def _lines(encoded: Sequence[Any]) -> str:
    """Return a list with one argument a line."""
    items = "".join(f"        {_code(item)},\n" for item in encoded)
    return f"[\n{items}    ]" if items else "[]"


def _code(encoded: Any) -> str:
    """Return the expression that rebuilds a stored value from SAVED, the tensors of the archive."""
    if isinstance(encoded, list):
        return "[" + ", ".join(map(_code, encoded)) + "]"
    if not isinstance(encoded, dict):
        return literal(encoded)
    tag = next(iter(encoded), "")
    if tag == VIEW:
        kept, moved, expanded = encoded[VIEW]
        text = _code(kept)
        text += "" if moved is None else f".permute({literal(moved)})"
        return text if expanded is None else f"{text}.expand({literal(expanded)})"
    if tag == NAMED:
        return _named(str(encoded[NAMED]), (torch.layout, torch.memory_format))
    if tag.startswith("gradsentinel:"):
        raise CannotRun(f"an argument of the kind {json.dumps(tag)} has no form in Python source")
    if not tag.startswith("$"):
        return "{" + ", ".join(f"{literal(str(k))}: {_code(v)}" for k, v in encoded.items()) + "}"
    return _tagged(tag, encoded)


def _tagged(tag: str, encoded: Mapping[str, Any]) -> str:
    writers: dict[str, Callable[[Any], str]] = {
        "$tensor": lambda name: f"saved({literal(str(name))}{_kind(encoded)})",
        "$sparse": lambda parts: _sparse(parts, encoded),
        "$dtype": lambda name: f"wanted({_dtype(name)})",
        "$device": lambda _: "DEVICE",
        "$float": lambda parts: literal(float(parts[0])),
        "$complex": lambda parts: f"complex({_code(parts[0])}, {_code(parts[1])})",
        "$int": lambda text: literal(int(text, 16)),
        "$size": lambda size: literal(list(size)),
        "$tuple": lambda items: "(" + "".join(f"{_code(item)}, " for item in items) + ")",
    }
    if tag not in writers:
        raise CannotRun(f"an argument of the kind {json.dumps(tag)} has no form in Python source")
    return writers[tag](encoded[tag])


def _kind(encoded: Mapping[str, Any]) -> str:
    return f", {_dtype(encoded['dtype'])}" if "dtype" in encoded else ""


def _sparse(parts: Sequence[Any], encoded: Mapping[str, Any]) -> str:
    indices, values = map(_code, parts)
    size = literal(list(encoded["size"]))
    text = f"torch.sparse_coo_tensor({indices}, {values}, {size}, check_invariants=True)"
    return f"{text}.coalesce()" if encoded["coalesced"] else text


def _dtype(name: str) -> str:
    return _named(name.removeprefix("torch."), (torch.dtype,))


def _named(name: str, kinds: tuple[type, ...]) -> str:
    if (
        not name.isidentifier()
        or keyword.iskeyword(name)
        or not isinstance(getattr(torch, name, None), kinds)
    ):
        raise CannotRun(f"torch has no {name!r}")
    return f"torch.{name}"


def _written(function: Any) -> list[int]:
    """Numbers of the arguments that an operator without a result writes to."""
    return [
        number
        for number, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# -- the header ----------------------------------------------------------------------------------------


def _header(
    incident: Incident,
    diagnosis: Diagnosis,
    call: OperatorCall,
    function: FunctionCall | None,
    *,
    allocation: bool,
) -> list[str]:
    where = [diagnosis.phase and f"{diagnosis.phase} pass", diagnosis.module and f"module {diagnosis.module}"]
    where += [diagnosis.node and f"autograd node {diagnosis.node}", diagnosis.source]
    lines = [
        f"Generated by GradSentinel {__version__} from incident {incident.id}.",
        "",
        f"Step {incident.step}: {incident.message}",
        f"Cause: {diagnosis.cause} ({diagnosis.confidence:.0%} sure), {', '.join(filter(None, where))}",
        *(f"- {text}" for text in diagnosis.evidence),
        "To do:" if diagnosis.remedy else "",
        *(f"- {text}" for text in diagnosis.remedy),
        "",
        f"Runs {call.name.replace('::', '.')} on what it was given in that step (it ran on {call.device}).",
    ]
    if call.cut:
        lines.append(
            f"The inputs were too large to keep whole. This part of them shows the same: {call.cut}."
        )
    if allocation:
        lines.append(
            "It hands out memory that nobody has written to. Torch fills it with NaN here, to make it "
            "visible; the fault is in the code that reads it before it is written."
        )
    if function is not None:
        how = f"from {function.module} import {function.qualname.partition('.')[0]}"
        script = f", a training script: give --import {function.module}" if function.in_script else ""
        lines.append(
            "It ran inside of a custom autograd.Function. Where that can be imported "
            f"({how}{script}), it is run instead, with what it was given."
        )
    elif not call.name.startswith(tuple(f"{space}::" for space in STANDARD)):
        known = ", ".join(filter(None, (*call.modules, call.script, *call.libraries))) or "some module"
        lines.append(f"The operator is not torch's own but made by {known}: give it with --import NAME.")
    if call.reproduced is False:
        lines.append(
            "When it was saved, the operator alone made finite values of these inputs: either they were "
            "overwritten after it had run, or it does not always compute the same."
        )
    return lines


def _comments(lines: Sequence[str]) -> list[str]:
    found = []
    for line in lines:
        text = printable(line)
        indent = "  " if text.startswith("- ") else ""
        wrapped = textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=True) or [""]
        found += [f"# {part}".rstrip() for part in wrapped]
    return found
