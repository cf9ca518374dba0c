"""The state of a training run: every array that outlives a step, and how it gets to its device and back."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, assert_never

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Device, Tracer
from jvpipe.ir.brief import brief
from jvpipe.ir.buffers import HOST, Buffer, Peak, Spot
from jvpipe.ir.columns import columns
from jvpipe.ir.given import is_whole
from jvpipe.ir.layers import LayerGraph, Spec
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.sizes import format_bytes
from jvpipe.ir.values import NONE, Owner, Value, ValueKind
from jvpipe.programs.model import piece_program
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.pieces import Piece, Slot, SlotKind
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.phases import phase
from jvpipe.runtime.tensors import Ledger
from jvpipe.runtime.value_shapes import value_spec
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.keys import is_key
from jvpipe.trace.structure import structure


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "words"],
    meta_fields=["step", "stream_steps", "updates", "model"],
)
@dataclass(frozen=True)
class State:
    """Arrays in the order of the buffer table's persistent rows, the words of the run's key, and steps done.

    `updates` is how often parameters were updated. In an asynchronous stream `stream_steps` is the number of its steps
    so far; then there are also the arrays of the micro-batches in flight. It is 0 when nothing is. All states of one
    pipeline's `model` have the same.
    """

    arrays: tuple[jax.Array, ...]  # None for what another process holds
    words: np.ndarray | None
    step: int
    stream_steps: int = 0
    updates: int = 0
    model: object = None

    def __repr__(self) -> str:
        flying = f", {self.stream_steps} steps in flight" if self.stream_steps else ""
        told = f"State(step={self.step}, updates={self.updates}{flying})"
        here = [x for x in self.arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
        if any(x.is_deleted() for x in here):
            return f"{told}, consumed by a later step"
        places: dict[str, list[int]] = {}
        for x in here:
            away = "" if x.sharding.memory_kind in (None, "device") else ", on the host"
            place = f"{', '.join(sorted(map(str, x.devices())))}{away}"
            places.setdefault(place, []).append(x.nbytes)
        rows = [(place, len(sizes), format_bytes(sum(sizes))) for place, sizes in places.items()]
        return f"{told}\n{columns([('on', 'arrays', 'bytes'), *sorted(rows)])}" if rows else told

    def check(self, count: int) -> None:
        """Raises ValueError if a later step has taken these arrays, or if they are another pipeline's."""
        if not is_whole(self.step) or self.step < 0:
            told = f"the state is of step {brief(self.step)}"
            raise ValueError(f"{told}: use the one that init, step or restore returned")
        if len(self.arrays) != count:
            raise ValueError(
                "this state belongs to another pipeline or plan: use the one that init or restore gave"
            )
        kinds = {
            type(x) for x in self.arrays if x is not None
        }  # few, and faster than to ask each array
        if any(issubclass(kind, Tracer) for kind in kinds):
            raise ValueError(
                "this state is being traced: call the pipeline's members outside of jax.jit and its like, for they "
                "compile all that they run"
            )
        if other := next((kind for kind in kinds if not issubclass(kind, jax.Array)), None):
            raise ValueError(
                f"this state is a copy, of {other.__name__}: use the one that the step returned"
            )
        if any(x is not None and x.is_deleted() for x in self.arrays):
            raise ValueError(
                "this state was consumed by an earlier step: use the state that the step returned, or save it before "
                "with pipe.save; if that step failed, go on from the last checkpoint with pipe.restore"
            )


Key = Spot | Slot
"""Names an array while a state is made: where it lies, or, of a small value, the slot that it is for."""
Name = tuple[str, int]
FEW = 64
"""Integers that are worth no program of their own: so many at most."""
_LASTING = (Owner.PARAMETER, Owner.OPTIMIZER, Owner.STATE, Owner.CONSTANT)


def _nothing(device: Device, spec: Spec) -> int:
    return 0


@dataclass(frozen=True)
class Leaf:
    """Puts or makes one array on a device, by a program; `needs` are bytes that it takes there beside, meanwhile.

    Over a group of devices it lies as a spec says.
    """

    make: Callable[[Device, Spec], jax.Array]
    needs: Callable[[Device, Spec], int] = _nothing
    program: Program | None = None


