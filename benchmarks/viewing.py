"""How fast the GradSentinel tab answers: 100,000 steps, 1,000 parameters, 100 incidents, 512 ranks.

The run is written by the classes that write real ones; the routes are asked as TensorBoard asks them. What
the browser does with the answers is in drawing.py.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from workload import CLOCK

from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis, TensorEvidence
from gradsentinel.incident import Incident, Outcome
from gradsentinel.ranks.topology import Rank
from gradsentinel.store import EventFile, RunDirectory
from gradsentinel.tensorboard_plugin.plugin import Tab

STEPS, PARAMETERS, INCIDENTS = 100_000, 1_000, 100
MESH = {"pp": 4, "dp": 16, "tp": 8}
EVERY = 10
"""A line of the log for so many steps, as `EventLog` writes by default."""
KEPT = 64
"""Steps of norms before each incident."""
REPEATS = 15
TIME = "2026-01-31T08:15:00Z"
_MODULES = ("attn.q", "attn.k", "attn.v", "attn.proj", "mlp.up", "mlp.down", "norm1", "norm2")


def names(count: int = PARAMETERS) -> list[str]:
    """Return names of parameters as a transformer has them."""
    return [f"blocks.{i // len(_MODULES)}.{_MODULES[i % len(_MODULES)]}.weight" for i in range(count)]


def write_run(
    path: Path,
    *,
    steps: int = STEPS,
    parameters: int = PARAMETERS,
    incidents: int = INCIDENTS,
    mesh: dict[str, int] | None = None,
) -> None:
    """Write the run."""
    dice = random.Random(0)
    mesh = MESH if mesh is None else mesh
    places = [dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))]
    ranks = [
        Rank(rank=number, host=f"node{number // 8:03d}", device=f"npu:{number % 8}", coordinates=place)
        for number, place in enumerate(places)
    ]
    for rank in ranks:
        log = EventFile(path / f"events-rank{rank.rank}.jsonl")
        start = {"event": "run_start", "step": 0, "time": TIME, "iteration": 0, "version": "bench"}
        log.write({**start, "rank": rank.as_dict(), "world_size": len(ranks)})
        if rank.rank == 0:
            write_steps(log, range(steps), dice)
        log.close()
    directory = RunDirectory(path)
    for at in sorted(dice.sample(range(KEPT, steps), incidents)):
        write_incident(directory, at, names(parameters), ranks, dice)


def write_steps(log: EventFile, steps: range, dice: random.Random) -> None:
    """Write the numbers of steps as `EventLog` does."""
    before: list[tuple[int, float, float]] = []
    for step in steps:
        loss, norm = 2 + 8 * math.exp(-step / 2e4) + dice.gauss(0, 0.05), 1 + abs(dice.gauss(0, 0.2))
        if (step + 1) % EVERY:
            before.append((step, loss, norm))
            continue
        iterations, losses, norms = (list(column) for column in zip(*before, strict=True))
        line = {"event": "step", "step": step, "time": TIME, "iteration": step, "applied": True}
        line |= {"loss": loss, "grad_norm": norm, "learning_rates": [1e-3], "loss_scale": None}
        log.write({**line, "before": {"iterations": iterations, "loss": losses, "grad_norm": norms}})
        before.clear()


def write_incident(
    directory: RunDirectory, step: int, parameters: list[str], ranks: list[Rank], dice: random.Random
) -> None:
    """Write one incident with the norms of the steps before it."""
    bad = dice.sample(parameters, min(10, len(parameters)))
    incident = Incident(
        id=directory.new_incident_id(step, str(Kind.NONFINITE_GRADIENT)),
        step=step,
        iteration=step,
        kind=Kind.NONFINITE_GRADIENT,
        action=Action.SKIP,
        outcome=Outcome.SKIPPED,
        time=TIME,
        message=f"non-finite gradient in {', '.join(bad[:3])} and {len(bad) - 3} more",
        detector="NanCallback",
        recovery="step dropped, nothing changed (9 of 10 drops left)",
        loss=2.25,
        grad_norm=math.nan,
        seconds={"detect": 0.004, "diagnose": 0.35, "recover": 0.012},
        tensors=tuple(TensorEvidence(name=n, nonfinite=1, numel=4096, norm=math.nan) for n in bad),
        diagnosis=Diagnosis(
            cause="math",
            confidence=0.9,
            op="aten.div.Tensor",
            module="blocks.3.attn",
            phase="backward",
            source="model.py:57",
            remedy=(
                "make the divisor safe: x / (y + eps), or y.clamp(min=eps) (model.py:57)",
                "leave out samples without a single valid position",
            ),
            evidence=(f"spread: aten.div.Tensor > aten.sum.default > {', '.join(bad[:3])} and 7 more",),
        ),
    )
    incident.concern(dice.sample(ranks, 1))
    directory.write_incident(incident)
    iterations = list(range(step - KEPT + 1, step + 1))
    values: list[list[Any]] = [[float(f"{dice.random():.6g}") for _ in parameters] for _ in iterations]
    values[-1] = ["nan" if name in bad else value for name, value in zip(parameters, values[-1], strict=True)]
    norms = {"names": parameters, "steps": iterations, "iterations": iterations, "values": values}
    directory.write_norms(incident, {**norms, "local": True}, rank=incident.ranks[0].rank)


def ask(tab: Tab, route: str, **query: Any) -> tuple[float, int, Any]:
    """Return the seconds that an answer takes, its bytes as they are sent, and what it says."""
    environ = {"REQUEST_METHOD": "GET", "QUERY_STRING": urlencode(query, doseq=True)}
    told: list[Any] = []
    apps = tab.apps()
    started = CLOCK.now()
    body = b"".join(apps[route](environ, lambda *start: told.append(start)))
    seconds = CLOCK.now() - started
    assert told[0][0].startswith("200"), body
    packed = b"".join(apps[route]({**environ, "HTTP_ACCEPT_ENCODING": "gzip"}, lambda *_: None))
    return seconds, len(packed), json.loads(body)


def measure() -> dict[str, Any]:
    """Return the times of the routes: the first answer, and the median of later ones."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        write_run(run_dir)
        found = sorted((run_dir / "incidents").iterdir())
        middle = STEPS // 2
        requests: dict[str, tuple[str, dict[str, Any]]] = {
            "list of runs": ("/runs", {}),
            "overview": ("/run", {"name": "run"}),
            "timeline, 800 points": ("/timeline", {"name": "run", "points": 800}),
            "zoom into 2,000 steps": (
                "/timeline",
                {"name": "run", "start": middle, "stop": middle + 2000, "points": 800},
            ),
            "list of incidents": ("/incidents", {"name": "run"}),
            "one incident": ("/incident", {"name": "run", "id": found[0].name}),
            "two runs compared": ("/compare", {"name": ["run", "run"], "tag": "loss"}),
        }
        routes = {name: of_route(run_dir.parent, route, query) for name, (route, query) in requests.items()}
        size = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
        log = (run_dir / "events-rank0.jsonl").stat().st_size
        clock = "wall clock" if CLOCK.now is time.perf_counter else "cpu time"
        return {"clock": clock, "routes": routes, "run_mb": size / 1e6, "log_mb": log / 1e6, **grown(run_dir)}


