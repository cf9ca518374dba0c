"""Temporaries of a model's programs, as counted and as compiled; each distinct layer keeps
everything.

    python -m experiments.absent_hardware.programs bert:large h100
    python -m experiments.absent_hardware.programs bert:large h100 4 3 B  # layer 3's backward: its equations

wants `jvpipe[aot-cuda]` or `jvpipe[aot-tpu]`. A cell of the table takes minutes, this seconds.
"""

import sys

import jax

from experiments.absent_hardware.table import MIB, planned
from jvpipe.cli.job import keep_compiled, stay_on_cpus
from jvpipe.cost.archive import Archive
from jvpipe.cost.compiling import compiler_of
from jvpipe.cost.target_store import TargetStore
from jvpipe.cost.targets import target_of
from jvpipe.cost.temporaries import temporary_bytes
from jvpipe.programs.model_programs import backward_program, forward_program, layer_programs
from jvpipe.programs.store import shared_store


def main(model: str, hardware: str, stages: str = "2", layer: str = "", kind: str = "") -> None:
    """Prints a line for each distinct program, or the equations of one."""
    stay_on_cpus()
    keep_compiled()
    found = planned(model, hardware, int(stages), planner="even")
    assert found.question
    assert found.problem.cluster
    device = found.problem.cluster.device
    programs = layer_programs(shared_store(), found.question.trace().traced)
    if layer:
        own = programs[int(layer)]
        print(own.forward if kind == "F" else own.backward)
        return
    compiler = compiler_of(target_of(device), Archive.beside_the_cache().folder)
    store = TargetStore(compiler, shared_store())
    firsts = {of_layer.key: number for number, of_layer in reversed([*enumerate(programs)])}
    for number in sorted(firsts.values()):
        own = programs[number]
        each = ("F", own.forward, forward_program), ("B", own.backward, backward_program)
        for name, closed, program in each:
            counted = temporary_bytes(closed, device)
            (absent,) = store.compile([(program(own), jax.devices()[0])])
            compiled = absent.temp_size_in_bytes
            print(f"{number:3} {name} {counted / MIB:9.1f} {compiled / MIB:9.1f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