def given_leaves(values: Sequence[Any]) -> list[Leaf]:
    """Leaves from arrays; the caller's own are never taken, and lazy ones are read one after another."""

    def put(value: Any, device: Device, spec: Spec) -> jax.Array:
        sharding, lazy = _jax.sharding_on(device, spec), isinstance(value, LazyArray)
        array = jax.device_put(np.asarray(value) if lazy else value, sharding, may_alias=False)
        return array.block_until_ready() if lazy else array  # the next one is read when it is there

    return [Leaf(partial(put, value)) for value in values]


def made_leaves(store: ProgramStore, fn: Callable[..., Any], rng: jax.Array) -> list[Leaf]:
    """Each leaf of what `fn(rng)` returns, as something to be made on its own device.

    Each leaf has its own program (leaves alike share one), so no device ever holds more than it owns. Keys, and other
    few integers, are derived at once and for all: programs that each derived their own would seldom be alike.

    Args:
        store: where the programs are compiled.
        fn: makes the whole tree from a key.
        rng: that key.
    """
    closed = flatten(fn, rng)
    known = dict(
        zip([*closed.jaxpr.invars, *closed.jaxpr.constvars], [rng, *closed.consts], strict=True)
    )
    eqns = list[_jax.JaxprEqn]()
    for eqn in closed.jaxpr.eqns:
        if all(map(_is_few_integers, eqn.outvars)) and all(
            v in known for v in jaxprs.variables(eqn.invars)
        ):
            jaxprs.run([eqn], known)
        else:
            eqns.append(eqn)

    def leaf(out: _jax.Atom) -> Leaf:
        needed = jaxprs.prune(eqns, [out])
        inputs = list(jaxprs.free_variables(needed)) or [
            v for v in jaxprs.variables([out]) if v in known
        ]

        def run(*values: Any) -> list[Any]:
            env = dict(zip(inputs, values, strict=True))
            jaxprs.run(needed, env)
            return jaxprs.read([out], env)

        program = Program(
            ("init", structure(needed, inputs, [out], rules=False)),
            run,
            tuple(map(_jax.aval, inputs)),
        )

        def make(device: Device, spec: Spec) -> jax.Array:
            (compiled,) = store.compile([(program.laid((), [spec]), device)])
            return compiled(*(jax.device_put(known[v], _jax.sharding_on(device)) for v in inputs))[
                0
            ]

        def needs(device: Device, spec: Spec) -> int:
            needed = store.compile([(program.laid((), [spec]), device)])[0].memory_analysis()
            return needed.temp_size_in_bytes + needed.argument_size_in_bytes

        return Leaf(make, needs, program)

    return [leaf(out) for out in closed.jaxpr.outvars]


def _is_few_integers(atom: _jax.Atom) -> bool:
    """Whether a value is of random keys or integers, whose bits do not depend on who computes them, and of few."""
    aval = _jax.aval(atom)
    return (is_key(aval) or np.issubdtype(aval.dtype, np.integer)) and aval.size <= FEW


def name_of(buffer: Buffer) -> Name:
    """The name of a persistent array, wherever it lies."""
    return buffer.value.kind, buffer.value.index


def key_of(buffer: Buffer) -> Spot:
    """The name of a persistent array while a state is made, whether it will lie on its device or on the host."""
    return Spot(buffer.value, buffer.place)


