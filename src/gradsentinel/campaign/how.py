"""How the campaign measures, in the words of its page."""

HOW = """\
# Results: what a campaign of faults measured

`make campaign` (or `gradsentinel campaign`) trains the same runs under the same faults, guarded in several
ways, and writes this page, [results.json](results.json) and the plots. Nothing here is written by hand.

## How it is measured

**Runs.** A character GPT learns the sources of Python's standard library in a plain loop, with and without
a GradScaler; the same in Lightning; a Megatron-Core GPT, tensor- and data-parallel, on four ranks over
gloo. All on CPUs: nothing on this page was measured on an NPU or on CUDA. Each trial is a stretch of such a
run in a process of its own, and every policy gets the very same weights, batches and faults.

**Faults.** Of ten faults six are in the data, three in the precision or the optimizer, one is of hardware,
a framework or an operator, in places that the seed chooses. Bad data and overflows are there again when
their step is computed again, most flipped bits are not. Data: NaN and Inf in a record, outliers, wrong
labels, empty masks. Precision: attention logits and other products that overflow float16, a collapsed loss
scale, Adam with `eps=0`. Hardware: one flipped bit, one NaN or Inf in an activation or a gradient, an
operator that returns something else. A sweep flips every bit of float32 once in an activation, in a weight
and in a gradient.

**What a fault does** is measured first, in the run without faults: a copy makes the step with the fault
from the same state. *Non-finite*: loss, gradient or weights are not finite then. *Strong*: all is finite,
and the update ends more than 10 % of its length away from the right one. *Faint*: less than that. *Void*:
nothing happened.

**An update is spoiled** if it was made in the step of a fault and the weights end more than 10 % of the
right update's length away from where the step without the fault, from the same state, would have ended
(measured on a copy), or if it was made from a loss or gradient that is not finite. It counts if it is in
the final weights; what was rolled back is counted as taken back. **Useful** are the batches whose update is
in the final weights and was not spoiled, as a share of all steps that were computed, those that were undone
or repeated included. **Interruptions**: the job ended, and had to be started again from its last checkpoint
(every 50 steps); if it dies twice without getting further somebody takes the batches out by hand. **False
alarms**: incidents more than 60 steps behind any fault; so a second incident soon after a fault is not
counted as one. **Right parameter, module, operator, sample**: what the first incident names, against where
the fault was put. **Right cause**: what the diagnosis says first, of all faults that were noticed; no
diagnosis counts as wrong. **Time to diagnosis**: from the end of the bad step, on this machine.
**Overhead** compares medians of healthy steps of different processes and says little on a busy machine;
[performance.md](performance.md) has the exact one.

**Policies.** *GradSentinel*: `standard()` with `forward=`. A spike that comes out the same when its step is
computed again is real, and only reported: wrong labels are learnt from, clipped, since to drop every hard
batch costs more (`SpikeCallback(action="skip")` does). *Skip only*: `NanCallback()` and `Skip()`.
*Checkpoint and restart*: the job dies at a loss or gradient that is not finite, as the check of a framework
has it. *Megatron's own check*: `check_for_nan_in_grad`. *Nothing*: trains on.
"""
