"""What it costs to recompute whole layers by their own forward programs, by the compiler of
hardware that is not here.

    python -m experiments.compiled_bits.whole bert:tiny,resnet:tiny h100,v5e float32,bfloat16 [FOLDER]

wants `jvpipe[aot-cuda]` or `jvpipe[aot-tpu]`. FOLDER (compiled_bits) keeps what was compiled. A layer
that is recomputed runs these programs, with `whole_layers` and without:

    whole     F that keeps all, the same F again, B for which all is kept
    inside    F that keeps nothing, B that recomputes what it reads

The table has the kernels and the bytes of the first line over those of the second, summed over all
layers. It also has how many pairs of programs (F, B) each layer has under random fates.
"""

import os
import random
import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax

from experiments.compiled_bits.kernels import Kernel
from experiments.compiled_bits.layers import Asked, traced
from jvpipe.cost.targets import find_target
from jvpipe.ir.fates import Fates
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Fate, Plan
from jvpipe.programs.model_programs import backward_program, forward_program, layer_programs
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.graph import Traced

DRAWS = 20


def random_plan(graph: LayerGraph, seed: int) -> Plan:
    """Draws a fate for each candidate of the layers, in a plan of one stage."""
    draw = random.Random(seed)
    plan = Plan.from_cuts([len(graph.layers)])
    names = [f"{graph.label(layer)}/{c.name}" for layer in graph.layers for c in layer.candidates]
    fates = {name: draw.choice(list(Fate)) for name in names}
    return replace(plan, stages=(replace(plan.stages[0], fates=fates),))


def most_programs(model: Traced, draws: int = DRAWS) -> int:
    """Counts the pairs of programs of each layer under random fates; returns the largest count."""
    store = ProgramStore()
    pairs = [set[Hashable]() for _ in model.graph.layers]
    for seed in range(draws):
        fates = Fates.of(model.graph, random_plan(model.graph, seed))
        for of_layer, programs in zip(pairs, layer_programs(store, model, fates), strict=True):
            of_layer.add(programs.key)
    return max(map(len, pairs))


def row(model: str, target: str, dtype: str, folder: Path) -> str:
    """A line of the table."""
    name, _, size = model.partition(":")
    inside = traced(name, size, dtype)
    whole = replace(inside, graph=replace(inside.graph, whole_layers=True))
    asked, store = Asked(find_target(target), folder), ProgramStore()
    again: list[Kernel] = []
    within: list[Kernel] = []
    pairs = zip(layer_programs(store, whole), layer_programs(store, whole, "nothing"), strict=True)
    for keeps, drops in pairs:
        forward = asked.kernels(forward_program(keeps))
        again += [*forward, *forward, *asked.kernels(backward_program(keeps))]
        within += asked.kernels(forward_program(drops))
        within += asked.kernels(backward_program(drops))
    shown = [name, size, target, dtype, len(whole.graph.layers)]
    shown += [most_programs(inside), most_programs(whole)]
    shown += [f"{len(again) / len(within):.3f}", f"{moved(again) / moved(within):.3f}"]
    return f"| {' | '.join(map(str, shown))} |"


def moved(kernels: Sequence[Kernel]) -> int:
    """Counts the bytes that kernels read and write."""
    return sum(kernel.bytes for kernel in kernels)


def main(models: str, targets: str, dtypes: str, folder: str = "compiled_bits") -> None:
    """Prints the table, cell by cell."""
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    print(
        "| model | size | target | type | layers | programs, inside | whole | kernels | bytes |\n|"
        + "---|" * 9
    )
    for model, target, dtype in product(models.split(","), targets.split(","), dtypes.split(",")):
        print(row(model, target, dtype, Path(folder)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