@dataclass(frozen=True)
class Placing:
    """Puts a run's arrays where the buffer table says, and finds them again.

    An array has a name that no cut changes: its kind and the index of its leaf. Copies share a name.
    """

    graph: LayerGraph
    optimizer: OptimizerCut
    buffers: tuple[Buffer, ...]
    devices: tuple[Device, ...]

    def compile(self, leaves: Mapping[Name, Leaf], store: ProgramStore) -> None:
        """Compiles what makes arrays, side by side; else each would be when it is asked for."""
        made = ((leaves.get(name_of(b)), b) for b in self.buffers if self._is_own(b))
        if wanted := [
            (leaf.program.laid((), [self._spec(b.value)]), self.devices[b.place])
            for leaf, b in made
            if leaf and leaf.program
        ]:
            with phase("compiling, or loading what was compiled"):
                store.compile(wanted)

    def peaks(self, leaves: Mapping[Name, Leaf]) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host, while the arrays are placed in their order."""
        memories = (*range(len(self.devices)), HOST)
        live, most = [0] * len(memories), [0] * len(memories)
        for buffer in self.buffers:
            d, leaf = buffer.place, leaves.get(name_of(buffer))
            live[buffer.memory] += buffer.bytes
            making = (
                leaf.needs(self.devices[d], self._spec(buffer.value))
                if leaf and self._is_own(buffer)
                else 0
            )
            most[d] = max(most[d], live[d] + making)
        for d, passing in enumerate(self._passing_bytes):
            most[d] = max(most[d], live[d] + passing)
        most[HOST] = live[HOST]
        holders = [
            tuple(
                (owner, sum(b.bytes for b in self.buffers if (b.owner, b.memory) == (owner, d)))
                for owner in _LASTING
            )
            for d in memories
        ]
        return tuple(Peak(most[d], None, holders[d]) for d in memories)

    def place(
        self, ledger: Ledger, leaves: Mapping[Name, Leaf], store: ProgramStore
    ) -> tuple[jax.Array, ...]:
        """Makes every persistent array of this process; optimizer state without leaves is initialised.

        Args:
            ledger: counts them.
            leaves: put or make the arrays, by name.
            store: where programs are compiled.
        """
        table: dict[Key, jax.Array] = {}
        first: dict[
            Name, Key
        ] = {}  # the first array of a name; a parameter's others are copies of it
        own = [buffer for buffer in self.buffers if self._is_own(buffer)]
        for buffer in own:
            name = name_of(buffer)
            if name in leaves:
                device, spec = self.devices[buffer.place], self._spec(buffer.value)
                ledger.hold(buffer.memory, buffer.bytes)
                ledger.hold(buffer.place, 0, leaves[name].needs(device, spec))
                if buffer.owner is Owner.PARAMETER and name in first:
                    made = self.put(table[first[name]], buffer)
                else:
                    made = self._resting(leaves[name].make(device, spec), buffer)
                table[key_of(buffer)] = made
                first.setdefault(name, key_of(buffer))
        fresh = [buffer for buffer in own if key_of(buffer) not in table]
        for buffer in fresh:
            ledger.hold(buffer.memory, buffer.bytes)
        for d, passing in enumerate(self._passing_bytes):
            ledger.hold(d, 0, passing)
        if fresh:
            self.initialise_optimizer(table, store)
        return tuple(table.get(key_of(buffer)) for buffer in self.buffers)  # pyright: ignore[reportReturnType]

    @cached_property
    def _passing_bytes(self) -> list[int]:
        """The most bytes of one layer, by device, that are made there and then lie on the host."""
        passing = Counter[tuple[int, int]]()
        for buffer in self.buffers:
            if buffer.copy.on_host:
                passing[buffer.place, buffer.value.layer] += buffer.bytes
        return [
            max((size for (place, _), size in passing.items() if place == d), default=0)
            for d in range(len(self.devices))
        ]

    def _resting(self, array: jax.Array, buffer: Buffer) -> jax.Array:
        """An array that was made on a device where it lies between steps; what goes to the host has arrived there."""
        if not buffer.copy.on_host:
            return array
        away = _jax.swapper(self.devices[buffer.place], "pinned_host")(array).block_until_ready()
        array.delete()
        return away

    def put(self, value: Any, buffer: Buffer, *, may_alias: bool | None = None) -> jax.Array:
        """Puts an array where a buffer lies.

        Args:
            value: the array.
            buffer: of the table.
            may_alias: whether the two may share memory; as JAX has it unless given.
        """
        sharding = _jax.sharding_on(self.devices[buffer.place], self._spec(buffer.value))
        return self._resting(jax.device_put(value, sharding, may_alias=may_alias), buffer)

    def _spec(self, value: Value) -> Spec:
        return value_spec(self.graph, self.optimizer, value)

    def _is_own(self, buffer: Buffer) -> bool:
        return _jax.is_own(self.devices[buffer.place])

    def values(self, arrays: Sequence[jax.Array | None]) -> dict[Name, jax.Array]:
        """One array for each name that this process has any of."""
        values: dict[Name, jax.Array] = {}
        for buffer, array in zip(self.buffers, arrays, strict=True):
            if array is not None:
                values.setdefault(name_of(buffer), array)
        return values

    def initialise_optimizer(self, table: dict[Key, jax.Array], store: ProgramStore) -> None:
        """Makes the optimizer's state that the table lacks from parameters, each piece where its layer lies."""
        pieces, lacking = self._initialising(table)
        away: dict[Key, Buffer] = {key_of(b): b for b in self.buffers if b.copy.on_host}
        keys = [self._piece_keys(piece) for piece in pieces]
        executables = store.compile(
            [
                (self.initial_program(x), self.devices[d])
                for x, (d, *_) in zip(pieces, keys, strict=True)
            ]
        )
        for (d, reads, writes), executable in zip(keys, executables, strict=True):
            places = (_jax.sharding_on(self.devices[d], self._key_spec(key)) for key in reads)
            out = executable(
                *(
                    jax.device_put(table[key], place)
                    for key, place in zip(reads, places, strict=True)
                )
            )
            table |= {
                key: self._resting(x, away[key]) if key in away else x
                for key, x in zip(writes, out, strict=False)
                if key in lacking
            }

    def initial_program(self, piece: Piece) -> Program:
        """A piece of what makes the optimizer's state, as something to compile."""
        _, *both = self._piece_keys(piece)
        takes, gives = ([self._key_spec(key) for key in keys] for keys in both)
        return piece_program(piece).laid(takes, gives)

    def _key_spec(self, key: Key) -> Spec:
        return self._spec(key.value) if isinstance(key, Spot) else ()

    def spare_bytes(self, table: Collection[Key]) -> list[int]:
        """The most bytes at once, by device, that `initialise_optimizer` makes of what the table has already."""
        pieces, lacking = self._initialising(table)
        size: dict[Key, int] = {key_of(buffer): buffer.bytes for buffer in self.buffers}
        most = [0] * len(self.devices)
        for piece in pieces:
            d, _, writes = self._piece_keys(piece)
            most[d] = max(most[d], sum(size.get(key, 0) for key in writes if key not in lacking))
        return most

    def _initialising(self, table: Collection[Key]) -> tuple[list[Piece], set[Key]]:
        """The pieces that make what the table lacks, and what that is: state, and what goes between pieces."""
        own = (b for b in self.buffers if b.owner is Owner.OPTIMIZER and self._is_own(b))
        lacking: set[Key] = {key_of(b) for b in own if key_of(b) not in table}
        making = []
        for piece in reversed(self.optimizer.init):
            _, reads, writes = self._piece_keys(piece)
            if not lacking.isdisjoint(writes):
                making.append(piece)
                lacking.update(
                    key
                    for slot, key in zip(piece.reads, reads, strict=True)
                    if slot.kind is not SlotKind.PARAMETER
                )
        return making[::-1], lacking

    def _piece_keys(self, piece: Piece) -> tuple[int, list[Key], list[Key]]:
        """The device of an initialising piece, and the names of what it reads and writes."""
        layer = NONE if piece.layer is None else piece.layer
        d = self._places.get(layer, self._home)  # one without state only makes small values
        return (
            d,
            [_named(self.graph, slot, layer, d) for slot in piece.reads],
            [_named(self.graph, slot, layer, d) for slot in piece.writes],
        )

    @cached_property
    def _home(self) -> int:
        return next(i for i, device in enumerate(self.devices) if _jax.is_own(device))

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where the optimizer's state of each layer is."""
        return {b.value.layer: b.place for b in self.buffers if b.owner is Owner.OPTIMIZER}


def _named(graph: LayerGraph, slot: Slot, layer: int, d: int) -> Key:
    """The key of what an initialising piece reads or writes; small values are fetched from wherever they lie.

    Args:
        graph: the model's.
        slot: of the piece.
        layer: the piece's.
        d: the device that it runs on.
    """
    match slot.kind:
        case SlotKind.PARAMETER:
            return Spot(graph.parameter(slot.index, version=0), d)
        case SlotKind.STATE:
            return Spot(Value(ValueKind.OPTIMIZER, slot.index, layer), d)
        case (
            SlotKind.PARTIAL
            | SlotKind.GLOBAL
            | SlotKind.KEPT
            | SlotKind.GRADIENT
            | SlotKind.WEIGHT
            | SlotKind.GRAD_NORM
        ):
            return slot
        case _:
            assert_never(slot.kind)
