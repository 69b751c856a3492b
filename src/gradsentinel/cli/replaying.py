"""`gradsentinel replay`: a saved step, or its bad operator alone, run again on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import console, print_json
from gradsentinel.cli.rerun import Rerun, cpu, dtype_named, on_a_saved_step
from gradsentinel.wording import printable

if TYPE_CHECKING:
    import torch

    from gradsentinel.diagnosis.offline import Outcome
    from gradsentinel.diagnosis.operator import OperatorCall
    from gradsentinel.diagnosis.stage import Stage
    from gradsentinel.evidence import Diagnosis


_HELP = (
    "Run a failing step again, here, and repeat the verdict.\n\n"
    "With --target the whole step is run: the saved batch and random states, the saved weights "
    "if there are any (level 'full'), your model. Without it the bad operator alone is run on "
    "its saved inputs.\n\n"
    "Exit codes: 0 the failure is there again, with the same verdict; 1 it is not, or the "
    "verdict is another one; 2 it cannot be tried."
)


@app.command(help=_HELP)
@on_a_saved_step
def replay(
    rerun: Rerun,
    *,
    dtype: Annotated[
        str | None, typer.Option(help="Run in this floating dtype instead, such as float32.")
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Let operators compute in a fixed order: slower, and not by the very kernels of the run.",
        ),
    ] = False,
) -> int:
    """Run a failing step again, here, and repeat the verdict."""
    wanted = dtype_named(dtype)
    why = "--deterministic" if deterministic else ""
    if rerun.target is None:
        return _replay_operator(rerun, wanted, why)
    return _replay_step(rerun, rerun.target, wanted, why)


def _replay_operator(rerun: Rerun, dtype: torch.dtype | None, why: str) -> int:
    from gradsentinel.devices import device_of  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis import operator  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis.determinism import deterministic  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis.stage import CannotReplay  # noqa: PLC0415 - imports torch

    bundle, device = rerun.bundle, rerun.device or cpu()
    reason = bundle.why_no_operator()
    if reason is not None:
        raise CannotReplay(f"{bundle.directory}: {reason}; give --target to run the whole step")
    call = bundle.operator(device=device, dtype=dtype)
    _, meta = bundle.read("operator")
    function = operator.find(call.name)
    try:
        filled = operator.filled_memory() if meta.get("allocation") else nullcontext()
        with deterministic(why, device_of(device)) as conditions, filled:
            outputs = operator.run(function, call.args, call.kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise operator.CannotRun(f"{call.name} raised {type(error).__name__}: {error}") from error
    again = operator.shows(call, outputs)
    facts = {
        "incident": bundle.incident.id,
        "operator": call.name.replace("::", "."),
        "device": str(device),
        "inputs": _described([call.args, dict(call.kwargs)]),
        "outputs": _described(outputs),
        "deterministic": list(conditions.said()),
        "reproduced": again,
    }
    if rerun.as_json:
        print_json(facts)
    else:
        _print_operator(console(), call, facts, again=again, function=meta.get("function"))
        if not again and dtype is not None:
            console().print(f"Without --dtype {_name(dtype)} it runs in the dtype of the run.")
    return 0 if again else 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> list[dict[str, Any]]:
    from gradsentinel.diagnosis.statistics import describe  # noqa: PLC0415 - imports torch
    from gradsentinel.state.tree import tensors_in  # noqa: PLC0415 - imports torch

    return [describe(tensor) for _, tensor in tensors_in(value)]


def _print_operator(
    out: Console, call: OperatorCall, facts: Mapping[str, Any], *, again: bool, function: Any
) -> None:
    out.print(Text(f"{facts['operator']}, alone, on {facts['device']}", "bold"))
    for what in ("inputs", "outputs"):
        for number, entry in enumerate(facts[what]):
            out.print(Text(f"  {what[:-1]} {number}: {_in_words(entry)}"))
    if call.cut:
        out.print(Text(f"  only a part of the inputs was kept: {printable(call.cut)}"))
    for said in facts["deterministic"]:
        out.print(Text(f"  {printable(said)}"))
    if function is not None:
        out.print(Text(f"  it ran inside of {printable(function)}; repro.py runs that one too"))
    text = "The bad values are there again." if again else "All is finite here."
    out.print(Text(text, "bold" if again else "bold yellow"))


def _in_words(entry: Mapping[str, Any]) -> str:
    text = f"{entry['dtype']}{entry['shape']}"
    if "min" in entry:
        text += f", from {float(entry['min']):.6g} to {float(entry['max']):.6g}"
    if entry.get("zeros"):
        text += f", {entry['zeros']} exact zero{'s' if entry['zeros'] > 1 else ''}"
    if entry.get("nonfinite"):
        text += f", {entry['nonfinite']} not finite"
    return text


def _replay_step(rerun: Rerun, target: str, dtype: torch.dtype | None, why: str) -> int:
    from gradsentinel.devices import device_of  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis import offline  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis.determinism import deterministic  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis.stage import CannotReplay, settings_of  # noqa: PLC0415 - imports torch

    bundle = rerun.bundle
    reason = offline.reason_against(bundle.incident)
    if reason is not None:
        raise CannotReplay(reason)
    stage = rerun.stage(target, dtype)
    recorded = bundle.incident.diagnosis
    device = device_of(stage.run.host.device)
    with settings_of(bundle), deterministic(why, device) as conditions:
        outcome = offline.compute(stage)
        wider = dtype is not None and dtype.itemsize >= 4
        wide = offline.compute_in_wide(stage) if wider and not outcome.finite else []
        if wide:
            outcome.losses.clear()
            outcome.gradients.clear()
            outcome.wide = wide
            stage.said.append("what autocast makes half precision was computed in float32, too")
        verdict = offline.judge(stage) if _worth_judging(recorded, outcome) else None
    stage.said += conditions.said()
    same = offline.same_verdict(recorded, verdict) and (not outcome.finite or verdict is not None)
    if rerun.as_json:
        print_json(
            {
                "incident": bundle.incident.id,
                "target": target,
                "device": str(stage.run.host.device),
                "notes": stage.said,
                "deterministic": list(conditions.said()),
                "losses": [float(one.loss) for one in (outcome.wide or outcome.computed)],
                "nonfinite": {"losses": outcome.losses, "gradients": outcome.gradients},
                "then": None if recorded is None else recorded.as_dict(),
                "now": None if verdict is None else verdict.as_dict(),
                "same_verdict": same,
            }
        )
    else:
        _print_step(console(), stage, outcome, verdict, target, dtype, same=same)
    return 0 if same else 1


def _worth_judging(recorded: Diagnosis | None, outcome: Outcome) -> bool:
    """A finite step needs a verdict only where the recorded one is about a step that was finite again."""
    return (
        not outcome.finite
        or recorded is None
        or recorded.cause in ("hardware", "unknown", "data", "optimizer")
    )


def _print_step(
    out: Console,
    stage: Stage,
    outcome: Outcome,
    verdict: Diagnosis | None,
    target: str,
    dtype: torch.dtype | None,
    *,
    same: bool,
) -> None:
    incident, recorded = stage.bundle.incident, stage.bundle.incident.diagnosis
    title = f"Step {incident.step} of {incident.id}, with {target} on {stage.run.host.device}"
    out.print(Text(printable(title), "bold"))
    for said in stage.said:
        out.print(Text(f"  {printable(said)}"))
    losses = ", ".join(f"{float(one.loss):.6g}" for one in (outcome.wide or outcome.computed))
    result = "all is finite" if outcome.finite else f"not finite: {outcome.in_words()}"
    then = "" if incident.loss is None else f" (then {incident.loss:.6g})"
    out.print(Text(f"  loss {losses}{then}; {printable(result)}"))
    if verdict is not None or recorded is not None:
        out.print(_comparison(recorded, verdict))
    for text in () if verdict is None else verdict.evidence:
        out.print(Text(f"- {printable(text)}"))
    out.print(Text(_conclusion(outcome, dtype, same=same), "bold" if same else "bold yellow"))


def _comparison(recorded: Diagnosis | None, verdict: Diagnosis | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "then", "now"):
        table.add_column(title, overflow="fold")
    for label, name in (
        *(("cause", "cause"), ("phase", "phase"), ("operator", "op"), ("autograd node", "node")),
        *(("module", "module"), ("line", "source")),
    ):
        then, now = (getattr(one, name) if one is not None else None for one in (recorded, verdict))
        if then or now:
            table.add_row(
                label, *(Text(printable("-" if text in (None, "") else text)) for text in (then, now))
            )
    return table


def _conclusion(outcome: Outcome, dtype: torch.dtype | None, *, same: bool) -> str:
    if same and outcome.finite:
        return "The verdict is the same."
    if same:
        return "The failure is there again, with the same verdict."
    if outcome.finite:
        if dtype is not None:
            return f"The failure is not there: in {_name(dtype)} all is finite."
        return (
            "The failure is not there: with this model and these weights, here, all is finite. "
            "If this is the program that failed: does the factory build it with the same dtype and autocast?"
        )
    return "The failure is there again, but the verdict is another one."
