"""Compares bits: python -m experiments.exactness.run [subject ...]"""

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax

MICROBATCHES, STEPS = 4, 3
SEEDS = 2  # of random cuts with random fates, each also migrated to the next


def main() -> None:
    """A row for each subject and type: how many runs, how many of them differ from one stage that
    keeps everything.
    """
    jax.config.update("jax_num_cpu_devices", 2)
    from experiments.exactness.subjects import SUBJECTS, in_bfloat16

    print("| subject | type | layers | candidates | runs | differ | s |")
    print("|---|---|---|---|---|---|---|")
    differing = 0
    for name in sys.argv[1:] or SUBJECTS:
        for dtype in ("float32", "bfloat16"):
            start_s = time.perf_counter()
            subject = SUBJECTS[name]()
            subject = subject if dtype == "float32" else in_bfloat16(subject)
            whole = _Runs(subject)
            wrong = [kind for kind, found in whole.others() if found != whole.expected]
            differing += len(wrong)
            graph = whole.graph
            candidates = sum(len(layer.candidates) for layer in graph.layers)
            taken_s = time.perf_counter() - start_s
            shown = (
                f"{len(graph.layers)} | {candidates} | {whole.count} | {', '.join(wrong) or 0} | "
                f"{taken_s:.0f}"
            )
            print(f"| {name} | {dtype} | {shown} |", flush=True)
    print(f"{differing} runs differ")


class _Runs:
    """A subject on one stage that keeps everything, and in all other ways."""

    def __init__(self, subject: Any) -> None:
        import jvpipe

        self.subject, self.count = subject, 0
        pipe, self.expected = self._trained(1)
        self.graph, self.peak_bytes = pipe.session.graph, pipe.ledger.peak[0]
        self.plan_of = jvpipe.Plan.from_cuts

    def others(self) -> Iterator[tuple[str, bytes]]:
        """The bits of every other run."""
        import jvpipe

        stages = min(2, len(self.graph.layers))
        for fate in ("swap", "recompute"):
            yield fate, self._trained(stages, fates={"*": fate})[1]
        for mode in ("always", "except_last"):
            yield mode, self._trained(stages, checkpoint=mode)[1]
        plans = [self._drawn(seed) for seed in range(SEEDS + 1)]
        for n, (plan, after) in enumerate(pairwise(plans)):
            yield f"random {n}", self._trained(plan)[1]
            yield f"migrated {n}", self._trained(plan, then=after)[1]
        try:
            self._trained(1, memory_limit=1, planner="jvpipe")
        except jvpipe.MemoryLimitExceeded as error:
            least = error.smallest_limit_bytes
            for limit in (least, (least + self.peak_bytes) // 2):
                yield f"limit {limit}", self._trained(1, memory_limit=limit, planner="jvpipe")[1]

    def _drawn(self, seed: int) -> Any:
        """A plan of random cuts in which every candidate, and every tensor that may have one, has a
        random fate.
        """
        draw, graph = random.Random(seed), self.graph
        layers = len(graph.layers)
        ends = sorted(draw.sample(range(1, layers), min(1 + seed % 2, layers - 1)))
        plan = self.plan_of([b - a for a, b in zip([0, *ends], [*ends, layers], strict=True)])
        stages = []
        for stage in plan.stages:
            inside = set(stage.layers)
            own = [graph.layers[i] for i in stage.layers]
            names = [f"{graph.label(layer)}/{c.name}" for layer in own for c in layer.candidates]
            fates = {name: draw.choice(["keep", "swap", "recompute"]) for name in names}
            for tensor in graph.tensors:
                if tensor.producer in inside:
                    fates[tensor.array.name] = draw.choice(["keep", "swap", "recompute"])
            stages.append(replace(stage, fates=fates, devices=(0,)))
        return replace(plan, stages=tuple(stages))

    def _trained(
        self, plan: Any, then: Any = None, planner: str = "even", **options: Any
    ) -> tuple[Any, bytes]:
        """The pipeline after some steps, and the bits of its losses and parameters; after the first
        it may migrate.
        """
        import optax

        import jvpipe

        subject, stages = self.subject, plan if isinstance(plan, int) else len(plan.stages)
        pipe = jvpipe.Pipeline(
            subject.loss_fn,
            optax.adamw(1e-2),
            plan,
            MICROBATCHES,
            "1f1b",
            planner=planner,
            devices=jax.devices()[:1] * max(stages, 3),  # programs are compiled for one device
            **options,
        )
        key = jax.random.key(7) if subject.rng is None else subject.rng
        state = pipe.init(subject.params, subject.batch, key)
        bits = []
        for step in range(STEPS):
            if step == 1 and then is not None:
                state = pipe.migrate(state, then)
            state, metrics = pipe.step(state, subject.batch)
            bits.append(jax.device_get(metrics["loss"]).tobytes())
        self.count += 1
        return pipe, b"".join([*bits, *(x.tobytes() for x in jax.tree.leaves(pipe.params(state)))])


if __name__ == "__main__":
    main()
