"""Finds the temporary bytes of every option's backward, by compiling it.

An option of a layer says which values the layer's backward recomputes. The temporary bytes
cannot be derived from the sizes of these values. For example, recomputing half of a layer may
need more temporary bytes than recomputing all of it. So each backward is compiled, and the
compiler reports its bytes. No backward is run.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from jvpipe.cost.costs import Option
from jvpipe.ir.fates import left_by
from jvpipe.programs.model_programs import backward_program, partial_inputs
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device


def with_compiled_bytes(
    traced: Traced,
    options: Sequence[Sequence[Option]],
    alike: Sequence[Hashable],
    store: ProgramStore,
    device: Device,
) -> list[tuple[Option, ...]]:
    """Returns the options of all layers, with `extra_bytes` as the compiler reports them.

    Args:
        traced: the model.
        options: by layer, its options, the first of which keeps everything.
        alike: by layer, a key that is equal for layers with the same programs, which are compiled
            once.
        store: the store that compiles the programs.
        device: the device that the programs are compiled for.
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
    # All are compiled in one call, because the store compiles the programs of a call side by side.
    distinct = {program.key: program for program in program_of.values()}
    executables = store.compile([(program, device) for program in distinct.values()])
    temporary: dict[Hashable, int] = {}
    for key, executable in zip(distinct, executables, strict=True):
        temporary[key] = executable.memory_analysis().temp_size_in_bytes
    compiled = []
    for of_layer, programs in zip(options, backwards, strict=True):
        # The temporary bytes of the first option, which keeps everything, are part of the layer's
        # own cost. So `extra_bytes` is what an option needs beyond them: 0 for the first option.
        least = temporary[programs[0].key]
        with_bytes = []
        for option, program in zip(of_layer, programs, strict=True):
            extra = max(temporary[program.key] - least, 0)
            with_bytes.append(replace(option, extra_bytes=extra))
        compiled.append(tuple(with_bytes))
    return compiled
