"""Decides where each array of a new model comes from, when the model changes during training.

An array has an identity: its kind (parameter, optimizer state, model state or constant), path,
shape and type. Arrays of the two models are the same if their identities are equal. A parameter's
optimizer state is kept, parked or made together with the parameter. Optimizer state that belongs to
no parameter, such as a step count, is kept if both models have it. In this picture each letter is a
parameter, and lines join the parameters that both models have:

    old model    A  B  C         A stays where it is; B is copied, because its device changes;
                 |  |            C is parked on the host, with its optimizer state
    new model    A  B     D      D returns from the host if it was parked earlier, or else is made
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax

from jvpipe.ir.buffers import Buffer
from jvpipe.ir.values import Owner
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.hosts import ALONE, Hosts
from jvpipe.runtime.engine.placing import name_of
from jvpipe.runtime.engine.tensors import Away, Identity
from jvpipe.runtime.engine.value_shapes import value_array
from jvpipe.util.devices import is_own

Parked = dict[Identity, Any]
"""By identity, the arrays of earlier models that lie on the host; `Away` for an array on another
process's host."""


class Arrival(NamedTuple):
    """A persistent buffer of the new model, with the identity and the origin of its array.

    A persistent buffer exists between steps, at a place (the number of a device). Its memory is
    that device's or the host's. The origin, `how`, is one of four:

        stay      the old model has the array at this place, in this memory
        copy      the old model has it elsewhere
        return    it is parked on the host
        make      it is new, or a constant

    If the array stays or is copied, `old_index` is the number of its buffer in the old model.
    """

    identity: Identity
    buffer: Buffer
    how: Literal["stay", "copy", "return", "make"]
    old_index: int = -1


