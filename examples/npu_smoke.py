"""Tries GradSentinel on this machine's accelerator within five minutes, and writes a report to be pasted.

python examples/npu_smoke.py --device npu
torchrun --nproc-per-node 2 examples/npu_smoke.py --device npu

Every line says PASS, FAIL, or NOT HERE with the reason. The exit code is 0 if nothing failed, 1 if something
did, and 2 if there is no such device, or nowhere to write the report. `--device cuda` and `--device cpu` work
too.
"""

import argparse
import importlib
import itertools
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import (
    Callback,
    MagnitudeCallback,
    NanCallback,
    Retry,
    Rollback,
    SaturationCallback,
    Sentinel,
    __version__,
)
from gradsentinel.devices import device_of
from gradsentinel.devices.health import HealthUnavailable
from gradsentinel.diagnosis.determinism import VARIABLE as FIXED_ORDER
from gradsentinel.diagnosis.environment import environment
from gradsentinel.doctor import examine, installed
from gradsentinel.marks import VARIABLE as MARKS
from gradsentinel.ranks.replicas import checksum
from gradsentinel.redaction import harmless_variables, redact

NAN = float("nan")
PASS, FAIL, NOT_HERE = "PASS", "FAIL", "NOT HERE"
CHECKS = []
NZ = 29
"""The number of the format in which an NPU keeps matrices in blocks."""


class NotHere(Exception):
    """This machine cannot tell; the text says why."""


def check(title):
    def register(function):
        CHECKS.append((title, function))
        return function

    return register


def ensure(truth, words):
    if not truth:
        raise AssertionError(words)


@contextmanager
def setting(name, value):
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


# -- a small training ------------------------------------------------------------------------------


class Net(nn.Module):
    """Has what is easily damaged: dropout draws, running statistics; and a fault for one pass, on request."""

    def __init__(self, faulty_pass=None):
        super().__init__()
        self.enter, self.norm = nn.Linear(32, 128), nn.BatchNorm1d(128)
        self.drop, self.leave = nn.Dropout(0.1), nn.Linear(128, 8)
        self.passes, self.faulty_pass = itertools.count(), faulty_pass

    def forward(self, batch):
        """Score a batch."""
        hidden = self.drop(torch.relu(self.norm(self.enter(batch))))
        return self.leave(hidden * NAN if next(self.passes) == self.faulty_pass else hidden)


class Trial:
    """One training from the same seed, by hand (`callbacks=None`) or watched."""

    def __init__(self, device, folder, callbacks=None, *, guard="host", fused=False, bad=(), **faults):
        torch.manual_seed(0)
        self.device, self.bad, self.poisoned = device, bad, faults.get("poisoned")
        self.model = Net(faults.get("faulty_pass")).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=fused)
        self.before_step = lambda _step: None
        self.sentinel = None
        if callbacks is not None:
            self.sentinel = Sentinel(
                self.model,
                self.optimizer,
                callbacks=callbacks,
                run_dir=tempfile.mkdtemp(dir=folder),
                guard=guard,
                forward=lambda model, batch: model(batch).square().mean(),
            )

    def run(self, steps):
        """Make so many steps, the same in every trial but for its faults."""
        drawn = torch.randn(steps, 16, 32, generator=torch.Generator().manual_seed(1)).to(self.device)
        data = list(drawn)
        for step in self.bad:
            data[step][0, 0] = NAN
        for step, batch in enumerate(data if self.sentinel is None else self.sentinel.steps(data)):
            self.before_step(step)
            if step == self.poisoned:
                with torch.no_grad():
                    self.model.enter.weight[0, 0] = NAN
            loss = self.model(batch).square().mean()
            if self.sentinel is not None:
                self.sentinel.backward(loss)
                self.sentinel.step(1.0)
                continue
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.sentinel is not None:
            self.sentinel.close()
        return self

    @property
    def state(self):
        """Weights, running statistics and moments, on the host."""
        moments = [v for state in self.optimizer.state.values() for v in state.values()]
        return [t.detach().cpu() for t in (*self.model.state_dict().values(), *moments) if torch.is_tensor(t)]

    @property
    def finite(self):
        """True if nothing of that is NaN or Inf."""
        return all(bool(torch.isfinite(t).all()) for t in self.state)

    def told(self):
        """Step, kind and outcome of each incident."""
        return [(i.step, str(i.kind), str(i.outcome)) for i in self.sentinel.incidents]


