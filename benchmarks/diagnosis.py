"""Compares the diagnosis with torch.autograd.detect_anomaly on the failures of the test suite.

python benchmarks/diagnosis.py            prints the table of docs/diagnosis.md
python benchmarks/diagnosis.py --write    writes it into that page
python benchmarks/diagnosis.py --time     prints how long a diagnosis of the demo model takes
"""

import argparse
import logging
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "diagnosis.md"
START, END = "<!-- table: begin -->", "<!-- table: end -->"
sys.path.insert(0, str(ROOT / "tests" / "diagnosis"))

from test_real_failures import (  # noqa: E402 - the tests' own cases
    Attention,
    Checkpointed,
    Encoder,
    Gate,
    Gated,
    distance,
)
from verdicts import FAILURES, Failure, run_failure, wrong_in  # noqa: E402 - likewise

from gradsentinel import NanCallback, Sentinel  # noqa: E402
from gradsentinel.demo.config import DemoConfig  # noqa: E402
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text  # noqa: E402
from gradsentinel.demo.run import build  # noqa: E402
from gradsentinel.faults import FaultPlan, MatmulOverflow  # noqa: E402

_WARM_UP, _HEALTHY = 3, 12


@dataclass
class Row:
    """One failure, and what the two tools say of it."""

    name: str
    truth: str
    told: str
    right: bool
    anomaly: str
    anomaly_right: bool


