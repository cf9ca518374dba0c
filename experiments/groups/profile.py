"""Where a step of one stage goes on this CPU: seconds of each layer's programs, and of the products
in them alone.

    NPROC=1 python -m experiments.groups.profile [--model transformer] [--group]

A row of the table is a kind of program of one layer, its seconds those of all micro-batches of a
step, as the monitor measures them. Beside them stands how long its products take if each is a
program of its own, on operands that lie as they would like them: what is over is layouts,
transposes, whatever else is computed, sums, and threads that wake.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import jvpipe
from experiments.groups.works import WORKS
from experiments.throughput.data import MICRO_BATCHES
from jvpipe import _jax
from jvpipe.ir.kinds import KINDS

REPEATS = 5


def products(jaxpr: Any) -> Iterator[Any]:
    """Yields the products of a program, those of the functions that it calls, too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in _jax.inner_jaxprs(eqn):
            yield from products(inner)


@cache
def alone_s(shapes: tuple[Any, ...], dimensions: Any) -> float:
    """Seconds of a product in a program of its own, the median of some runs."""
    run = jax.jit(lambda x, y: jax.lax.dot_general(x, y, dimensions))
    operands = [jnp.ones(shape, dtype) for shape, dtype in shapes]
    run(*operands).block_until_ready()
    taken_s = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run(*operands).block_until_ready()
        taken_s.append(time.perf_counter() - start_s)
    return statistics.median(taken_s)


def products_s(program: Any) -> float:
    """Seconds of all products of a program, each alone."""
    total_s = 0.0
    for eqn in products(jax.make_jaxpr(program.fn)(*program.inputs).jaxpr):
        avals = [_jax.aval(atom) for atom in eqn.invars]
        shapes = tuple((aval.shape, aval.dtype) for aval in avals)
        total_s += alone_s(shapes, eqn.params["dimension_numbers"])
    return total_s


def main() -> None:
    """Prints the table, the longest rows first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=WORKS, default="transformer")
    parser.add_argument("--group", action="store_true")
    options = parser.parse_args()
    work = WORKS[options.model]()
    pipe = jvpipe.Pipeline(
        work.loss,
        optax.adamw(1e-3),
        1,
        MICRO_BATCHES,
        planner="even",
        group=options.group,
    )
    state = pipe.init(work.params, work.batch, jax.random.key(0))
    state, _ = pipe.step(state, work.batch)
    pipe.session.monitor()
    taken_s: dict[tuple[str, int], list[float]] = defaultdict(list)  # by kind and layer, per step
    for _ in range(REPEATS):
        state, _ = pipe.step(state, work.batch)
        of_step: dict[tuple[str, int], float] = defaultdict(float)
        for span in pipe.session.measured().spans:
            of_step[span.kind, span.args.get("layer", -1)] += span.end_s - span.start_s
        for key, s in of_step.items():
            taken_s[key].append(s)
    compiled = pipe.session.compiled
    alone: dict[tuple[str, int], float] = defaultdict(float)
    parts = [part for row in compiled.lowered.rows for part in row.parts]
    for part in parts:
        if KINDS[part.kind].computes:
            program = compiled.row_programs.program(compiled.lowered, part)
            alone[part.kind, part.layer] += products_s(program)
    median_s = {key: statistics.median(each) for key, each in taken_s.items()}
    print("| program | layer | ms per step | its products alone |")
    print("|---|---|---|---|")
    for key in sorted(median_s, key=lambda key: -median_s[key]):
        kind, layer = key
        name = compiled.graph.label(compiled.graph.layers[layer]) if layer >= 0 else ""
        print(f"| {kind} | {layer} {name} | {1e3 * median_s[key]:.1f} | {1e3 * alone[key]:.1f} |")
    total_ms = 1e3 * sum(median_s.values())
    print(f"| all | | {total_ms:.1f} | {1e3 * sum(alone.values()):.1f} |")


if __name__ == "__main__":
    main()
