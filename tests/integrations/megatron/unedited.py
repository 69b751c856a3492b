"""Runs the unedited pretrain_gpt.py of a Megatron-LM checkout through the launcher, on CPUs, and compares.

    python tests/integrations/megatron/unedited.py MEGATRON_LM [--layout tp2dp2] [--path EXTRA_PACKAGES]

Trainings of a few iterations: as it is; watched and healthy; with a transient fault; with one that comes
back; and, where a model is spread over ranks, with a transient one in what the last rank hands to others in
its backward pass. All must end with the same weights, bit for bit, but the fourth, which skips one iteration.
The faults are a NaN in one gradient of the last rank, of a weight or of a layer's input. Megatron-LM needs
einops, regex, six and tqdm, and to build its reader of datasets once, pybind11, make and a C++ compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import runpy
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    "one": (1, "--bf16"),
    "dp2": (2, ""),
    "dp2-overlap": (2, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp2": (2, "--bf16 --tensor-model-parallel-size 2"),
    "tp2dp2": (4, "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}
"""Number of ranks, and what pretrain_gpt.py is told beyond the rest."""
REST = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 4224 --transformer-impl local
--distributed-backend gloo --use-cpu-initialization --num-layers 4 --hidden-size 32
--num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3
--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 100 --eval-iters 0
--eval-interval 1000 --log-interval 1 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion
--no-bias-dropout-fusion --no-persist-layer-norm --num-workers 0
"""
ITERATION = 3
"""In which the fault strikes, from 0."""
EXCHANGED = {
    "tp2": ("mlp.linear_fc1", "the gradient of the input of decoder.layers.0.mlp.linear_fc1"),
    "tp2dp2": ("mlp.linear_fc1", "the gradient of the input of decoder.layers.0.mlp.linear_fc1"),
    "pp2": ("layers.0.input_layernorm", "the gradient that pipeline stage 1 hands back"),
}
"""Where the fault strikes that shows only in what the last rank hands to others, and how it is told."""


class _Anything:
    """Stands for whatever is imported of triton, and never launched."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


def stand_in_for_triton() -> None:
    """Let Megatron's files that hold triton kernels be imported."""
    from importlib.machinery import ModuleSpec

    parts = (
        "",
        ".language",
        ".language.extra",
        ".language.extra.cuda",
        ".language.extra.libdevice",
        ".runtime",
    )
    for part in (*parts, ".tools", ".tools.tensor_descriptor"):
        name = f"triton{part}"
        module: Any = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = "0.0.0"
        module.__getattr__ = lambda wanted: getattr(_Anything(), wanted)
        sys.modules[name] = module
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)


def prepare() -> None:
    """Let the training scripts run on a CPU: what cuda_on_cpu.py does for megatron.core, and some more."""
    import torch
    import torch._dynamo  # before the stand-in: it looks for triton itself
    import torch._inductor.runtime.hints
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    sys.path.insert(0, str(HERE.parents[2] / "examples"))
    import cuda_on_cpu

    cuda_on_cpu.install()
    stand_in_for_triton()
    cuda: Any = torch.cuda
    told = types.SimpleNamespace(
        name="cpu", major=9, minor=0, multi_processor_count=2, total_memory=1 << 34, uuid="0"
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
        "get_device_properties": told,
        "is_current_stream_capturing": False,
        "memory_stats": {},
        "mem_get_info": (1 << 33, 1 << 34),
        "reset_peak_memory_stats": None,
        "set_stream": None,
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
        ),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    kinds = {"Float": torch.float, "Int": torch.int, "Long": torch.long, "Double": torch.double}
    kinds |= {"Half": torch.half, "BFloat16": torch.bfloat16, "Byte": torch.uint8}
    for name, dtype in kinds.items():
        make = {"__new__": lambda cls, *given, dtype=dtype: torch.tensor(*given, dtype=dtype)}
        setattr(cuda, f"{name}Tensor", type(f"{name}Tensor", (), make))
    import typing

    if not hasattr(typing, "override"):  # main asks for Python 3.12 for this one name
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]


