"""A model that changes while it is trained: what both models have stays, what leaves is parked, what is new is made.

An array is the same in both if its kind, path, shape and type are. The optimizer's state of a parameter goes where
the parameter goes; state that belongs to no parameter (a step count) always stays.

Of several processes each parks what leaves its own devices. What is wanted in another one goes there from device to
device, and nothing leaves before all of it has come everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax

from jvpipe import _jax
from jvpipe.ir.buffers import HOST, Buffer, Peak, Spot
from jvpipe.ir.layers import Array
from jvpipe.ir.values import Owner
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.failures import HostLost, StageError
from jvpipe.runtime.hosts import ALONE, Carried, Hosts
from jvpipe.runtime.state import key_of, name_of
from jvpipe.runtime.tensors import Away, Identity, Ledger, Limits, MemoryLimitExceeded, parked_bytes

_CLOSING_S = 1.0
"""How long it may take until the connection to a process that is gone has ended."""
Parked = dict[Identity, Any]
"""Arrays on the host that no present model has; of those of other processes where they are."""


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A model that took another one's place before a step: the paths of its parameters by where they came from.

    `parked` are those of the model before that it lacks; `how`: "beside" each other, or "by host": what leaves or
    moves goes to the host before anything arrives, since a device cannot hold both at once.
    """

    step: int
    kept: tuple[str, ...]
    returned: tuple[str, ...]
    new: tuple[str, ...]
    parked: tuple[str, ...]
    moved_bytes: int
    how: str

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(getattr(self, name))} {name}" for name in ("kept", "returned", "new", "parked")
        )
        return f"step {self.step}: another model; parameters: {counts}; {self.moved_bytes:,} bytes moved {self.how}"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of an array of the new model; `index` is that of the old model's buffer that stays or is copied."""

    how: Literal["stay", "copy", "return", "make"]
    index: int = -1


def plan_model_switch(
    old: CompiledPlan,
    new: CompiledPlan,
    given: Mapping[str, Sequence[Any]],
    parked: Parked,
    limits: Limits,
) -> "ModelSwitch":
    """Checks everything; nothing has happened yet.

    Args:
        old: the compiled plan that a state belongs to.
        new: the one that takes it over.
        given: leaves of the "parameter" and "state" of the new model, for those that are new.
        parked: what lies on the host.
        limits: kept at every instant.

    Raises:
        ValueError: an array has the path of one of the old model and another shape or type, or lacks its values.
        MemoryLimitExceeded: the new model does not keep the limit, or nothing can be moved within it.
    """
    switch, hosts = ModelSwitch(old, new, given, parked, by_host=False), new.hosts or ALONE
    way = "while one model takes over from another"
    hosts.together("new model", switch.check)
    hosts.together(
        "limits", lambda: replace(limits, parked=switch.parked_after).check(new.peaks, new.devices)
    )
    if new.hosts is not None:
        hosts.together("limits", lambda: limits.check(switch.peaks, new.devices, way))
        return switch
    try:
        replace(limits, host_bytes=None).check(switch.peaks, new.devices)
    except MemoryLimitExceeded:
        switch = replace(switch, by_host=True)
    limits.check(switch.peaks, new.devices, way)
    return switch


