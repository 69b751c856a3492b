"""DDP on real text: one gradient of one rank turns NaN; that rank is named, and all ranks go on alike.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import CrossRankCallback, NanCallback, Resync, Rollback, Sentinel
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.demo.model import CharGPT
from gradsentinel.faults import FaultPlan, PoisonGradient


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/ddp", help="where events and incidents are written")
    parser.add_argument("--fault-rank", type=int, default=1, help="the rank whose gradient turns NaN")
    parser.add_argument("--fault-step", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def choose_device():
    """Return this rank's own CUDA, NPU or other device, or the CPU where there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))


def main(options):
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))  # gloo, nccl, hccl
    rank = dist.get_rank()

    torch.manual_seed(0)
    corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
    model = CharGPT(vocab=corpus.vocab, width=32, heads=2, layers=2, context=32).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=5e-3)
    loader = batches(corpus, batch_size=16, steps=options.steps, context=32, seed=rank)  # each rank its own

    fault = PoisonGradient(
        steps=(options.fault_step,), ranks=(options.fault_rank,), parameter="blocks.1.attn.query.weight"
    )
    plan = FaultPlan([fault])  # all ranks make the same plan
    callbacks = [NanCallback(), CrossRankCallback(every=20), Resync(), Rollback(every=20, confirm_after=5)]
    sentinel = Sentinel(parallel, optimizer, callbacks=callbacks, run_dir=options.run_dir)
    with plan.attach(model), sentinel:
        for step, records in enumerate(sentinel.steps(plan.batches(loader))):
            batch = {name: values.to(device) for name, values in records.items()}
            loss = parallel(**batch).loss
            sentinel.backward(loss)
            sentinel.step(max_norm=1.0)  # the ranks agree: step, or drop
            if rank == 0 and (step % 10 == 0 or not sentinel.applied):
                print(f"step {step:3}  loss {loss.item():.3f}  {sentinel.last_action.label}", flush=True)

    if rank == 0:
        print(f"\n{'step':>4}  {'ranks':<6}  {'kind':<20}  {'outcome':<8}  what")
        for incident in sentinel.incidents:
            ranks = ",".join(str(place.rank) for place in incident.ranks)
            what = f"{incident.step:>4}  {ranks:<6}  {incident.kind!s:<20}  {incident.outcome!s:<8}"
            print(f"{what}  {incident.message}")
        print(f"evidence: {sentinel.run_dir / 'incidents'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments())
