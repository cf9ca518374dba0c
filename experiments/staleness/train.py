"""One run: a subject under a schedule, its held-out loss along the way, and the simulated seconds
of its steps.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

import jvpipe
from experiments.staleness.subjects import MICRO_BATCHES, Batch, Subject
from jvpipe.schedules import PipeMare, Schedule, find_schedule
from jvpipe.simulate.simulator import simulate_lists
from jvpipe.simulate.stages import StageLoad

FORWARD_S, BACKWARD_S = 1.0, 2.0  # of the whole model on one device, per micro-batch


@dataclass(frozen=True)
class Run:
    """What is run; `rate` is the learning rate."""

    subject: str
    schedule: str
    stages: int
    seed: int
    rate: float


@dataclass(frozen=True)
class Curve:
    """Held-out loss after so many steps (batches), from 0 on; infinite where the run had
    diverged.
    """

    run: Run
    steps: tuple[int, ...]
    losses: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> "Curve":
        return Curve(Run(**found["run"]), tuple(found["steps"]), tuple(found["losses"]))


def per_micro_batch(schedule: str) -> bool:
    """Whether every micro-batch is an update of its own."""
    return find_schedule(schedule).period(MICRO_BATCHES) == 1


def updates(schedule: str, steps: int) -> int:
    """The updates of so many steps."""
    return steps * MICRO_BATCHES if per_micro_batch(schedule) else steps


def with_options(schedule: str, steps: int) -> Schedule:
    """PipeMare's T1 ends after a quarter of the updates; all else is as it is by default."""
    if schedule == "pipemare":
        return PipeMare(anneal_updates=updates(schedule, steps) // 4)
    return find_schedule(schedule)


def train(subject: Subject, run: Run, steps: int | None = None) -> Curve:
    """Trains for `steps`, those of the subject unless given, and looks at the held-out loss eight
    times.

    All stages share one device: which version a task reads is fixed by the lists, not by what runs
    beside it. A look on the way sees each layer's newest weights; at the end nothing is in flight.
    """
    steps = steps or subject.steps
    pipe = jvpipe.Pipeline(
        subject.loss_fn,
        subject.optimizer(run.rate),
        stages=run.stages,
        microbatches=MICRO_BATCHES,
        schedule=with_options(run.schedule, subject.steps),
        planner="even",
        devices=jax.devices()[:1] * run.stages,
    )
    batches = subject.data(run.seed)
    state = pipe.init(subject.init, subject.held_out[0], jax.random.key(run.seed))
    seen, losses = [0], [_held_out_loss(pipe, state, subject.held_out)]
    try:
        stream = pipe.run(state, batches, num_steps=steps)
        for state, _ in stream:
            if state.step % (steps // MICRO_BATCHES) == 0 and state.step < steps:
                seen.append(state.step)
                losses.append(_held_out_loss(pipe, state, subject.held_out))
        seen.append(steps)
        losses.append(_held_out_loss(pipe, pipe.drain(state), subject.held_out))
    except ValueError as error:
        if "the loss of" not in str(error):
            raise
        rest = range(seen[-1] + steps // MICRO_BATCHES, steps + 1, steps // MICRO_BATCHES)
        seen, losses = [*seen, *rest], losses + [math.inf] * len(rest)
    return Curve(
        run, tuple(seen), tuple(loss if math.isfinite(loss) else math.inf for loss in losses)
    )


def _held_out_loss(pipe: jvpipe.Pipeline, state: Any, held_out: Sequence[Batch]) -> float:
    """The mean over the examples of all batches, or over what counts in them."""
    counts = [
        float(batch["weights"].sum()) if "weights" in batch else len(batch["labels"])
        for batch in held_out
    ]
    losses = [float(pipe.evaluate(state, batch)["loss"]) for batch in held_out]
    return sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)


def simulated_s(schedule: str, stages: int, steps: int) -> tuple[float, ...]:
    """When all stages have done the backwards of each step, from 0 steps on; the stages are
    balanced.

    A stage's forward takes FORWARD_S / S and its backward BACKWARD_S / S; updates and sends take
    none. A synchronous step is what `simulate_lists` makes of its lists, times the steps; an
    asynchronous stream is simulated whole.
    """
    found = find_schedule(schedule)
    loads = [StageLoad(FORWARD_S / stages, BACKWARD_S / stages)] * stages
    if found.synchronous:
        step_s = simulate_lists(found.lists(stages, MICRO_BATCHES), loads).step_s
        return tuple(n * step_s for n in range(steps + 1))
    timeline = simulate_lists(found.lists(stages, MICRO_BATCHES * steps), loads)
    ends_s = [0.0] * (steps + 1)
    for task, end_s in zip(timeline.tasks, timeline.ends_s.tolist(), strict=True):
        done = task.microbatch + 1
        if task.stage == 0 and task.kind == "B" and done % MICRO_BATCHES == 0:
            ends_s[done // MICRO_BATCHES] = end_s
    return tuple(ends_s)