def same(one, other):
    return len(one.state) == len(other.state) and all(map(torch.equal, one.state, other.state))


class Waits(TorchDispatchMode):
    """Counts operators, and waits of the host: values read back, copies to it that block or go unpinned."""

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")

    def __init__(self):
        super().__init__()
        self.count = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        name, kwargs = func._schema.name, kwargs or {}
        found = func(*args, **kwargs)
        copies = name in {"aten::copy_", "aten::_to_copy"}
        source = args[1] if name == "aten::copy_" else next(iter(args), None)
        if torch.is_tensor(source) and source.device.type != "cpu":
            freely = kwargs.get("non_blocking", name == "aten::copy_" and args[2:3] == (True,))
            back = copies and found.device.type == "cpu" and not (freely and found.is_pinned())
            self.count += back or name in self.READS
        return found


# -- the checks, in order --------------------------------------------------------------------------


@check("device found")
def _(device, _folder):
    ensure(float(torch.ones(2, device=device).sum()) == 2.0, "the device cannot add two numbers")
    return f"{device}: {device_of(device).name}"


@check("versions")
def _(device, _folder):
    wrong = [c.found for c in examine().checks if c.name in {"torch", "torch_npu"} and c.remedy]
    ensure(not wrong, "; ".join(wrong))
    module = sys.modules.get("torch_npu")
    version = installed("torch-npu") or getattr(module, "__version__", "of unknown version")
    npu = f"torch_npu {version}, CANN {getattr(torch.version, 'cann', 'unknown')}, "
    return f"torch {torch.__version__}, {npu * (device.type == 'npu')}Python {platform.python_version()}"


@check("health readings")
def _(device, _folder):
    source = device_of(device).health_source()
    if source is None:
        raise NotHere(f"nobody tells the health of {device.type}")
    try:
        return source.read().words
    except HealthUnavailable as error:
        raise NotHere(str(error)) from error


@check("device guard: as many operators for one detector as for ten, none of them falls back to the CPU")
def _(device, folder):
    counts = []
    with warnings.catch_warnings(record=True) as caught:  # of a fallback torch_npu warns once in a process
        warnings.simplefilter("always")
        for detectors in (1, 10):
            waits, seen = Waits(), {}
            watch = [NanCallback(), *(MagnitudeCallback(max_global_norm=1e6 + n) for n in range(detectors))]
            trial = fused(device, folder, watch)

            def look(step, waits=waits, seen=seen):
                seen[step] = waits.operators

            trial.before_step = look
            with waits:
                trial.run(30)
            counts.append(seen[28] - seen[18])
    fallen = [str(entry.message) for entry in caught if "fall back" in str(entry.message)]
    ensure(not fallen, "; ".join(fallen))
    ensure(
        counts[0] == counts[1], f"{counts[0]} operators in 10 steps with one detector, {counts[1]} with ten"
    )
    return f"{counts[0] / 10:g} operators a step"


@check("healthy run is bit-identical")
def _(device, folder):
    plain = Trial(device, folder).run(20)
    if not same(plain, Trial(device, folder).run(20)):
        raise NotHere(
            "two runs without GradSentinel differ here: set HCCL_DETERMINISTIC, CUBLAS_WORKSPACE_CONFIG"
        )
    watched = Trial(device, folder, [NanCallback(), Rollback(every=5)]).run(20)
    ensure(same(plain, watched), "weights or moments differ with GradSentinel")
    ensure(watched.told() == [], f"incidents on a healthy run: {watched.told()}")
    return "20 steps, weights, running statistics and moments"


def needs_nan(device):
    if device_of(device).saturates:
        raise NotHere("in saturation mode a NaN becomes 0 before anybody sees it")


