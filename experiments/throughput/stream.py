"""A stream without a flush against 1F1B: seconds per micro-batch, and how busy the devices are.

Usage: NPROC=1 python -m experiments.throughput.stream [ROUNDS | work]

`work` tells instead what a micro-batch costs by kind of task, both stages on one device: the lower
quartile over micro-batches, which depends less on what else a machine does than the seconds of two
devices.
"""

import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 2)

import optax  # noqa: E402

import jvpipe  # noqa: E402
from experiments.throughput import data, model  # noqa: E402
from jvpipe.ir.span import Span  # noqa: E402
from jvpipe.report.chrome_trace import COMPUTE  # noqa: E402

WARM, STEPS = 3, 8


Started = dict[str, tuple[jvpipe.Pipeline, Any]]


def started(schedule: str, plan: int | jvpipe.Plan) -> tuple[jvpipe.Pipeline, Any]:
    """A pipeline of two stages and its first state."""
    count = len(jax.devices()) if isinstance(plan, int) else 1 + plan.stages[-1].devices[0]
    pipe = jvpipe.Pipeline(
        model.transformer_loss,
        optax.sgd(0.1),
        plan,
        data.MICRO_BATCHES,
        schedule,
        planner="torchgpipe",
        devices=jax.devices()[:count] * (2 // count),
        group=False,
    )
    return pipe, pipe.init(data.transformer_params(), data.transformer_batch(), None)


def both(*, apart: bool) -> Started:
    """The two schedules with the same cuts, which measured seconds would else set anew for each."""
    first = started("1f1b", 2)
    plan = jvpipe.Plan.from_cuts(list(first[0].plan.cuts))
    if apart:
        return {"1f1b": first, "pipedream": started("pipedream", plan)}
    plan = replace(plan, stages=tuple(replace(stage, devices=(0,)) for stage in plan.stages))
    return {name: started(name, plan) for name in ("1f1b", "pipedream")}


def timed(pipe: jvpipe.Pipeline, state: Any) -> tuple[Any, float, float]:
    """Runs on; the state, seconds per micro-batch after some warm steps, and the busy share of the
    devices.
    """
    batch, spans, began_s, losses = data.transformer_batch(), [], 0.0, []
    pipe.session.monitor()
    for n, found in enumerate(pipe.run(state, [batch] * (WARM + STEPS + 1))):
        state = found[0]
        losses.append(found[1]["loss"])
        if n >= 1:
            measured = pipe.session.measured(
                before=True
            )  # of the step before: the next one is under way
            if n - 1 == WARM - 1:
                began_s = time.perf_counter()
            elif WARM <= n - 1 < WARM + STEPS:
                spans += measured.spans
        if n - 1 == WARM + STEPS - 1:
            break
    taken_s = time.perf_counter() - began_s
    jax.block_until_ready(state.arrays)
    return state, taken_s / (STEPS * data.MICRO_BATCHES), busy_share(spans)


def busy_share(spans: list[Span]) -> float:
    """The share of the time between the first start and the last end that the less busy device
    works.
    """
    work = [span for span in spans if span.kind in COMPUTE]
    devices = {span.device for span in work}
    begin_s = max(min(s.start_s for s in work if s.device == d) for d in devices)
    end_s = min(max(s.end_s for s in work if s.device == d) for d in devices)
    inside = [s for s in work if begin_s <= s.start_s and s.end_s <= end_s]
    return min(sum(s.end_s - s.start_s for s in inside if s.device == d) for d in devices) / (
        end_s - begin_s
    )


def work(turns: int = 4) -> None:
    """Prints what the programs of each kind and stage take of a micro-batch, in ms."""
    pipes, batch = both(apart=False), data.transformer_batch()
    tasks: dict[str, dict[Any, list[float]]] = {name: defaultdict(list) for name in pipes}
    for turn in range(turns + WARM):
        for name, (pipe, state) in pipes.items():
            pipe.session.monitor()
            for found, _ in pipe.run(state, [batch]):
                pipes[name] = pipe, jax.block_until_ready(found)
            taken: dict[str, float] = defaultdict(float)  # by task, over its layers
            for span in pipe.session.measured().spans if turn >= WARM else ():
                if span.kind in COMPUTE:
                    taken[span.name] += span.end_s - span.start_s
            for task, seconds in taken.items():
                tasks[name][task[:2]].append(seconds)
    kinds = [f"{stage}{kind}" for kind in "FBU" for stage in "01"]
    print(f"| schedule | {' | '.join(kinds)} | all |\n|---{'|---' * len(kinds)}|---|")
    for name, found in tasks.items():
        quartile = [sorted(found[kind])[len(found[kind]) // 4] * 1e3 for kind in kinds]
        often = [len(found[kind]) / turns / data.MICRO_BATCHES for kind in kinds]
        spent = [seconds * times for seconds, times in zip(quartile, often, strict=True)]
        print(
            f"| {name} | {' | '.join(f'{x:.1f}' for x in spent)} | {sum(spent):.1f} |", flush=True
        )


def main() -> None:
    """Takes turns between the schedules and prints medians and their ratio."""
    if sys.argv[1:] == ["work"]:
        work()
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    pipes = both(apart=True)
    taken: dict[str, list[float]] = {name: [] for name in pipes}
    busy: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(rounds):
        for name, (pipe, state) in pipes.items():
            state, seconds, share = timed(pipe, state)
            pipes[name] = pipe, jax.block_until_ready(pipe.drain(state))
            taken[name].append(seconds)
            busy[name].append(share)
            print(
                f"{name}: {seconds * 1e3:.1f} ms per micro-batch, the less busy device works "
                f"{share:.1%}",
                flush=True,
            )
    median = {name: statistics.median(values) for name, values in taken.items()}
    print("\n| schedule | ms per micro-batch | less busy device |\n|---|---|---|")
    for name, value in median.items():
        print(f"| {name} | {value * 1e3:.1f} | {statistics.median(busy[name]):.1%} |")
    print(f"\npipedream over 1f1b: {median['pipedream'] / median['1f1b']:.3f} (bound 0.98)")


if __name__ == "__main__":
    main()
