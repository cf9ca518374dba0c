"""A model that changes while it is trained: what both models have stays, what leaves is parked, what is new is made.

An array is the same in both if its kind, path, shape and type are. The optimizer's state of a parameter goes where
the parameter goes; state that belongs to no parameter (a step count) always stays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax

from jvpipe.ir.buffers import HOST, Buffer, Peak
from jvpipe.ir.layers import Array
from jvpipe.ir.values import Owner
from jvpipe.programs.optimizer import match_paths
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.failures import StageError
from jvpipe.runtime.state import Placing, name_of
from jvpipe.runtime.tensors import Identity, Ledger, Limits, MemoryLimitExceeded, parked_bytes

Parked = dict[Identity, Any]
"""Arrays on the host that no present model has."""


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
        counts = ", ".join(f"{len(getattr(self, name))} {name}" for name in ("kept", "returned", "new", "parked"))
        return f"step {self.step}: another model; parameters: {counts}; {self.moved_bytes:,} bytes moved {self.how}"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of an array of the new model; `index` is that of the old model's buffer that stays or is copied."""

    how: Literal["stay", "copy", "return", "make"]
    index: int = -1


def plan_model_switch(
    old: CompiledPlan, new: CompiledPlan, given: Mapping[str, Sequence[Any]], parked: Parked, limits: Limits
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
    switch = ModelSwitch(old, new, given, parked, by_host=False)
    switch.check()
    replace(limits, parked=switch.parked_after).check(new.peaks, new.devices)
    try:
        replace(limits, host_bytes=None).check(switch.peaks, new.devices)
    except MemoryLimitExceeded:
        switch = replace(switch, by_host=True)
    limits.check(switch.peaks, new.devices, "while one model takes over from another")
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
        for (kind, array), buffer, source in zip(self._after, self.new.persistent, self.sources, strict=True):
            value = self.given[kind][name_of(buffer)[1]] if kind in self.given and source.how == "make" else None
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ValueError(f"{kind} '{array.name}' is new: its values must be given, not their shape alone")

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
        pool: dict[tuple[Identity, int], list[int]] = {}  # what can stay, by device
        for i, (identity, buffer) in enumerate(zip(self._before, self.old.persistent, strict=True)):
            pool.setdefault((identity, buffer.memory), []).append(i)
        anywhere = {identity: i for i, identity in reversed(list(enumerate(self._before)))}

        def source(identity: Identity, buffer: Buffer) -> Source:
            kind, owner = identity[0], owners.get(buffer.value.index) if buffer.owner is Owner.OPTIMIZER else None
            if kind == "constant":
                return Source("make")
            if identity in before and (owner is None or owner in before):
                here = pool.get((identity, buffer.memory))
                return Source("stay", here.pop(0)) if here else Source("copy", anywhere[identity])
            back = identity in self.parked and (owner is None or (owner in self.parked and owner not in before))
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
        back = {it for it, source in zip(self._after, self.sources, strict=True) if source.how == "return"}
        return {it: value for it, value in (self.parked | self.parks).items() if it not in back}

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
        return ModelChange(step, kept, returned, new, parked, moved, "by host" if self.by_host else "beside")

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host beside what is parked, on the way."""
        devices = range(len(self.new.devices))
        before, gone, arriving = ([0] * len(devices) for _ in range(3))
        for i, buffer in enumerate(self.old.persistent):
            before[buffer.memory] += buffer.bytes
            gone[buffer.memory] += buffer.bytes if self.by_host and i in self.leaving else 0
        held: set[Any] = set()
        for buffer, source in zip(self.new.persistent, self.sources, strict=True):
            arriving[buffer.memory] += 0 if source.how == "stay" else buffer.bytes
            if source.how != "make" or buffer.owner is not Owner.OPTIMIZER:
                held.add(buffer.spot)
        spare = _placing(self.new).spare_bytes(held)
        most = [max(before[d], before[d] - gone[d] + arriving[d] + spare[d]) for d in devices]
        holders = [(("the model before", before[d] - gone[d]), ("what arrives", arriving[d])) for d in devices]
        waiting = sum(self.old.persistent[i].bytes for i in self._copied) if self.by_host else 0
        parks = parked_bytes(self.parks)
        host = _peak(parks + waiting, (("what is to be parked", parks), ("what moves", waiting)))
        return (*map(_peak, most, holders), host)

    @cached_property
    def _copied(self) -> frozenset[int]:
        """The old model's buffers that the new one has elsewhere."""
        return frozenset(source.index for source in self.sources if source.how == "copy")

    def run(self, arrays: Sequence[jax.Array], ledger: Ledger) -> tuple[jax.Array, ...]:
        """The new model's arrays. What has left is added to `parked`, what has come back is taken from it.

        Raises:
            StageError: something failed; its `table` are the old model's arrays, whole.
        """
        live, made = list(ledger.live), dict[Any, jax.Array]()
        leaves = {identity: to_host(arrays[i]) for identity, i in self.parks.items()}
        on_host = {i: to_host(arrays[i]) for i in self._copied if self.by_host}
        ledger.hold(HOST, self.peaks[HOST].bytes)
        try:
            if self.by_host:
                self._leave(arrays, ledger)
            self._arrive({**dict(enumerate(arrays)), **on_host}, made, ledger)
        except BaseException as error:
            if self.by_host:
                left = leaves | {self._before[i]: x for i, x in on_host.items()}
                arrays = self._restored(arrays, made.values(), left)
            ledger.live[:] = live
            if not isinstance(error, Exception):
                raise
            failure = StageError(f"the model could not be changed: {error}")
            failure.table = arrays
            raise failure from error
        if not self.by_host:
            self._leave(arrays, ledger)
        ledger.drop(HOST, self.peaks[HOST].bytes + parked_bytes(self.parked) - parked_bytes(self.parked_after))
        for identity in self.parked.keys() - self.parked_after.keys():
            del self.parked[identity]
        self.parked.update(leaves)
        return tuple(made[buffer.spot] for buffer in self.new.persistent)

    def _arrive(self, before: Mapping[int, Any], made: dict[Any, jax.Array], ledger: Ledger) -> None:
        """Puts every array of the new model in its place; `before` are the old model's values, by buffer."""
        given = {**self.given, "constant": self.new.traced.loss.constants}
        for (kind, array), buffer, source in zip(self._after, self.new.persistent, self.sources, strict=True):
            match source.how:
                case "stay":
                    made[buffer.spot] = before[source.index]
                    continue
                case "copy":
                    value = before[source.index]
                case "return":
                    value = self.parked[kind, array]
                case "make" if kind == "optimizer":
                    value = None
                case "make":
                    value = given[kind][name_of(buffer)[1]]
            ledger.hold(buffer.memory, buffer.bytes)
            if value is not None:
                made[buffer.spot] = jax.device_put(value, self.new.devices[buffer.memory], may_alias=False)
        _placing(self.new).initialise_optimizer(made, self.new.store)
        jax.block_until_ready(list(made.values()))

    def _restored(
        self, arrays: Sequence[jax.Array], made: Iterable[jax.Array], left: Mapping[Identity, Any]
    ) -> tuple[jax.Array, ...]:
        """The old model's arrays again, once what was made for the new one is gone."""
        staying = {id(x) for x in arrays}
        for x in made:
            if id(x) not in staying:
                x.delete()
        there = {identity: x for identity, x in zip(self._before, arrays, strict=True) if not x.is_deleted()}
        values = {**there, **left}
        constants = self.old.traced.loss.constants
        restored = []
        for x, identity, buffer in zip(arrays, self._before, self.old.persistent, strict=True):
            if x.is_deleted():
                kind, index = name_of(buffer)
                value = constants[index] if kind == "constant" else values[identity]
                x = jax.device_put(value, self.old.devices[buffer.memory], may_alias=False)
            restored.append(x)
        return tuple(restored)

    def _leave(self, arrays: Sequence[jax.Array], ledger: Ledger) -> None:
        for i in self.leaving:
            buffer = self.old.persistent[i]
            arrays[i].delete()
            ledger.drop(buffer.memory, buffer.bytes)


def _placing(compiled: CompiledPlan) -> Placing:
    return Placing(compiled.traced.graph, compiled.optimizer, compiled.persistent, compiled.devices)


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
    paths = [tuple(array.name.split("/")) for array in parameters]
    leaves = [tuple(leaf.array.name.split("/")) for leaf in compiled.optimizer.state]
    matches = enumerate(match_paths(leaves, paths))
    return {j: ("parameter", parameters[p]) for j, p in matches if p is not None}


def _peak(size: int, holders: tuple[tuple[Any, int], ...]) -> Peak:
    return Peak(size, None, holders)
