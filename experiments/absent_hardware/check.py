"""The compiled bytes of plans, summed once more without jvpipe's child, its count of peaks or its
reading of tiles.

    python -m experiments.absent_hardware.check bert:mini h100 2

JAX itself compiles each program for a device of the topology; `memory_analysis` tells its
temporaries, the layouts of its arguments and results what each array takes. The rows of the step
are then walked with a set of what is alive.
"""

import math
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from experiments.absent_hardware.table import forecast
from jvpipe._jax import absent_device
from jvpipe.cli.job import keep_compiled, stay_on_cpus
from jvpipe.cost.targets import find_target
from jvpipe.programs.store import ProgramStore
from jvpipe.session.question import Question


def array_bytes(shape: tuple[int, ...], dtype: Any, layout: Any) -> int:
    """The bytes of an array: the last dimensions of its layout are filled up to the first tile."""
    laid = [shape[i] for i in layout.major_to_minor]
    tile = (layout.tiling or [()])[0]
    laid = [1] * (len(tile) - len(laid)) + laid
    for back, whole in enumerate(reversed(tile), 1):
        laid[-back] = math.ceil(laid[-back] / whole) * whole
    return math.prod(laid) * np.dtype(dtype).itemsize


def summed(question: Question, found: Any, name: str) -> list[int]:
    """The most that each device holds, by the compiler's numbers and the rows alone."""
    target = find_target(name)
    device = absent_device(target.platform, target.topology, target.config)
    plan = question.compiled(found.plan, ProgramStore())
    bound = replace(plan, devices=(device,) * len(plan.devices)).step
    sizes = {b: x.bytes for b, x in enumerate(bound.lowered.buffers)}
    for it in bound.instructions:
        run: Any = it.run
        if not hasattr(run, "input_formats") or target.platform != "tpu":
            continue
        formats, _ = run.input_formats
        arrays = [*zip(it.row.reads, run.in_avals[0], formats, strict=True)]
        arrays += zip(it.row.writes, run.out_avals, run.output_formats, strict=False)
        for b, aval, laid in arrays:
            sizes[b] = max(sizes[b], array_bytes(aval.shape, aval.dtype, laid.layout))
    places = [x.memory for x in bound.lowered.buffers]
    alive, most = set(range(bound.lowered.persistent)), Counter[int]()
    for it in bound.instructions:
        alive.update(it.row.writes)
        held = Counter[int]()
        for b in alive:
            held[places[b]] += sizes[b]
        program: Any = it.run
        if hasattr(program, "memory_analysis"):
            held[it.row.place] += program.memory_analysis().temp_size_in_bytes
        most |= held
        alive.difference_update(it.row.frees)
    return [most[place] for place in range(len(plan.devices))]


def main(model: str, hardware: str, stages: str) -> None:
    """Prints both sums for each stage."""
    stay_on_cpus()
    keep_compiled()
    jax.config.update("jax_enable_compilation_cache", False)
    found = forecast(model, hardware, int(stages))
    assert found.question
    question = replace(found.question, microbatches=found.microbatches)
    ours = [stage.compiled_bytes for stage in found.answers[0].compiled]
    theirs = summed(question, found, found.answers[0].compiled[0].target)
    print(model, hardware, stages, ours, theirs, "the same" if ours == theirs else "DIFFERENT")


if __name__ == "__main__":
    main(*sys.argv[1:])