@dataclass(frozen=True)
class Origins:
    """The origins of all arrays of a new model, and what happens to those of the old model.

    Args:
        old: the compiled plan of the old model.
        new: the compiled plan of the new model.
        values: the leaves of the new model's parameters ("parameter") and model state ("state"),
            which are used for arrays that are new.
        parked: the arrays of earlier models that lie on the host.
    """

    old: CompiledPlan
    new: CompiledPlan
    values: Mapping[str, Sequence[Any]]
    parked: Parked

    def check(self) -> None:
        """Checks that the arrays of both models fit together.

        Raises:
            ValueError: an array has another shape or type than before, or a new array has no
                values.
        """
        # Arrays with equal paths must have equal shapes and types. Otherwise the new one would be
        # another array, and training would silently begin again with new values.
        before = {(kind, array.name): array for kind, array in self.before}
        for kind, array in self.after:
            old = before.get((kind, array.name), array)
            if kind in self.values and old != array:
                raise ValueError(
                    f"{kind} '{array.name}' is {array.dtype}{list(array.shape)} in the new "
                    f"model, {old.dtype}{list(old.shape)} in the present one: "
                    "give it another path, for instance a name that contains its shape, "
                    "so that each keeps its own values"
                )
        for arrival in self.arrivals:
            kind, array = arrival.identity
            if kind not in self.values or arrival.how != "make":
                continue
            _, leaf = name_of(arrival.buffer)
            if isinstance(self.values[kind][leaf], jax.ShapeDtypeStruct):
                raise ValueError(
                    f"{kind} '{array.name}' is new: its values must be given, not only their shape"
                )

    @property
    def hosts(self) -> Hosts:
        """The processes that change the model together, or this one alone."""
        return self.new.hosts or ALONE

    @cached_property
    def before(self) -> tuple[Identity, ...]:
        """The identity of each persistent buffer's array in the old model."""
        return _identities(self.old)

    @cached_property
    def after(self) -> tuple[Identity, ...]:
        """The identity of each persistent buffer's array in the new model."""
        return _identities(self.new)

    @cached_property
    def arrivals(self) -> tuple[Arrival, ...]:
        """The persistent buffers of the new model, with the origins of their arrays."""
        owners = _parameters_of_state(self.new)
        before = frozenset(self.before)
        # By array, place and memory: the old buffers, each of which stays for one arrival only.
        staying: dict[tuple[Identity, int, int], list[int]] = {}
        anywhere: dict[Identity, int] = {}
        for i, buffer in enumerate(self.old.persistent):
            identity = self.before[i]
            here = staying.setdefault((identity, buffer.place, buffer.memory), [])
            here.append(i)
            anywhere.setdefault(identity, i)

        def arrival(identity: Identity, buffer: Buffer) -> Arrival:
            if identity[0] == "constant":
                return Arrival(identity, buffer, "make")
            # Optimizer state was computed along with the values of its parameter, so the state is
            # kept, or returns, only if the parameter does.
            is_state = buffer.owner is Owner.OPTIMIZER
            owner = owners.get(buffer.value.index) if is_state else None
            # An array stays if the old model has it at this place and in this memory. Otherwise it
            # is copied from any buffer of the old model that has it.
            if identity in before and (owner is None or owner in before):
                if here := staying.get((identity, buffer.place, buffer.memory)):
                    return Arrival(identity, buffer, "stay", here.pop(0))
                return Arrival(identity, buffer, "copy", anywhere[identity])
            owner_returns = owner is None or (owner in self.parked and owner not in before)
            returns = identity in self.parked and owner_returns
            return Arrival(identity, buffer, "return" if returns else "make")

        return tuple(map(arrival, self.after, self.new.persistent))

    @cached_property
    def leaving(self) -> tuple[int, ...]:
        """The old model's buffers whose arrays do not stay where they are."""
        stays = {arrival.old_index for arrival in self.arrivals if arrival.how == "stay"}
        buffers = range(len(self.old.persistent))
        return tuple(i for i in buffers if i not in stays)

    @cached_property
    def parks(self) -> Parked:
        """The arrays that the change parks on the host.

        The value of an array is not the array itself, but the number of its buffer in the old
        model, or `Away` if another process has this buffer.
        """
        after, parks = frozenset(self.after), Parked()
        for i in self.leaving:
            identity = self.before[i]
            if identity[0] != "constant" and identity not in after:
                value = i if self.had(i) else Away(self.process_of(i))
                parks.setdefault(identity, value)
        return parks

    @cached_property
    def parked_after(self) -> Parked:
        """The parked arrays after the change; those that the change parks have the values of
        `parks`.
        """
        parked = self.parked | self.parks
        for arrival in self.arrivals:
            if arrival.how == "return":
                parked.pop(arrival.identity, None)
        return parked

    def had(self, index: int) -> bool:
        """Tells whether a buffer of the old model is on a device of this process."""
        place = self.old.persistent[index].place
        return is_own(self.old.devices[place])

    def process_of(self, index: int) -> int:
        """Returns the process that holds a buffer of the old model."""
        place = self.old.persistent[index].place
        return self.old.devices[place].process_index

    @cached_property
    def copied(self) -> frozenset[int]:
        """The old model's buffers from which arrays are copied to other places or memories."""
        return frozenset(arrival.old_index for arrival in self.arrivals if arrival.how == "copy")

    def home(self, arrival: Arrival) -> int | None:
        """Returns the place from which a parked array is sent to another process.

        The process that has parked the array puts it on its first device and sends it from there.
        Returns None for an array that was not parked, or that does not leave its process.
        """
        parked = self.parked.get(arrival.identity)
        devices = self.new.devices
        process = parked.process if isinstance(parked, Away) else self.hosts.process
        target = devices[arrival.buffer.place].process_index
        if arrival.how != "return" or target == process:
            return None
        return next(d for d, device in enumerate(devices) if device.process_index == process)


def _identities(compiled: CompiledPlan) -> tuple[Identity, ...]:
    """Returns the identity of each persistent buffer's array."""
    identities: list[Identity] = []
    for buffer in compiled.persistent:
        value = buffer.value
        array = value_array(compiled.traced.graph, compiled.optimizer, value)
        assert array is not None, f"{value} is not state between steps"
        identities.append((value.kind, array))
    return tuple(identities)


def _parameters_of_state(compiled: CompiledPlan) -> dict[Any, Identity]:
    """Returns the parameter to which each leaf of the optimizer's state belongs, by index."""
    parameters = compiled.traced.graph.parameters
    parameter_of: dict[Any, Identity] = {}
    for j, leaf in enumerate(compiled.optimizer.state):
        if leaf.parameter is not None:
            array = parameters[leaf.parameter].array
            parameter_of[j] = "parameter", array
    return parameter_of
