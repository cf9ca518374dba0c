"""A check that a layer cut in two still computes bitwise identical results and updates.

XLA chooses for each program which operations it fuses, and a multiplication that is fused
with an addition rounds once instead of twice. What XLA fuses cannot be predicted. Therefore
the whole layer and its two halves run on the same random numbers, and all outputs, gradients
and cotangents are compared.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Var
from jvpipe.ir.layers import Signature
from jvpipe.ir.values import ValueKind
from jvpipe.programs.model_programs import (
    backward_program,
    forward_program,
    piece_program,
    programs_of,
)
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.body import Body
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device

_Arrays = dict[Var, np.ndarray]


def same_bits(
    store: ProgramStore,
    device: Device,
    whole: Traced,
    layer: int,
    halves: Traced,
) -> bool:
    """Tells whether a layer computes bitwise the same results whole and cut in two.

    The answer is also False if the results cannot be compared, because the layer takes random keys
    or its results are not finite.

    Args:
        store: compiles the programs.
        device: runs the programs.
        whole: the model in which the layer is whole.
        layer: the number of the layer in `whole`; in `halves` its halves are `layer` and
            `layer + 1`.
        halves: the model in which the layer is cut in two.
    """
    body = whole.bodies[layer]
    rng = np.random.default_rng(0)
    atoms = [*body.inputs, *body.outputs]
    types = [_jax.aval(v).dtype for v in atoms]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in types):
        return False
    values: _Arrays = {}
    for v, ref in zip(body.inputs, body.reads, strict=True):
        is_parameter = ref.kind == ValueKind.PARAMETER
        values[v] = _drawn(rng, v, is_parameter=is_parameter)
    # The cotangents from later layers and the gradients of earlier micro-batches are random and not
    # zeros: zero plus a product is the same number whether the two operations are fused or not.
    variables = dict.fromkeys(v for v in atoms if isinstance(v, Var))
    sums = {v: _drawn(rng, v) for v in variables}
    one = _outcome(store, device, whole, [layer], values, sums)
    two = _outcome(store, device, halves, [layer, layer + 1], values, sums)
    for a, b in zip(one, two, strict=True):
        # The values between the two halves are missing in the results of the whole layer.
        common = [v for v in sums if v in a]
        if not all(_alike(a[v], b[v]) for v in common):
            return False
    return True


def same_update(
    store: ProgramStore,
    device: Device,
    whole: OptimizerCut,
    layer: int,
    halves: OptimizerCut,
) -> bool:
    """Tells whether a layer is updated bitwise in the same way whole and cut in two.

    Args:
        store: compiles the programs.
        device: runs the programs.
        whole: the optimizer, cut for the model in which the layer is whole.
        layer: the number of the layer in `whole`; in `halves` its halves are `layer` and
            `layer + 1`.
        halves: the optimizer, cut for the model in which the layer is cut in two.
    """
    one = _updated(store, device, whole, [layer])
    two = _updated(store, device, halves, [layer, layer + 1])
    if one.keys() != two.keys():
        return False
    return all(_alike(one[slot], two[slot]) for slot in one)


def _updated(
    store: ProgramStore,
    device: Device,
    cut: OptimizerCut,
    layers: Sequence[int],
) -> dict[Slot, np.ndarray]:
    """Runs the optimizer's pieces of some layers.

    Returns the new parameters and state, and the values for the global program (the part of
    the optimizer that mixes layers). The values for the global program are joined and
    sorted, because two halves send them in two vectors and in another order.
    """
    values: dict[tuple[Slot, int | None], np.ndarray] = {}
    to_global: dict[Slot, list[np.ndarray]] = defaultdict(list)
    for piece in cut.update:
        if piece.layer not in layers:
            continue
        arrays = []
        for slot, aval in zip(piece.reads, piece.program.in_avals, strict=True):
            passed = values.get((slot, piece.layer))  # from an earlier piece of the layer
            arrays.append(_value_of(slot, aval) if passed is None else passed)
        (executable,) = store.compile([(piece_program(piece), device)])
        for slot, x in zip(piece.writes, _run(executable, arrays, device), strict=False):
            values[slot, piece.layer] = x
            if slot.kind is SlotKind.PARTIAL:
                to_global[replace(slot, source=0)].append(x)
    lasting = (SlotKind.PARAMETER, SlotKind.STATE)
    written: dict[Slot, np.ndarray] = {}
    for (slot, _), x in values.items():
        if slot.kind in lasting:
            written[slot] = x
    for slot, vectors in to_global.items():
        written[slot] = np.sort(np.concatenate(vectors))
    return written


def _value_of(slot: Slot, aval: Any) -> np.ndarray:
    """Draws numbers for a slot, which depend only on the slot's kind, index, shape and type.

    State may be a mean of squares, and a global value may be a norm. So the numbers for these, and
    for the weight of the loss, are not negative.
    """
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return np.zeros(aval.shape, aval.dtype)
    is_positive = slot.kind in (SlotKind.STATE, SlotKind.WEIGHT, SlotKind.GLOBAL)
    rng = np.random.default_rng([slot.kind.order, slot.index])
    low = 0.0 if is_positive else -1.0
    return rng.uniform(low, 1.0, aval.shape).astype(aval.dtype)


def _alike(x: np.ndarray, y: np.ndarray) -> bool:
    """Tells whether arrays are bitwise identical and finite."""
    # NumPy's `isfinite` does not take every type of JAX, but all of them convert to complex128.
    is_finite = np.isfinite(x.astype(np.complex128)).all()
    return x.tobytes() == y.tobytes() and bool(is_finite)


def _outcome(
    store: ProgramStore,
    device: Device,
    traced: Traced,
    layers: Sequence[int],
    inputs: _Arrays,
    sums: _Arrays,
) -> tuple[_Arrays, _Arrays]:
    """Runs the forwards of some layers in order, and their backwards in reverse order.

    Args:
        store: compiles the programs.
        device: runs the programs.
        traced: the model.
        layers: the layers that run.
        inputs: the values that the layers read.
        sums: the cotangents of the values that the layers write, and the sums to which the layers
            add their gradients and cotangents.

    Returns:
        The values that the layers compute, and the gradients and cotangents of their inputs.
    """
    values = dict(inputs)
    passes = []
    for layer in layers:
        one = _forward(store, device, traced, layer, values)
        passes.append(one)
        for v, x in zip(one.body.outputs, one.sources["output"], strict=True):
            if isinstance(v, Var):
                values[v] = x
    # The cotangents of a layer come from the layer after it, so backwards run from last to first.
    cotangents = dict(sums)
    gradients: _Arrays = {}
    for one in reversed(passes):
        moved = one.gradients(cotangents, device)
        cotangents |= moved
        gradients |= moved
    return values, gradients


@dataclass(frozen=True)
class _Pass:
    """A layer whose forward has run, and whose backward has not.

    Attributes:
        body: the layer's equations.
        signature: the arguments and results of the layer's backward.
        backward: the compiled backward.
        sources: the values of the layer's inputs, outputs and residuals, under the keys "input",
            "output" and "residual".
    """

    body: Body
    signature: Signature
    backward: Any
    sources: Mapping[str, Sequence[np.ndarray]]

    def gradients(self, cotangents: _Arrays, device: Device) -> _Arrays:
        """Runs the backward, and returns the gradients and cotangents of the layer's inputs.

        Args:
            cotangents: the cotangents of the layer's outputs, and the sums to which the backward
                adds.
            device: runs the program.
        """
        body = self.body
        signature = self.signature
        # An output with a cotangent is a variable, never a literal.
        summed: list[Any] = [body.outputs[i] for i in signature.cotangents]
        taken = (*signature.partial, *signature.gradients)
        summed += [body.inputs[i] for i in taken]
        arguments = [self.sources[kind][i] for kind, i in signature.sources]
        arguments += [cotangents[v] for v in summed]
        results = _run(self.backward, arguments, device)
        yielded = (*signature.gradients, *signature.returned)
        variables = [body.inputs[i] for i in yielded]
        # The last result is a marker (see `_forward`), which `zip` leaves out.
        return dict(zip(variables, results, strict=False))


def _forward(
    store: ProgramStore,
    device: Device,
    traced: Traced,
    layer: int,
    values: _Arrays,
) -> _Pass:
    """Runs the forward of a layer.

    Args:
        store: compiles the programs.
        device: runs the programs.
        traced: the model.
        layer: the number of the layer.
        values: the values of its inputs.
    """
    body = traced.bodies[layer]
    programs = programs_of(store, traced, layer)
    pair = forward_program(programs, recompute=True), backward_program(programs)
    forward, backward = store.compile([(program, device) for program in pair])
    inputs = [values[v] for v in body.inputs]
    results = _run(forward, inputs, device)
    # A forward yields outputs, then residuals, then a marker: an array whose arrival shows that the
    # program has finished.
    count = len(body.outputs)
    sources = {
        "input": inputs,
        "output": results[:count],
        "residual": results[count:],
    }
    return _Pass(body, programs.signature, backward, sources)


def _run(
    executable: Any,
    arrays: Sequence[np.ndarray],
    device: Device,
) -> list[np.ndarray]:
    placed = [jax.device_put(x, device, may_alias=False) for x in arrays]
    return [np.asarray(x) for x in executable(*placed)]


def _drawn(
    rng: np.random.Generator,
    var: Var,
    *,
    is_parameter: bool = False,
) -> np.ndarray:
    """Draws numbers of the magnitude that a layer meets in training.

    Most matrix products sum over the first axis of a parameter. The elements of a parameter shrink
    with the square root of that axis's length, so the results of products stay near one.
    """
    aval = _jax.aval(var)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return np.zeros(aval.shape, aval.dtype)
    is_matrix = is_parameter and aval.shape
    size = 2 / math.sqrt(aval.shape[0]) if is_matrix else 1.0
    drawn = rng.uniform(-size, size, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        drawn = drawn + 1j * rng.uniform(-size, size, aval.shape)
    return drawn.astype(aval.dtype)
