"""Really run: NPROC=1 python -m experiments.nas.real changed|evolved|unpaced [gpipe|pipedream]
[ARCHITECTURES]

`changed`: layers are added twice to one stage and removed twice from another. `evolved`: 30
architectures of a search. Both paced, on four devices. `unpaced`: the search with the model `mini`
and the same kinds of blocks, on two devices.
"""

import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jvpipe
from experiments.awake import awake
from experiments.nas import paced, streams, variants
from experiments.nas.report import MICRO_BATCHES, STEPS, keep, report
from jvpipe import models
from jvpipe.models.architecture import Architecture, Supernet
from jvpipe.models.architecture_search import ArchitectureSearch
from jvpipe.models.evolved_transformer import default_architecture
from jvpipe.models.workload import Workload
from jvpipe.planners.user_fates import checkpointed

WARM, TIMED, TRIES = 2, 3, 2
"""A variant that is measured alone is trained for `WARM` steps, and for `TIMED` whose median
counts; again if another machine on the same host was busy meanwhile.
"""
QUIET = 0.05
"""At most this share of the cores' time may be stolen by other machines."""


@dataclass(frozen=True)
class Subject:
    """A supernet and the stream of architectures that is drawn from it; None: by the search
    itself.
    """

    name: str
    workload: Workload
    supernet: Supernet
    stages: int
    architectures: Sequence[Architecture] | None
    micro_batch: int
    limit_bytes: int | None

    def batch(self) -> Any:
        """A batch of ones."""
        shapes = self.workload.abstract_batch(self.micro_batch * MICRO_BATCHES)
        return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)


class Timed(jvpipe.Pipeline):
    """Keeps what each preparation and each switch took, in seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prepared_s, self.switched_s = list[float](), list[float]()

    def precompile(self, *args: Any, **options: Any) -> None:
        """As it is."""
        start_s = time.perf_counter()
        super().precompile(*args, **options)
        self.prepared_s.append(time.perf_counter() - start_s)

    def update_model(self, *args: Any, **options: Any) -> Any:
        """As it is."""
        start_s = time.perf_counter()
        found = super().update_model(*args, **options)
        self.switched_s.append(time.perf_counter() - start_s)
        return found


class Moment(NamedTuple):
    """The time, and the seconds that a host of virtual machines has kept from this one's cores
    until then.
    """

    at_s: float
    stolen_s: float

    @staticmethod
    def now() -> "Moment":
        """On a machine that does not tell, nothing is stolen."""
        path = Path("/proc/stat")
        ticks = path.read_text().split(maxsplit=9)[8] if path.exists() else 0
        return Moment(time.perf_counter(), int(ticks) / os.sysconf("SC_CLK_TCK"))

    def quiet(self, later: "Moment") -> bool:
        """Whether hardly anything was stolen from here on."""
        return later.stolen_s - self.stolen_s < QUIET * (later.at_s - self.at_s) * (
            os.cpu_count() or 1
        )


class Clock:
    """When arrays were there; a thread of its own waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._found: list[Future[Moment]] = []

    def watch(self, array: jax.Array) -> None:
        """The next one."""
        self._found.append(self._pool.submit(lambda: (array.block_until_ready(), Moment.now())[1]))

    def moments(self) -> list[Moment]:
        """Of all that were watched."""
        return [future.result() for future in self._found]


@contextmanager
def counted_compilations() -> Iterator[dict[bool, int]]:
    """How many programs are compiled meanwhile, by whether that was on the training's thread."""
    found, main = {True: 0, False: 0}, threading.current_thread()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found[threading.current_thread() is main] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclass(frozen=True)
class Followed:
    """A stream that was trained: when steps ended, with whose architecture; what switching took."""

    architectures: list[Architecture]
    ends: list[Moment]
    prepared_s: list[float]
    switched_s: list[float]
    compiled: dict[bool, int]

    def step_s(self) -> list[float]:
        """Of each architecture after the first, seconds per step, those of the switch to it among
        them.
        """
        return [(b.at_s - a.at_s) / STEPS for a, b in self._spans]

    def quiet(self) -> list[bool]:
        """Of each architecture after the first, whether the machine was all ours."""
        return [a.quiet(b) for a, b in self._spans]

    @property
    def _spans(self) -> Iterator[tuple[Moment, Moment]]:
        return pairwise(self.ends[STEPS - 1 :: STEPS])


