"""FSDP2 on real text: one rank computes NaN, later it is killed; the restarted job goes on from its disk.

torchrun --nproc-per-node 2 --max-restarts 1 examples/fsdp2.py
"""

import argparse
import os
import signal
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.demo.model import CharGPT
from gradsentinel.faults import FaultPlan, WrongOperator
from gradsentinel.store import RunDirectory


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/fsdp2", help="a run that left its state there goes on")
    parser.add_argument("--fault-rank", type=int, default=1, help="the rank that computes NaN and is killed")
    parser.add_argument("--fault-step", type=int, default=15)
    parser.add_argument("--kill-step", type=int, default=48, help="in the first start only")
    parser.add_argument("--steps", type=int, default=80)
    return parser.parse_args()


def join(start):
    """Join the job on this rank's own CUDA, NPU or other device, or on the CPU where there is none."""
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"start{start}", store)  # torchrun's still holds the addresses of dead ranks
    backend = dist.get_default_backend_for_device(device)  # gloo, nccl, hccl
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return rank, device


def main(options):
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, device = join(start)
    torch.manual_seed(0)
    corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
    model = CharGPT(vocab=corpus.vocab, width=32, heads=2, layers=2, context=32).to(device)
    for part in (*model.blocks, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = batches(corpus, batch_size=16, steps=options.steps, context=32, seed=rank)  # each rank its own
    when = {"steps": (options.fault_step,), "ranks": (options.fault_rank,)}
    fault = WrongOperator(operator="uninitialised_rows", phase="backward", module="blocks.1.mlp", **when)
    plan = FaultPlan([fault])  # all ranks make the same plan
    callbacks = [NanCallback(), Rollback(every=10, confirm_after=5, on_disk=2)]  # each rank saves its shard
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=options.run_dir)
    with plan.attach(model), sentinel:
        # The newest known-good state that all ranks have on disk, or 0. It is written beside the training, so
        # it may be one snapshot older than the last that had proved good when the job was killed.
        first = sentinel.restore(missing_ok=True)
        if rank == 0:
            print(f"start {start}: goes on from step {first}", flush=True)
        rest = islice(loader, first, None)  # the data goes on where that step was
        for step, records in enumerate(sentinel.steps(plan.batches(rest, start=first)), first):
            if (start, rank, step) == (0, options.fault_rank, options.kill_step):
                os.kill(os.getpid(), signal.SIGKILL)
            batch = {name: values.to(device) for name, values in records.items()}
            loss = model(**batch).loss
            sentinel.backward(loss)
            sentinel.step(max_norm=1.0)  # the ranks agree: step, or drop
            if rank == 0 and (step % 10 == 0 or not sentinel.applied):
                print(f"step {step:3}  loss {loss.item():.3f}  {sentinel.last_action.label}", flush=True)

    if rank == 0:
        print(f"\n{'step':>4}  {'ranks':<6}  {'kind':<20}  {'outcome':<8}  what")
        for incident in RunDirectory(options.run_dir).read_incidents():  # from before the restart too
            ranks = ",".join(str(place.rank) for place in incident.ranks)
            what = f"{incident.step:>4}  {ranks:<6}  {incident.kind!s:<20}  {incident.outcome!s:<8}"
            print(f"{what}  {incident.message}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments())
