"""A run again on one device, one micro-batch after the other, by nothing but what the ledger of versions says.

It calls the layers' own programs, for else bits cannot agree, and shares nothing with the controller: no lists, no
lowering, no buffers. A forward reads the version that the ledger names, so does a backward, and an update makes the
next; which of them may come when follows from this alone.
"""

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import first_of
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import Layer, Ref
from jvpipe.ir.use import Use
from jvpipe.ir.values import ValueKind
from jvpipe.programs import weights
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import forward_program, piece_program
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.store import Program
from jvpipe.runtime.compiled_plan import CompiledPlan


class Replay:
    """A sequential run of a model: parameters by version, everything else by micro-batch.

    Args:
        compiled: the plan whose layers and fates it follows.
        parameters: the leaves at the start, as the layers see them.
        state: the leaves of the optimizer's state at the start, by index and layer.
        model_state: the leaves of the model state at the start.
        constants: what the trace closed over.
        version: what the first updates start from.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        parameters: Sequence[Any],
        state: dict[tuple[int, int], Any],
        model_state: Sequence[Any],
        constants: Sequence[Any],
        version: int = 0,
    ) -> None:
        self._graph, self._first = compiled.traced.graph, version
        self._enter(compiled)
        self._versions = {(p, version): x for p, x in enumerate(parameters)}
        self._optimizer, self._model_state, self._constants = (
            dict(state),
            list(model_state),
            constants,
        )
        self._memory: dict[
            tuple[int, int], Any
        ] = {}  # delta, or the last update, by parameter and version
        self._count: dict[int, Any] = {}
        self._weights: dict[int, Any] = {}
        # Gradients of the update to come, by parameter and reader; where devices take turns, those of each.
        self._sums: dict[tuple[int, int], list[Any]] = {}
        self._done: dict[int, int] = {}  # by layer, the backwards since the last update

    @property
    def parameters(self) -> list[Any]:
        """The newest version of each."""
        newest = dict(sorted(self._versions))
        return [self._versions[p, newest[p]] for p in range(len(self._graph.parameters))]

    def microbatch(
        self, compiled: CompiledPlan, uses: Iterable[Use], batch: Sequence[Any], seed: Any
    ) -> float:
        """Runs forward, backward and updates of one micro-batch; returns its loss.

        Args:
            compiled: has the backwards and the optimizer: those of a synchronous beginning are others.
            uses: which versions were read and made.
            batch: the leaves of the micro-batch.
            seed: the words of its key.
        """
        self._enter(compiled)
        self._at = {(use.kind, use.layer): use for use in uses}
        self._values: dict[Ref, Any] = {Ref(ValueKind.BATCH, i): x for i, x in enumerate(batch)}
        self._values |= {Ref(ValueKind.CONSTANT, i): x for i, x in enumerate(self._constants)}
        self._values |= {
            Ref(ValueKind.SEED, 0): seed,
            **{Ref(ValueKind.STATE, k): x for k, x in enumerate(self._model_state)},
        }
        self._residuals: dict[int, Sequence[Any]] = {}
        self._again: dict[int, list[Any]] = {}
        inputs = {}
        for layer in self._graph.layers:
            inputs[layer.id] = [self._read(layer, ref, Kind.F) for ref in layer.reads]
            out = self._run(forward_program(self._programs(layer)), inputs[layer.id])
            self._values |= dict(zip(layer.writes, out, strict=False))
            self._residuals[layer.id] = out[len(layer.writes) :]
            for k in layer.writing(ValueKind.STATE):
                self._model_state[k] = self._values[Ref(ValueKind.STATE, k)]
        if self._graph.weighted:
            self._weights[len(self._weights)] = self._values[Ref(ValueKind.LOSS, 1)]
        cotangents: dict[int, Any] = {}
        for layer in reversed(self._graph.layers):
            if (Kind.B, layer.id) in self._at:  # else it was still in flight
                self._backward(layer, inputs[layer.id], cotangents)
        if any(kind is Kind.U for kind, _ in self._at):
            self._update()
        return float(self._values[Ref(ValueKind.LOSS, 0)])

    def _enter(self, compiled: CompiledPlan) -> None:
        self._compiled, self._fates = compiled, Fates.of(self._graph, compiled.plan)
        self._stage = {
            layer: s for s, stage in enumerate(compiled.plan.stages) for layer in stage.layers
        }

    def forget(self) -> None:
        """A drain: what was remembered of updates is gone."""
        self._memory, self._count = {}, {}

    def _programs(self, layer: Layer) -> LayerPrograms:
        return self._compiled.programs[0][layer.id]

    def _run(self, program: Program, arguments: Sequence[Any]) -> list[Any]:
        device = first_of(self._compiled.devices[0])
        (executable,) = self._compiled.store.compile([(program, device)])
        given = [jax.device_put(x, device) for x in arguments]
        given = [jnp.copy(x) if i in program.donated else x for i, x in enumerate(given)]
        return list(executable(*given))

    def _read(self, layer: Layer, ref: Ref, kind: Kind) -> Any:
        if ref.kind != ValueKind.PARAMETER:
            return self._values[ref]
        use, p = self._at[kind, layer.id], ref.index
        tied = dict(use.tied)
        if p in tied:
            return self._versions[p, tied[p]]
        if self._graph.parameters[p].frozen:
            return self._versions[p, self._first]
        plain = self._versions[p, use.version]
        if not use.shift:
            return plain
        shape = jax.ShapeDtypeStruct(plain.shape, plain.dtype)
        factor = -use.shift if KINDS[kind].back else use.shift
        return self._run(weights.shifted([shape], factor), [plain, self._memory[p, use.version]])[0]

    def _run_again(self, layer: Layer) -> list[Any]:
        """A layer's forward again, with the backward's weights: what it wrote, and new residuals."""
        if layer.id not in self._again:
            reads = [self._back(layer, ref) for ref in layer.reads]
            out = self._run(forward_program(self._programs(layer), recompute=True), reads)
            self._again[layer.id] = out
            self._residuals[layer.id] = out[len(layer.writes) :]
        return self._again[layer.id]

    def _back(self, layer: Layer, ref: Ref) -> Any:
        """Reads for a backward what its forward read: recomputed if it was dropped."""
        edge = self._stage[layer.id], ref.index
        if ref.kind == ValueKind.TENSOR and edge in self._fates.dropped:
            producer = self._graph.layers[self._graph.tensors[ref.index].producer]
            return self._run_again(producer)[producer.writes.index(ref)]
        return self._read(layer, ref, Kind.B)

    def _backward(self, layer: Layer, inputs: Sequence[Any], cotangents: dict[int, Any]) -> None:
        signature = self._programs(layer).signature
        if signature.is_idle:
            return
        for kind, i in signature.sources:
            if kind == "input":
                self._back(layer, layer.reads[i])
        if layer.id in self._fates.recomputed:
            self._run_again(layer)
        arguments = []
        for kind, i in signature.sources:
            if kind == "residual":
                arguments.append(self._residuals[layer.id][i])
            elif kind == "output":
                arguments.append(self._back(layer, layer.writes[i]))
            elif layer.reads[i].kind in (ValueKind.PARAMETER, ValueKind.TENSOR):
                arguments.append(self._back(layer, layer.reads[i]))
            else:
                arguments.append(inputs[i])
        arguments += [cotangents[layer.writes[i].index] for i in signature.cotangents]
        arguments += [cotangents[layer.reads[i].index] for i in signature.partial]
        sums = [layer.reads[i].index for i in signature.gradients]
        program = self._compiled.backward_program(self._programs(layer))
        turns = len(self._compiled.plan.stages[self._stage[layer.id]].devices)
        turn = self._done.get(layer.id, 0) % turns
        self._done[layer.id] = self._done.get(layer.id, 0) + 1
        parts = [self._sums.setdefault((p, layer.id), [self._zero(p)] * turns) for p in sums]
        if len(program.inputs) > len(arguments):
            arguments += [part[turn] for part in parts]
        out = self._run(program, arguments)
        for part, x in zip(parts, out, strict=False):
            part[turn] = x
        cotangents |= {
            layer.reads[i].index: x
            for i, x in zip(signature.returned, out[len(sums) :], strict=False)
        }

    def _zero(self, p: int) -> np.ndarray:
        array = self._graph.parameters[p].array
        return np.zeros(array.shape, array.dtype)

    def _update(self) -> None:
        """Every layer's update, from the gradients that were added up since the last one."""
        total: list[Any] = []
        if self._graph.weighted:
            parts = list(self._weights.values())
            shape = self._compiled.traced.loss_shapes[1]
            total = self._run(weights.total(shape, len(parts)), parts)
        before: dict[int, dict[int, int]] = {}  # by layer, the versions that the update starts from
        values: dict[Slot, Any] = {}
        for piece in self._compiled.optimizer.update:
            layer = piece.layer
            if layer is None or (Kind.U, layer) not in self._at:
                continue
            trained = self._graph.trained(self._graph.owned(layer))
            owned = before.setdefault(layer, {p: self._newest(p) for p in trained})
            reads = [self._slot(slot, layer, owned, total, values) for slot in piece.reads]
            for slot, x in zip(piece.writes, self._run(piece_program(piece), reads), strict=False):
                if slot.kind is SlotKind.PARAMETER:
                    self._versions[slot.index, self._at[Kind.U, layer].version] = x
                elif slot.kind is SlotKind.STATE:
                    self._optimizer[slot.index, layer] = x
                else:
                    values[slot] = x
        for layer, owned in before.items():
            self._remember(layer, owned)
        self._sums, self._done, self._weights = {}, {}, {}

    def _newest(self, p: int) -> int:
        return max(v for q, v in self._versions if q == p)

    def _slot(
        self,
        slot: Slot,
        layer: int,
        before: dict[int, int],
        total: list[Any],
        values: dict[Slot, Any],
    ) -> Any:
        match slot.kind:
            case SlotKind.GRADIENT:
                reader = self._graph.parameters[slot.index].readers[slot.source]
                first, *others = self._sums.get((slot.index, reader), [self._zero(slot.index)])
                return reduce(operator.add, map(jnp.asarray, others), first)
            case SlotKind.WEIGHT:
                return total[0]
            case SlotKind.PARAMETER:
                return self._versions[slot.index, before.get(slot.index, self._first)]
            case SlotKind.STATE:
                return self._optimizer[slot.index, layer]
            case SlotKind.KEPT | SlotKind.PARTIAL | SlotKind.GLOBAL | SlotKind.GRAD_NORM:
                return values[slot]
            case _:
                assert_never(slot.kind)

    def _remember(self, layer: int, before: dict[int, int]) -> None:
        """PipeMare's mean of the updates and its scaling, XPipe's last update."""
        schedule, tau = (
            self._compiled.schedule,
            len(self._compiled.plan.stages) - 1 - self._stage[layer],
        )
        if not before or tau == 0 or not (schedule.predicts or schedule.decay is not None):
            self._count.pop(layer, None)
            return
        now = self._at[Kind.U, layer].version
        old, new = (
            [self._versions[p, v] for p, v in before.items()],
            [self._versions[p, now] for p in before],
        )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old]
        kept = [self._memory.get((p, v), self._zero(p)) for p, v in before.items()]
        if schedule.decay is None:
            out = self._run(weights.difference(shapes), [*old, *new, *kept])
        else:
            program = weights.settled(shapes, tau, schedule.decay, schedule.anneal_updates)
            out = self._run(program, [*old, *new, *kept, self._count.get(layer, np.int32(0))])
            self._versions |= {(p, now): x for p, x in zip(before, out, strict=False)}
            self._count[layer] = out[2 * len(before)]
            out = out[len(before) :]
        self._memory |= {(p, now): x for p, x in zip(before, out, strict=False)}