@dataclass(frozen=True)
class ModelSwitch:
    """Turns one compiled plan's arrays into another's; `by_host`: what leaves has to go before anything arrives."""

    old: CompiledPlan
    new: CompiledPlan
    given: Mapping[str, Sequence[Any]]
    parked: Parked
    by_host: bool

    def check(self) -> None:
        """Raises ValueError if an array has another shape than before, or one that is new has no value."""
        before = {(kind, array.name): array for kind, array in self._before}
        for kind, array in dict.fromkeys(self._after):
            was = before.get((kind, array.name), array)
            if kind in ("parameter", "state") and was != array:
                raise ValueError(
                    f"{kind} '{array.name}' is {array.dtype}{list(array.shape)} in the new model, "
                    f"{was.dtype}{list(was.shape)} in the present one: give it another path, for instance a name that "
                    "tells its shape, so that each keeps its own values"
                )
        for (kind, array), buffer, source in zip(
            self._after, self.new.persistent, self.sources, strict=True
        ):
            value = (
                self.given[kind][name_of(buffer)[1]]
                if kind in self.given and source.how == "make"
                else None
            )
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"{kind} '{array.name}' is new: its values must be given, not their shape alone"
                )

    @property
    def _hosts(self) -> Hosts:
        return self.new.hosts or ALONE

    @cached_property
    def _before(self) -> tuple[Identity, ...]:
        return _identities(self.old)

    @cached_property
    def _after(self) -> tuple[Identity, ...]:
        return _identities(self.new)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Of each persistent buffer of the new compiled."""
        owners, before = _parameters_of_state(self.new), frozenset(self._before)
        pool: dict[tuple[Identity, int, int], list[int]] = {}  # what can stay, by place and memory
        for i, (identity, buffer) in enumerate(zip(self._before, self.old.persistent, strict=True)):
            pool.setdefault((identity, buffer.place, buffer.memory), []).append(i)
        anywhere = {identity: i for i, identity in reversed(list(enumerate(self._before)))}

        def source(identity: Identity, buffer: Buffer) -> Source:
            kind, owner = (
                identity[0],
                owners.get(buffer.value.index) if buffer.owner is Owner.OPTIMIZER else None,
            )
            if kind == "constant":
                return Source("make")
            if identity in before and (owner is None or owner in before):
                here = pool.get((identity, buffer.place, buffer.memory))
                return Source("stay", here.pop(0)) if here else Source("copy", anywhere[identity])
            back = identity in self.parked and (
                owner is None or (owner in self.parked and owner not in before)
            )
            return Source("return" if back else "make")

        return tuple(map(source, self._after, self.new.persistent))

    @cached_property
    def leaving(self) -> tuple[int, ...]:
        """The old model's buffers that are not the new one's."""
        stays = {source.index for source in self.sources if source.how == "stay"}
        return tuple(i for i in range(len(self.old.persistent)) if i not in stays)

    @cached_property
    def parks(self) -> dict[Identity, int]:
        """The arrays that are kept on the host from here on, and the buffer that holds each."""
        after, parks = frozenset(self._after), dict[Identity, int]()
        for i in self.leaving:
            kind, array = self._before[i]
            if kind != "constant" and (kind, array) not in after:
                parks.setdefault((kind, array), i)
        return parks

    @cached_property
    def parked_after(self) -> Parked:
        """The arrays on the host once the new model has taken over; of what leaves now, not yet the values."""
        back = {
            it
            for it, source in zip(self._after, self.sources, strict=True)
            if source.how == "return"
        }
        parks = {
            it: i if self._had(i) else Away(self._process_of(i)) for it, i in self.parks.items()
        }
        return {it: value for it, value in (self.parked | parks).items() if it not in back}

    def _had(self, index: int) -> bool:
        """Tells whether a buffer of the old model lies with this process."""
        return _jax.is_own(self.old.devices[self.old.persistent[index].place])

    def _process_of(self, index: int) -> int:
        """The process that holds a buffer of the old model."""
        return self.old.devices[self.old.persistent[index].place].process_index

    def change(self, step: int) -> ModelChange:
        """The entry of the history for this switch, made before a step."""
        paths: dict[str, dict[str, None]] = {"kept": {}, "return": {}, "make": {}}
        for (kind, array), source in zip(self._after, self.sources, strict=True):
            if kind == "parameter":
                paths[source.how if source.how in paths else "kept"][array.name] = None
        parked = tuple(array.name for kind, array in self.parks if kind == "parameter")
        kept, returned, new = map(tuple, paths.values())
        copied = zip(self.new.persistent, self.sources, strict=True)
        moved = sum(buffer.bytes for buffer, source in copied if source.how == "copy")
        return ModelChange(
            step, kept, returned, new, parked, moved, "by host" if self.by_host else "beside"
        )

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host beside what is parked, on the way."""
        devices = range(len(self.new.devices))
        before, gone, arriving = ([0] * (len(devices) + 1) for _ in range(3))  # last the host's
        for i, buffer in enumerate(self.old.persistent):
            before[buffer.memory] += buffer.bytes
            gone[buffer.memory] += buffer.bytes if self.by_host and i in self.leaving else 0
        held: set[Any] = set()
        for identity, buffer, source in zip(
            self._after, self.new.persistent, self.sources, strict=True
        ):
            arriving[buffer.memory] += 0 if source.how == "stay" else buffer.bytes
            if (on_its_way := self._home(identity, buffer, source)) is not None:
                arriving[on_its_way] += buffer.bytes
            if source.how != "make" or buffer.owner is not Owner.OPTIMIZER:
                held.add(key_of(buffer))
        spare = self.new.placing.spare_bytes(held)
        most = [max(before[d], before[d] - gone[d] + arriving[d] + spare[d]) for d in devices]
        holders = [
            (("the model before", before[d] - gone[d]), ("what arrives", arriving[d]))
            for d in devices
        ]
        waiting = sum(self.old.persistent[i].bytes for i in self._copied) if self.by_host else 0
        parks = parked_bytes({it: i for it, i in self.parks.items() if self._had(i)})
        host = _peak(parks + waiting, (("what is to be parked", parks), ("what moves", waiting)))
        return (*map(_peak, most, holders), host)

    @cached_property
    def _copied(self) -> frozenset[int]:
        """The old model's buffers that the new one has elsewhere."""
        return frozenset(source.index for source in self.sources if source.how == "copy")

    def _home(self, identity: Identity, buffer: Buffer, source: Source) -> int | None:
        """The place over which what one process has parked goes to another one: the first there."""
        parked, devices = self.parked.get(identity), self.new.devices
        process = parked.process if isinstance(parked, Away) else self._hosts.process
        if source.how != "return" or devices[buffer.place].process_index == process:
            return None
        return next(d for d, device in enumerate(devices) if device.process_index == process)

    def run(self, arrays: Sequence[jax.Array], ledger: Ledger) -> tuple[jax.Array, ...]:
        """The new model's arrays. What has left is added to `parked`, what has come back is taken from it.

        Raises:
            StageError: something failed; its `table` are the old model's arrays, whole.
        """
        live, made = list(ledger.live), dict[Any, jax.Array]()
        leaves = {
            it: to_host(arrays[i]) if self._had(i) else Away(self._process_of(i))
            for it, i in self.parks.items()
        }
        on_host = {i: to_host(arrays[i]) for i in self._copied if self.by_host}
        ledger.hold(HOST, self.peaks[HOST].bytes)
        try:
            if self.by_host:
                self._leave(arrays, ledger)
            there = {**dict(enumerate(arrays)), **on_host}
            sent = self._arrive(there, made, ledger)
        except HostLost:
            raise
        except BaseException as error:
            if self._hosts.count > 1 and (gone := self._hosts.gone(wait_s=_CLOSING_S)):
                raise HostLost(
                    f"{gone}, go on from the last checkpoint: the model was being changed"
                ) from error
            if self.by_host:
                left = leaves | {self._before[i]: x for i, x in on_host.items()}
                arrays = self._restored(arrays, made.values(), left)
            ledger.live[:] = live
            if not isinstance(error, Exception):
                raise
            failure = StageError(f"the model could not be changed: {error}")
            failure.table = arrays
            raise failure from error
        for place, array in sent:
            ledger.drop(place, array.nbytes)
        if not self.by_host:
            self._leave(arrays, ledger)
        ledger.drop(
            HOST,
            self.peaks[HOST].bytes + parked_bytes(self.parked) - parked_bytes(self.parked_after),
        )
        for identity in self.parked.keys() - self.parked_after.keys():
            del self.parked[identity]
        self.parked.update(leaves)
        return tuple(made.get(key_of(buffer)) for buffer in self.new.persistent)  # pyright: ignore[reportReturnType]

    def _arrive(
        self, before: Mapping[int, Any], made: dict[Any, jax.Array], ledger: Ledger
    ) -> list[tuple[int, jax.Array]]:
        """Puts every array of the new model in its place; `before` are the old model's values, by buffer.

        Returns what has been held meanwhile at places of this process, for others.
        """
        hosts, sent = self._hosts, list[tuple[int, jax.Array]]()
        crossing = hosts.together(
            "arrays of the new model", lambda: self._put(before, made, sent, ledger)
        )
        if crossing:
            arrived = hosts.carry(
                [copy for _, copy, _ in crossing], [array for _, _, array in crossing]
            )
            made |= {
                spot: array
                for (spot, *_), array in zip(crossing, arrived, strict=True)
                if array is not None
            }

        def initialise() -> None:
            self.new.placing.initialise_optimizer(made, self.new.store)
            jax.block_until_ready(list(made.values()))

        hosts.together("optimizer's state of the new model", initialise)
        return sent

    def _put(
        self,
        before: Mapping[int, Any],
        made: dict[Any, jax.Array],
        sent: list[tuple[int, jax.Array]],
        ledger: Ledger,
    ) -> list[tuple[Spot, Carried, jax.Array | None]]:
        """Puts every array that this process has and is to have in its place; returns what goes between processes.

        Args:
            before: the old model's values, by buffer.
            made: gets the arrays, by their spots.
            sent: gets those that are made for other processes, and their places.
            ledger: counts them.
        """
        hosts, devices, crossing = (
            self._hosts,
            self.new.devices,
            list[tuple[Spot, Carried, jax.Array | None]](),
        )
        for identity, buffer, source in zip(
            self._after, self.new.persistent, self.sources, strict=True
        ):
            device, own = devices[buffer.place], _jax.is_own(devices[buffer.place])
            process, value = self._value(identity, buffer, source, before)
            if own and source.how != "stay":
                ledger.hold(buffer.memory, buffer.bytes)
            if process != device.process_index:
                home = self._home(identity, buffer, source)
                if home is not None and process == hosts.process:
                    ledger.hold(home, buffer.bytes)
                    value = jax.device_put(
                        value, self.new.lying(buffer.value, home).sharding, may_alias=False
                    )
                    sent.append((home, value))
                like = self.new.lying(buffer.value, buffer.place)
                crossing.append(
                    (key_of(buffer), Carried(process, device.process_index, like), value)
                )
            elif own and source.how == "stay":
                made[key_of(buffer)] = value
            elif own and value is not None:
                made[key_of(buffer)] = self.new.placing.put(value, buffer, may_alias=False)
        return crossing

    def _value(
        self, identity: Identity, buffer: Buffer, source: Source, before: Mapping[int, Any]
    ) -> tuple[int, Any]:
        """The process that has an array of the new model, and the array if that is this one; None if it is yet to be
        made there.
        """
        here, kind = self.new.devices[buffer.place].process_index, identity[0]
        match source.how:
            case "stay" | "copy":
                return self._process_of(source.index), before[source.index]
            case "return":
                value = self.parked[identity]
                return (
                    (value.process, None)
                    if isinstance(value, Away)
                    else (self._hosts.process, value)
                )
            case "make" if kind == "optimizer":
                return here, None
            case "make":
                given = {**self.given, "constant": self.new.traced.loss.constants}
                return here, given[kind][name_of(buffer)[1]]

    def _restored(
        self, arrays: Sequence[jax.Array], made: Iterable[jax.Array], left: Mapping[Identity, Any]
    ) -> tuple[jax.Array, ...]:
        """The old model's arrays again, once what was made for the new one is gone."""
        staying = {id(x) for x in arrays}
        for x in made:
            if id(x) not in staying:
                x.delete()
        there = {
            identity: x
            for identity, x in zip(self._before, arrays, strict=True)
            if not x.is_deleted()
        }
        values = {**there, **left}
        constants = self.old.traced.loss.constants
        restored = []
        for x, identity, buffer in zip(arrays, self._before, self.old.persistent, strict=True):
            if x.is_deleted():
                kind, index = name_of(buffer)
                value = constants[index] if kind == "constant" else values[identity]
                x = self.old.placing.put(value, buffer, may_alias=False)
            restored.append(x)
        return tuple(restored)

    def _leave(self, arrays: Sequence[jax.Array], ledger: Ledger) -> None:
        for i in filter(self._had, self.leaving):
            buffer = self.old.persistent[i]
            arrays[i].delete()
            ledger.drop(buffer.memory, buffer.bytes)


def _identities(compiled: CompiledPlan) -> tuple[Identity, ...]:
    """Of each persistent buffer."""
    graph, optimizer = compiled.traced.graph, compiled.optimizer
    known: dict[str, Callable[[int], Array]] = {
        "parameter": lambda i: graph.parameters[i].array,
        "optimizer": lambda i: optimizer.state[i].array,
        "state": lambda i: graph.state[i],
        "constant": lambda i: graph.constants[i],
    }
    names = map(name_of, compiled.persistent)
    return tuple((kind, known[kind](index)) for kind, index in names)


def _parameters_of_state(compiled: CompiledPlan) -> dict[Any, Identity]:
    """The parameter that a leaf of the optimizer's state belongs to, by the leaf's index."""
    parameters = [parameter.array for parameter in compiled.traced.graph.parameters]
    leaves = enumerate(compiled.optimizer.state)
    return {
        j: ("parameter", parameters[leaf.parameter])
        for j, leaf in leaves
        if leaf.parameter is not None
    }


def _peak(size: int, holders: tuple[tuple[Any, int], ...]) -> Peak:
    return Peak(size, None, holders)
