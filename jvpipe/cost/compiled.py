"""The temporary bytes of backwards, told by the compiler: how it lays values out cannot be modelled.

A backward that recomputes half of its layer may need more than one that recomputes all of it, or as much as one that
is given everything.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from jvpipe._jax import Device
from jvpipe.cost.costs import Option
from jvpipe.ir.fates import left_by
from jvpipe.ir.values import ValueKind
from jvpipe.programs.model import backward_program
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced


def with_compiled_bytes(
    traced: Traced,
    options: Sequence[Sequence[Option]],
    alike: Sequence[Hashable],
    store: ProgramStore,
    device: Device,
) -> list[tuple[Option, ...]]:
    """The options of all layers with `extra_bytes` as compiled; nothing is run, backwards alike are compiled once.

    Args:
        traced: the model.
        options: of each layer, the first of which keeps everything.
        alike: of each layer, what is equal for layers with the same programs.
        store: where the programs are kept.
        device: what they are compiled for.
    """
    program_of: dict[tuple[Hashable, frozenset[str]], Program] = {}
    backwards: list[list[Program]] = []
    for layer, body, costs_of_layer, like in zip(
        traced.graph.layers, traced.bodies, options, alike, strict=True
    ):
        later = [
            t
            for t in layer.reading(ValueKind.TENSOR)
            if traced.graph.tensors[t].readers[-1] != layer.id
        ]
        backwards.append([])
        for option in costs_of_layer:
            kept = left_by(traced.graph, layer, option.fates, lambda info: info.saved)
            if (like, kept) not in program_of:
                program_of[like, kept] = backward_program(store.layer(body, sorted(kept), later))
            backwards[-1].append(program_of[like, kept])
    distinct = {program.key: program for program in program_of.values()}
    executables = store.compile([(program, device) for program in distinct.values()])
    temporary = {
        key: executable.memory_analysis().temp_size_in_bytes
        for key, executable in zip(distinct, executables, strict=True)
    }
    compiled = []
    for costs_of_layer, programs in zip(options, backwards, strict=True):
        least, *more = (temporary[program.key] for program in programs)
        pairs = zip(costs_of_layer[1:], more, strict=True)
        compiled.append(
            (costs_of_layer[0], *(replace(o, extra_bytes=max(b - least, 0)) for o, b in pairs))
        )
    return compiled