@check("NaN is caught before the update, step dropped exactly")
def _(device, folder):
    needs_nan(device)
    trial, kept = Trial(device, folder, [NanCallback()], bad=(5,)), {}
    trial.before_step = lambda step: kept.setdefault(step, trial.state) if step in {5, 6} else None
    trial.run(10)
    ensure([t[::2] for t in trial.told()] == [(5, "skipped")], f"told {trial.told()}")
    ensure(all(map(torch.equal, kept[5], kept[6])), "the bad step changed weights, moments or buffers")
    ensure(trial.finite, "something is not finite at the end")
    return trial.told()[0][1]


@check("retry: a transient fault costs nothing")
def _(device, folder):
    needs_nan(device)
    healthy = Trial(device, folder, [NanCallback(), Retry()]).run(12)
    trial = Trial(device, folder, [NanCallback(), Retry()], faulty_pass=6).run(12)
    ensure([t[::2] for t in trial.told()] == [(6, "retried")], f"told {trial.told()}")
    ensure(same(healthy, trial), "the retried run ends with other weights than the faultless one")
    return "ends bit for bit as without the fault"


@check("rollback: a ruined weight is put back")
def _(device, folder):
    needs_nan(device)
    trial = Trial(device, folder, [NanCallback(), Rollback(every=2, confirm_after=2)], poisoned=11).run(16)
    ensure([t[2] for t in trial.told()] == ["rolled_back"], f"told {trial.told()}")
    ensure(trial.finite, "something is not finite at the end")
    return trial.sentinel.incidents[0].recovery


@check("snapshots: staged copies, ordered before the next write")
def _(device, folder):
    class Capture(Callback):
        def on_run_start(self, event):
            self.run = event.run

        def on_after_step(self, event):
            if event.step == 3:
                self.expected = [p.detach().clone() for _, p in self.run.host.named_parameters()]
                self.taken = self.run.capture()

    capture = Capture()
    Trial(device, folder, [NanCallback(), capture]).run(8)  # the steps after it write over what is copied
    capture.taken.settle()
    copies = list(capture.taken.parameters.values())
    ensure(all(torch.equal(a.cpu(), b) for a, b in zip(capture.expected, copies, strict=True)), "a torn copy")
    pinned = all(copy.is_pinned() for copy in copies)
    ensure(pinned or device.type == "cpu", "the copies are not in pinned memory: each makes the host wait")
    return "pinned memory" if pinned else "host memory"


@check("device guard: the device drops the bad step by itself")
def _(device, folder):
    needs_nan(device)
    trial = fused(device, folder, [NanCallback()], bad=(5,)).run(12)
    ensure([t[::2] for t in trial.told()] == [(5, "skipped")], f"told {trial.told()}")
    ensure(trial.finite, "something is not finite at the end")
    host = Trial(device, folder, [NanCallback()], fused=True, bad=(5,)).run(12)
    ensure(same(host, trial), "the two guards end with different weights")
    return "as the host's guard would, bit for bit"


@check("device guard: the host waits for nothing")
def _(device, folder):
    if device.type == "cpu":
        raise NotHere("nobody waits for a CPU")
    own = getattr(getattr(torch, device.type), "set_sync_debug_mode", None)
    alarm = "the device has no alarm of its own" if own is None else "the device's own alarm is silent too"
    counts = []
    for trial in (Trial(device, folder, fused=True), fused(device, folder, [NanCallback()])):
        waits, seen = Waits(), {}

        def look(step, waits=waits, seen=seen, watched=trial.sentinel is not None):
            seen[step] = waits.count
            if watched and own is not None and step in {8, 28}:
                own("error" if step == 8 else "default")  # between them the device raises if the host waits

        trial.before_step = look
        try:
            with waits:
                trial.run(30)
        finally:
            if own is not None:
                own("default")
        counts.append(seen[28] - seen[8])
    ensure(counts[1] == counts[0], f"{counts[1]} waits in 20 steps, {counts[0]} without GradSentinel")
    return f"{counts[1]} waits in 20 steps, as without it, by what torch dispatches; {alarm}"


