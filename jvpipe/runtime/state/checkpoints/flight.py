"""Finds arrays in a state in flight, and restores such a state from a checkpoint.

A stream is an asynchronous run, whose pipeline is not flushed between steps. So between two steps,
some micro-batches are in flight: their forwards have run, and their backwards have not. What a
state has depends on this:

    at rest      The plain arrays: parameters, optimizer state, model state and constants. Their
                 buffers are `CompiledPlan.persistent`.
    in flight    Every version of the weights that a later task reads, residuals, tensors between
                 layers, sums of gradients and so on. Their names are `StreamStep.after`.

The newest version of each plain array is always among the arrays in flight. So a stream need not be
drained (its micro-batches need not be finished) to read the parameters or to evaluate.

The name of a buffer is its spot: a value, a place (the number of a device), and which of the copies
at this place it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jvpipe.ir.buffers import Buffer, Copy, Spot
from jvpipe.ir.values import NONE, VALUES, ValueKind
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.hosts import Carried
from jvpipe.runtime.engine.placing import name_of
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.training_state import Name, State
from jvpipe.runtime.engine.value_shapes import shape
from jvpipe.util.brief import brief
from jvpipe.util.devices import devices_in, is_own, sharding_on, swapper, unshared


def names_of(compiled: CompiledPlan, stream_steps: int) -> tuple[Spot, ...]:
    """Returns the names of a state's arrays, in their order.

    Args:
        compiled: the compiled plan of the state.
        stream_steps: how many steps the stream has had; 0 at rest.
    """
    if not stream_steps:
        return tuple(buffer.spot for buffer in compiled.persistent)
    return compiled.stream.step(stream_steps - 1).after


def newest_of(compiled: CompiledPlan, stream_steps: int) -> dict[Name, int]:
    """Returns the positions, in a state's arrays, of the newest version of each plain array.

    Args:
        compiled: the compiled plan of the state.
        stream_steps: how many steps the stream has had; 0 at rest.

    Returns:
        The position by the array's name.
    """
    newest = _newest(names_of(compiled, stream_steps))
    # Several places may have a copy of an array. The loop runs backwards, so the entry of the first
    # copy is made last and stays.
    backwards = reversed(compiled.persistent)
    return {name_of(buffer): newest[_holder(buffer.spot)] for buffer in backwards}


def plain_arrays(compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
    """Returns the newest version of each plain array, in the order of `CompiledPlan.persistent`.

    An array is copied to its place under the plan if it lies on another device of this process.
    While a layer moves to another process, its arrays may still lie with the old process. Then the
    old process returns them where they lie, and the new process returns None for them.

    Args:
        compiled: the compiled plan of the state.
        state: a state at rest or in flight.
    """
    if not state.stream_steps:
        return state.arrays
    plain = []
    nearest = _nearest(compiled, state.stream_steps)
    for buffer, at in zip(compiled.persistent, nearest, strict=True):
        array = state.arrays[at]
        device = compiled.devices[buffer.place]
        is_here = array is not None and is_own(device)
        if is_here and array.devices() != {*devices_in(device)}:
            array = compiled.placing.put(array, buffer)
        plain.append(array)
    return tuple(plain)


def brought_arrays(
    compiled: CompiledPlan,
    state: State,
    plain: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Returns the plain arrays, each at its place under the plan.

    All processes must call this together, because arrays that still lie with another process are
    copied.

    Args:
        compiled: the compiled plan of the state.
        state: a state at rest or in flight.
        plain: the arrays that `plain_arrays` returns for the state.
    """
    arrays: list[Any] = list(plain)
    names = names_of(compiled, state.stream_steps)
    devices = compiled.devices
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
    """Returns the position, in a state's arrays, of the newest version of each plain array.

    The positions are in the order of `CompiledPlan.persistent`. If the version has a copy at its
    place under the plan, this copy is taken. While a layer moves, there may be none at that place,
    and any other copy is taken.
    """
    spots = names_of(compiled, stream_steps)
    at = {spot: i for i, spot in enumerate(spots)}
    newest = _newest(spots)
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
    leaves: Mapping[int, Any],
    *,
    consume: bool,
) -> tuple[jax.Array, ...]:
    """Returns the arrays of a state, with arrays of a kind replaced where they lie.

    Args:
        names: the names of the arrays.
        arrays: the arrays of the state.
        kind: the kind to replace: parameters, or the optimizer's state.
        leaves: the new values, on the host, by the numbers of the leaves; others stay.
        consume: whether to delete each array before its new value is put there.
    """
    replaced = []
    for spot, array in zip(names, arrays, strict=True):
        value = spot.value
        if value.kind is kind and value.index in leaves and array is not None:
            sharding = array.sharding
            if consume:
                array.delete()
            array = jax.device_put(unshared(leaves[value.index]), sharding, may_alias=False)
        replaced.append(array)
    return tuple(replaced)


