"""The programs of all layers of a model."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe.ir.fates import Fates
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms, inference, program_key
from jvpipe.programs.pieces import Piece, SlotKind
from jvpipe.programs.split_backward import Halves
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Body, Traced

Share = Literal["all", "half", "nothing"]


def layer_programs(
    store: ProgramStore, traced: Traced, share: Share | Fates = "all"
) -> tuple[LayerPrograms, ...]:
    """Forward and backward of every layer, with so much of its candidates kept, or what the fates of a plan keep.

    Args:
        store: that may know them already.
        traced: the model.
        share: which candidates are kept.
    """
    return tuple(programs_of(store, traced, layer.id, share) for layer in traced.graph.layers)


def programs_of(
    store: ProgramStore, traced: Traced, number: int, share: Share | Fates = "all"
) -> LayerPrograms:
    """Forward and backward of one layer.

    Args:
        store: where they are kept.
        traced: the model.
        number: the layer.
        share: which candidates are kept.
    """
    layer, body = traced.graph.layers[number], traced.bodies[number]
    later = [
        t for t in layer.reading(ValueKind.TENSOR) if traced.graph.tensors[t].readers[-1] != number
    ]
    names = [c.name for c in layer.candidates]
    kept = sorted(share.kept[number]) if isinstance(share, Fates) else kept_names(names, share)
    return store.layer(body, kept, later)


def kept_names(names: Sequence[str], share: Share) -> Sequence[str]:
    """Picks the candidates of a layer that are kept; half of them is every other one.

    >>> kept_names(["a", "b", "c"], "half")
    ['a', 'c']
    """
    return {"all": names, "half": names[::2], "nothing": names[:0]}[share]


def forward_program(programs: LayerPrograms, *, recompute: bool = False) -> Program:
    """A layer's forward as something to compile; `recompute`: it prints nothing, as one on trial."""
    if recompute and programs.recompute is not programs.forward:
        return Program.of(programs.recompute, marked=True, key=("F again", programs.key))
    return Program.of(programs.forward, marked=True, key=("F", programs.key))


def evaluation_program(body: Body) -> Program:
    """A layer's forward that leaves nothing for a backward."""
    closed = inference(body)
    return Program.of(closed, marked=True, key=("E", program_key(closed)))


def backward_program(programs: LayerPrograms) -> Program:
    """A layer's backward; it adds into the sums that it is given."""
    signature = programs.signature
    first = len(signature.sources) + len(signature.cotangents)
    count = len(signature.partial) + len(signature.gradients)
    return Program.of(
        programs.backward, range(first, first + count), marked=True, key=("B", programs.key)
    )


def input_program(programs: LayerPrograms) -> Program:
    """The half of a layer's backward that yields cotangents; it adds into the partial sums that it is given."""
    halves = _halves(programs)
    signature = halves.signature.input
    first = len(signature.sources) + len(signature.cotangents)
    donated = range(first, first + len(signature.partial))
    return Program.of(halves.input, donated, marked=True, key=("I", programs.key))


def weight_program(programs: LayerPrograms) -> Program:
    """The half of a layer's backward that yields gradients; it adds into the accumulators that it is given."""
    halves = _halves(programs)
    count = len(halves.weight.in_avals)
    donated = range(count - len(halves.signature.weight.gradients), count)
    return Program.of(halves.weight, donated, marked=True, key=("W", programs.key))


def _halves(programs: LayerPrograms) -> Halves:
    assert programs.halves is not None, "a backward that does not split"
    return programs.halves


def single_backward_program(programs: LayerPrograms) -> Program:
    """A layer's backward where every micro-batch is an update of its own: there are no sums to add to."""
    signature, avals = programs.signature, programs.backward.in_avals
    given = len(avals) - len(signature.gradients)
    run = _jax.jaxpr_as_fun(programs.backward)

    def fn(*arrays: jax.Array) -> tuple[Any, ...]:
        zeros = (jnp.zeros(a.shape, a.dtype) for a in avals[given:])
        return (*run(*arrays, *zeros), jnp.int32(0))

    first = len(signature.sources) + len(signature.cotangents)
    called = backward_program(programs).calls_host
    return Program(
        ("B alone", programs.key), fn, tuple(avals[:given]), tuple(range(first, given)), called
    )


def piece_program(piece: Piece, *, keeps: bool = False) -> Program:
    """A piece of the optimizer as something to compile; one that `keeps` does not overwrite its parameters."""
    donated = tuple(
        i for i in piece.donated if not (keeps and piece.reads[i].kind is SlotKind.PARAMETER)
    )
    return Program.of(piece.program, donated, marked=True, key=("U", piece.key, donated))