@check("diagnosis: the bad operator is named, in a fixed order too")
def _(device, folder):
    needs_nan(device)
    torch.manual_seed(0)
    model, answers = nn.Linear(8, 8).to(device), []

    def forward(model, batch):
        return torch.log(model(batch) * 0).mean()

    for order in ("0", "1"):
        with setting(FIXED_ORDER, order):
            optimizer, run_dir = torch.optim.SGD(model.parameters(), 1e-3), tempfile.mkdtemp(dir=folder)
            with Sentinel(model, optimizer, run_dir=run_dir, forward=forward) as sentinel:
                for batch in sentinel.steps([torch.ones(4, 8, device=device)]):
                    sentinel.backward(forward(model, batch))
                    sentinel.step()
            answers.append(sentinel.incidents[0].diagnosis)
    named = [(answer.cause, answer.op, answer.phase) for answer in answers]
    ensure(named == [("math", "aten.log.default", "forward")] * 2, f"the diagnoses are {named}")
    ensure(FIXED_ORDER in "".join(answers[1].evidence), "nothing was said of the fixed order")
    ensure(not torch.are_deterministic_algorithms_enabled(), "the switch was not put back")
    return "; ".join([answers[0].op, *(text for text in answers[1].evidence if "deterministic" in text)])


@check("internal formats: bits are looked at in a plain one")
def _(device, _folder):
    module = sys.modules.get("torch_npu")
    if device.type != "npu" or module is None:
        raise NotHere(f"{device.type} has none")
    plain = torch.randn(32, 64, device=device).half()
    blocked = module.npu_format_cast(plain.clone(), NZ)
    if module.get_npu_format(blocked) != NZ:
        raise NotHere("this release keeps to plain formats (torch.npu.config.allow_internal_format)")
    ensure(int(checksum(plain)) == int(checksum(blocked)), "the same numbers have another checksum in NZ")
    return "NZ and ND have one checksum"


@check("marks in a profile")
def _(device, folder):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with setting(MARKS, "1"), torch.profiler.profile(activities=activities) as profile:
        Trial(device, folder, [NanCallback()]).run(2)
    names = sorted({entry.key for entry in profile.key_averages() if entry.key.startswith("gradsentinel/")})
    ensure("gradsentinel/before_clip" in names, f"only {names} are in the profile")
    return f"{len(names)} ranges, with {type(device_of(device)).__name__.lower()}'s own tool beside torch's"


@check("overflow: infinities, or saturation")
def _(device, folder):
    saturates = device_of(device).saturates
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device).half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watch = [SaturationCallback(action="skip")] if saturates else [NanCallback()]
    with Sentinel(model, optimizer, callbacks=watch, run_dir=tempfile.mkdtemp(dir=folder)) as sentinel:
        sentinel.backward(model(torch.ones(4, 8, device=device, dtype=torch.float16)).float().sum() * 1e6)
        sentinel.step()
        ensure(not sentinel.applied, "an overflow in float16 was not seen")
    mode = "saturation mode, SaturationCallback" if saturates else "infinities, NanCallback"
    return f"{mode} dropped the step"


@check("overhead of a step")
def _(device, folder):
    seconds = {"plain": clock(Trial(device, folder, fused=True))}
    seconds["host"] = clock(Trial(device, folder, [NanCallback()], fused=True))
    seconds["device"] = clock(fused(device, folder, [NanCallback()]))
    told = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())
    return f"{told}; a tiny model, so an upper bound: real steps are longer, the cost per step is not"


def fused(device, folder, callbacks, **faults):
    try:
        torch.optim.AdamW([nn.Parameter(torch.zeros(1, device=device))], fused=True)
    except RuntimeError as error:
        raise NotHere(f"no fused optimizer: {error}") from error
    return Trial(device, folder, callbacks, guard="device", fused=True, **faults)


