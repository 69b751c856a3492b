"""The main job of the demonstration: three runs of one model, three faults, and what became of them."""

from __future__ import annotations

import importlib.util
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gradsentinel import (
    Callback,
    Incident,
    MagnitudeCallback,
    NanCallback,
    RecoveryEvent,
    Rollback,
    Sentinel,
    SnapshotSaver,
    TensorBoardCallback,
)
from gradsentinel.demo.charts import LossCurve, loss_chart, save_png
from gradsentinel.demo.config import DemoConfig
from gradsentinel.demo.data import CharCorpus, Record, batches, stdlib_text
from gradsentinel.demo.model import CharGPT, build
from gradsentinel.faults import FaultPlan, FlipBit, MatmulOverflow, PoisonSample
from gradsentinel.terminal import incident_table

_TITLE = "A character GPT on the Python standard library: three runs, three faults"
MAX_GRADIENT_NORM = 100.0
"""Healthy gradients of this model stay below 5; a flipped exponent bit makes them about 1e36."""


@dataclass(slots=True)
class _Result:
    """What one run left behind."""

    name: str
    losses: list[float] = field(default_factory=list)
    incidents: tuple[Incident, ...] = ()
    injected: int = 0

    def curve(self) -> LossCurve:
        """The run as a curve of the chart; steps are counted from 0, as in the incidents."""
        marks = [(incident.step, f"{_words(incident)}") for incident in self.incidents]
        return LossCurve(name=self.name, losses=self.losses, marks=marks, first_step=0)


