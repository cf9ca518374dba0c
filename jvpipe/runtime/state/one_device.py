"""Replays a run on one device, one micro-batch after another, from the ledger of versions.

The version of a layer's weights is the number of updates that they have had. The ledger
(`versions.py`) says which version each forward and backward read, and which version each update
made. No task reads a version that needs the gradients of a later micro-batch. So a replay can run
each micro-batch entirely before the next one begins. A forward or backward may read an older
version than the newest, so the replay keeps all versions. This takes one copy of the parameters for
each update of the run.

A replay checks a run, so it shares little with the controller: no task lists, no lowering, no
buffers. Only the programs of the layers and of the optimizer are the same, because only the same
programs give bitwise identical results.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import Layer, Ref, Source
from jvpipe.ir.use import Use
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.layout import stages_of
from jvpipe.programs import weight_programs
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import forward_program, piece_program
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.store import Program
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.util.devices import first_of


class Replay:
    """A sequential run of a model, which keeps every version of the parameters.

    A fate says whether a value is kept, swapped to the host or recomputed between forward and
    backward.

    Args:
        compiled: the plan whose layers and fates the replay uses at first.
        parameters: the parameters at the start, in the order of the graph.
        state: the leaves of the optimizer's state at the start, by index and layer.
        model_state: the leaves of the model state at the start.
        version: the version of the parameters at the start.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        parameters: Sequence[Any],
        state: dict[tuple[int, int], Any],
        model_state: Sequence[Any],
        version: int = 0,
    ) -> None:
        self._graph = compiled.traced.graph
        self._first = version
        self._enter(compiled)
        self._versions = [{version: x} for x in parameters]  # by parameter, then by version
        self._optimizer = dict(state)
        self._model_state = list(model_state)
        self._constants = compiled.traced.loss.constants
        self.forget()
        self._forget_gradients()

    @property
    def parameters(self) -> list[Any]:
        """The newest version of each parameter."""
        return [versions[max(versions)] for versions in self._versions]

    def microbatch(
        self,
        compiled: CompiledPlan,
        uses: Iterable[Use],
        batch: Sequence[Any],
        seed: Any,
    ) -> float:
        """Runs the forward, backward and updates of a micro-batch; returns its loss.

        Args:
            compiled: the plan under which the micro-batch ran. It may differ from the plan of the
                micro-batch before: plans change, and an asynchronous run may begin with synchronous
                steps.
            uses: the versions that the micro-batch's tasks read and made.
            batch: the leaves of the micro-batch.
            seed: the words of the micro-batch's random key.
        """
        self._enter(compiled)
        self._at = {(use.kind, use.layer): use for use in uses}
        self._values = {
            Ref(ValueKind.SEED, 0): seed,
            **_by_ref(ValueKind.BATCH, batch),
            **_by_ref(ValueKind.CONSTANT, self._constants),
            **_by_ref(ValueKind.STATE, self._model_state),
        }
        self._inputs: dict[int, list[Any]] = {}  # by layer: the values that its forward read
        # By layer: the values that its forward leaves for its backward, and the results of its
        # second forward.
        self._residuals: dict[int, Sequence[Any]] = {}
        self._again: dict[int, list[Any]] = {}
        layers = self._graph.layers
        for layer in layers:
            self._forward(layer)
        if self._graph.weighted:
            weight = self._values[Ref(ValueKind.LOSS, 1)]
            self._weights.append(weight)
        cotangents: dict[int, Any] = {}
        for layer in reversed(layers):
            if (Kind.B, layer.id) in self._at:  # no backward if in flight at the end of the run
                self._backward(layer, cotangents)
        if any(kind is Kind.U for kind, _ in self._at):
            self._update()
        return float(self._values[Ref(ValueKind.LOSS, 0)])

    def _enter(self, compiled: CompiledPlan) -> None:
        """Uses a plan from now on. The plan of a run may change at any micro-batch."""
        self._compiled = compiled
        self._fates = Fates.of(self._graph, compiled.plan)
        self._stage = stages_of(compiled.plan)

    def forget(self) -> None:
        """Forgets PipeMare's mean and XPipe's last update, as a run does after a drain.

        PipeMare and XPipe are schedules that shift the weights which a task reads, to bring them
        closer to those of another version (see `_read`).
        """
        # By parameter and version: PipeMare's running mean of updates, or XPipe's last update.
        self._memory: dict[tuple[int, int], Any] = {}
        self._count: dict[int, Any] = {}  # by layer: how many updates PipeMare's mean has seen

    def _forget_gradients(self) -> None:
        """Forgets what has been summed for the last update, so that the next sums can begin."""
        self._weights: list[Any] = []  # the losses' weights since the last update
        # By parameter and reading layer: the gradients for the next update. If the devices of a
        # stage take turns with its micro-batches, each device has a sum of its own.
        self._sums: dict[tuple[int, int], list[Any]] = {}
        self._done = Counter[int]()  # by layer: how many backwards ran since the last update

    def _programs(self, layer: Layer) -> LayerPrograms:
        return self._compiled.programs[0][layer.id]

    def _run(self, program: Program, arguments: Sequence[Any]) -> list[Any]:
        """Runs a program on one device, and returns its results."""
        device = first_of(self._compiled.devices[0])
        (executable,) = self._compiled.store.compile([(program, device)])
        arrays = [jax.device_put(x, device) for x in arguments]
        # A program may overwrite its donated arguments, so these are copied: versions must stay.
        for i in program.donated:
            arrays[i] = jnp.copy(arrays[i])
        return list(executable(*arrays))

    def _forward(self, layer: Layer) -> None:
        """Runs a layer's forward."""
        reads = [self._read(layer, ref, Kind.F) for ref in layer.reads]
        out = self._run(forward_program(self._programs(layer)), reads)
        self._values |= dict(zip(layer.writes, out, strict=False))
        self._residuals[layer.id] = out[len(layer.writes) :]
        for k in layer.writing(ValueKind.STATE):
            self._model_state[k] = self._values[Ref(ValueKind.STATE, k)]
        self._inputs[layer.id] = reads

    def _read(self, layer: Layer, ref: Ref, kind: Kind) -> Any:
        """Returns a value that a layer reads; a parameter in the version that the ledger names.

        Args:
            layer: the layer.
            ref: the value.
            kind: F or B: whether the forward or the backward reads it.
        """
        if ref.kind != ValueKind.PARAMETER:
            return self._values[ref]
        use = self._at[kind, layer.id]
        p = ref.index
        versions = self._versions[p]
        tied = dict(use.tied)
        if p in tied:
            return versions[tied[p]]
        if self._graph.parameters[p].frozen:
            return versions[self._first]
        plain = versions[use.version]
        if not use.shift:
            return plain
        # Before a forward, XPipe adds the last update several times, to predict later weights.
        # Before a backward, PipeMare subtracts the mean update several times, to approximate the
        # weights that the forward read.
        updates = -use.shift if KINDS[kind].back else use.shift
        shape = jax.ShapeDtypeStruct(plain.shape, plain.dtype)
        program = weight_programs.shifted([shape], updates)
        remembered = self._memory[p, use.version]
        (shifted,) = self._run(program, [plain, remembered])[:1]
        return shifted

    def _run_again(self, layer: Layer) -> list[Any]:
        """Recomputes a layer's forward with the weights of its backward, once per micro-batch.

        Returns the values that the layer writes, and then its residuals (the values that its
        backward reads). The residuals replace those of the first forward.
        """
        if layer.id not in self._again:
            reads = [self._back(layer, ref) for ref in layer.reads]
            program = forward_program(self._programs(layer), recompute=True)
            out = self._run(program, reads)
            self._again[layer.id] = out
            self._residuals[layer.id] = out[len(layer.writes) :]
        return self._again[layer.id]

    def _back(self, layer: Layer, ref: Ref) -> Any:
        """Returns a value that a layer's forward read or wrote, for its backward.

        A value that the run dropped is recomputed, as it was in the run. An edge is a stage and a
        tensor between layers that the stage reads or makes.
        """
        edge = self._stage[layer.id], ref.index
        if ref.kind == ValueKind.TENSOR and edge in self._fates.dropped:
            number = self._graph.tensors[ref.index].producer
            producer = self._graph.layers[number]
            written = self._run_again(producer)
            return written[producer.writes.index(ref)]
        # The layer's forward may have overwritten the model state, so its input is read instead.
        if ref.kind == ValueKind.STATE and ref in layer.reads:
            return self._inputs[layer.id][layer.reads.index(ref)]
        return self._read(layer, ref, Kind.B)

    def _backward(
        self,
        layer: Layer,
        cotangents: dict[int, Any],
    ) -> None:
        """Runs a layer's backward; adds its gradients to the sums, and sets its inputs' cotangents.

        Args:
            layer: the layer.
            cotangents: by tensor, the sum of the cotangents from the later layers that read it.
        """
        signature = self._programs(layer).signature
        if signature.is_idle:
            return
        # Recomputing comes first, because it replaces residuals that are read below. `_back` is
        # called here only because it recomputes inputs that were dropped.
        for kind, i in signature.sources:
            if kind == "input":
                self._back(layer, layer.reads[i])
        if layer.id in self._fates.recomputed:
            self._run_again(layer)
        arguments = [self._source(layer, source) for source in signature.sources]
        arguments += [cotangents[layer.writes[i].index] for i in signature.cotangents]
        arguments += [cotangents[layer.reads[i].index] for i in signature.partial]
        parameters = [layer.reads[i].index for i in signature.gradients]
        # Devices that share a stage take turns with its micro-batches. Each device adds up its own
        # gradients, so the replay must do the same to get the same rounding.
        stage = self._compiled.plan.stages[self._stage[layer.id]]
        turns = len(stage.devices)
        turn = self._done[layer.id] % turns
        self._done[layer.id] += 1
        sums = []
        for p in parameters:
            zeros = [self._zero(p)] * turns
            sums.append(self._sums.setdefault((p, layer.id), zeros))
        program = self._compiled.row_programs.backward_program(self._programs(layer))
        # If each micro-batch has an update, the program has no inputs for sums.
        if len(program.inputs) > len(arguments):
            arguments += [of_turns[turn] for of_turns in sums]
        out = self._run(program, arguments)
        for of_turns, x in zip(sums, out, strict=False):
            of_turns[turn] = x
        returned = out[len(parameters) :]
        for i, x in zip(signature.returned, returned, strict=False):
            cotangents[layer.reads[i].index] = x

    def _source(self, layer: Layer, source: Source) -> Any:
        """Returns the value that a backward takes from one source of its signature.

        Args:
            layer: the layer.
            source: "residual", "output" or "input", and the number of the value among these.
        """
        kind, i = source
        if kind == "residual":
            return self._residuals[layer.id][i]
        if kind == "output":
            return self._back(layer, layer.writes[i])
        if layer.reads[i].kind in (ValueKind.PARAMETER, ValueKind.TENSOR):
            return self._back(layer, layer.reads[i])
        return self._inputs[layer.id][i]

    def _zero(self, p: int) -> np.ndarray:
        array = self._graph.parameters[p].array
        return np.zeros(array.shape, array.dtype)

    def _update(self) -> None:
        """Runs the updates of layers, with the gradients that were summed since the last update.

        The optimizer is cut into pieces. A piece is the program of one layer in one phase, and a
        slot names an array that pieces read or write.
        """
        total: list[Any] = []
        if self._graph.weighted:
            shape = self._compiled.traced.loss_shapes[1]
            program = weight_programs.total(shape, len(self._weights), self._graph.weight_type)
            total = self._run(program, self._weights)
        before: dict[int, dict[int, int]] = {}  # by layer: the versions at the start of the update
        values: dict[Slot, Any] = {}
        for piece in self._compiled.optimizer.update:
            layer = piece.layer
            if layer is None or (Kind.U, layer) not in self._at:
                continue
            if layer not in before:
                trained = self._graph.trained(self._graph.owned(layer))
                before[layer] = {p: max(self._versions[p]) for p in trained}
            old = before[layer]
            new = self._at[Kind.U, layer].version
            reads = [self._slot(slot, layer, old, total, values) for slot in piece.reads]
            out = self._run(piece_program(piece), reads)
            for slot, x in zip(piece.writes, out, strict=False):
                if slot.kind is SlotKind.PARAMETER:
                    self._versions[slot.index][new] = x
                elif slot.kind is SlotKind.STATE:
                    self._optimizer[slot.index, layer] = x
                else:
                    values[slot] = x
        for layer, versions in before.items():
            self._remember(layer, versions)
        self._forget_gradients()

    def _slot(
        self,
        slot: Slot,
        layer: int,
        before: dict[int, int],
        total: list[Any],
        values: dict[Slot, Any],
    ) -> Any:
        """Returns the value that a piece of the optimizer reads in a slot.

        Args:
            slot: the slot.
            layer: the layer of the piece.
            before: by parameter, its version at the start of the update.
            total: the sum of weights, if the loss is weighted.
            values: the values that earlier pieces have written.
        """
        match slot.kind:
            case SlotKind.GRADIENT:
                p = slot.index
                reader = self._graph.parameters[p].readers[slot.source]
                first, *others = self._sums.get((p, reader), [self._zero(p)])
                return reduce(operator.add, map(jnp.asarray, others), first)
            case SlotKind.WEIGHT:
                return total[0]
            case SlotKind.PARAMETER:
                version = before.get(slot.index, self._first)
                return self._versions[slot.index][version]
            case SlotKind.STATE:
                return self._optimizer[slot.index, layer]
            case SlotKind.KEPT | SlotKind.PARTIAL | SlotKind.GLOBAL | SlotKind.GRAD_NORM:
                return values[slot]
            case _:
                assert_never(slot.kind)

    def _remember(self, layer: int, before: dict[int, int]) -> None:
        """Remembers an update for later shifts: in PipeMare's mean, or as XPipe's last update.

        Args:
            layer: the layer.
            before: by parameter, its version at the start of the update.
        """
        schedule = self._compiled.schedule
        tau = schedule.tau(len(self._compiled.plan.stages), self._stage[layer])
        remembers = schedule.predicts or schedule.decay is not None
        if not (before and tau and remembers):
            self._count.pop(layer, None)
            return
        now = self._at[Kind.U, layer].version
        old = [self._versions[p][version] for p, version in before.items()]
        new = [self._versions[p][now] for p in before]
        memory = [self._memory.get(at, self._zero(at[0])) for at in before.items()]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old]
        if schedule.decay is None:
            program = weight_programs.difference(shapes)
            memory = self._run(program, [*old, *new, *memory])
        else:
            program = weight_programs.settled(
                shapes,
                tau,
                schedule.decay,
                schedule.anneal_updates,
            )
            count = self._count.get(layer, np.int32(0))
            out = self._run(program, [*old, *new, *memory, count])
            # PipeMare also scales the update itself, so the new version is replaced.
            for p, x in zip(before, out, strict=False):
                self._versions[p][now] = x
            memory = out[len(before) :]
            self._count[layer] = out[2 * len(before)]
        for p, x in zip(before, memory, strict=False):
            self._memory[p, now] = x


def _by_ref(kind: ValueKind, values: Sequence[Any]) -> dict[Ref, Any]:
    return {Ref(kind, i): x for i, x in enumerate(values)}
