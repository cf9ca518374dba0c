"""Changes the model during training: shared arrays stay, old ones are parked, new ones are made.

Arrays that only the old model has are parked: they wait on the host for a later change that brings
them back. Before anything moves, `origins.py` decides where each array of the new model comes from.
There are two orders of work, and the second one needs less room on the devices:

    beside     copy to the host what is parked; make or copy the new arrays; delete old arrays
    by host    copy to the host what is parked or moves; delete old arrays; make or copy the new ones

Before an array is deleted, a copy of it is on the host or at its new place. So the old model can be
restored until all arrays of the new model have arrived.

If there are several processes, each parks the arrays that leave its own devices. Arrays that
another process needs are copied there from device to device. No array is deleted before all
arrays have arrived in all processes. So an error in one process leaves all with the old model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from jvpipe.ir.buffers import HOST, Peak, Spot
from jvpipe.ir.values import Owner
from jvpipe.runtime.engine.channel import CLOSING_S
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.hosts import Carried
from jvpipe.runtime.engine.placing import key_of, name_of
from jvpipe.runtime.engine.tensors import (
    Away,
    Ledger,
    Limits,
    MemoryLimitExceeded,
    parked_bytes,
)
from jvpipe.runtime.engine.transport import to_host
from jvpipe.runtime.state.origins import Arrival, Origins, Parked
from jvpipe.util.devices import is_own, unshared


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A change of the model before a step. Parameters are given by their paths.

    Attributes:
        step: the step before which the model changed.
        kept: the parameters that both models have.
        returned: the parameters that came back from the host, where they had been parked.
        new: the parameters that were neither in the old model nor parked.
        parked: the parameters that only the old model has, which are now parked on the host.
        moved_bytes: the bytes of arrays that moved to other devices.
        how: "beside" if the devices held both models at once; "by host" if there was no room for
            both, and arrays that leave or move went to the host first.
    """

    step: int
    kept: tuple[str, ...]
    returned: tuple[str, ...]
    new: tuple[str, ...]
    parked: tuple[str, ...]
    moved_bytes: int
    how: str

    def __str__(self) -> str:
        names = ("kept", "returned", "new", "parked")
        counts = ", ".join(f"{len(getattr(self, name))} {name}" for name in names)
        return (
            f"step {self.step}: another model; parameters: {counts}; {self.moved_bytes:,} bytes "
            f"moved {self.how}"
        )


def plan_model_switch(
    old: CompiledPlan,
    new: CompiledPlan,
    values: Mapping[str, Sequence[Any]],
    parked: Parked,
    limits: Limits,
) -> "ModelSwitch":
    """Checks that a model can replace another one, and chooses between "beside" and "by host".

    Nothing moves yet.

    Args:
        old: the compiled plan of the old model.
        new: the compiled plan of the new model.
        values: the leaves of the new model's parameters ("parameter") and model state ("state"),
            which are used for arrays that are new.
        parked: the arrays of earlier models that lie on the host.
        limits: the memory limits, during the change and after it.

    Raises:
        ValueError: an array has one path in both models, but different shapes or types; or a new
            array has no values.
        MemoryLimitExceeded: the new model, or the change to it, exceeds a limit.
    """
    origins = Origins(old, new, values, parked)
    switch = ModelSwitch(origins, by_host=False)

    def check_after() -> None:
        replace(limits, parked=origins.parked_after).check(new.peaks, new.devices)

    def check_change() -> None:
        limits.check(switch.peaks, new.devices, "while one model takes over from another")

    origins.hosts.together("new model", origins.check)
    origins.hosts.together("limits", check_after)
    # A change by host frees arrays before the others have arrived. An error in one process could
    # then not be undone in the others, so several processes do not change models by host. Only the
    # limits of the devices matter here, because a change by host needs more of the host's memory.
    if new.hosts is None:
        try:
            replace(limits, host_bytes=None).check(switch.peaks, new.devices)
        except MemoryLimitExceeded:
            switch = replace(switch, by_host=True)
    origins.hosts.together("limits", check_change)
    return switch