_Holder = tuple[ValueKind, int, int, int]
"""The key that all versions of a value share: kind, index, layer, and for some kinds the place."""


def _newest(names: Sequence[Spot]) -> dict[_Holder, int]:
    """Returns the positions of the newest versions of all values that outlive a step."""
    # Parameters and optimizer state are numbered by updates, model state by micro-batches. The
    # number that a value lacks is below all others, so the larger of the two counts.
    newest: dict[_Holder, tuple[int, int]] = {}
    for at, spot in enumerate(names):
        if VALUES[spot.value.kind].lasts and spot.copy in (Copy.OWN, Copy.AWAY):
            holder = _holder(spot)
            number = max(spot.value.version, spot.value.microbatch)
            if holder not in newest or number > newest[holder][0]:
                newest[holder] = number, at
    return {holder: at for holder, (_, at) in newest.items()}


def _holder(spot: Spot) -> _Holder:
    """Returns the key that all versions of a value share.

    The key of a parameter or of optimizer state has no place, because the value may lie at another
    place while its layer moves. Model state and constants have one entry for each of their places.
    """
    value = spot.value
    is_of_place = value.kind in (ValueKind.STATE, ValueKind.CONSTANT)
    place = spot.place if is_of_place else NONE
    return value.kind, value.index, value.layer, place


def restore_in_flight(
    compiled: CompiledPlan,
    stream_steps: int,
    values: Mapping[str, Any],
    ledger: Ledger,
) -> tuple[jax.Array, ...]:
    """Puts each array of a state in flight where it lay when it was saved.

    Returns the arrays, with None for those of other processes.

    Args:
        compiled: the compiled plan of the state.
        stream_steps: how many steps the stream has had.
        values: the arrays on the host, by name; None for arrays of other processes.
        ledger: counts the bytes of the arrays.

    Raises:
        ValueError: the names are not those of this plan's stream, or an array has another shape or
            type than expected.
    """
    step = compiled.stream.step(stream_steps - 1)
    names = [str(spot) for spot in step.after]
    # Arrays are saved under the names of the stream's buffers. A version of jvpipe that names its
    # buffers differently cannot restore them.
    if unknown := sorted(values.keys() ^ set(names)):
        raise ValueError(
            f"the checkpoint in flight names its arrays otherwise ({unknown[0]!r}): "
            "another version wrote it. Restore it there, save what pipe.drain returns, "
            "and go on from that here"
        )
    arrays = []
    for b, name in zip(step.lowered.final, names, strict=True):
        value = values[name]
        buffer = step.lowered.buffers[b]
        device = compiled.devices[buffer.place]
        if not is_own(device):
            arrays.append(None)
            continue
        expected = _like(compiled, buffer)
        is_like = expected is None or (
            value.shape == expected.shape and value.dtype == expected.dtype
        )
        if not is_like or value.nbytes != buffer.bytes:
            other = f"of {buffer.bytes} bytes" if expected is None else brief(expected)
            raise ValueError(f"its '{name}' is {brief(value)}, and should be {other}")
        ledger.hold(buffer.memory, buffer.bytes)
        sharding = sharding_on(device, compiled.spec(buffer.value))
        array = jax.device_put(value, sharding, may_alias=False)
        if buffer.copy.on_host:
            array = swapper(device, "pinned_host")(array)
        arrays.append(array)
    return tuple(arrays)


def _like(compiled: CompiledPlan, buffer: Buffer) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and type of an array in flight; None if this plan does not know them.

    The residuals of a micro-batch depend on the plan under which its forward ran. After a change of
    plan, and with replicas (which work on slices), only their bytes are known.
    """
    value = buffer.value
    if value.kind is not ValueKind.RESIDUAL:
        return compiled.row_programs.known_shape(value)
    if compiled.previous or compiled.replicas:
        return None
    signature = compiled.programs[0][value.layer].signature
    return shape(signature.residuals[value.index])