def reported() -> list[Failure]:
    """Return the failures that people reported, as cases of the same form."""
    torch.manual_seed(0)
    pair = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}
    pair["b"][2] = pair["a"][2]
    points = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[1] = True
    padded = {"x": torch.randn(3, 4, 8), "padding": padding}
    masked = {"x": torch.randn(6, 4), "mask": torch.zeros(6)}

    def loud_attention() -> nn.Module:
        model = Attention()
        with torch.no_grad():
            model.q.weight.mul_(400)
            model.k.weight.copy_(model.q.weight)
        return model

    def half(model: nn.Module, x: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return out.float().pow(2).mean()

    math = {"cause": "math"}
    sqrt = {"phase": "backward", "op": "aten.div.Tensor", "node": "SqrtBackward0"}
    return [
        Failure(name="distance of equal embeddings (pytorch#160016)", forward=distance, batch=lambda: pair,
                model=lambda: nn.Linear(4, 3), **math, **sqrt, samples=(2,)),
        Failure(name="where, sqrt of a negative (pytorch#187297)", forward=lambda m, x: m(x).sum(),
                batch=lambda: points, model=lambda: Gate("sqrt"), **math, phase="forward",
                op="aten.sqrt.default", node="SqrtBackward0"),
        Failure(name="where, exp overflows (pytorch#68425)", forward=lambda m, x: m(x).sum(),
                batch=lambda: points, model=lambda: Gate("exp"), **math, phase="forward",
                op="aten.exp.default", node="ExpBackward0"),
        Failure(name="attention over padding only (pytorch#41508)", model=Encoder, batch=lambda: padded,
                forward=lambda m, b: m(b["x"], b["padding"])[[0, 2]].pow(2).mean(), cause="data",
                phase="forward", op="aten._softmax.default", node="SoftmaxBackward0", samples=(1,)),
        Failure(name="no token supervised (OLMo-core#657)", model=lambda: nn.Linear(4, 1),
                batch=lambda: masked,
                forward=lambda m, b: (m(b["x"]).pow(2).flatten() * b["mask"]).sum() / b["mask"].sum(),
                cause="data", phase="forward", op="aten.div.Tensor"),
        Failure(name="zero gate under a norm (DeepSpeed#8415)", model=Gated, batch=lambda: torch.randn(8, 4),
                **math, **sqrt,
                forward=lambda m, x: m.lin(x).pow(2).mean() + 0.01 * m.gate.pow(2).sum().sqrt()),
        Failure(name="checkpointed block (pytorch#81296)", model=lambda: Checkpointed(False),
                batch=lambda: torch.randn(2, 3), forward=lambda m, x: m(x), **math, **sqrt),
        Failure(name="the same, reentrant", model=lambda: Checkpointed(True),
                batch=lambda: torch.randn(2, 3), forward=lambda m, x: m(x), **math, **sqrt),
        Failure(name="attention scores beyond float16 (transformers#5651)", model=loud_attention,
                batch=lambda: torch.randn(2, 5, 16), forward=half, cause="precision", phase="forward",
                op="aten.bmm.default"),
    ]  # fmt: skip


def anomaly(case: Failure) -> str:
    """Return the autograd node that detect_anomaly names, or what it does instead."""
    torch.manual_seed(0)
    model = case.model()
    if case.prepare is not None:
        case.prepare(model)
    batches = case.batch() if case.accumulate > 1 else [case.batch()]
    loop = case.loop or case.forward
    optimizer = case.optimizer(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                for batch in batches:
                    with case.device():
                        loss = loop(model, batch)
                    with case.backward_device():
                        loss.backward()
                    if case.after_backward is not None:
                        case.after_backward(model)
                optimizer.step()
    except RuntimeError as error:
        named = re.search(r"Function '(\w+)' returned nan", str(error))
        return named[1] if named else "another error"
    return "nothing"


def compare(case: Failure) -> Row:
    """Run both tools on a failure and judge them by what is really wrong."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        incident = run_failure(case, Path(folder))
    found = incident.diagnosis
    causes = (case.cause,) if isinstance(case.cause, str) else case.cause
    operator = " or ".join(case.op) if isinstance(case.op, tuple) else case.op
    named = anomaly(case)
    return Row(
        name=case.name,
        truth=f"{' or '.join(causes)}{f', {operator}' if operator else ''}",
        told=f"{found.cause}{f', {found.op}' if found.op else ''}",
        right=not wrong_in(case, incident),
        anomaly=named,
        anomaly_right=named != "nothing" and named == (case.node or found.node),
    )


def table(rows: list[Row]) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "| failure | really | GradSentinel | | detect_anomaly names | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        marks = ["yes" if good else "no" for good in (row.right, row.anomaly_right)]
        lines.append(f"| {row.name} | {row.truth} | {row.told} | {marks[0]} | {row.anomaly} | {marks[1]} |")
    ours, theirs = sum(r.right for r in rows), sum(r.anomaly_right for r in rows)
    lines.append(f"| **right** | | | **{ours} of {len(rows)}** | | **{theirs} of {len(rows)}** |")
    return "\n".join(lines)


# -- how long it takes -----------------------------------------------------------------------------


def _loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(**batch).loss


def _fault(step: int) -> FaultPlan:
    """Attention scores that leave float16's range, every time that step is computed."""
    overflow = MatmulOverflow(steps=(step,), module="blocks.1.attn", nth=2, persistent=True)
    return FaultPlan([overflow], seed=1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(rounds: int = 3) -> dict[str, Any]:
    """Time the diagnosis of an overflow in the demo model, and a rerun of the step in anomaly mode.

    Returns seconds of a healthy step, of the diagnosis and of the rerun, both also in steps, and what the
    two named, of the round that is the median by the diagnosis' steps. The rerun needs more than it takes: to
    be at that step, with its weights, batch and random state.
    """
    found = sorted((_measured() for _ in range(rounds)), key=lambda one: float(one["diagnosis_steps"]))
    return found[rounds // 2]


def _measured() -> dict[str, Any]:
    config = DemoConfig()
    corpus = CharCorpus(stdlib_text(config.corpus_bytes // 10))
    bad = _WARM_UP + _HEALTHY
    with _one_thread(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(config.seed)
        model = build(config, corpus.vocab)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = batches(corpus, batch_size=config.batch_size, steps=bad + 1, context=config.context, seed=0)
        plan = _fault(bad)
        seconds: list[float] = []
        sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder, forward=_loss_of)
        with sentinel, plan.attach(model):
            for batch in sentinel.steps(plan.batches(loader)):
                started = time.perf_counter()
                sentinel.backward(_loss_of(model, batch))
                sentinel.step(max_norm=1.0)
                seconds.append(time.perf_counter() - started)
        (incident,) = sentinel.incidents
        plan = _fault(0)
        with plan.attach(model):
            for last in plan.batches([batch]):
                started = time.perf_counter()
                named = _named_by_anomaly_mode(model, last)
                rerun = time.perf_counter() - started
    step = statistics.median(seconds[_WARM_UP:bad])
    diagnosis = incident.seconds["diagnose"]
    found = incident.diagnosis
    return {
        "step_seconds": step,
        "diagnosis_seconds": diagnosis,
        "diagnosis_steps": diagnosis / step,
        "found": f"{found.cause}, {found.op} in {found.module}, {found.source}",
        "anomaly_seconds": rerun,
        "anomaly_steps": rerun / step,
        "anomaly_found": named,
        "within_limit": diagnosis <= 10 * step + 2,
    }


def _named_by_anomaly_mode(model: nn.Module, batch: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                _loss_of(model, batch).backward()
    except RuntimeError as error:
        named = re.search(r"Function '(\w+)' returned nan", str(error))
        return named[1] if named else "another error"
    return "nothing"


def main() -> None:
    """Print or write the table, or the time a diagnosis takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/diagnosis.md")
    parser.add_argument("--time", action="store_true", help="time the diagnosis of the demo model")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if arguments.time:
        for name, value in measure().items():
            print(f"{name:18} {f'{value:.3f}' if isinstance(value, float) else value}")
        return
    torch.set_num_threads(1)
    text = table([compare(case) for case in [*reported(), *FAILURES]])
    if not arguments.write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    PAGE.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
