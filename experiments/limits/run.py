"""Asks for random memory limits again and again.

    python -m experiments.limits.run [--limits 200] [--planner NAME]

Each limit is asked for three times, of fresh pipelines that measure anew: once with seconds as they
are on this machine, twice with each program's multiplied by a random factor from 1/2 to 2. It must
be accepted or refused alike each time; refusals must name one limit, and it must be accepted each
time; no limit above it may be refused; and what an accepted plan holds must be accepted as a limit.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

import jvpipe
from jvpipe.cost import measure
from jvpipe.ir.buffers import HOST
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.zoo import CASES, Case

MODELS = (
    "mlp",
    "pre-norm",
    "chained-keys",
    "scanned",
    "resnet",
    "unet",
    "three-readers",
    "experts",
    "with-aux",
    "linen",
)
SETTINGS = ((2, "1f1b"), (3, "gpipe"), (2, "pipedream"), (3, "2bw"))
TIMES, MICROBATCHES = 3, 4


@dataclass
class Question:
    """A model under a schedule on so many devices, planned by a planner; `smallest` is the limit
    that is named.
    """

    case: Case
    stages: int
    schedule: str
    planner: str
    rng: random.Random
    optimizer: optax.GradientTransformation = field(default_factory=lambda: optax.adam(1e-2))
    smallest: set[int] = field(default_factory=set)

    def held_bytes(self, limit: int | None, factor: float = 1.0) -> int | None:
        """What the fullest device holds under the plan for a limit, None if it is refused."""
        pipe = jvpipe.Pipeline(
            self.case.loss_fn,
            self.optimizer,
            self.stages,
            MICROBATCHES,
            self.schedule,
            self.planner,
            memory_limit=limit,
            devices=jax.devices()[: self.stages],
            has_aux=self.case.has_aux,
            has_state=self.case.has_state,
            remeasure=True,
        )
        try:
            with perturbed(factor, self.rng):
                pipe.init(
                    self.case.params,
                    batch_of(self.case, MICROBATCHES),
                    key_of(self.case),
                    self.case.state,
                )
        except jvpipe.MemoryLimitExceeded as error:
            self.smallest.add(error.smallest_limit_bytes)
            return None
        return max(peak.bytes for peak in pipe.session.compiled.peaks[:HOST])

    def wrong(self, limit: int) -> str:
        """What is wrong with the answers to a limit; nothing if all is well."""
        held = [self.held_bytes(limit, factor) for factor in (1.0, 2.0, 2.0)]
        if any(bytes_ is not None and bytes_ > limit for bytes_ in held):
            return f"a plan does not keep the limit {limit}: {held}"
        if len({bytes_ is None for bytes_ in held}) > 1:
            return f"the limit {limit} was not answered alike: {held}"
        if len(self.smallest) > 1:
            return f"several limits were named: {sorted(self.smallest)}"
        if held[0] is None and limit >= min(self.smallest):
            return f"the limit {limit} was refused, and {min(self.smallest)} would do"
        for bytes_ in {x for x in held if x is not None}:
            if self.held_bytes(bytes_, 2.0) is None:
                return f"the limit {bytes_}, which a plan keeps, was refused"
        return ""


@contextmanager
def perturbed(factor: float, rng: random.Random) -> Iterator[None]:
    """Meanwhile seconds are measured as they are times a random factor, from its inverse to
    itself.
    """
    plain: Callable[..., list[list[float]]] = measure._in_turns

    def in_turns(*given: Any, **named: Any) -> list[list[float]]:
        drawn = []
        for seconds in plain(*given, **named):
            by = factor ** rng.uniform(-1, 1)
            drawn.append([s * by for s in seconds])
        return drawn

    measure._in_turns = in_turns
    try:
        yield
    finally:
        measure._in_turns = plain


def asked_limits(question: Question, count: int) -> Iterator[int]:
    """The smallest limit, as it is named, one byte less, and random ones from below it to what is
    held without one.
    """
    most = question.held_bytes(None)
    question.held_bytes(1)
    (smallest,) = question.smallest
    assert most is not None
    yield from (smallest, smallest - 1)
    for _ in range(count - 2):
        yield round(
            smallest * 0.9 + max(most - 0.9 * smallest, 0.3 * smallest) * question.rng.random() ** 2
        )


def main() -> None:
    """Prints a line per model, and how many limits were answered wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, default=200)
    parser.add_argument("--planner", default="jvpipe")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    given = parser.parse_args()
    asked, refused, bad = 0, 0, 0
    for name in given.models:
        number = MODELS.index(name)
        stages, schedule = SETTINGS[number % len(SETTINGS)]
        question, before = (
            Question(CASES[name](), stages, schedule, given.planner, random.Random(number)),
            (refused, bad),
        )
        for limit in asked_limits(question, given.limits // len(given.models)):
            wrong = question.wrong(limit)
            asked, bad, refused = (
                asked + 1,
                bad + bool(wrong),
                refused + (limit < min(question.smallest)),
            )
            if wrong:
                print(f"{name}, {stages} stages, {schedule}: {wrong}", flush=True)
        (smallest, *others) = sorted(question.smallest)
        told = f"{smallest:,}" if not others else f"{smallest:,} and others"
        print(
            f"| {name} | {stages}, {schedule} | {told} | {refused - before[0]} | "
            f"{bad - before[1]} |",
            flush=True,
        )
    print(f"{asked} limits, {refused} of them refused, {bad} answered wrongly")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 3)
    main()
