"""A whole campaign: plan, trials, results, page."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradsentinel.campaign.page import page
from gradsentinel.campaign.plan import impossible, trials
from gradsentinel.campaign.plots import draw
from gradsentinel.campaign.pool import run
from gradsentinel.campaign.readme import fill
from gradsentinel.campaign.report import results
from gradsentinel.campaign.trial import SCHEMA, Trial
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import jsonable


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a campaign is to do."""

    form: str
    """`tiny`, `small`, `short` or `long`."""
    seed: int
    folder: Path
    """Where the trials leave their results, and the page is written."""
    jobs: int
    """Processes at a time."""
    resume: bool = False
    """Go on with what is in the folder."""
    only: tuple[str, ...] = ()
    """Workloads; empty for all."""
    docs: Path | None = None
    """Where results.md, results.json and the plots go, too; READMEs beside it get the results in short."""
    hang: float = 900.0
    """Seconds without a result after which a run counts as hung."""
    command: str = "gradsentinel campaign"
    """As it was called, for the page."""


def conduct(orders: Orders, console: Console) -> dict[str, Any]:
    """Run the campaign, write results.json, results.md and the plots, and return the results.

    Raises:
        ConfigurationError: the folder has results already, or those of another campaign.
    """
    planned = trials(orders.form, orders.seed, only=orders.only)
    left_out = {w: why for w in {t.workload for t in planned} if (why := impossible(w)) is not None}
    for workload, why in sorted(left_out.items()):
        console.print(f"[yellow]left out: {workload}.[/yellow] {why}")
    planned = [trial for trial in planned if trial.workload not in left_out]
    if not planned:
        raise ConfigurationError("nothing of this campaign can be run here")
    before = _settle(orders)
    _forget_failures(planned, orders.folder)
    total = sum(len(trial.policies) for trial in planned)
    missing = sum(len(trial.missing(orders.folder)) for trial in planned)
    started = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task("runs", total=total, completed=total - missing)
        problems = run(
            planned,
            orders.folder,
            jobs=orders.jobs,
            hang=orders.hang,
            done=lambda count: progress.update(task, advance=count),
        )
    seconds = before + time.monotonic() - started
    _remember(orders, seconds)
    for problem in problems:
        console.print(f"[red]failed:[/red] {problem}", highlight=False)
    facts = {
        "command": orders.command,
        "form": orders.form,
        "seed": orders.seed,
        "jobs": orders.jobs,
        "seconds": seconds,
        "left_out": dict(sorted(left_out.items())),
    }
    found = results(planned, orders.folder, facts)
    publish(found, orders.folder, pictures="images")
    if orders.docs is not None:
        publish(found, orders.docs, pictures="images")
        fill(json.loads((orders.docs / "results.json").read_text(encoding="utf-8")), orders.docs.parent)
    return found


def publish(found: dict[str, Any], folder: Path, *, pictures: str) -> None:
    """Write results.json, results.md and the plots into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(found, folder / pictures)
    text = json.dumps(jsonable(found), indent=1, allow_nan=False) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    shown = [(f"{pictures}/{name}", what) for name, what in drawn]
    (folder / "results.md").write_text(page(found, shown), encoding="utf-8")


def _settle(orders: Orders) -> float:
    """Take the folder, and return how many seconds were spent on what is in it."""
    mark = orders.folder / "campaign.json"
    mine = {
        "schema": SCHEMA,
        "form": orders.form,
        "seed": orders.seed,
    }
    spent = 0.0
    if mark.is_file():
        known = json.loads(mark.read_text(encoding="utf-8"))
        spent = float(known.pop("seconds", 0.0))
        if not orders.resume:
            raise ConfigurationError(
                f"{orders.folder} holds a campaign: --resume goes on with it, --out names another place"
            )
        if known != mine:
            raise ConfigurationError(
                f"{orders.folder} holds another campaign ({known['form']}, seed {known['seed']}): "
                "give its --form and --seed, or another --out"
            )
    orders.folder.mkdir(parents=True, exist_ok=True)
    if not mark.is_file():
        shutil.rmtree(orders.folder / "trials", ignore_errors=True)
    mark.write_text(json.dumps({**mine, "seconds": spent}), encoding="utf-8")
    return spent


def _forget_failures(planned: list[Trial], folder: Path) -> None:
    """Remove what failed, so that it is tried again."""
    for trial in planned:
        for policy in trial.policies:
            path = trial.file(folder, policy)
            if path.is_file() and "failed" in json.loads(path.read_text(encoding="utf-8")):
                path.unlink()


def _remember(orders: Orders, seconds: float) -> None:
    mark = orders.folder / "campaign.json"
    known = json.loads(mark.read_text(encoding="utf-8"))
    mark.write_text(json.dumps({**known, "seconds": seconds}), encoding="utf-8")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