def run_demo(*, steps: int | None, run_dir: Path, seed: int, console: Console) -> int:
    """Train without faults, with faults and GradSentinel, and with faults alone; show all three.

    Returns:
        0 if every fault was caught and the guarded run ended with a finite loss, else 1.

    Raises:
        ValueError: if there are too few steps for three faults.
    """
    config = (
        replace(DemoConfig(), seed=seed) if steps is None else replace(DemoConfig(), seed=seed, steps=steps)
    )
    if config.steps < 40:
        raise ValueError(f"--steps {config.steps} leaves no room for three faults; give at least 40")
    run_dir.mkdir(parents=True, exist_ok=True)  # said now if it cannot be, not after the first run
    corpus = CharCorpus(stdlib_text(config.corpus_bytes))
    at = [config.steps * part // 10 for part in (3, 5, 8)]
    console.print(
        f"A character GPT learns the Python standard library, {config.steps} steps, three times: without "
        f"faults, with three faults and GradSentinel, and with the same faults alone.\n"
        f"Faults: a poisoned record at step {at[0]}, attention logits that overflow in float16 at step "
        f"{at[1]}, a flipped bit in a gradient at step {at[2]}.",
        highlight=False,
    )
    with _threads(config.threads), _quiet(), _progress(console) as progress:
        healthy = _train(config, corpus, _Result("no faults"), progress, guard=None, faults=None)
        guarded = _train(
            config, corpus, _Result("faults, GradSentinel"), progress, guard=run_dir, faults=_faults(at, seed)
        )
        alone = _train(
            config, corpus, _Result("faults alone"), progress, guard=None, faults=_faults(at, seed)
        )
    results = [healthy, guarded, alone]
    curves = [result.curve() for result in results]
    console.print()
    console.print(incident_table(guarded.incidents))
    console.print(loss_chart(curves))
    _say_where(console, run_dir, save_png(curves, run_dir / "loss.png", title=_TITLE))
    caught = {incident.step for incident in guarded.incidents}
    good = caught == set(at) and math.isfinite(guarded.losses[-1])
    if not good:
        console.print(f"[red]not all faults were caught: due at {at}, caught at {sorted(caught)}[/red]")
    return 0 if good else 1


def _faults(at: list[int], seed: int) -> FaultPlan:
    """The same three faults for each run that gets them."""
    return FaultPlan(
        [
            PoisonSample(steps=(at[0],), field="weight"),
            # The third product of the module is query @ key^T: the attention logits.
            # Persistent, as real overflows are: it comes back when the diagnosis runs the step again.
            MatmulOverflow(
                steps=(at[1],), module="blocks.1.attn", nth=2, dtype=torch.float16, persistent=True
            ),
            FlipBit(steps=(at[2],), target="gradient", name="blocks.2.mlp.expand.weight", bit=30),
        ],
        seed=seed,
    )


def _train(
    config: DemoConfig,
    corpus: CharCorpus,
    result: _Result,
    progress: Progress,
    *,
    guard: Path | None,
    faults: FaultPlan | None,
) -> _Result:
    model = build(config, corpus.vocab)
    torch.manual_seed(config.seed)  # dropout draws the same masks in all three runs
    optimizer = AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    scheduler = LambdaLR(optimizer, config.learning_rate_scale)
    loader = batches(
        corpus, batch_size=config.batch_size, steps=config.steps, context=config.context, seed=config.seed
    )
    task = progress.add_task(result.name, total=config.steps, loss="")

    def seen(loss: Tensor) -> None:
        value = float(loss.detach())
        result.losses.append(value)
        shown = f"loss {value:.3f}" if math.isfinite(value) else f"[red]loss {value}[/red]"
        progress.update(task, advance=1, loss=shown)

    plan = faults or FaultPlan([])
    with plan.attach(model):
        batches_due = plan.batches(loader)
        if guard is None:
            _plain_loop(config, model, optimizer, scheduler, iter(batches_due), seen)
        else:
            callbacks = _callbacks()
            sentinel = Sentinel(
                model, optimizer, scheduler=scheduler, callbacks=callbacks, run_dir=guard, forward=_loss_of
            )
            with sentinel:
                sentinel.on(RecoveryEvent, lambda event: progress.console.print(_line(event.incident)))
                for batch in sentinel.steps(batches_due):
                    loss = _loss_of(model, batch)
                    sentinel.backward(loss)
                    sentinel.step(max_norm=config.max_norm)
                    seen(loss)
            result.incidents = sentinel.incidents
    result.injected = len(plan.log)
    return result


def _plain_loop(
    config: DemoConfig,
    model: CharGPT,
    optimizer: AdamW,
    scheduler: LambdaLR,
    loader: Iterator[Record],
    seen: Callable[[Tensor], None],
) -> None:
    """The loop as everybody writes it."""
    for batch in loader:
        loss = _loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen(loss)


def _loss_of(model: nn.Module, batch: Record) -> Tensor:
    """Compute the loss; the attention logits are float16, as under mixed precision on an accelerator."""
    with torch.autocast("cpu", dtype=torch.float16):
        loss: Tensor = model(**batch).loss
    return loss


def _callbacks() -> list[Callback]:
    callbacks: list[Callback] = [
        NanCallback(),
        MagnitudeCallback(max_global_norm=MAX_GRADIENT_NORM, action="skip"),
        Rollback(every=50),
        SnapshotSaver(),
    ]
    if importlib.util.find_spec("tensorboard") is not None:
        callbacks.append(TensorBoardCallback())
    return callbacks


def _words(incident: Incident) -> str:
    return f"{str(incident.kind).replace('_', ' ')}, {incident.outcome}".replace("_", " ")


def _line(incident: Incident) -> str:
    where = f" in {escape(incident.where)}" if incident.where else ""
    return (
        f"[yellow]step {incident.step}[/yellow] [bold]{str(incident.kind).replace('_', ' ')}[/bold]{where}\n"
        f"    {escape(incident.message)}\n"
        f"{escape(_cause(incident))}"
        f"    [green]{escape(incident.recovery)}[/green]"
    )


def _cause(incident: Incident) -> str:
    """The diagnosis in one line, if there is one."""
    found = incident.diagnosis
    if found is None or found.cause == "unknown":
        return ""
    place = ", ".join(part for part in (found.op, found.source) if part)
    return f"    cause: {found.cause}{f' ({place})' if place else ''}\n"


def _say_where(console: Console, run_dir: Path, png: Path | None) -> None:
    console.print(f"\nRun directory: [bold]{escape(str(run_dir))}[/bold]")
    if png is None:
        console.print("No PNG of the curves: pip install 'gradsentinel\\[demo]' adds matplotlib")
    else:
        console.print(f"Loss curves:   [bold]{escape(str(png))}[/bold]")
    console.print(f"Incidents:     [bold]gradsentinel incidents {escape(str(run_dir))}[/bold]")
    if importlib.util.find_spec("tensorboard") is not None:
        console.print(f"TensorBoard:   [bold]tensorboard --logdir {escape(str(run_dir))}[/bold]")
    else:
        console.print("No TensorBoard files: pip install 'gradsentinel\\[demo]' adds tensorboard")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:<12}"),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """The display shows every incident; the log would write across the progress bars."""
    log = logging.getLogger("gradsentinel")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # In the unguarded run everything is NaN by then, and NaN cannot overflow.
            warnings.filterwarnings(
                "ignore", message="matmul_overflow .* did not happen", category=RuntimeWarning
            )
            yield
    finally:
        log.setLevel(before)