class Experiment:
    """One training on one rank: what is put into it, and what comes of it."""

    def __init__(self, script: Path, line: list[str], fault: str, module: str) -> None:
        self._module = module
        self._script = script
        self._line = line
        self._fault = fault
        self._calls = 0
        self._model: Any = None
        self.iteration = -1

    def run(self, folder: Path, *, watched: bool) -> dict[str, Any]:
        """Run the script and return the digest of its weights and its incidents."""
        import megatron.training.training as loop
        import torch

        with contextlib.suppress(ImportError):  # up to 0.16 they ask nvcc for its version
            from megatron.legacy import fused_kernels

            fused_kernels.load = lambda _: None
        loop.setup_model_and_optimizer = self._injecting(loop.setup_model_and_optimizer)
        loop.train_step = self._counting(loop.train_step)
        words = [str(self._script), *self._line]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if watched:
                from gradsentinel.integrations.megatron.launch import main

                main([*self._options(folder), *words])
            else:
                sys.argv = words
                sys.path.insert(0, str(self._script.parent))
                runpy.run_path(str(self._script), run_name="__main__")
        digest = hashlib.sha256()
        for chunk in self._model:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        told = re.findall(r"number of skipped iterations:\s+(\d+)", printed.getvalue())
        return {
            "weights": digest.hexdigest()[:16],
            "skipped": sum(map(int, told)),
            "iterations": self.iteration + 1,
        }

    def _options(self, folder: Path) -> list[str]:
        """The launcher's options: those of a healthy run on the line, of one with a fault in a file."""
        if not self._fault:
            return ["--gs-run-dir", str(folder), "--gs-callbacks", "NanCallback, Retry"]
        file = folder.with_name(f"{folder.name}-{os.environ['RANK']}.json")
        file.write_text(json.dumps({"run_dir": str(folder), "callbacks": {"NanCallback": {}, "Retry": {}}}))
        return ["--gs-config", str(file)]

    def _injecting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            self._model = made[0]
            last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
            if last and self._fault == "exchanged":
                modules = made[0][0].named_modules()
                chosen = next(module for name, module in modules if name.endswith(self._module))
                chosen.register_forward_hook(self._spoil_return)
            elif last and self._fault:
                named = made[0][0].named_parameters()
                next(p for name, p in named if "linear_fc1.weight" in name).register_hook(self._spoil)
            return made

        return setup_model_and_optimizer

    def _counting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self.iteration += 1
            return plain(*args, **kwargs)

        return train_step

    def _spoil_return(self, _module: Any, _given: Any, made: Any) -> None:
        from injection import spoil_return
        from layouts import Fault

        if self.iteration == ITERATION and not self._calls:
            self._calls += 1
            spoil_return(made, Fault(rank=0, parameter=""))

    def _spoil(self, gradient: Any) -> Any:
        if self.iteration != ITERATION or (self._calls and self._fault == "transient"):
            return None
        self._calls += 1
        spoilt = gradient.clone()
        spoilt.view(-1)[5] = float("nan")
        return spoilt


def rank_main(
    rank: int, world: int, port: int, experiment: tuple[Path, list[str], str, str], queue: Any, folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    logging.disable(logging.INFO)
    script, line, how, module = experiment
    fault = how if how in {"transient", "persistent", "exchanged"} else ""
    try:
        queue.put((rank, Experiment(script, line, fault, module).run(folder, watched=how != "alone")))
    except BaseException as error:
        queue.put((rank, {"failed": f"{type(error).__name__}: {error}"}))
        raise


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train(script: Path, layout: str, how: str, folder: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Train on all ranks; return what came of it by rank, and the incidents on disk."""
    world, words = LAYOUTS[layout]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    line = [*REST.split(), *words.split()]
    experiment = (script, line, how, EXCHANGED.get(layout, ("",))[0])
    ranks = [
        context.Process(target=rank_main, args=(rank, world, port, experiment, queue, folder))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = dict(queue.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join(timeout=30)
    failed = {rank: result["failed"] for rank, result in sorted(found.items()) if "failed" in result}
    if failed:
        raise SystemExit(f"{layout} {how}: {failed}")
    files = sorted((folder / "incidents").glob("*/incident.json"))
    return [found[rank] for rank in range(world)], [json.loads(file.read_text()) for file in files]


def compare(script: Path, layout: str) -> None:
    """Run the trainings of a layout, print what they came to, and raise if it is not as promised."""
    results: dict[str, list[dict[str, Any]]] = {}
    incidents: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        exchanged = ("exchanged",) if layout in EXCHANGED else ()
        for how in ("alone", "healthy", "transient", "persistent", *exchanged):
            begin = time.perf_counter()
            results[how], incidents[how] = train(script, layout, how, Path(folder, how))
            seconds = time.perf_counter() - begin
            say(f"{layout} {how}: {seconds:.0f} s, {results[how]}")
            for incident in incidents[how]:
                ranks = [rank["rank"] for rank in incident["ranks"]]
                say(f"  step {incident['step']}: {incident['outcome']}, ranks {ranks}: {incident['message']}")
    assert results["healthy"] == results["alone"]
    assert results["transient"] == results["alone"]
    assert incidents["healthy"] == []
    last = LAYOUTS[layout][0] - 1
    for how, outcome in (("transient", "retried"), ("persistent", "skipped")):
        [incident] = incidents[how]
        assert (incident["step"], incident["outcome"]) == (ITERATION, outcome)
        assert [rank["rank"] for rank in incident["ranks"]] == [last]
        assert incident["parameters"][0]["name"].endswith("mlp.linear_fc1.weight")
    for how in exchanged:
        [incident] = incidents[how]
        assert results[how] == results["alone"]
        assert (incident["step"], incident["outcome"]) == (ITERATION, "retried")
        assert f"; it began on rank {last}: {EXCHANGED[layout][1]}" in incident["message"]
    assert {one["skipped"] for one in results["alone"]} == {0}
    assert results["persistent"][last]["skipped"] == 1
    assert results["persistent"] != results["alone"]
    say(f"{layout}: as promised")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--layout", nargs="*", choices=list(LAYOUTS), default=["tp2dp2", "pp2"])
    parser.add_argument("--path", type=Path, help="a folder with further packages")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(given.megatron.resolve())]
    if given.path is not None:
        sys.path.append(str(given.path))
        os.environ["PYTHONPATH"] = str(given.path.resolve())  # for the make that Megatron-LM starts
    prepare()
    import torch

    torch.set_num_threads(1)
    import megatron.training.training  # noqa: F401 - once, before the ranks are forked

    for layout in given.layout:
        compare(given.megatron.resolve() / "pretrain_gpt.py", layout)


if __name__ == "__main__":
    main()
