"""States in flight between the steps of an asynchronous stream: their names, and the plain state in them.

A plain state has the arrays that lie on the devices when nothing is in flight; a state in flight has those of
`Step.after`: every live version of the weights, residuals, edges, sums of gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jvpipe import _jax
from jvpipe.ir.brief import brief
from jvpipe.ir.buffers import Buffer, Copy, Spot
from jvpipe.ir.values import NONE, VALUES, ValueKind
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.hosts import Carried
from jvpipe.runtime.placing import name_of
from jvpipe.runtime.state import Name, State
from jvpipe.runtime.tensors import Ledger
from jvpipe.runtime.value_shapes import shape


def names_of(compiled: CompiledPlan, stream_steps: int) -> tuple[Spot, ...]:
    """The names of a state's arrays after so many steps of a stream."""
    if not stream_steps:
        return tuple(buffer.spot for buffer in compiled.persistent)
    return compiled.stream.step(stream_steps - 1).after


def newest_of(compiled: CompiledPlan, stream_steps: int) -> dict[Name, int]:
    """By name, where among a state's arrays the newest of everything lies that a plain state has; of copies the first.

    Args:
        compiled: what the state belongs to.
        stream_steps: the steps of its stream, 0 at rest.
    """
    newest = _newest(names_of(compiled, stream_steps))
    return {
        name_of(buffer): newest[_holder(buffer.spot)] for buffer in reversed(compiled.persistent)
    }


def plain_arrays(compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
    """The newest of everything that a plain state has; what is in flight is left out.

    What is still on its way to another process is given where it lies.
    """
    if not state.stream_steps:
        return state.arrays
    plain = []
    for buffer, at in zip(compiled.persistent, _nearest(compiled, state.stream_steps), strict=True):
        array, device = state.arrays[at], compiled.devices[buffer.place]
        here = (
            array is None
            or not _jax.is_own(device)
            or array.devices() == {*_jax.devices_in(device)}
        )
        plain.append(array if here else compiled.placing.put(array, buffer))
    return tuple(plain)


def brought_arrays(
    compiled: CompiledPlan, state: State, plain: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The arrays of a plain state, each where the plan has it: what lies with another process is brought; all ask.

    Args:
        compiled: what the state belongs to.
        state: perhaps in flight.
        plain: the plain state in it.
    """
    arrays: list[Any] = list(plain)
    names, devices = names_of(compiled, state.stream_steps), compiled.devices
    crossing: dict[int, tuple[Carried, jax.Array | None]] = {}
    for i, at in enumerate(_nearest(compiled, state.stream_steps)):
        buffer, source = compiled.persistent[i], devices[names[at].place].process_index
        if (target := devices[buffer.place]).process_index != source:
            like = compiled.lying(buffer.value, buffer.place)
            crossing[i] = Carried(source, target.process_index, like), state.arrays[at]
    if crossing:
        assert compiled.hosts is not None
        brought = compiled.hosts.carry(*zip(*crossing.values(), strict=True))
        for i, array in zip(crossing, brought, strict=True):
            arrays[i] = array
    return tuple(arrays)


def _nearest(compiled: CompiledPlan, stream_steps: int) -> list[int]:
    """For each array of a plain state, where its newest version is among a state's arrays: at its place, if it can."""
    spots = names_of(compiled, stream_steps)
    at, newest = {spot: i for i, spot in enumerate(spots)}, _newest(spots)
    first = [(buffer, newest[_holder(buffer.spot)]) for buffer in compiled.persistent]
    return [at.get(Spot(spots[i].value, buffer.place), i) for buffer, i in first]


def with_leaves(
    names: Sequence[Spot],
    arrays: Sequence[jax.Array],
    kind: ValueKind,
    leaves: Sequence[Any],
    *,
    consume: bool,
) -> tuple[jax.Array, ...]:
    """The arrays of a state, those of a kind from others where they lie.

    Args:
        names: of the arrays.
        arrays: the state's.
        kind: of those to replace: parameters, or the optimizer's state.
        leaves: the others, on the host.
        consume: end each array before another takes its place.
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


def _newest(names: Sequence[Spot]) -> dict[_Holder, int]:
    """The newest version of everything that lies on the devices between steps: where it is among the names."""
    newest: dict[_Holder, tuple[int, int]] = {}
    for at, spot in enumerate(names):
        if VALUES[spot.value.kind].lasts and spot.copy in (Copy.OWN, Copy.AWAY):
            holder, number = _holder(spot), max(spot.value.version, spot.value.microbatch)
            if holder not in newest or number > newest[holder][0]:
                newest[holder] = number, at
    return {holder: at for holder, (_, at) in newest.items()}


def _holder(spot: Spot) -> _Holder:
    """The key of all versions of a value; of parameters and optimizer state wherever they lie: layers may be moving."""
    here = spot.value.kind in (ValueKind.STATE, ValueKind.CONSTANT)
    return spot.value.kind, spot.value.index, spot.value.layer, spot.place if here else NONE


def restore_in_flight(
    compiled: CompiledPlan, stream_steps: int, values: Mapping[str, Any], ledger: Ledger
) -> tuple[jax.Array, ...]:
    """Puts the arrays of a state in flight each where it lay, those of this process.

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
        own = _like(compiled, buffer)
        same = own is None or (value.shape, value.dtype) == (own.shape, own.dtype)
        if not same or value.nbytes != buffer.bytes:
            wanted = f"of {buffer.bytes} bytes" if own is None else brief(own)
            raise ValueError(f"its '{name}' is {brief(value)}, and should be {wanted}")
        ledger.hold(buffer.memory, buffer.bytes)
        array = jax.device_put(
            value, _jax.sharding_on(device, compiled.spec(buffer.value)), may_alias=False
        )
        arrays.append(_jax.swapper(device, "pinned_host")(array) if buffer.copy.on_host else array)
    return tuple(arrays)


def _like(compiled: CompiledPlan, buffer: Buffer) -> jax.ShapeDtypeStruct | None:
    """The shape and type of an array in flight; None where only programs of an earlier plan know."""
    value = buffer.value
    if value.kind is not ValueKind.RESIDUAL:
        return compiled.row_programs.known_shape(value)
    if compiled.previous or compiled.replicas:
        return None
    return shape(compiled.programs[0][value.layer].signature.residuals[value.index])
