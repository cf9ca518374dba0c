"""Slicing: an operation of a stage that is replicated becomes one for each replica, on its part of the micro-batch.

    F(layer 3) makes tensor 7           ->  F(layer 3, 0:2)  F(layer 3, 2:4)       a stage of two replicas
    B(layer 4) delivers cotangent 7     ->  SLICE 0:2  SLICE 2:4                   where the next one has more
    F(layer 4) reads tensor 7           ->  CONCAT(0:2, 2:4)  F(layer 4)           where the one before had more
    F(layer 4) reads a sum or a mean    ->  REDUCE(0:2, 2:4)  F(layer 4)           likewise, by their weights
    U(layer 3)                          ->  REDUCE  U(layer 3)                     at one replica, for all
    F(layer 3) makes model state        ->  F(layer 3, 0:2)  F(layer 3, 2:4)  REDUCE    at the first, for all

Parts are cut at the bounds of both stages, so that each is sent once. Names tell the examples, never the replica: what
depends on no example keeps its name and is made alike at every replica. Replicas add their gradients up by themselves
over the micro-batches of an update; REDUCE adds up theirs in ascending order, at the one that updates the layer, and
sends it to the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Ref
from jvpipe.ir.rows import ConcatRun, JoinRun, LayerRun, SliceRun, StateRun
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.operation import Delivery, Operation, Write, summed
from jvpipe.lowering.placement import Placement

Slice = Examples | None
REDUCED = (Over.SUM, Over.MEAN)
"""What has no axis of examples, and what replicas have of it makes the whole all the same."""


class Slicing:
    """Slices operations one after another.

    Args:
        where: the replicas of each layer.
        batching: how edges and aux lie over the examples.
        layouts: by their numbers; of an evaluation there are none.
        updating: the replica of each layer that updates it.
    """

    def __init__(
        self,
        where: Placement,
        batching: Batching,
        layouts: Mapping[int, MicrobatchLayout] | None = None,
        updating: Mapping[int, int] | None = None,
    ) -> None:
        self._where, self._batching, self._layouts = where, batching, layouts or {}
        self._updating = updating or {}
        self._graph = where.graph
        self._joined: set[tuple[Value, int]] = set()  # values, and the stages that have joined them

    def __call__(self, op: Operation) -> Iterator[Operation]:
        """Yields an operation for each replica, after what joins its inputs and before what cuts its results."""
        match op.kind:
            case Kind.F | Kind.B | Kind.I | Kind.W | Kind.R | Kind.E | Kind.ZERO:
                for number, examples in enumerate(self._where.slices(op.layer)):
                    yield from self._joins(op, examples)
                    direct, cut = self._delivered(op, number, examples)
                    yield self._replica(op, examples, direct)
                    yield from cut
                if op.kind is Kind.F:
                    yield from self._remembered(op)
            case Kind.LOSS:
                reads = [self.named(value, e) for value in op.reads for e in self._makers(value)]
                yield replace(op, reads=tuple(reads))
            case Kind.U:
                delivers = (
                    Delivery(d.value, (i,), self._where.slices(i))
                    for d in op.delivers
                    for i in d.layers
                )
                examples = (
                    None
                    if op.layer == NONE
                    else self._where.slices(op.layer)[self._updating[op.layer]]
                )
                yield replace(op, examples=examples, delivers=tuple(delivers))
            case _:
                raise AssertionError(f"nobody says how replicas share {op.kind}")

    def reduced(self, layers: Sequence[int]) -> Iterator[Operation]:
        """Yields what adds up the gradients of the replicas of a stage, last layer first: each where it is wanted."""
        for layer in reversed(layers):
            slices, by_replica = self._where.slices(layer), dict[int, list[int]]()
            read = self._graph.layers[layer].reading(ValueKind.PARAMETER)
            for p in self._graph.trained(read) if len(slices) > 1 else ():
                owner = self._graph.parameters[p].owner
                here = self._where.stage[owner] == self._where.stage[layer]
                at = (
                    self._updating[owner] if here else layer % len(slices)
                )  # for another stage replicas take turns
                by_replica.setdefault(at, []).append(p)
            for replica, mine in sorted(by_replica.items()):
                sums = [Value(ValueKind.GRADIENT, p, layer, version=0) for p in mine]
                writes = tuple(
                    Write(value, self._graph.parameters[value.index].array.bytes) for value in sums
                )
                parts = [[value._replace(examples=part) for value in sums] for part in slices]
                yield from (
                    replace(op, examples=slices[replica])
                    for op in summed(layer, NONE, parts, sums, writes)
                )

    def spots(self, layer: int, value: Value) -> list[tuple[Value, int]]:
        """The parts of a value that the replicas of a layer have, each with its place."""
        return [(self.named(value, e), self._where.of(layer, e)) for e in self._where.slices(layer)]

    # Names and sizes

    def named(self, value: Value, examples: Slice) -> Value:
        """The part of a value that is of some examples; what is the same for all of them is whole."""
        match value.kind:
            case ValueKind.PARAMETER | ValueKind.CONSTANT | ValueKind.SEED:
                return value
            case ValueKind.STATE:  # replicas find the whole of it
                return value
            case ValueKind.TENSOR if self._batching.tensors[value.index].over is Over.NONE:
                return value
            case (
                ValueKind.TENSOR
                | ValueKind.BATCH
                | ValueKind.COTANGENT
                | ValueKind.RESIDUAL
                | ValueKind.HANDED
                | ValueKind.GRADIENT
                | ValueKind.LOSS
                | ValueKind.AUX
            ):
                return value._replace(examples=examples)
            case _:
                raise AssertionError(f"nobody says how replicas share {value}")

    def _spread(self, value: Value) -> Spread:
        """How an edge, its cotangent or a leaf of aux lies over the examples; other values are not cut or joined."""
        match value.kind:
            case ValueKind.TENSOR | ValueKind.COTANGENT:
                return self._batching.tensors[value.index]
            case ValueKind.AUX:
                return self._batching.aux[value.index]
            case (
                ValueKind.BATCH
                | ValueKind.RESIDUAL
                | ValueKind.HANDED
                | ValueKind.GRADIENT
                | ValueKind.LOSS
                | ValueKind.PARAMETER
                | ValueKind.CONSTANT
                | ValueKind.SEED
                | ValueKind.STATE
            ):
                return Spread(Over.MIXED)
            case _:
                raise AssertionError(f"nobody says how {value} lies over examples")

    def _part_bytes(self, value: Value, size: int, examples: Slice) -> int:
        if examples is None or self._spread(value).over is not Over.ALONG:
            return size
        return size // self._graph.examples * examples.size

    def _part(self, op: Operation, write: Write, examples: Slice) -> Write:
        """The part of what a layer writes that one of its replicas writes."""
        value, size, copy = write
        if examples is not None and value.kind in (ValueKind.RESIDUAL, ValueKind.HANDED):
            assert isinstance(op.run, LayerRun)
            sliced = self._layouts[op.run.layout].sliced[examples]
            left = sliced.halves[op.layer].handed if value.kind is ValueKind.HANDED else None
            size = (left or sliced.signatures[op.layer].residuals)[value.index].bytes
        made = (
            value._replace(examples=examples)
            if self._is_shared(value)
            else self.named(value, examples)
        )
        return Write(made, self._part_bytes(value, size, examples), copy)

    def _is_shared(self, value: Value) -> bool:
        """Whether replicas make parts of a leaf of the model state, rather than each all of it."""
        return value.kind is ValueKind.STATE and self._batching.state[value.index] is not None

    def _whole(self, examples: Slice) -> Examples:
        return examples or Examples(0, self._graph.examples)

    def _overlap(self, a: Slice, b: Slice) -> Slice:
        """The examples that two slices share, which there must be."""
        both = self._whole(a), self._whole(b)
        shared = Examples(max(s.start for s in both), min(s.stop for s in both))
        return None if shared == self._whole(None) else shared

    def _meeting(self, examples: Slice, layer: int) -> list[Slice]:
        """The slices of a layer's replicas that share examples with a slice."""
        own = self._whole(examples)
        return [
            e
            for e in self._where.slices(layer)
            if self._whole(e).start < own.stop and own.start < self._whole(e).stop
        ]

    # Operations

    def _replica(self, op: Operation, examples: Slice, delivers: Sequence[Delivery]) -> Operation:
        run = op.run
        if examples is not None and KINDS[op.kind].runs is Runs.LAYER:
            run = LayerRun(run.layout if isinstance(run, LayerRun) else 0, examples)
        return replace(
            op,
            reads=tuple(self.named(value, examples) for value in op.reads),
            writes=tuple(self._part(op, write, examples) for write in op.writes),
            run=run,
            delivers=tuple(delivers),
            examples=examples,
        )

    def _remembered(self, op: Operation) -> Iterator[Operation]:
        """Yields what makes the model state of what the replicas of a layer have made of it, for the next micro-batch.

        Every replica is told: the loss may read it.
        """
        slices = self._where.slices(op.layer)
        writes = tuple(write for write in op.writes if self._is_shared(write.value))
        if not writes or len(slices) == 1:
            return
        parts, reads = list[Value](), list[Value]()
        for value, *_ in writes:
            own = [value._replace(examples=e) for e in slices]
            spread = self._batching.state[value.index]
            before = (
                [value._replace(microbatch=op.microbatch)]
                if spread and spread.over is Over.ADDED
                else []
            )
            parts, reads = [*parts, *own], [*reads, *before, *own]
        readers = {value: layers for value, layers, _ in op.delivers}
        yield Operation(
            Kind.REDUCE,
            op.layer,
            op.microbatch,
            tuple(reads),
            writes,
            StateRun(),
            delivers=tuple(
                d for value, *_ in writes for d in self._told(value, (op.layer, *readers[value]))
            ),
            forgets=tuple(parts),
            examples=slices[0],
        )

    def _told(self, value: Value, layers: Sequence[int]) -> list[Delivery]:
        """Deliveries of a leaf of the model state to all replicas of some layers."""
        return [Delivery(value, (i,), self._where.slices(i)) for i in layers]

    def _joins(self, op: Operation, examples: Slice) -> Iterator[Operation]:
        """Yields what joins the parts that have come from a stage of another width."""
        stage = self._where.stage[op.layer]
        for value in op.reads:
            if value.kind not in (ValueKind.TENSOR, ValueKind.COTANGENT):
                continue
            own, source, spread = (
                self.named(value, examples),
                self._source(value, op.layer),
                self._spread(value),
            )
            if self._where.stage[source] == stage or (own, stage) in self._joined:
                continue
            self._joined.add((own, stage))
            write = Write(
                own, self._part_bytes(value, self._graph.tensors[value.index].array.bytes, examples)
            )
            join = partial(
                Operation,
                layer=op.layer,
                microbatch=op.microbatch,
                writes=(write,),
                examples=examples,
            )
            slices, others = self._where.slices(op.layer), self._where.slices(source)
            if spread.over is Over.ALONG:
                parts = [self._overlap(examples, e) for e in self._meeting(examples, source)]
                reads = tuple(self.named(value, part) for part in parts)
                if parts != [examples]:
                    run = ConcatRun(Ref(value.kind, value.index), spread.axis)
                    yield join(Kind.CONCAT, reads=reads, run=run, forgets=reads)
            elif spread.over in REDUCED and slices != others:
                run = JoinRun(Ref(value.kind, value.index), self._weights(value, examples, others))
                yield join(Kind.REDUCE, reads=tuple(self.named(value, e) for e in others), run=run)
            elif (
                value.kind is ValueKind.COTANGENT and slices != others
            ):  # the first replica gets all of it
                is_first, run = examples == slices[0], JoinRun(Ref(value.kind, value.index))
                reads = tuple(self.named(value, e) for e in others) if is_first else ()
                yield join(Kind.REDUCE if is_first else Kind.ZERO, reads=reads, run=run)

    def _weights(self, value: Value, examples: Slice, others: Sequence[Slice]) -> tuple[float, ...]:
        """How much of what each of the others has goes into what a replica of another stage gets.

        Of a sum each replica gets its share, so that theirs add up to the whole again; each gets
        the whole of a mean. Cotangents go the other way, by the transposed weights:

                        a sum                       a mean
            tensor      v'_e = share_e sum(v)       v'_e = sum(share v)
            cotangent   c_e = sum(share' c')        c_e = share_e sum(c')

        Args:
            value: a tensor or its cotangent.
            examples: of the replica that gets it.
            others: the slices of those that have it.
        """
        is_sum = self._spread(value).over is Over.SUM
        if is_sum == (value.kind is ValueKind.TENSOR):
            return (self._share(examples),) * len(others)
        return tuple(map(self._share, others))

    def _share(self, examples: Slice) -> float:
        return self._whole(examples).size / self._graph.examples

    def _source(self, value: Value, layer: int) -> int:
        """The layer from which an edge, or the sum of its cotangents so far, has come to a layer."""
        tensor = self._graph.tensors[value.index]
        if value.kind is ValueKind.TENSOR:
            return tensor.producer
        return next(reader for reader in tensor.readers if reader > layer)

    def _makers(self, value: Value) -> Sequence[Slice]:
        """The slices that make a loss or a leaf of aux; of what is the same for all the first."""
        graph = self._graph
        layer = next(
            (x.id for x in graph.layers if value.index in x.writing(value.kind)), graph.loss_layer
        )
        slices = self._where.slices(layer)
        return slices[:1] if self._spread(value).over is Over.NONE else slices

    def _delivered(
        self, op: Operation, number: int, examples: Slice
    ) -> tuple[list[Delivery], list[Operation]]:
        """What a replica delivers as it is, and the operations that cut the rest."""
        direct: list[Delivery] = []
        parts: dict[Value, list[Delivery]] = {}
        for value, layers, _ in op.delivers:
            match value.kind:
                case ValueKind.TENSOR | ValueKind.COTANGENT:
                    elsewhere = [
                        i for i in layers if self._where.stage[i] != self._where.stage[op.layer]
                    ]
                    for delivery in self._edges(op.layer, value, elsewhere, number, examples):
                        is_whole = delivery.value == self.named(value, examples)
                        (direct if is_whole else parts.setdefault(delivery.value, [])).append(
                            delivery
                        )
                case ValueKind.AUX:
                    direct += (
                        [Delivery(self.named(value, examples), layers)]
                        if examples in self._makers(value)
                        else []
                    )
                case ValueKind.STATE if examples is not None and self._is_shared(
                    value
                ):  # the first makes the whole
                    first = self._where.slices(op.layer)[:1]
                    direct.append(Delivery(value._replace(examples=examples), (op.layer,), first))
                case ValueKind.STATE:  # replicas have made it too
                    own = self._where.stage[op.layer]
                    layers = tuple(
                        i for i in layers if examples is None or self._where.stage[i] != own
                    )
                    direct += self._told(value, layers) if number == 0 else []
                case _:
                    raise AssertionError(f"nobody says where {value} goes to")
        if examples is not None:  # losses are summed where the first replica is
            losses = (w.value for w in op.writes if w.value.kind is ValueKind.LOSS)
            direct += [Delivery(self.named(value, examples), (op.layer,)) for value in losses]
        return direct, [self._cut(op, part, delivers, examples) for part, delivers in parts.items()]

    def _edges(
        self, maker: int, value: Value, layers: Sequence[int], number: int, examples: Slice
    ) -> Iterator[Delivery]:
        """Yields the parts of an edge that a replica sends to layers of other stages."""
        over, own = self._spread(value).over, self.named(value, examples)
        for layer in layers:
            slices = self._where.slices(layer)
            if over is Over.ALONG:
                for e in self._meeting(examples, layer):
                    yield Delivery(self.named(value, self._overlap(examples, e)), (layer,), (e,))
            elif (
                value.kind is ValueKind.TENSOR and over is Over.NONE
            ):  # every replica has all of it
                count = len(self._where.slices(self._graph.tensors[value.index].producer))
                yield from (
                    Delivery(own, (layer,), (e,))
                    for j, e in enumerate(slices)
                    if j % count == number
                )
            elif examples in slices and len(slices) == len(self._where.slices(maker)):
                yield Delivery(own, (layer,), (examples,))
            elif over in REDUCED:
                yield Delivery(own, (layer,), slices)
            else:
                assert over is Over.NONE, (
                    f"stages of unequal width, and {value} has no axis of examples"
                )
                yield Delivery(own, (layer,), slices[:1])

    def _cut(
        self, op: Operation, part: Value, delivers: Sequence[Delivery], examples: Slice
    ) -> Operation:
        """What cuts a part out of a result of a replica."""
        array, spread = self._graph.tensors[part.index].array, self._spread(part)
        rows, first = array.shape[spread.axis] // self._graph.examples, self._whole(examples).start
        wanted = self._whole(part.examples)
        start, stop = ((bound - first) * rows for bound in wanted)
        run = SliceRun(Ref(part.kind, part.index), spread.axis, start, stop)
        write = Write(part, self._part_bytes(part, array.bytes, part.examples))
        return Operation(
            Kind.SLICE,
            op.layer,
            op.microbatch,
            (part._replace(examples=examples),),
            (write,),
            run,
            tuple(delivers),
            examples=examples,
        )
