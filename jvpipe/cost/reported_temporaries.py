"""Increases the modeled temporary bytes of layers to what a target's compiler reports.

A target is a device that programs are compiled for, whether it is here or not. A layer's work
has the seconds and temporary bytes of its programs if all candidates are kept. Temporary bytes
are what a program needs besides its inputs and results. An option of a layer is a way to treat
what its forward leaves: values are kept, swapped or recomputed. Extra bytes are what an option
needs beyond the temporary bytes of the work. As modeled, they are the bytes of the values that
the option recomputes.

A layer has many options, each with programs of its own. But a plan uses one option per layer,
and the compiler was only asked about the programs of plans. So some options have an answer of
the compiler, and others do not. The excess of an answer (the compiler's extra bytes minus the
modeled ones) is interpolated for the other options, as a function of the modeled extra bytes.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jvpipe.cost.compiled import option_programs
from jvpipe.cost.compiling import Sizes
from jvpipe.cost.costs import Option
from jvpipe.cost.model_costs import Work, holders_of
from jvpipe.ir.layers import LayerGraph
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import (
    backward_program,
    forward_program,
    input_program,
    piece_program,
    weight_program,
)
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced

Said = Mapping[Hashable, Sizes]
"""The compiler's answers, by the keys of programs."""


def with_said_work(work: Work, programs: LayerPrograms, said: Said) -> Work:
    """Returns a layer's work, with temporary bytes increased to the compiler's if it reports more.

    Args:
        work: the modeled work, with all candidates kept.
        programs: the programs of the layer that keep all candidates.
        said: the compiler's answers.
    """
    forward = _largest(said, forward_program(programs)) or 0
    backward = _largest(said, backward_program(programs)) or 0
    return replace(
        work,
        forward_temporary_bytes=max(work.forward_temporary_bytes, forward),
        backward_temporary_bytes=max(work.backward_temporary_bytes, backward),
    )


def with_said_updates(
    work: Work,
    graph: LayerGraph,
    layer: int,
    optimizer: OptimizerCut,
    said: Said,
) -> Work:
    """Returns a layer's work, with its update's temporary bytes increased to the compiler's.

    The update's bytes stay as they are if the compiler reports fewer, or was not asked.

    Args:
        work: the modeled work.
        graph: the layers.
        layer: the number of the layer.
        optimizer: the optimizer, cut into pieces.
        said: the compiler's answers.
    """
    holders = holders_of(graph, layer)
    pieces = [piece for piece in optimizer.update if piece.layer in holders]
    programs = [piece_program(piece, keeps=keeps) for piece in pieces for keeps in (False, True)]
    said_bytes = _largest(said, *programs) or 0
    return replace(work, update_temporary_bytes=max(work.update_temporary_bytes, said_bytes))


def with_said_options(
    traced: Traced,
    works: Sequence[Work],
    options: Sequence[Sequence[Option]],
    store: ProgramStore,
    said: Said,
) -> list[tuple[Option, ...]]:
    """Returns the options of all layers, with `extra_bytes` increased to the compiler's if larger.

    Options that the compiler was not asked about get interpolated bytes (`_with_extra`).

    Args:
        traced: the model.
        works: by layer, its work with all candidates kept.
        options: by layer, its options, the first of which keeps everything.
        store: the store with the programs that the compiler was asked about.
        said: the compiler's answers.
    """
    layers = []
    every = option_programs(traced, options, store.known_layer)
    for work, of_layer, programs in zip(works, options, every, strict=True):
        extras = [_extra_bytes(said, of_option, work) for of_option in programs]
        pairs = list(zip(of_layer, extras, strict=True))
        # Maps modeled extra bytes to the compiler's. If several options have equal modeled
        # bytes, the largest answer counts. The first entry is the option that keeps
        # everything: extra bytes are counted beyond this option, so it has 0 modeled and 0
        # compiled ones.
        said_bytes = {0: 0}
        for option, extra in pairs:
            if extra is not None:
                modeled = option.extra_bytes
                said_bytes[modeled] = max(said_bytes.get(modeled, 0), extra)
        # Each option depends on the answers for all others, so options are changed only now.
        layers.append(tuple(_with_extra(option, extra, said_bytes) for option, extra in pairs))
    return layers


def _extra_bytes(said: Said, programs: LayerPrograms | None, work: Work) -> int | None:
    """Counts the bytes that an option's programs need beyond the programs that keep everything.

    Returns:
        The bytes; None if the compiler was asked about none of the option's programs, for example
        because they were never made.
    """
    if programs is None:
        return None
    backwards = [backward_program(programs)]
    if programs.halves is not None:
        backwards += [input_program(programs), weight_program(programs)]
    forward = _largest(said, forward_program(programs))
    backward = _largest(said, *backwards)
    if forward is None and backward is None:
        return None
    # A layer's forward and backward never run at once, so a plan sets aside the larger of their
    # bytes. So a forward needs extra bytes only if it needs more than this larger number.
    set_aside = max(work.forward_temporary_bytes, work.backward_temporary_bytes)
    more_backward = (backward or 0) - work.backward_temporary_bytes
    more_forward = (forward or 0) - set_aside
    return max(0, more_backward, more_forward)


def _with_extra(option: Option, said: int | None, said_bytes: Mapping[int, int]) -> Option:
    """Returns an option with the compiler's extra bytes, or with interpolated ones.

    The interpolation is described at the top of this file.

    Args:
        option: the modeled option.
        said: the compiler's extra bytes for it; None if the compiler was not asked about it.
        said_bytes: for options of the same layer, a mapping from modeled extra bytes to the
            compiler's.
    """
    if said is not None:
        return replace(option, extra_bytes=max(option.extra_bytes, said))
    modeled = sorted(said_bytes)
    excesses = [said_bytes[size] - size for size in modeled]
    excess = float(np.interp(option.extra_bytes, modeled, excesses))
    return replace(option, extra_bytes=option.extra_bytes + max(0, round(excess)))


def _largest(said: Said, *programs: Program) -> int | None:
    """Returns the most temporary bytes of several programs; None if none of them has an answer."""
    answers = [said[program.key].temp_size_in_bytes for program in programs if program.key in said]
    return max(answers, default=None)
