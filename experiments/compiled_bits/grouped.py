"""Which kernels layers have in a group, and which alone, by the compiler of hardware that is not
here.

    python -m experiments.compiled_bits.grouped bert:tiny h100,v5e [FOLDER]

wants `jvpipe[aot-cuda]` or `jvpipe[aot-tpu]`. The model is cut into two stages; each group of rows
is compiled whole and part by part. A group is alike if its sums (products, convolutions,
reductions) are those of its parts, all of these and no others. What was compiled lies in FOLDER
(compiled_bits): a second run takes seconds.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax

import jvpipe
from experiments.compiled_bits.kernels import Kernel
from experiments.compiled_bits.layers import EXAMPLES, Asked, results
from jvpipe.cost.targets import find_target
from jvpipe.ir.kinds import Kind
from jvpipe.lowering.group import grouped
from jvpipe.models import load
from jvpipe.programs.store import Program

STAGES, MICROBATCHES = 2, 2


@dataclass(frozen=True)
class Group:
    """A group as its parts make it, and as one program makes it.

    Attributes:
        name: its stage, its kind and its layers.
        parts: the kernels of the programs of its parts.
        whole: the kernels of its own program.
    """

    name: str
    parts: list[Kernel]
    whole: list[Kernel]

    def sums(self) -> tuple[Counter[str], Counter[str]]:
        """Counts the sums that the parts have and the whole lacks, and the other way round."""
        parts, whole = (Counter(results(x, sums=True)) for x in (self.parts, self.whole))
        return parts - whole, whole - parts

    def row(self) -> str:
        """A line of the table."""
        missing, added = (count.total() for count in self.sums())
        counts = f"{len(self.whole)} / {len(self.parts)}"
        sizes = f"{_bytes(self.whole) / _bytes(self.parts):.3f}"
        every = sum(1 for _ in results(self.parts, sums=True))
        return f"| {self.name} | {every} | {missing}, {added} | {counts} | {sizes} |"


def _bytes(program: Iterable[Kernel]) -> int:
    return sum(kernel.bytes for kernel in program)


def programs(model: str, size: str) -> Iterator[tuple[str, Program, list[Program]]]:
    """Yields each distinct group of a model's forwards and backwards: its name, its program, those
    of its parts.
    """
    workload = load(model, size)
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        optax.sgd(0.1),
        STAGES,
        MICROBATCHES,
        planner="even",
        group=False,
        has_aux=workload.has_aux,
        has_state=workload.has_state,
    )
    shapes = workload.abstract_batch(EXAMPLES * MICROBATCHES)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    pipe.init(workload.init, batch, jax.random.key(0), workload.initial_state())
    compiled = pipe.session.compiled
    lowered, seen = grouped(compiled.lowered), set()
    for row in lowered.rows:
        if row.kind not in (Kind.F, Kind.B) or len(row.parts) < 2:
            continue
        whole = compiled.row_programs.program(lowered, row)
        if whole.key not in seen:
            seen.add(whole.key)
            parts = [compiled.row_programs.program(lowered, part) for part in row.parts]
            yield str(row), whole, parts


def groups(model: str, size: str, asked: Asked) -> Iterator[Group]:
    """Compiles each group of a model whole and part by part."""
    for name, whole, parts in programs(model, size):
        apart = [kernel for part in parts for kernel in asked.kernels(part)]
        yield Group(name, apart, asked.kernels(whole))


def main(model: str, targets: str, folder: str = "compiled_bits") -> None:
    """Prints the table, group by group."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    name, _, size = model.partition(":")
    print("| target | group | sums | missing, added | kernels: whole / parts | bytes |")
    print("|---|---|---|---|---|---|")
    for target in targets.split(","):
        for group in groups(name, size, Asked(find_target(target), Path(folder))):
            print(f"| {target} {group.row()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