def of_route(logdir: Path, route: str, query: dict[str, Any]) -> dict[str, float]:
    """Return how long a route takes when nothing was read before, and then."""
    tab = KeptTab(logdir)
    first, size, answer = ask(tab, route, **query)
    while isinstance(answer, dict) and answer.get("reading", 1.0) < 1.0:  # a slow machine reads it in slices
        more, size, answer = ask(tab, route, **query)
        first += more
    later = [ask(tab, route, **query)[0] for _ in range(REPEATS)]
    return {"first_ms": first * 1e3, "later_ms": statistics.median(later) * 1e3, "sent_kb": size / 1e3}


def grown(run_dir: Path) -> dict[str, float]:
    """Return how long the timeline takes while the run goes on: 100 more steps before each look."""
    tab, dice = KeptTab(run_dir.parent), random.Random(1)
    ask(tab, "/timeline", name="run")
    log = EventFile(run_dir / "events-rank0.jsonl")
    times = []
    for number in range(REPEATS):
        write_steps(log, range(STEPS + 100 * number, STEPS + 100 * (number + 1)), dice)
        times.append(ask(tab, "/timeline", name="run")[0])
    log.close()
    return {"grown_ms": statistics.median(times) * 1e3}


class KeptTab(Tab):
    """A tab whose routes are made once, as TensorBoard does."""

    def __init__(self, logdir: Path) -> None:
        super().__init__(str(logdir))
        self._apps = super().apps()

    def apps(self) -> Any:
        """Return the routes."""
        return self._apps


if __name__ == "__main__":
    if "--cpu-time" in sys.argv:
        CLOCK.now = time.thread_time
    print(json.dumps(measure(), indent=2))
