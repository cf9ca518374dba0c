"""The answers of a target's compiler about a model's programs,
where they exceed what the roofline counts.

A plan uses few of the programs that its model has, and the compiler was asked about these alone.
Its answer for one way to treat a layer is carried over to the other ways of that layer, by how much
they compute again.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jvpipe.cost.compiling import Sizes
from jvpipe.cost.costs import Option
from jvpipe.cost.model import Work, holders_of
from jvpipe.ir.fates import left_by
from jvpipe.ir.layers import LayerGraph
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import (
    backward_program,
    forward_program,
    input_program,
    partial_inputs,
    piece_program,
    weight_program,
)
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced

Said = Mapping[Hashable, Sizes]
"""The compiler's answers, by the keys of programs."""


def with_said_work(work: Work, programs: LayerPrograms, said: Said) -> Work:
    """Returns the work of a layer with temporaries that are no less than the compiler's.

    Args:
        work: as it is counted, with all candidates kept.
        programs: of the layer.
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
    """Returns the work of a layer with the temporaries of its update.

    Args:
        work: as it is counted.
        graph: the layers.
        layer: whose pieces of the optimizer count.
        optimizer: in pieces.
        said: the compiler's answers.
    """
    holders = holders_of(graph, layer)
    pieces = [piece for piece in optimizer.update if piece.layer in holders]
    programs = [piece_program(piece, keeps=keeps) for piece in pieces for keeps in (False, True)]
    said_bytes = _largest(said, *programs) or 0
    largest = max(work.update_temporary_bytes, said_bytes)
    return replace(work, update_temporary_bytes=largest)


def with_said_options(
    traced: Traced,
    works: Sequence[Work],
    options: Sequence[Sequence[Option]],
    store: ProgramStore,
    said: Said,
) -> list[tuple[Option, ...]]:
    """Returns the options of all layers, with `extra_bytes` that are no less than the compiler's.

    Args:
        traced: the model.
        works: of each layer, with all candidates kept.
        options: of each layer, the first of which keeps everything.
        store: where programs are kept.
        said: the compiler's answers.
    """
    layers = []
    of_layers = zip(traced.graph.layers, traced.bodies, works, options, strict=True)
    for layer, body, work, of_layer in of_layers:
        partial = partial_inputs(traced.graph, layer)
        # The compiler's extra bytes by the modelled ones: several options may share these.
        said_bytes: dict[int, int] = {0: 0}
        extras: list[int | None] = []
        for option in of_layer:
            kept = left_by(
                traced.graph,
                layer,
                option.fates,
                lambda info: info.saved,
            )
            programs = store.known_layer(body, kept, partial)
            extra = None if programs is None else _extra_bytes(said, programs, work)
            extras.append(extra)
            if extra is not None:
                modelled = option.extra_bytes
                said_bytes[modelled] = max(said_bytes.get(modelled, 0), extra)
        pairs = zip(of_layer, extras, strict=True)
        # Only now are the bytes of all options known that share modelled ones.
        layers.append(tuple(_with_extra(option, extra, said_bytes) for option, extra in pairs))
    return layers


def _extra_bytes(said: Said, programs: LayerPrograms, work: Work) -> int | None:
    """Counts the bytes that an option's programs need beyond those that keep everything.

    Returns:
        None if the compiler was asked about none of them.
    """
    halves = (input_program, weight_program) if programs.halves is not None else ()
    backwards = [backward_program(programs), *(half(programs) for half in halves)]
    forward = _largest(said, forward_program(programs))
    backward = _largest(said, *backwards)
    if forward is None and backward is None:
        return None
    # The forward may use what is set aside for the backward: they never run at once.
    set_aside = max(work.forward_temporary_bytes, work.backward_temporary_bytes)
    more_backward = (backward or 0) - work.backward_temporary_bytes
    more_forward = (forward or 0) - set_aside
    return max(0, more_backward, more_forward)


def _with_extra(option: Option, said: int | None, said_bytes: Mapping[int, int]) -> Option:
    """Returns an option with the compiler's bytes, or those of options that compute about as much
    again.

    Args:
        option: as it is modelled.
        said: the compiler's extra bytes for it, if it was asked.
        said_bytes: the compiler's extra bytes by the modelled ones, for options of the same layer.
    """
    if said is not None:
        return replace(option, extra_bytes=max(option.extra_bytes, said))
    modelled = sorted(said_bytes)
    excesses = [said_bytes[size] - size for size in modelled]
    excess = float(np.interp(option.extra_bytes, np.array(modelled), np.array(excesses)))
    return replace(option, extra_bytes=option.extra_bytes + max(0, round(excess)))


def _largest(said: Said, *programs: Program) -> int | None:
    """Returns the largest temporaries of some programs; None if the compiler answered for none."""
    answers = [said[program.key].temporary for program in programs if program.key in said]
    return max(answers, default=None)
