"""Compares the diagnosis with torch.autograd.detect_anomaly on the failures of the test suite.

python benchmarks/diagnosis.py            prints the table of docs/diagnosis.md
python benchmarks/diagnosis.py --write    writes it into that page
"""

import argparse
import logging
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "diagnosis.md"
START, END = "<!-- table: begin -->", "<!-- table: end -->"
sys.path.insert(0, str(ROOT / "tests" / "diagnosis"))

from failures import FAILURES, Failure  # noqa: E402 - the tests' own cases
from test_real_failures import (  # noqa: E402
    Attention,
    Checkpointed,
    Encoder,
    Gate,
    Gated,
    distance,
)

from gradsentinel import NanCallback, Sentinel  # noqa: E402


@dataclass
class Row:
    """One failure, and what the two tools say of it."""

    name: str
    truth: str
    told: str
    right: bool
    anomaly: str
    anomaly_right: bool
    seconds: float
    step: float


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
                model=lambda: nn.Linear(4, 3), **math, **sqrt),
        Failure(name="where, sqrt of a negative (pytorch#187297)", forward=lambda m, x: m(x).sum(),
                batch=lambda: points, model=lambda: Gate("sqrt"), **math, phase="forward",
                op="aten.sqrt.default", node="SqrtBackward0"),
        Failure(name="where, exp overflows (pytorch#68425)", forward=lambda m, x: m(x).sum(),
                batch=lambda: points, model=lambda: Gate("exp"), **math, phase="forward",
                op="aten.exp.default", node="ExpBackward0"),
        Failure(name="attention over padding only (pytorch#41508)", model=Encoder, batch=lambda: padded,
                forward=lambda m, b: m(b["x"], b["padding"])[[0, 2]].pow(2).mean(), cause="data",
                phase="forward", op="aten._softmax.default", node="SoftmaxBackward0"),
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


def diagnose(case: Failure) -> tuple[Any, float, float]:
    """Run the failing step under a sentinel; return the diagnosis, its seconds and those of a plain step."""
    torch.manual_seed(0)
    model = case.model()
    if case.prepare is not None:
        case.prepare(model)
    batches = case.batch() if case.accumulate > 1 else [case.batch()]
    optimizer = case.optimizer(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        Sentinel(
            model, optimizer, callbacks=[NanCallback()], run_dir=folder, forward=case.forward
        ) as sentinel,
    ):
        started = time.perf_counter()
        for batch in sentinel.steps(batches, accumulate=case.accumulate):
            sentinel.backward(case.forward(model, batch))
            step = time.perf_counter() - started
            if case.after_backward is not None:
                case.after_backward(model)
            sentinel.step()
    incident = sentinel.incidents[0]
    return incident.diagnosis, incident.seconds["diagnose"], step


def anomaly(case: Failure) -> str:
    """Return the autograd node that detect_anomaly names, or what it does instead."""
    torch.manual_seed(0)
    model = case.model()
    if case.prepare is not None:
        case.prepare(model)
    batches = case.batch() if case.accumulate > 1 else [case.batch()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                for batch in batches:
                    case.forward(model, batch).backward()
                    if case.after_backward is not None:
                        case.after_backward(model)
    except RuntimeError as error:
        named = re.search(r"Function '(\w+)' returned nan", str(error))
        return named[1] if named else "another error"
    return "nothing"


def compare(case: Failure) -> Row:
    """Run both tools on a failure and judge them by what is really wrong."""
    found, seconds, step = diagnose(case)
    causes = (case.cause,) if isinstance(case.cause, str) else case.cause
    right = (
        found.cause in causes
        and (case.op is None or found.op == case.op)
        and (case.phase is None or found.phase == case.phase)
        and (case.node is None or found.node == case.node)
    )
    named = anomaly(case)
    node = case.node or found.node
    return Row(
        name=case.name,
        truth=f"{' or '.join(causes)}{f', {case.op}' if case.op else ''}",
        told=f"{found.cause}{f', {found.op}' if found.op else ''}",
        right=right,
        anomaly=named,
        anomaly_right=named != "nothing" and named == node,
        seconds=seconds,
        step=step,
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


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/diagnosis.md")
    write = parser.parse_args().write
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = table([compare(case) for case in [*reported(), *FAILURES]])
    if not write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    PAGE.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
