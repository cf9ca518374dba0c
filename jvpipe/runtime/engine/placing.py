"""Puts the arrays that outlive a step at their places, and counts the bytes that this takes.

These arrays are the parameters, the optimizer's state, the model state and constants. They are
placed in the order of the buffer table. A `Leaf` (`training_state.py`) makes an array or puts a
given one on its device. When a run begins, the optimizer's state has no leaves. It is computed from
the parameters by the pieces of the optimizer. A piece is a program that makes the state of one
layer on the layer's device, or the state that belongs to no layer. Pieces may also pass small
values to later pieces.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, assert_never

import jax

from jvpipe.ir.buffers import HOST, Buffer, Peak, Spot
from jvpipe.ir.layers import LayerGraph, Spec
from jvpipe.ir.values import NONE, Owner, Value, ValueKind
from jvpipe.programs.model_programs import piece_program
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.pieces import Piece, Slot, SlotKind
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.training_state import Leaf, Name
from jvpipe.runtime.engine.value_shapes import value_spec
from jvpipe.util.devices import Device, is_own, sharding_on, swapper

Key = Spot | Slot
"""The key of an array while a state is made. It is the array's value and place (a spot), or for a
small value that pieces pass to each other, its name in the pieces (a slot)."""
_LASTING = (Owner.PARAMETER, Owner.OPTIMIZER, Owner.STATE, Owner.CONSTANT)


def name_of(buffer: Buffer) -> Name:
    """Returns the name of a persistent array, which is the same at every place."""
    return buffer.value.kind, buffer.value.index


def key_of(buffer: Buffer) -> Spot:
    """Returns the key of a persistent array, the same on its device and on the device's host."""
    return Spot(buffer.value, buffer.place)


@dataclass(frozen=True)
class _PieceKeys:
    """The device of an initializing piece, and the keys of the arrays that it reads and writes."""

    device: int
    reads: list[Key]
    writes: list[Key]