@dataclass(frozen=True)
class ModelSwitch:
    """The change of the arrays of one compiled plan into those of another.

    Args:
        origins: says where each array comes from. `run` changes `origins.parked`.
        by_host: whether arrays leave the devices before others arrive (see the top of this file).
    """

    origins: Origins
    by_host: bool

    @property
    def _old(self) -> CompiledPlan:
        return self.origins.old

    @property
    def _new(self) -> CompiledPlan:
        return self.origins.new

    def change(self, step: int) -> ModelChange:
        """Returns the entry of the history for this switch, which is made before `step`."""
        # A parameter has an arrival for each place that reads it. Keys of a dict keep each name
        # once, in order.
        paths: dict[str, dict[str, None]] = {"kept": {}, "return": {}, "make": {}}
        for arrival in self.origins.arrivals:
            kind, array = arrival.identity
            if kind == "parameter":
                how = arrival.how if arrival.how in paths else "kept"
                paths[how][array.name] = None
        kept, returned, new = map(tuple, paths.values())
        parked = tuple(array.name for kind, array in self.origins.parks if kind == "parameter")
        copied = (arrival for arrival in self.origins.arrivals if arrival.how == "copy")
        moved_bytes = sum(arrival.buffer.bytes for arrival in copied)
        how = "by host" if self.by_host else "beside"
        return ModelChange(
            step,
            kept,
            returned,
            new,
            parked,
            moved_bytes,
            how,
        )

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The most bytes on each device during the change, and last on the host.

        The bytes on the host do not include the arrays that were parked before the change, because
        `Limits` adds those.
        """
        devices = range(len(self._new.devices))
        before, staying, arriving = Counter[int](), Counter[int](), Counter[int]()
        for i, buffer in enumerate(self._old.persistent):
            before[buffer.memory] += buffer.bytes
            if not self.by_host or i not in self.origins.leaving:
                staying[buffer.memory] += buffer.bytes
        ready: set[Any] = set()  # the keys of arrays that the optimizer need not make
        for arrival in self.origins.arrivals:
            buffer = arrival.buffer
            if arrival.how != "stay":
                arriving[buffer.memory] += buffer.bytes
            # A parked array for another process is sent from a device of the process that has it.
            passed = self.origins.home(arrival)
            if passed is not None:
                arriving[passed] += buffer.bytes
            if arrival.how != "make" or buffer.owner is not Owner.OPTIMIZER:
                ready.add(key_of(buffer))
        # The optimizer's state is made by pieces, programs that each make all of a layer's state.
        # So a piece that makes a missing array also makes arrays that exist already.
        spare = self._new.placing.spare_bytes(ready)
        peaks = []
        for d in devices:
            peak_bytes = max(before[d], staying[d] + arriving[d] + spare[d])
            holders = (("the model before", staying[d]), ("what arrives", arriving[d]))
            peaks.append(Peak(peak_bytes, None, holders))
        # The optimizer's state may lie on the host, too.
        state_bytes = max(before[HOST], staying[HOST] + arriving[HOST])
        return (*peaks, self._passing.beside("the optimizer's state", state_bytes))

    @property
    def _waiting(self) -> frozenset[int]:
        """The old model's buffers whose arrays wait on the host between their old and new places.

        Empty unless the change is by host.
        """
        origins = self.origins
        return origins.copied.intersection(origins.leaving) if self.by_host else frozenset()

    @property
    def _passing(self) -> Peak:
        """The bytes that this change brings to the host: arrays that it parks, or that it moves
        by host.
        """
        origins = self.origins
        waiting = sum(self._old.persistent[i].bytes for i in self._waiting)
        parks = parked_bytes(origins.parks)
        holders = (("what is to be parked", parks), ("what moves", waiting))
        return Peak(parks + waiting, None, holders)

    def run(self, arrays: Sequence[jax.Array], ledger: Ledger) -> tuple[jax.Array, ...]:
        """Makes the change; returns the new model's arrays.

        `Origins.parked` gains the arrays that have left, and loses those that have come back.

        Args:
            arrays: the old model's arrays, which are consumed.
            ledger: counts the bytes.

        Raises:
            StageError: a copy or program failed. The error's `table` has all arrays of the old
                model, unless the error is a `HostLost`: another process, and its arrays, are gone.
        """
        origins, live = self.origins, list(ledger.live)
        placed: dict[Any, jax.Array] = {}
        leaves = Parked()
        origins.hosts.come(*arrays)
        for identity, x in origins.parks.items():
            leaves[identity] = x if isinstance(x, Away) else to_host(arrays[x])
        # In a change by host, `_leave` deletes arrays that move, so they are copied first.
        on_host = {i: to_host(arrays[i]) for i in self._waiting}
        ledger.hold(HOST, self._passing.bytes)
        try:
            if self.by_host:
                self._leave(arrays, ledger)
            before = {**dict(enumerate(arrays)), **on_host}
            sent = self._arrive(before, placed, ledger)
        except HostLost:
            raise
        except BaseException as error:
            is_alone = origins.hosts.count == 1
            if gone := "" if is_alone else origins.hosts.gone(wait_s=CLOSING_S):
                raise HostLost(
                    f"{gone}, go on from the last checkpoint: the model was being changed"
                ) from error
            if self.by_host:
                left = leaves | {origins.before[i]: x for i, x in on_host.items()}
                arrays = self._restored(arrays, placed.values(), left)
            ledger.live[:] = live
            if not isinstance(error, Exception):
                raise
            failure = StageError(f"the model could not be changed: {error}")
            failure.table = arrays
            raise failure from error
        # All arrays have arrived, and nothing after this can fail.
        for place, array in sent:
            ledger.drop(place, array.nbytes)
        if not self.by_host:
            self._leave(arrays, ledger)
        self._park(leaves, ledger)
        return tuple(placed.get(key_of(buffer)) for buffer in self._new.persistent)  # pyright: ignore[reportReturnType]

    def _park(self, leaves: Parked, ledger: Ledger) -> None:
        """Adds the arrays that have left to `Origins.parked`; removes those that have come back."""
        before = self.origins.parked
        after = self.origins.parked_after
        now_parked = parked_bytes(after) - parked_bytes(before)
        ledger.drop(HOST, self._passing.bytes - now_parked)
        for identity in before.keys() - after.keys():
            del before[identity]
        before.update(leaves)

    def _arrive(
        self,
        before: Mapping[int, Any],
        placed: dict[Any, jax.Array],
        ledger: Ledger,
    ) -> list[tuple[int, jax.Array]]:
        """Puts every array of the new model in its place.

        Args:
            before: the old model's arrays, by buffer.
            placed: gets the new model's arrays, by their spots (value and place).
            ledger: counts the bytes.

        Returns:
            The parked arrays that were put on devices of this process only to be sent to other
            processes, with their places.
        """
        hosts, sent = self.origins.hosts, list[tuple[int, jax.Array]]()
        put = partial(self._put, before, placed, sent, ledger)
        crossing = hosts.together("arrays of the new model", put)
        if crossing:
            spots, copies, values = zip(*crossing, strict=True)
            arrived = hosts.carry(copies, values)
            pairs = zip(spots, arrived, strict=True)
            placed |= {spot: array for spot, array in pairs if array is not None}

        def initialize() -> None:
            self._new.placing.initialize_optimizer(placed, self._new.store)
            jax.block_until_ready(list(placed.values()))

        hosts.together("optimizer's state of the new model", initialize)
        return sent

    def _put(
        self,
        before: Mapping[int, Any],
        placed: dict[Any, jax.Array],
        sent: list[tuple[int, jax.Array]],
        ledger: Ledger,
    ) -> list[tuple[Spot, Carried, jax.Array | None]]:
        """Puts arrays in their places, except those that come from another process.

        Args:
            before: the old model's arrays, by buffer.
            placed: gets the arrays, by their spots.
            sent: gets, with their places, arrays that are put on a device only to be sent to
                another process.
            ledger: counts the bytes.

        Returns:
            For each copy between processes: the spot of its array, the copy, and the array (None if
            another process has it). All processes return the same copies in the same order, as
            `Hosts.carry` requires.
        """
        crossing = []
        for arrival in self.origins.arrivals:
            buffer = arrival.buffer
            device = self._new.devices[buffer.place]
            is_here = is_own(device)
            process, value = self._value(arrival, before)
            if is_here and arrival.how != "stay":
                ledger.hold(buffer.memory, buffer.bytes)
            if process != device.process_index:
                home = self.origins.home(arrival)
                if home is not None and process == self.origins.hosts.process:
                    ledger.hold(home, buffer.bytes)
                    sharding = self._new.lying(buffer.value, home).sharding
                    value = jax.device_put(value, sharding, may_alias=False)
                    sent.append((home, value))
                copy = self._new.carried(buffer, process)
                crossing.append((key_of(buffer), copy, value))
            elif is_here and arrival.how == "stay":
                placed[key_of(buffer)] = value
            elif is_here and value is not None:
                placed[key_of(buffer)] = self._new.placing.put(value, buffer, may_alias=False)
        return crossing

    def _value(self, arrival: Arrival, before: Mapping[int, Any]) -> tuple[int, Any]:
        """Returns the process that has an array of the new model, and the array.

        The array is None if another process has it, or if the optimizer will make it.

        Args:
            arrival: the arrival of the array.
            before: the old model's arrays, by buffer.
        """
        here = self._new.devices[arrival.buffer.place].process_index
        kind, _ = arrival.identity
        match arrival.how:
            case "stay" | "copy":
                process = self.origins.process_of(arrival.old_index)
                return process, before[arrival.old_index]
            case "return":
                value = self.origins.parked[arrival.identity]
                if isinstance(value, Away):
                    return value.process, None
                return self.origins.hosts.process, value
            case "make" if kind == "optimizer":
                return here, None
            case "make":
                _, leaf = name_of(arrival.buffer)
                if kind == "constant":
                    return here, self._new.traced.loss.constants[leaf]
                return here, unshared(self.origins.values[kind][leaf])

    def _restored(
        self,
        arrays: Sequence[jax.Array],
        placed: Iterable[jax.Array],
        left: Parked,
    ) -> tuple[jax.Array, ...]:
        """Deletes the new model's arrays; returns the old model's arrays, restored from the host.

        Args:
            arrays: the old model's arrays, some of which have been deleted.
            placed: the new model's arrays so far; arrays that stay are among them.
            left: copies on the host of the arrays that were deleted, except constants.
        """
        # An array that stays is the same object in both models, and must not be deleted.
        staying = {id(x) for x in arrays}
        for x in placed:
            if id(x) not in staying:
                x.delete()
        identities = self.origins.before
        pairs = zip(identities, arrays, strict=True)
        values = {identity: x for identity, x in pairs if not x.is_deleted()} | left
        constants = self._old.traced.loss.constants
        restored = list(arrays)
        for i, buffer in enumerate(self._old.persistent):
            if arrays[i].is_deleted():
                kind, index = name_of(buffer)
                value = constants[index] if kind == "constant" else values[identities[i]]
                restored[i] = self._old.placing.put(value, buffer, may_alias=False)
        return tuple(restored)

    def _leave(self, arrays: Sequence[jax.Array], ledger: Ledger) -> None:
        """Deletes the arrays of the old model that leave devices of this process."""
        for i in filter(self.origins.had, self.origins.leaving):
            buffer = self._old.persistent[i]
            arrays[i].delete()
            ledger.drop(buffer.memory, buffer.bytes)
