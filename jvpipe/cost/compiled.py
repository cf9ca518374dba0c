"""The temporary bytes of backwards as the compiler reports them: its layouts cannot be modelled.

A backward that recomputes half of its layer may need more than one that recomputes all of it, or as
much as one that is given everything. So each option's backward is compiled; none is run.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from jvpipe._jax import Device
from jvpipe.cost.costs import Option
from jvpipe.ir.fates import left_by
from jvpipe.programs.model import backward_program, partial_inputs
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced


def with_compiled_bytes(
    traced: Traced,
    options: Sequence[Sequence[Option]],
    alike: Sequence[Hashable],
    store: ProgramStore,
    device: Device,
) -> list[tuple[Option, ...]]:
    """Returns the options of all layers with `extra_bytes` as compiled.

    Args:
        traced: the model.
        options: of each layer, the first of which keeps everything.
        alike: a key per layer, equal for layers with the same programs: these are compiled once.
        store: where the programs are kept.
        device: what they are compiled for.
    """
    program_of: dict[tuple[Hashable, frozenset[str]], Program] = {}
    backwards: list[list[Program]] = []
    layers = zip(traced.graph.layers, traced.bodies, options, alike, strict=True)
    for layer, body, of_layer, key in layers:
        partial = partial_inputs(traced.graph, layer)
        backwards.append([])
        for option in of_layer:
            kept = left_by(
                traced.graph,
                layer,
                option.fates,
                lambda info: info.saved,
            )
            if (key, kept) not in program_of:
                programs = store.layer(body, sorted(kept), partial)
                program_of[key, kept] = backward_program(programs)
            backwards[-1].append(program_of[key, kept])
    # All at once: the store compiles side by side.
    distinct = {program.key: program for program in program_of.values()}
    executables = store.compile([(program, device) for program in distinct.values()])
    temporary: dict[Hashable, int] = {}
    for key, executable in zip(distinct, executables, strict=True):
        temporary[key] = executable.memory_analysis().temp_size_in_bytes
    compiled = []
    for of_layer, programs in zip(options, backwards, strict=True):
        least, *others = (temporary[program.key] for program in programs)
        # The first option's temporaries are the layer's own; the others add to them.
        with_bytes = [of_layer[0]]
        for option, size in zip(of_layer[1:], others, strict=True):
            with_bytes.append(replace(option, extra_bytes=max(size - least, 0)))
        compiled.append(tuple(with_bytes))
    return compiled
