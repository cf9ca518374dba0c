"""States in flight between the steps of an asynchronous stream: their names, and the plain state in them.

A plain state has the arrays that lie on the devices when nothing is in flight; a state in flight
has those of `Step.after`: every live version of the weights, residuals, edges, sums of gradients.
The newest version of what a plain state has is always among these, so whoever asks for parameters,
or evaluates, need not drain the stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jvpipe import _jax
from jvpipe.ir.buffers import Buffer, Copy, Spot
from jvpipe.ir.values import NONE, VALUES, ValueKind
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.hosts import Carried
from jvpipe.runtime.engine.placing import name_of
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.training_state import Name, State
from jvpipe.runtime.engine.value_shapes import shape
from jvpipe.util.brief import brief


def names_of(compiled: CompiledPlan, stream_steps: int) -> tuple[Spot, ...]:
    """Returns the names of a state's arrays after so many steps of a stream; 0 at rest."""
    if not stream_steps:
        return tuple(buffer.spot for buffer in compiled.persistent)
    return compiled.stream.step(stream_steps - 1).after


def newest_of(compiled: CompiledPlan, stream_steps: int) -> dict[Name, int]:
    """Returns where the newest of everything that a plain state has is among a state's arrays, by name.

    Args:
        compiled: what the state belongs to.
        stream_steps: the steps of its stream, 0 at rest.
    """
    newest = _newest(names_of(compiled, stream_steps))
    # If an array has several copies, the first one counts: from last to first, it comes to stand in
    # the result.
    backwards = reversed(compiled.persistent)
    return {name_of(buffer): newest[_holder(buffer.spot)] for buffer in backwards}


