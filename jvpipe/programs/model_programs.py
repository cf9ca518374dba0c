"""The programs of a model's layers and of its optimizer, ready to be compiled."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe.ir.fates import Fates
from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms, inference, program_key
from jvpipe.programs.pieces import Piece, SlotKind
from jvpipe.programs.split_backward import Halves
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.body import Body
from jvpipe.trace.graph import Traced

Share = Literal["all", "half", "nothing"]


def layer_programs(
    store: ProgramStore,
    traced: Traced,
    share: Share | Fates = "all",
) -> tuple[LayerPrograms, ...]:
    """Returns the forward and the backward of every layer.

    Args:
        store: makes and stores the programs.
        traced: the model.
        share: the share of its candidates that each layer's forward keeps, or the fates of a plan,
            which name the candidates to keep.
    """
    layers = range(len(traced.graph.layers))
    return tuple(programs_of(store, traced, layer, share) for layer in layers)


def programs_of(
    store: ProgramStore,
    traced: Traced,
    number: int,
    share: Share | Fates = "all",
) -> LayerPrograms:
    """Returns the forward and the backward of one layer.

    Args:
        store: makes and stores the programs.
        traced: the model.
        number: the number of the layer.
        share: as for `layer_programs`.
    """
    layer = traced.graph.layers[number]
    body = traced.bodies[number]
    if isinstance(share, Fates):
        kept = sorted(share.kept[number])
    else:
        kept = kept_names([c.name for c in layer.candidates], share)
    return store.layer(body, kept, partial_inputs(traced.graph, layer))


def partial_inputs(graph: LayerGraph, layer: Layer) -> list[int]:
    """Returns the ids of the tensors that both a layer and a later layer read.

    The cotangents of a tensor are summed from its last reader to its first. So every reader except
    the last adds to a partial sum.
    """
    read = layer.reading(ValueKind.TENSOR)
    return [t for t in read if graph.tensors[t].readers[-1] != layer.id]


def kept_names(names: Sequence[str], share: Share) -> Sequence[str]:
    """Returns the names of the candidates to keep; "half" keeps every other candidate.

    >>> kept_names(["a", "b", "c"], "half")
    ['a', 'c']
    """
    return {"all": names, "half": names[::2], "nothing": names[:0]}[share]


def forward_program(programs: LayerPrograms, *, recompute: bool = False) -> Program:
    """Returns a layer's forward; `recompute` leaves out the `jax.debug` calls, which ran before."""
    if recompute and programs.recompute is not programs.forward:
        return Program.of(programs.recompute, key=("F again", programs.key))
    return Program.of(programs.forward, key=("F", programs.key))


def evaluation_program(body: Body) -> Program:
    """Returns a layer's forward for evaluation, which yields no residuals."""
    closed = inference(body)
    return Program.of(closed, key=("E", program_key(closed)))


def backward_program(programs: LayerPrograms) -> Program:
    """Returns a layer's backward, which adds in place to the sums that it takes."""
    signature = programs.signature
    first = len(signature.sources) + len(signature.cotangents)
    count = len(signature.partial) + len(signature.gradients)
    donated = range(first, first + count)
    return Program.of(programs.backward, donated, key=("B", programs.key))


def input_program(programs: LayerPrograms) -> Program:
    """Returns the half of a layer's backward that yields cotangents.

    The program adds in place to the partial sums that it takes.
    """
    halves = _halves(programs)
    signature = halves.signature.input
    first = len(signature.sources) + len(signature.cotangents)
    donated = range(first, first + len(signature.partial))
    return Program.of(halves.input, donated, key=("I", programs.key))


def weight_program(programs: LayerPrograms) -> Program:
    """Returns the half of a layer's backward that yields gradients.

    The program adds in place to the accumulators that it takes.
    """
    halves = _halves(programs)
    count = len(halves.weight.in_avals)
    donated = range(count - len(halves.signature.weight.gradients), count)
    return Program.of(halves.weight, donated, key=("W", programs.key))


def _halves(programs: LayerPrograms) -> Halves:
    assert programs.halves is not None, "a backward that does not split"
    return programs.halves


def single_backward_program(programs: LayerPrograms) -> Program:
    """Returns a layer's backward for schedules that update after each micro-batch.

    The program takes no accumulators, because there are no earlier gradients to add to.
    """
    signature, avals = programs.signature, programs.backward.in_avals
    taken = len(avals) - len(signature.gradients)
    run = _jax.jaxpr_as_fun(programs.backward)

    def fn(*arrays: jax.Array) -> tuple[Any, ...]:
        # The same backward runs with zeros as accumulators, so results are bitwise identical.
        zeros = (jnp.zeros(a.shape, a.dtype) for a in avals[taken:])
        return (*run(*arrays, *zeros), jnp.int32(0))

    first = len(signature.sources) + len(signature.cotangents)
    calls_host = backward_program(programs).calls_host
    key = "B alone", programs.key
    return Program(
        key,
        fn,
        tuple(avals[:taken]),
        tuple(range(first, taken)),
        calls_host,
    )


def piece_program(piece: Piece, *, keeps: bool = False) -> Program:
    """Returns the program of a piece of the optimizer.

    With `keeps`, the program does not overwrite its parameters.
    """
    is_kept = [keeps and slot.kind is SlotKind.PARAMETER for slot in piece.reads]
    donated = tuple(i for i in piece.donated if not is_kept[i])
    return Program.of(piece.program, donated, key=("U", piece.key, donated))
