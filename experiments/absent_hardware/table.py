"""Planned and compiled bytes of each stage, for models of some size on hardware that is not here.

    python -m experiments.absent_hardware.table bert:mini,gpt2:mini h100,a100-80gb,v5e 2,4

wants `jvpipe[aot-cuda]` or `jvpipe[aot-tpu]`. Each cell is a line as soon as it is there; what compilers say is kept:
a second run takes seconds. Batches are the models' own, limits what the devices have.
"""

import sys
import time
from collections.abc import Iterator
from itertools import product

import jvpipe
from jvpipe.cli.job import keep_compiled
from jvpipe.cli.own_model import find_model
from jvpipe.ir.compiled_stage import CompiledStage

MIB = 2**20


def cell(model: str, size: str, hardware: str, stages: int) -> jvpipe.Forecast:
    """The plan of a model, signed by the hardware's compiler."""
    workload = find_model(model, size, {})
    return jvpipe.plan_for(**workload.to_plan(), stages=stages, hardware=hardware, compile=True)


def lines(found: jvpipe.Forecast) -> Iterator[str]:
    """What a row of the table says of each stage."""
    for stage in found.answers[0].compiled:
        yield f"{stage.planned_bytes / MIB:.1f} / {stage.compiled_bytes / MIB:.1f} = {ratio(stage):.3f}"


def ratio(stage: CompiledStage) -> float:
    """Planned bytes over compiled ones."""
    return stage.planned_bytes / stage.compiled_bytes


def main(models: str, hardware: str, stages: str) -> None:
    """Prints the table, cell by cell."""
    keep_compiled()
    print(
        "| model | hardware | planned / compiled MiB = ratio, stage by stage | s |\n|---|---|---|---|"
    )
    every = product(models.split(","), hardware.split(","), map(int, stages.split(",")))
    for name, target, count in every:
        start_s = time.perf_counter()
        model, _, size = name.partition(":")
        found = cell(model, size, target, count)
        told = "; ".join(lines(found)) if found.fits else found.why_not()
        seconds = time.perf_counter() - start_s
        print(f"| {name} | {target} | {told} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