def clock(trial, steps=60):
    """Seconds that a step takes, from the median of those after the first ten."""
    times = []

    def tick(_):
        if trial.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter())

    trial.before_step = tick
    trial.run(steps)
    taken = sorted(b - a for a, b in itertools.pairwise(times[10:]))
    return taken[len(taken) // 2]


def agreement(device, folder):
    """With torchrun: one rank's NaN drops the step on all of them, and their weights stay alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    flags = torch.full((4,), rank, dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    ensure(flags.tolist() == [world - 1] * 4, "all_reduce(MAX) of int32 is wrong")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=f"{folder}/agreement") as sentinel:
        for step, batch in enumerate(sentinel.steps([torch.ones(8, 32) * (rank + 1)] * 6)):
            loss = model(batch.to(device)).square().mean()
            sentinel.backward(loss * NAN if (step, rank) == (3, world - 1) else loss)
            sentinel.step(1.0)
    told = [(i.step, str(i.outcome), [r.rank for r in i.ranks]) for i in sentinel.incidents]
    ensure(told == [(3, "skipped", [world - 1])], f"rank {rank} was told {told}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(gathered, weights)
    ensure(all(torch.equal(weights, other) for other in gathered), "the ranks' weights differ")
    return f"{world} ranks over {dist.get_backend()}, rank {world - 1} named on all of them"


def attempt(function, device, folder):
    try:
        return PASS, function(device, folder)
    except NotHere as reason:
        return NOT_HERE, str(reason)
    except Exception as error:  # noqa: BLE001 - a check that breaks is a check that failed
        return FAIL, f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(
            error
        )


def report(results, device, seconds):
    """The report as Markdown; names no user, no machine and no path."""
    facts = environment()
    secret = facts["variables"].values()
    facts["variables"] = harmless_variables(facts["variables"])
    lines = [f"## GradSentinel {__version__} on {device_of(device).name}", ""]
    lines += ["| check | result | |", "|---|---|---|"]
    for title, result, words in results:
        lines.append(f"| {title} | {result} | {' '.join(words.split()).replace('|', '/')} |")
    lines += ["", f"{seconds:.0f} s in all.", "", "```text"]
    for name in ("gradsentinel", "python", "platform", "torch", "npu", "cuda", "variables"):
        lines.append(f"{name}: {facts[name]}")
    lines += [f"doctor, {c.name}: {c.found} -> {c.remedy}" for c in examine().checks if c.remedy]
    return redact("\n".join([*lines, "```", ""]), hide=secret)


def find_device(kind):
    if kind == "npu" and not hasattr(torch, "npu"):  # torch was told not to load it by itself
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # noqa: BLE001 - without CANN it raises anything
            print(f"torch_npu cannot be loaded: {type(error).__name__}: {error}")
    if kind != "cpu" and not (getattr(torch, kind, None) and getattr(torch, kind).is_available()):
        return None
    return (
        torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    )


def why_not_written(path):
    """Why a file cannot be written, before five minutes are spent on it; empty if it can."""
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        return str(error)
    return ""


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="npu", choices=["npu", "cuda", "cpu"])
    parser.add_argument(
        "--report", type=Path, default=Path("npu_smoke.md"), help="where the report is written"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("gradsentinel").setLevel(logging.ERROR)  # the faults are planted
    began, device = time.monotonic(), find_device(options.device)
    if device is None:
        print(f"torch sees no {options.device} device; `gradsentinel doctor` says what is missing")
        return 2
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    first = os.environ.get("RANK", "0") == "0"
    if first and (reason := why_not_written(options.report)):
        print(f"the report cannot be written: {reason}; name another place with --report")
        return 2
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    results = []
    with tempfile.TemporaryDirectory() as folder:

        def take(title, function):
            results.append((title, *attempt(function, device, folder)))
            if first:
                print("{1:8}  {0}: {2}".format(*results[-1]), flush=True)

        for title, function in CHECKS if first else ():
            take(title, function)
        title = "several ranks agree"
        if ranks > 1:
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(backend, timeout=timedelta(minutes=15))  # the others wait for the first
            take(title, agreement)
            dist.destroy_process_group()
        else:
            results.append((title, NOT_HERE, "start it with torchrun --nproc-per-node 2"))
            print("{1:8}  {0}: {2}".format(*results[-1]))
    if first:
        text = report(results, device, time.monotonic() - began)
        try:
            options.report.write_text(text, encoding="utf-8")
            print(f"{options.report} is ready to be pasted")
        except OSError as error:  # it could be written at the start: a full disk
            print(f"{text}\nthe report could not be written ({error}); it stands above, ready to be pasted")
    return int(any(result == FAIL for _, result, _ in results))


if __name__ == "__main__":
    sys.exit(main())
