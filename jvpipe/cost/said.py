"""What a target's compiler has said of a model's programs, where that is more than the roofline counts.

A plan uses few of the programs that its model has; of those the compiler was asked. What it has said of one way to
treat a layer is taken for a word on the others of that layer too, by how much they compute again.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jvpipe.cost.compiling import Sizes
from jvpipe.cost.costs import Option
from jvpipe.cost.model import Work
from jvpipe.ir.fates import left_by
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import (
    backward_program,
    forward_program,
    input_program,
    piece_program,
    weight_program,
)
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced

Said = Mapping[Hashable, Sizes]
"""What the compiler has said, by the keys of programs."""


def with_said_work(work: Work, programs: LayerPrograms, said: Said) -> Work:
    """The work of a layer with all candidates kept, its temporaries no less than the compiler says.

    Args:
        work: as it is counted.
        programs: of the layer.
        said: by the compiler.
    """
    forward, backward = forward_program(programs), backward_program(programs)
    return replace(
        work,
        forward_temporary_bytes=max(work.forward_temporary_bytes, *_temporaries(said, forward)),
        backward_temporary_bytes=max(work.backward_temporary_bytes, *_temporaries(said, backward)),
    )


def with_said_updates(
    work: Work, layer: int, loss: int, optimizer: OptimizerCut, said: Said
) -> Work:
    """The work of a layer, with the temporaries of its update.

    Args:
        work: as it is counted.
        layer: whose pieces of the optimizer count.
        loss: the layer of the loss, beside which the optimizer's global program runs.
        optimizer: in pieces.
        said: by the compiler.
    """
    holders = (layer, None) if layer == loss else (layer,)
    pieces = [piece for piece in optimizer.update if piece.layer in holders]
    programs = [piece_program(piece, keeps=keeps) for piece in pieces for keeps in (False, True)]
    largest = max(work.update_temporary_bytes, *_temporaries(said, *programs))
    return replace(work, update_temporary_bytes=largest)


def with_said_options(
    traced: Traced,
    works: Sequence[Work],
    options: Sequence[Sequence[Option]],
    store: ProgramStore,
    said: Said,
) -> list[tuple[Option, ...]]:
    """The options of all layers, with no fewer `extra_bytes` than the compiler says.

    Args:
        traced: the model.
        works: of each layer, with all candidates kept.
        options: of each layer, the first of which keeps everything.
        store: where programs are kept.
        said: by the compiler.
    """
    layers = []
    for layer, body, work, programs_of_layer in zip(
        traced.graph.layers, traced.bodies, works, options, strict=True
    ):
        later = [
            t
            for t in layer.reading(ValueKind.TENSOR)
            if traced.graph.tensors[t].readers[-1] != layer.id
        ]
        said_bytes: dict[int, int] = {0: 0}
        extra: list[int | None] = []
        for option in programs_of_layer:
            kept = left_by(traced.graph, layer, option.fates, lambda info: info.saved)
            programs = store.known_layer(body, kept, later)
            largest = None if programs is None else _most(said, programs, work)
            extra.append(largest)
            if largest is not None:
                said_bytes[option.extra_bytes] = max(said_bytes.get(option.extra_bytes, 0), largest)
        layers.append(
            tuple(
                _with_extra(option, x, said_bytes)
                for option, x in zip(programs_of_layer, extra, strict=True)
            )
        )
    return layers


def _most(said: Said, programs: LayerPrograms, work: Work) -> int | None:
    """By how much a layer's programs need more than those that keep everything; None if nobody has said."""
    halves = (input_program, weight_program) if programs.halves is not None else ()
    backwards = [backward_program(programs), *(half(programs) for half in halves)]
    forward = _temporaries(said, forward_program(programs))
    backward = _temporaries(said, *backwards)
    if not forward[1:] and not backward[1:]:
        return None
    return max(
        0,
        max(backward) - work.backward_temporary_bytes,
        max(forward) - max(work.forward_temporary_bytes, work.backward_temporary_bytes),
    )


def _with_extra(option: Option, said: int | None, said_bytes: Mapping[int, int]) -> Option:
    """Returns an option with the compiler's bytes for it, or for options that compute about as much again."""
    if said is not None:
        return replace(option, extra_bytes=max(option.extra_bytes, said))
    modelled = np.array(sorted(said_bytes))
    more = np.array([said_bytes[x] - x for x in sorted(said_bytes)])
    excess = float(np.interp(option.extra_bytes, modelled, more))
    return replace(option, extra_bytes=option.extra_bytes + max(0, round(excess)))


def _temporaries(said: Said, *programs: Program) -> list[int]:
    """The temporaries of those of some programs of which the compiler has told, after a nought."""
    return [0, *_told(said, programs)]


def _told(said: Said, programs: Sequence[Program]) -> Iterator[int]:
    return (said[program.key].temporary for program in programs if program.key in said)