class Alone(NamedTuple):
    """What a variant takes per step in its stride, by its plan, and whether the machine was all
    ours.
    """

    step_s: float
    plan: jvpipe.Plan
    quiet: bool


def pipeline(
    subject: Subject, schedule: str, loss_fn: Any, made: type[jvpipe.Pipeline] = jvpipe.Pipeline
) -> Any:
    """One that plans by itself."""
    optimizer = subject.workload.optimizer(1000, local=schedule == "pipedream")
    limit = subject.limit_bytes
    return made(loss_fn, optimizer, subject.stages, MICRO_BATCHES, schedule, memory_limit=limit)


def homes_of(subject: Subject, schedule: str, architecture: Architecture) -> list[int]:
    """Where the upper layer's own planner has the slots of an architecture."""
    loss_fn, optimizer = (
        subject.supernet.loss_of(architecture),
        subject.workload.optimizer(1000, local=True),
    )
    pipe = jvpipe.Pipeline(
        loss_fn, optimizer, subject.stages, MICRO_BATCHES, schedule, planner=schedule, group=False
    )
    pipe.init(
        subject.supernet.params_of(architecture, jax.random.key(0)),
        subject.batch(),
        jax.random.key(0),
    )
    return streams.homes(pipe.session.graph, len(architecture.slots), pipe.plan.cuts)


def followed(subject: Subject, schedule: str, count: int) -> tuple[Followed, jvpipe.Pipeline, Any]:
    """Trains the stream; layers move as the plan of each architecture says. Also the pipeline and
    its last state.
    """
    space = subject.supernet.space
    given = subject.architectures
    search = ArchitectureSearch(
        subject.supernet, 0, STEPS, streams.Given(space, given) if given else None
    )
    pipe, batch, clock = (
        pipeline(subject, schedule, search.first.loss_fn, Timed),
        subject.batch(),
        Clock(),
    )
    state = pipe.init(search.first.params, batch, jax.random.key(0))
    for architecture in dict.fromkeys(given[1:] if given else space.covering()):
        shapes = jax.eval_shape(
            lambda a=architecture: subject.supernet.params_of(a, jax.random.key(0))
        )
        pipe.precompile(subject.supernet.loss_of(architecture), shapes)
    pipe.prepared_s.clear()
    found = []
    with counted_compilations() as compiled:
        for reached, metrics, architecture in search.run(pipe, state, repeat(batch), STEPS * count):
            state = reached
            clock.watch(metrics["loss"])
            found.append(architecture)
    return (
        Followed(found[::STEPS], clock.moments(), [*pipe.prepared_s], [*pipe.switched_s], compiled),
        pipe,
        state,
    )


def plans_at_home(
    pipe: jvpipe.Pipeline, first: Sequence[int], whole: Sequence[int]
) -> dict[str, Iterator[jvpipe.Plan]]:
    """The pipeline's own plan, and those of the variants that leave layers at home, the first
    choice first.
    """
    assert pipe.session.compiled_plans.planned is not None
    problem = pipe.session.compiled_plans.planned.problem

    def kept(bounds: Sequence[int]) -> jvpipe.Plan:
        return jvpipe.Plan.from_cuts([j - i for i, j in pairwise(bounds)]).with_schedule(
            problem.schedule.name
        )

    def static(bounds: Sequence[int]) -> list[jvpipe.Plan]:
        again = checkpointed(pipe.session.graph, kept(bounds), "always")
        return [again] if problem.schedule.synchronous else [kept(bounds), again]

    chosen = (d.plan(problem, "vpipe") for d in variants.chosen_at_home(problem, whole))
    unlimited = problem.memory_limit_bytes is None
    return {
        "ideal": iter([pipe.plan]),
        "static, first": iter(static(first)),
        "static": iter(static(whole)),
        "swap/recompute": iter([kept(whole)]) if unlimited else chain(chosen, static(whole)),
    }


