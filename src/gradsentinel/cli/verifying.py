"""`gradsentinel verify`: does a fix hold in the saved scene of the failure?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import choose, complain, console, print_json
from gradsentinel.cli.rerun import (
    AsJson,
    Device,
    Id,
    Incident,
    Modules,
    OwnWeights,
    RankNumber,
    TargetName,
    cpu,
    device_named,
    directory_of,
    import_all,
    stage_of,
    user_code,
)
from gradsentinel.wording import printable

if TYPE_CHECKING:
    from gradsentinel.diagnosis.bundle import Bundle
    from gradsentinel.diagnosis.verify import Verification


_HELP = (
    "Run the fixed model on the saved scene of a failure and say whether the fix holds; made for CI.\n\n"
    "Looks at the bad operator alone, at the module that was to blame, and at the whole step; "
    "with an optimizer from the factory also at the update. Without --target only the operator "
    "is looked at, which decides where a torch operator was to blame.\n\n"
    "Exit codes: 0 the fix holds; 1 it does not; 2 it cannot be tried."
)


@app.command(help=_HELP)
def verify(
    incident: Incident,
    incident_id: Id = None,
    *,
    target: TargetName = None,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="PKG.MODULE:FACTORY",
            help="The model without the fix: shows first that the fault is there without it.",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    rank: RankNumber = None,
    own_weights: OwnWeights = False,
    modules: Modules = None,
    as_json: AsJson = False,
) -> None:
    """Run the fixed model on the saved scene of a failure and say whether the fix holds; made for CI."""
    from gradsentinel.diagnosis import verify as verifying  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis.bundle import Bundle  # noqa: PLC0415 - imports torch

    bundle = Bundle(directory_of(choose(incident, incident_id, "verify")), rank)
    place = device_named(device)
    with user_code():
        import_all(modules)
        if target is None:
            found = verifying.verify_operator(bundle, device=place or cpu())
            said: list[str] = []
        else:
            stage = stage_of(bundle, target, place, None, own_weights=own_weights, fixed=True)
            control = None
            if before is not None:
                control = stage_of(bundle, before, place, None, own_weights=own_weights, fixed=True)
            found, said = verifying.verify(stage, control), stage.said
    _print_verification(bundle, found, said, as_json=as_json)
    raise typer.Exit({True: 0, False: 1, None: 2}[found.holds])


_MARKS = {True: ("ok", "green"), False: ("BAD", "bold red"), None: ("-", "dim")}


def _print_verification(bundle: Bundle, found: Verification, said: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "incident": bundle.incident.id,
                "holds": found.holds,
                "conclusion": found.said,
                "notes": said,
                "checks": [{"what": c.what, "held": c.held, "said": c.said} for c in found.checks],
            }
        )
        return
    out = console()
    out.print(Text(printable(f"Does the fix hold for {bundle.incident.id}?"), "bold"))
    for text in said:
        out.print(Text(f"  {printable(text)}"))
    for check in found.checks:
        mark, style = _MARKS[check.held]
        out.print(Text.assemble("  ", (f"{mark:<4}", style), f"{check.what:<10}", printable(check.said)))
    conclusion = f"{found.said[0].upper()}{found.said[1:]}." if found.said else ""
    out.print(Text(printable(conclusion), "bold" if found.holds else "bold yellow"))
    if found.holds is None:
        complain("error", "it cannot be said whether the fix holds")
