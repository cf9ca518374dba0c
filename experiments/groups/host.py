"""What the host does per micro-batch, with layers apart and in groups: rows, programs of layers,
seconds of dispatch.

    python -m experiments.groups.host [--model bert] [--size large] [--stages 4] [--steps 5]

Every program is a stub that takes and yields as many arrays as the program that it stands for, of
one number each, and computes nothing: what is left of a step is the controller's own time and the
calls. Nothing of the model is compiled.

A second table has the calls alone, without what lies between them: by one thread, and by a thread
per device that waits for no other, so that it says the most that such threads could bring. "packed"
is as if all sums of gradients that a program adds to were one array.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from experiments.planners.questions import question
from jvpipe import Plan
from jvpipe.ir.buffers import HOST, Lowered
from jvpipe.ir.kinds import KINDS, Runs
from jvpipe.ir.values import ValueKind
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.controller import Controller, Moment
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.util.devices import Device

MICROBATCHES, MICRO_BATCH = 8, 8


@dataclass
class Stubs(ProgramStore):
    """Compiles in the place of each program one that computes nothing; equal counts of arrays share
    it.
    """

    stubs: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def compile(self, programs: Sequence[tuple[Program, Device]]) -> list[Any]:
        """Returns what stands for each program on its device."""
        results: dict[Any, int] = {}
        for program, _ in programs:
            if program.key not in results:
                results[program.key] = len(jax.eval_shape(program.fn, *program.inputs))
        return [self._stub(program, results[program.key], device) for program, device in programs]

    def _stub(self, program: Program, results: int, device: Device) -> Any:
        taken, donated = len(program.inputs), program.donated
        key = taken, results, donated, device
        if key not in self.stubs:
            one = jax.ShapeDtypeStruct(
                (), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
            )
            fn = jax.jit(
                lambda *xs: (*xs[:results], *[jnp.float32(0)] * (results - len(xs[:results]))),
                donate_argnums=donated,
                keep_unused=True,
            )
            with jax.default_device(device):
                self.stubs[key] = fn.lower(*[one] * taken).compile()
        return self.stubs[key]


def step_s(bound: Bound, devices: Sequence[Device], steps: int) -> tuple[float, float]:
    """Returns how long the host dispatches a step, in seconds and in seconds of the dispatching
    thread: medians.
    """
    lowered = bound.lowered
    controller = Controller(Ledger(tuple(devices)), MICROBATCHES)
    arrays = tuple(
        jax.device_put(jnp.float32(0), devices[b.place])
        for b in lowered.buffers[: lowered.persistent]
    )
    feeds = {leaf: [jnp.float32(0)] * MICROBATCHES for leaf in bound.feeds}
    wall_s, thread_s = [], []
    for step in range(steps + 1):
        jax.block_until_ready(arrays)
        start_s, began_s = time.perf_counter(), time.thread_time()
        arrays, _ = controller.run(bound, arrays, feeds, Moment(step))
        thread_s.append(time.thread_time() - began_s)
        wall_s.append(time.perf_counter() - start_s)
    assert controller.ledger.live[HOST] == 0
    return statistics.median(wall_s[1:]), statistics.median(thread_s[1:])


class Call(NamedTuple):
    """The arrays of a call: those that it takes, that it yields, and of both those that lie in one
    place.
    """

    taken: int
    yielded: int
    overwritten: int


def calls_of(lowered: Lowered, place: int, *, packed: bool) -> list[Call]:
    """Returns the calls of a place in a step, in their order."""

    def arrays(ids: Iterable[int]) -> set[int]:
        sums = {b for b in ids if lowered.buffers[b].value.kind is ValueKind.GRADIENT}
        return {*ids} - sums | {*list(sums)[:1]} if packed and sums else {*ids}

    rows = [row for row in lowered.rows if KINDS[row.kind].computes and row.place == place]
    found = []
    for row in rows:
        overwritten = arrays({*row.reads} & {*row.writes})
        taken, yielded = arrays(row.reads), arrays(row.writes)
        found.append(Call(len(taken), len(yielded), len(overwritten)))
    return found


class Caller:
    """A device's calls, each of a stub with as many arrays."""

    def __init__(self, calls: Sequence[Call], device: Device) -> None:
        self.calls = calls
        with jax.default_device(device):
            self.arrays = {call: [jnp.float32(i) for i in range(call.taken)] for call in calls}
            self.stubs = {call: self._stub(call) for call in self.arrays}

    def _stub(self, call: Call) -> Any:
        fresh = call.yielded - call.overwritten

        def fn(*xs: jax.Array) -> tuple[jax.Array, ...]:
            return (*xs[: call.overwritten], *[jnp.float32(0)] * fresh)

        donated = tuple(range(call.overwritten))
        run = jax.jit(fn, donate_argnums=donated, keep_unused=True)
        return run.lower(*self.arrays[call]).compile()

    def __call__(self) -> None:
        """Makes all calls of a step."""
        for call in self.calls:
            arrays = self.arrays[call]
            arrays[: call.overwritten] = self.stubs[call](*arrays)[: call.overwritten]


