"""`gradsentinel verify`: does a fix hold in the saved scene of the failure?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import complain, console, print_json
from gradsentinel.cli.rerun import Rerun, cpu, on_a_saved_step
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
@on_a_saved_step
def verify(
    rerun: Rerun,
    *,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="PKG.MODULE:FACTORY",
            help="The model without the fix: shows first that the fault is there without it.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Run the fixed model on the saved scene of a failure and say whether the fix holds; made for CI."""
    from gradsentinel.diagnosis import verify as verifying  # noqa: PLC0415 - imports torch

    if rerun.target is None:
        found = verifying.verify_operator(rerun.bundle, device=rerun.device or cpu())
        said: list[str] = []
    else:
        stage = rerun.stage(rerun.target, fixed=True)
        control = None if before is None else rerun.stage(before, fixed=True)
        found, said = verifying.verify(stage, control), stage.said
    _print_verification(rerun.bundle, found, said, as_json=rerun.as_json)
    return {True: 0, False: 1, None: 2}[found.holds]


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