def plain_arrays(compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
    """Returns the newest of everything that a plain state has; what is in flight is left out.

    An array that is still on its way to another process is returned where it lies.

    Args:
        compiled: what the state belongs to.
        state: at rest, or in flight.
    """
    if not state.stream_steps:
        return state.arrays
    plain = []
    for buffer, at in zip(compiled.persistent, _nearest(compiled, state.stream_steps), strict=True):
        array, device = state.arrays[at], compiled.devices[buffer.place]
        is_here = array is not None and _jax.is_own(device)
        if is_here and array.devices() != {*_jax.devices_in(device)}:
            array = compiled.placing.put(array, buffer)
        plain.append(array)
    return tuple(plain)


def brought_arrays(
    compiled: CompiledPlan, state: State, plain: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Returns the arrays of a plain state, each where the plan has it.

    All processes call it together. What still lies with another process is brought over.

    Args:
        compiled: what the state belongs to.
        state: at rest, or in flight.
        plain: the plain state in it.
    """
    arrays: list[Any] = list(plain)
    names, devices = names_of(compiled, state.stream_steps), compiled.devices
    crossing: list[int] = []
    copies: list[Carried] = []
    sources: list[jax.Array | None] = []
    for i, at in enumerate(_nearest(compiled, state.stream_steps)):
        buffer = compiled.persistent[i]
        source = devices[names[at].place].process_index
        target = devices[buffer.place].process_index
        if source != target:
            crossing.append(i)
            copies.append(compiled.carried(buffer, source))
            sources.append(state.arrays[at])
    if crossing:
        assert compiled.hosts is not None
        arrived = compiled.hosts.carry(copies, sources)
        for i, array in zip(crossing, arrived, strict=True):
            arrays[i] = array
    return tuple(arrays)


def _nearest(compiled: CompiledPlan, stream_steps: int) -> list[int]:
    """Returns for each array of a plain state where its newest version is among a state's arrays.

    If that version has several copies, it is the one at the array's own place, if there is one;
    else a layer is moving.
    """
    spots = names_of(compiled, stream_steps)
    at, newest = {spot: i for i, spot in enumerate(spots)}, _newest(spots)
    nearest = []
    for buffer in compiled.persistent:
        anywhere = newest[_holder(buffer.spot)]
        at_home = Spot(spots[anywhere].value, buffer.place)
        nearest.append(at.get(at_home, anywhere))
    return nearest


def with_leaves(
    names: Sequence[Spot],
    arrays: Sequence[jax.Array],
    kind: ValueKind,
    leaves: Sequence[Any],
    *,
    consume: bool,
) -> tuple[jax.Array, ...]:
    """Returns the arrays of a state, with those of a kind replaced in their places.

    Args:
        names: of the arrays.
        arrays: the state's.
        kind: of those to replace: parameters, or the optimizer's state.
        leaves: what replaces them, on the host.
        consume: free each array before another takes its place.
    """
    replaced = []
    for spot, array in zip(names, arrays, strict=True):
        if spot.value.kind is kind and array is not None:
            sharding = array.sharding
            if consume:
                array.delete()
            array = jax.device_put(leaves[spot.value.index], sharding, may_alias=False)
        replaced.append(array)
    return tuple(replaced)


_Holder = tuple[ValueKind, int, int, int]
"""What all versions of a value share: kind, index and layer, and for some kinds the place."""


def _newest(names: Sequence[Spot]) -> dict[_Holder, int]:
    """Returns where among the names the newest version is of everything that lies on the devices between steps."""
    # What counts up is the version of a parameter, or the micro-batch of model state.
    newest: dict[_Holder, tuple[int, int]] = {}
    for at, spot in enumerate(names):
        if VALUES[spot.value.kind].lasts and spot.copy in (Copy.OWN, Copy.AWAY):
            holder, number = _holder(spot), max(spot.value.version, spot.value.microbatch)
            if holder not in newest or number > newest[holder][0]:
                newest[holder] = number, at
    return {holder: at for holder, (_, at) in newest.items()}


def _holder(spot: Spot) -> _Holder:
    """Returns the key of all versions of a value.

    Layers may be moving, so parameters and optimizer state are found wherever they lie. Model state
    and constants are looked up at their own place.
    """
    value = spot.value
    is_of_place = value.kind in (ValueKind.STATE, ValueKind.CONSTANT)
    return value.kind, value.index, value.layer, spot.place if is_of_place else NONE


def restore_in_flight(
    compiled: CompiledPlan, stream_steps: int, values: Mapping[str, Any], ledger: Ledger
) -> tuple[jax.Array, ...]:
    """Puts the arrays of a state in flight where each lay.

    Returns None for those of other processes.

    Args:
        compiled: what the state belongs to.
        stream_steps: the steps of its stream.
        values: host arrays by their names; None for those of other processes.
        ledger: counts them.

    Raises:
        ValueError: the names are not those of this plan's stream, or an array is another one.
    """
    step = compiled.stream.step(stream_steps - 1)
    names = [str(spot) for spot in step.after]
    # Names are those of the stream's buffers, so a lowering that names them differently cannot go
    # on.
    if unknown := sorted(values.keys() ^ set(names)):
        raise ValueError(
            f"the checkpoint in flight names its arrays otherwise ({unknown[0]!r}): another version wrote it. "
            "Restore it there, save what pipe.drain returns, and go on from that here"
        )
    arrays = []
    for b, name in zip(step.lowered.final, names, strict=True):
        value, buffer = values[name], step.lowered.buffers[b]
        device = compiled.devices[buffer.place]
        if not _jax.is_own(device):
            arrays.append(None)
            continue
        expected = _like(compiled, buffer)
        is_like = expected is None or (value.shape, value.dtype) == (expected.shape, expected.dtype)
        if not is_like or value.nbytes != buffer.bytes:
            other = f"of {buffer.bytes} bytes" if expected is None else brief(expected)
            raise ValueError(f"its '{name}' is {brief(value)}, and should be {other}")
        ledger.hold(buffer.memory, buffer.bytes)
        sharding = _jax.sharding_on(device, compiled.spec(buffer.value))
        array = jax.device_put(value, sharding, may_alias=False)
        if buffer.copy.on_host:
            array = _jax.swapper(device, "pinned_host")(array)
        arrays.append(array)
    return tuple(arrays)


def _like(compiled: CompiledPlan, buffer: Buffer) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and type of an array in flight.

    Returns None if only programs of an earlier plan know.
    """
    value = buffer.value
    if value.kind is not ValueKind.RESIDUAL:
        return compiled.row_programs.known_shape(value)
    if compiled.previous or compiled.replicas:
        return None
    return shape(compiled.programs[0][value.layer].signature.residuals[value.index])