@dataclass(frozen=True)
class Placing:
    """The buffers that outlive a step, and methods that fill them with arrays.

    Args:
        graph: the model's layers.
        optimizer: the optimizer, whose pieces make its state.
        buffers: the buffers that outlive a step.
        devices: the device of each place.
    """

    graph: LayerGraph
    optimizer: OptimizerCut
    buffers: tuple[Buffer, ...]
    devices: tuple[Device, ...]

    def compile(self, leaves: Mapping[Name, Leaf], store: ProgramStore) -> None:
        """Compiles the programs that make arrays, all at the same time.

        Args:
            leaves: by the name of an array, how it gets onto a device.
            store: compiles programs.
        """
        programs = []
        for buffer in filter(self._is_own, self.buffers):
            leaf = leaves.get(name_of(buffer))
            if leaf and leaf.program:
                program = leaf.program.laid((), [self._spec(buffer.value)])
                programs.append((program, self.devices[buffer.place]))
        if programs:
            with phase("compiling, or loading what was compiled"):
                store.compile(programs)

    def peaks(self, leaves: Mapping[Name, Leaf]) -> tuple[Peak, ...]:
        """Returns the most bytes on each device, and last on the host, while `place` runs."""
        ledger = Ledger(self.devices)
        for buffer in self.buffers:
            d = buffer.place
            leaf = leaves.get(name_of(buffer))
            ledger.hold(buffer.memory, buffer.bytes)
            if leaf and self._is_own(buffer):
                temporary = leaf.needs(self.devices[d], self._spec(buffer.value))
                ledger.hold(d, 0, temporary)
        self._pass(ledger)
        memories = (*range(len(self.devices)), HOST)
        peaks = [Peak(ledger.peak[d], None, self._holders(d)) for d in memories]
        return tuple(peaks)

    def _pass(self, ledger: Ledger) -> None:
        """Counts optimizer state that will lie on the host, while it passes through its device.

        Such state is made after all other arrays and layer by layer. So a device holds such state
        of only one layer at a time.
        """
        passing = Counter[tuple[int, int]]()
        for buffer in self.buffers:
            if buffer.copy.on_host:
                passing[buffer.place, buffer.value.layer] += buffer.bytes
        for (place, _), size in passing.items():
            ledger.hold(place, 0, size)

    def _holders(self, memory: int) -> tuple[tuple[Owner, int], ...]:
        """Returns the bytes of each owner in a memory."""
        sizes = Counter[Owner]()
        for buffer in self.buffers:
            if buffer.memory == memory:
                sizes[buffer.owner] += buffer.bytes
        return tuple((owner, sizes[owner]) for owner in _LASTING)

    def place(
        self,
        ledger: Ledger,
        leaves: Mapping[Name, Leaf],
        store: ProgramStore,
    ) -> tuple[jax.Array, ...]:
        """Makes this process's persistent arrays: by leaves, or else by the optimizer's pieces.

        Returns the arrays in the order of `buffers`, with None for those of other processes.

        Args:
            ledger: counts the bytes of the arrays.
            leaves: by the name of an array, how it gets onto a device.
            store: compiles programs.
        """
        table: dict[Key, jax.Array] = {}
        here = list(filter(self._is_own, self.buffers))
        first: dict[Name, Key] = {}  # the key of the first array of each name
        for buffer in here:
            name = name_of(buffer)
            key = key_of(buffer)
            if name in leaves:
                device = self.devices[buffer.place]
                spec = self._spec(buffer.value)
                temporary = leaves[name].needs(device, spec)
                ledger.hold(buffer.memory, buffer.bytes)
                ledger.hold(buffer.place, 0, temporary)
                # A parameter is made once. The other places that read it get copies of it.
                if buffer.owner is Owner.PARAMETER and name in first:
                    table[key] = self.put(table[first[name]], buffer)
                else:
                    array = leaves[name].make(device, spec)
                    table[key] = self._resting(array, buffer)
                first.setdefault(name, key)
        # What is missing is optimizer state: all other arrays have leaves.
        lacking = [buffer for buffer in here if key_of(buffer) not in table]
        for buffer in lacking:
            ledger.hold(buffer.memory, buffer.bytes)
        self._pass(ledger)
        if lacking:
            self.initialize_optimizer(table, store)
        return tuple(table.get(key_of(buffer)) for buffer in self.buffers)  # pyright: ignore[reportReturnType]

    def _resting(self, array: jax.Array, buffer: Buffer) -> jax.Array:
        """Moves an array from the device that made it to the memory where it lies between steps.

        Only an array that lies on the host between steps has to move. Then this method waits for
        the copy, and deletes the array on the device.
        """
        if not buffer.copy.on_host:
            return array
        swap_out = swapper(self.devices[buffer.place], "pinned_host")
        away = swap_out(array).block_until_ready()
        array.delete()
        return away

    def put(
        self,
        value: Any,
        buffer: Buffer,
        *,
        may_alias: bool | None = None,
    ) -> jax.Array:
        """Puts an array where a buffer lies.

        Args:
            value: the array.
            buffer: the buffer to fill.
            may_alias: whether the result may share memory with `value`; None lets JAX decide.
        """
        spec = self._spec(buffer.value)
        sharding = sharding_on(self.devices[buffer.place], spec)
        array = jax.device_put(value, sharding, may_alias=may_alias)
        return self._resting(array, buffer)

    def _spec(self, value: Value) -> Spec:
        """Returns how a value is cut over the devices of a mesh."""
        return value_spec(self.graph, self.optimizer, value)

    def _is_own(self, buffer: Buffer) -> bool:
        return is_own(self.devices[buffer.place])

    def values(self, arrays: Sequence[jax.Array | None]) -> dict[Name, jax.Array]:
        """Returns one array of each name that this process has."""
        values: dict[Name, jax.Array] = {}
        for buffer, array in zip(self.buffers, arrays, strict=True):
            if array is not None:
                values.setdefault(name_of(buffer), array)
        return values

    def initialize_optimizer(
        self,
        table: dict[Key, jax.Array],
        store: ProgramStore,
    ) -> None:
        """Makes the optimizer's state that the table lacks, each piece on the device of its layer.

        Args:
            table: has the parameters; gets the state, and the small values that pieces pass on.
            store: compiles the pieces.
        """
        pieces, lacking = self._initializing(table)
        # State for the host is made on a device, and goes to the host after each piece.
        away: dict[Key, Buffer] = {key_of(b): b for b in self.buffers if b.copy.on_host}
        keys = [self._piece_keys(piece) for piece in pieces]
        programs = []
        for piece, of_piece in zip(pieces, keys, strict=True):
            program = self.initial_program(piece)
            programs.append((program, self.devices[of_piece.device]))
        executables = store.compile(programs)
        for of_piece, executable in zip(keys, executables, strict=True):
            device = self.devices[of_piece.device]
            arguments = []
            for key in of_piece.reads:
                sharding = sharding_on(device, self._key_spec(key))
                arguments.append(jax.device_put(table[key], sharding))
            results = executable(*arguments)  # a marker follows the arrays
            for key, array in zip(of_piece.writes, results, strict=False):
                if key in away and key in lacking:
                    table[key] = self._resting(array, away[key])
                elif key in lacking:
                    table[key] = array

    def initial_program(self, piece: Piece) -> Program:
        """Returns the program of a piece that makes optimizer state."""
        keys = self._piece_keys(piece)
        takes = [self._key_spec(key) for key in keys.reads]
        gives = [self._key_spec(key) for key in keys.writes]
        return piece_program(piece).laid(takes, gives)

    def _key_spec(self, key: Key) -> Spec:
        return self._spec(key.value) if isinstance(key, Spot) else ()

    def spare_bytes(self, table: Collection[Key]) -> list[int]:
        """Returns, by device, the largest number of bytes that one piece makes needlessly.

        `initialize_optimizer` runs whole pieces. A piece makes all arrays of its state, even those
        that the table already has. A check of memory limits must count these, too.
        """
        pieces, lacking = self._initializing(table)
        # The small values that pieces pass to each other are not counted.
        size: dict[Key, int] = {key_of(buffer): buffer.bytes for buffer in self.buffers}
        largest = [0] * len(self.devices)
        for piece in pieces:
            keys = self._piece_keys(piece)
            superfluous = [key for key in keys.writes if key not in lacking]
            spare = sum(size.get(key, 0) for key in superfluous)
            largest[keys.device] = max(largest[keys.device], spare)
        return largest

    def _initializing(self, table: Collection[Key]) -> tuple[list[Piece], set[Key]]:
        """Returns the pieces that make the state missing from the table, and the keys to be made.

        If a piece is needed, so are the earlier pieces that make the values that it reads. The loop
        goes from the last piece to the first, so it knows what later pieces need.
        """
        owned = [b for b in self.buffers if b.owner is Owner.OPTIMIZER and self._is_own(b)]
        lacking: set[Key] = {key_of(b) for b in owned}
        lacking -= set(table)
        making = []
        for piece in reversed(self.optimizer.init):
            keys = self._piece_keys(piece)
            if lacking.isdisjoint(keys.writes):
                continue
            making.append(piece)
            reads = zip(piece.reads, keys.reads, strict=True)
            lacking |= {key for slot, key in reads if slot.kind is not SlotKind.PARAMETER}
        return making[::-1], lacking

    def _piece_keys(self, piece: Piece) -> _PieceKeys:
        """Finds the device of an initializing piece, and the keys of what it reads and writes."""
        layer = NONE if piece.layer is None else piece.layer
        # If a layer has no state, its piece makes only small values, so it may run on any device.
        device = self._places.get(layer, self._home)
        reads = [_key_of_slot(self.graph, slot, layer, device) for slot in piece.reads]
        writes = [_key_of_slot(self.graph, slot, layer, device) for slot in piece.writes]
        return _PieceKeys(device, reads, writes)

    @cached_property
    def _home(self) -> int:
        """The first place whose device belongs to this process."""
        return next(i for i, device in enumerate(self.devices) if is_own(device))

    @cached_property
    def _places(self) -> dict[int, int]:
        """The place where each layer's optimizer state lies."""
        return {b.value.layer: b.place for b in self.buffers if b.owner is Owner.OPTIMIZER}


def _key_of_slot(graph: LayerGraph, slot: Slot, layer: int, place: int) -> Key:
    """Returns the key of a value that an initializing piece reads or writes.

    A small value has no fixed place, so its key is the slot, which has no place. A piece that runs
    on another device copies the value to its own device.

    Args:
        graph: the model's layers.
        slot: the slot of the value in the piece.
        layer: the layer of the piece.
        place: the place where the piece runs.
    """
    match slot.kind:
        case SlotKind.PARAMETER:
            parameter = graph.parameter(slot.index, version=0)
            return Spot(parameter, place)
        case SlotKind.STATE:
            state = Value(ValueKind.OPTIMIZER, slot.index, layer)
            return Spot(state, place)
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
