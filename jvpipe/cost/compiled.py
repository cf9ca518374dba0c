"""Finds the programs of every option, and the temporary bytes of their backwards.

An option of a layer says which values the layer's backward recomputes. The temporary bytes
cannot be derived from the sizes of these values. For example, recomputing half of a layer may
need more temporary bytes than recomputing all of it. So each backward is compiled, and the
compiler reports its bytes. No backward is run.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from typing import TypeVar

from jvpipe.cost.costs import Option
from jvpipe.ir.fates import left_by
from jvpipe.programs.model_programs import backward_program, partial_inputs
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.body import Body
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device

T = TypeVar("T")


def option_programs(
    traced: Traced,
    options: Sequence[Sequence[Option]],
    find: Callable[[Body, Collection[str], Collection[int]], T],
) -> list[list[T]]:
    """Returns, for each layer, the programs of each of its options.

    Args:
        traced: the model.
        options: by layer, its options.
        find: a method of a store that returns a layer's programs, such as `ProgramStore.layer`.
    """
    graph = traced.graph
    found: list[list[T]] = []
    for layer, body, of_layer in zip(graph.layers, traced.bodies, options, strict=True):
        partial = partial_inputs(graph, layer)
        found.append([])
        for option in of_layer:
            kept = left_by(graph, layer, option.fates, lambda info: info.saved)
            found[-1].append(find(body, sorted(kept), partial))
    return found


def with_compiled_bytes(
    traced: Traced,
    options: Sequence[Sequence[Option]],
    store: ProgramStore,
    device: Device,
) -> list[tuple[Option, ...]]:
    """Returns the options of all layers, with `extra_bytes` as the compiler reports them.

    Args:
        traced: the model.
        options: by layer, its options, the first of which keeps everything.
        store: the store that compiles the programs.
        device: the device that the programs are compiled for.
    """
    program_of = cache(backward_program)  # because equal layers share an object of programs
    every = chain.from_iterable(option_programs(traced, options, store.layer))
    # All are compiled in one call, because the store compiles the programs of a call side by side.
    executables = store.compile([(program_of(programs), device) for programs in every])
    sizes = (executable.memory_analysis().temp_size_in_bytes for executable in executables)
    compiled = []
    for of_layer in options:
        of_options = list(islice(sizes, len(of_layer)))
        # The temporary bytes of the first option, which keeps everything, are part of the layer's
        # own cost. So `extra_bytes` is what an option needs beyond them: 0 for the first option.
        extras = (max(size - of_options[0], 0) for size in of_options)
        pairs = zip(of_layer, extras, strict=True)
        compiled.append(tuple(replace(option, extra_bytes=extra) for option, extra in pairs))
    return compiled