def alone(
    subject: Subject,
    pipe: jvpipe.Pipeline,
    state: Any,
    architecture: Architecture,
    homes: Sequence[Sequence[int]],
) -> tuple[dict[str, Alone], Any]:
    """The variants that do not move layers; and the state."""
    batch, params = subject.batch(), subject.supernet.params_of(architecture, jax.random.key(0))
    state = pipe.update_model(state, subject.supernet.loss_of(architecture), params)
    found: dict[str, Alone] = {}
    bounds = [streams.home_bounds(pipe.session.graph, home, subject.stages) for home in homes]
    for name, wanted in plans_at_home(pipe, *bounds).items():
        for plan in wanted:
            try:
                state = pipe.migrate(state, plan)
                break
            except jvpipe.MemoryLimitExceeded:
                continue
        known = [taken for taken in found.values() if taken.plan == pipe.plan]
        for _ in range(0 if known else TRIES):
            clock = Clock()
            for reached, metrics in pipe.run(state, repeat(batch), WARM + TIMED):
                state = reached
                clock.watch(metrics["loss"])
            moments = clock.moments()[WARM - 1 :]
            step_s = statistics.median(b.at_s - a.at_s for a, b in pairwise(moments))
            known = [Alone(step_s, pipe.plan, moments[0].quiet(moments[-1]))]
            state = pipe.drain(state)
            if known[0].quiet:
                break
        found[name] = known[0]
    return found, state


def subject(name: str) -> Subject:
    """By its name."""
    if name == "unpaced":
        workload = models.load("evolved-transformer", "mini")
        assert workload.supernet is not None
        return Subject(name, workload, paced.smaller(workload.supernet), 2, None, 4, None)
    slots = streams.STAGES * streams.PER_STAGE if name == "changed" else streams.SLOTS
    workload, supernet = paced.paced_workload(slots)
    blocks = list(default_architecture(workload.config).slots[:2])
    given = streams.changed([block for block in blocks if block]) if name == "changed" else None
    return Subject(
        name,
        workload,
        supernet,
        streams.STAGES,
        given,
        paced.MICRO_BATCH,
        LIMIT_BYTES if given else None,
    )


LIMIT_BYTES = 2**21


def run(subject: Subject, schedule: str, count: int) -> None:
    """Runs everything under one schedule, prints the table and what switching took."""
    stream, pipe, state = followed(subject, schedule, count)
    first = stream.architectures[0]
    whole = first if subject.architectures else subject.supernet.default
    homes = [homes_of(subject, schedule, architecture) for architecture in (first, whole)]
    measured = []
    for architecture in stream.architectures[1:]:
        taken, state = alone(subject, pipe, state, architecture, homes)
        measured.append(taken)
    step_s = {
        name: [found[name].step_s for found in measured]
        for name in variants.NAMES
        if name != "full"
    }
    step_s["full"] = stream.step_s()
    layers = [sum(found["ideal"].plan.cuts) for found in measured]
    alone_quiet = [all(taken.quiet for taken in found.values()) for found in measured]
    counted = [a and b for a, b in zip(stream.quiet(), alone_quiet, strict=True)]
    report(f"{subject.name}, {schedule}", step_s, layers, counted, first=1)
    prepared_s, switched_s = stream.prepared_s, stream.switched_s
    print(
        f"traced and planned in the background in {statistics.median(prepared_s):.3f} s (most "
        f"{max(prepared_s):.3f}), switched in {statistics.median(switched_s):.3f} s (most "
        f"{max(switched_s):.3f}); an ideal step takes {statistics.mean(step_s['ideal']):.3f} "
        f"s\nprograms compiled on the training's thread: {stream.compiled[True]}, beside it: "
        f"{stream.compiled[False]}",
        flush=True,
    )
    keep(subject.name, schedule, step_s)


def main() -> None:
    """Every schedule that is named, or both."""
    words = sys.argv[1:]
    name = words[0] if words else "changed"
    jax.config.update("jax_num_cpu_devices", 2 if name == "unpaced" else streams.STAGES)
    asked = subject(name)
    count = next(
        (int(word) for word in words if word.isdigit()),
        len(asked.architectures or ()) or streams.COUNT,
    )
    with awake():
        for schedule in [word for word in words if word in ("gpipe", "pipedream")] or [
            "gpipe",
            "pipedream",
        ]:
            run(asked, schedule, count)


if __name__ == "__main__":
    main()