def calls_s(callers: Sequence[Caller], steps: int, threads: int) -> float:
    """Returns how long the calls of a step take so many threads, the median in seconds."""
    taken_s = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(steps + 1):
            began_s = time.perf_counter()
            list(pool.map(lambda caller: caller(), callers))
            taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s[1:])


def main() -> None:
    """Prints a table: apart, and in groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="bert")
    parser.add_argument("--size", default="large")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    told = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", told.stages)
    devices = tuple(jax.devices())
    asked = question(told.model, told.size, MICROBATCHES * MICRO_BATCH, MICROBATCHES, told.stages)
    layers = len(asked.trace().traced.graph.layers)
    cuts = [layers // told.stages + (s < layers % told.stages) for s in range(told.stages)]
    store = Stubs()
    apart = replace(asked.compiled(Plan.from_cuts(cuts), store), devices=devices)
    bounds = {"apart": apart.step, "in groups": replace(apart, grouped=True).step}
    print(f"{told.model} {told.size}, {layers} layers on {told.stages} stages, per micro-batch")
    print("| layers | rows | programs of layers | of these F, B | host, ms | its thread, ms |")
    print("|---|---|---|---|---|---|")
    for name, bound in bounds.items():
        rows = bound.lowered.rows
        kinds = Counter(str(row.kind) for row in rows if KINDS[row.kind].runs is Runs.LAYER)
        each = ", ".join(f"{count / MICROBATCHES:.1f}" for count in kinds.values())
        of_layers = sum(kinds.values()) / MICROBATCHES
        cells = f"{len(rows) / MICROBATCHES:.1f} | {of_layers:.1f} | {each}"
        took = (1e3 * s / MICROBATCHES for s in step_s(bound, devices, told.steps))
        print(f"| {name} | {cells} | {' | '.join(f'{ms:.2f}' for ms in took)} |", flush=True)
    print("\n| calls alone | arrays taken | by one thread, ms | by a thread per device, ms |")
    print("|---|---|---|---|")
    for name, packed in (("apart", False), ("in groups", False), ("in groups, packed", True)):
        lowered = bounds[name.partition(",")[0]].lowered
        calls = [calls_of(lowered, place, packed=packed) for place in range(told.stages)]
        callers = [Caller(*each) for each in zip(calls, devices, strict=True)]
        taken = sum(call.taken for each in calls for call in each) / MICROBATCHES
        one, several = (
            1e3 * calls_s(callers, told.steps, threads) / MICROBATCHES
            for threads in (1, told.stages)
        )
        print(f"| {name} | {taken:.0f} | {one:.2f} | {several:.2f} |", flush=True)


if __name__ == "__main__":
    main()
