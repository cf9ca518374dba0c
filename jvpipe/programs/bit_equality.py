"""Compares a layer in two programs with the layer in one: the bits that it computes, and those that it is updated to.

XLA chooses anew in each program what to fuse, and a fused multiplication and addition rounds once instead of twice. So
it is tried: both run on the same numbers, and every output, gradient and cotangent is compared.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Device, Var
from jvpipe.ir.values import ValueKind
from jvpipe.programs.model import backward_program, forward_program
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced

_Arrays = dict[Var, np.ndarray]


def same_bits(
    store: ProgramStore, device: Device, whole: Traced, layer: int, halves: Traced
) -> bool:
    """Tells whether `layer` of `whole` computes what `layer` and `layer + 1` of `halves` compute, to the bit.

    False also where that cannot be told: for a layer that takes keys, or gives what is not a number.

    Args:
        store: compiles the programs.
        device: runs them.
        whole: the model with the layer as one.
        layer: its number there.
        halves: the model with that layer as two.
    """
    body, rng = whole.bodies[layer], np.random.default_rng(0)
    if any(
        jnp.issubdtype(_jax.aval(v).dtype, jax.dtypes.extended)
        for v in [*body.inputs, *body.outputs]
    ):
        return False
    parameters = {
        v for v, ref in zip(body.inputs, body.reads, strict=True) if ref.kind == ValueKind.PARAMETER
    }
    values = {v: _drawn(rng, v, v in parameters) for v in body.inputs}
    # What comes in from later layers, and what earlier micro-batches added up: a sum that begins with nothing hides
    # whether its first product was rounded.
    sums = {
        v: _drawn(rng, v)
        for v in dict.fromkeys([*body.inputs, *body.outputs])
        if isinstance(v, Var)
    }
    one = _outcome(store, device, whole, [layer], values, sums)
    two = _outcome(store, device, halves, [layer, layer + 1], values, sums)
    pairs = [
        (results[0][v], results[1][v])
        for results in zip(one, two, strict=True)
        for v in sums
        if v in results[0]
    ]
    return all(_alike(x, y) for x, y in pairs)


def same_update(
    store: ProgramStore, device: Device, whole: OptimizerCut, layer: int, halves: OptimizerCut
) -> bool:
    """Tells whether `layer` of `whole` is updated as `layer` and `layer + 1` of `halves` are, to the bit.

    Args:
        store: compiles the programs.
        device: runs them.
        whole: the optimizer cut for the layer as one.
        layer: its number there.
        halves: the optimizer cut for that layer as two.
    """
    one = _updated(store, device, whole, [layer])
    two = _updated(store, device, halves, [layer, layer + 1])
    return one.keys() == two.keys() and all(_alike(one[slot], two[slot]) for slot in one)


def _updated(
    store: ProgramStore, device: Device, cut: OptimizerCut, layers: Sequence[int]
) -> dict[Slot, np.ndarray]:
    """Runs the pieces of some layers; what they tell the global program is joined and sorted, as halves split it."""
    values: dict[tuple[Slot, int | None], np.ndarray] = {}
    told: dict[Slot, list[np.ndarray]] = defaultdict(list)
    for piece in (piece for piece in cut.update if piece.layer in layers):
        inputs = zip(piece.reads, piece.program.in_avals, strict=True)
        arrays = [
            _value_of(slot, aval) if (x := values.get((slot, piece.layer))) is None else x
            for slot, aval in inputs
        ]
        (executable,) = store.compile([(Program.of(piece.program, key=("try", piece.key)), device)])
        for slot, x in zip(piece.writes, _run(executable, arrays, device), strict=False):
            values[slot, piece.layer] = x
            if slot.kind is SlotKind.PARTIAL:
                told[replace(slot, source=0)].append(x)
    written = {
        slot: x
        for (slot, _), x in values.items()
        if slot.kind in (SlotKind.PARAMETER, SlotKind.STATE)
    }
    return written | {slot: np.sort(np.concatenate(x)) for slot, x in told.items()}


def _value_of(slot: Slot, aval: Any) -> np.ndarray:
    """The same numbers for a slot in whatever piece; a state may be squares, so it is positive."""
    rng, low = np.random.default_rng([slot.kind.order, slot.index]), -1.0
    if slot.kind in (SlotKind.STATE, SlotKind.WEIGHT, SlotKind.GLOBAL):
        low = 0.0
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return np.zeros(aval.shape, aval.dtype)
    return rng.uniform(low, 1.0, aval.shape).astype(aval.dtype)


def _alike(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal to the bit, and numbers."""
    return x.tobytes() == y.tobytes() and bool(np.isfinite(x.astype(np.complex128)).all())


def _outcome(
    store: ProgramStore,
    device: Device,
    traced: Traced,
    layers: Sequence[int],
    given: _Arrays,
    sums: _Arrays,
) -> tuple[_Arrays, _Arrays]:
    """The values that layers compute, one after another, and the gradients and cotangents of what they read."""
    values, cotangents, passes = dict(given), dict(sums), []
    gradients: _Arrays = {}
    for layer in layers:
        body, tensors = traced.bodies[layer], traced.graph.tensors
        later = [
            r.index
            for r in body.reads
            if r.kind == ValueKind.TENSOR and tensors[r.index].readers[-1] > layer
        ]
        programs = store.layer(body, list(body.candidates.values()), later)
        forward, backward = store.compile(
            [
                (forward_program(programs, recompute=True), device),
                (backward_program(programs), device),
            ]
        )
        made = _run(forward, [values[v] for v in body.inputs], device)
        outputs = [(v, x) for v, x in zip(body.outputs, made, strict=False) if isinstance(v, Var)]
        values |= outputs
        passes.append((body, programs.signature, backward, made))
    for body, signature, backward, made in reversed(passes):
        sources = {
            "input": [values[v] for v in body.inputs],
            "output": made[: len(body.outputs)],
            "residual": made[len(body.outputs) :],
        }
        read = [sources[kind][i] for kind, i in signature.sources]
        read += [cotangents[body.outputs[i]] for i in signature.cotangents]
        read += [cotangents[body.inputs[i]] for i in (*signature.partial, *signature.gradients)]
        got = _run(backward, read, device)
        moved = {
            body.inputs[i]: x
            for i, x in zip((*signature.gradients, *signature.returned), got, strict=False)
        }
        cotangents |= moved
        gradients |= moved
    return values, gradients


def _run(executable: Any, arrays: Sequence[np.ndarray], device: Device) -> list[np.ndarray]:
    given = [jax.device_put(x, device, may_alias=False) for x in arrays]
    return [np.asarray(x) for x in executable(*given)]


def _drawn(rng: np.random.Generator, var: Var, parameter: bool = False) -> np.ndarray:
    """Numbers as a layer meets them: those of a parameter are small enough that products of them stay near one."""
    aval = _jax.aval(var)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return np.zeros(aval.shape, aval.dtype)
    size = 2 / math.sqrt(aval.shape[0]) if parameter and aval.shape else 1.0
    drawn = rng.uniform(-size, size, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        drawn = drawn + 1j * rng.uniform(-size, size, aval.shape)
    return drawn.astype(aval.dtype)
