"""The exchange of values between stages with replicas: parts are cut, sent and joined.

A replica is one of several places that run the same stage, each on a slice of every micro-batch. A
value between two stages is cut at the bounds of the slices of both stages, so that each example is
sent once to each stage:

    slices of a stage of two     |     0:3     |     3:6     |
    slices of a stage of three   |   0:2   |   2:4   |   4:6 |
    parts that are sent          |   0:2   |2:3|3:4|   4:6   |

The sending replica cuts the parts out of its result (SLICE), and the receiving replica joins its
parts (CONCAT). A value without an axis of examples is not cut. If it is a sum or a mean, the reader
makes a weighted sum of the senders' values (REDUCE). Otherwise all senders have the same value, so
each reader gets it from one of them. The cotangents that the readers send back are added up.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from jvpipe.ir.examples import Batching, Over
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Ref
from jvpipe.ir.rows import ConcatRun, JoinRun, SliceRun
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.operation import Delivery, Operation, Write
from jvpipe.lowering.placement import Placement
from jvpipe.lowering.replica_parts import ReplicaParts, Slice

REDUCED = (Over.SUM, Over.MEAN)
"""If a value depends on the examples in one of these ways, it is a weighted sum over replicas."""


class Exchange(ReplicaParts):
    """A maker of operations that join the values a replica reads, and cut those it delivers.

    Args:
        where: the replicas of each layer.
        batching: how edges (tensors between layers) and aux depend on the examples.
    """

    def __init__(self, where: Placement, batching: Batching) -> None:
        super().__init__(where, batching)
        self._joined: set[tuple[Value, int]] = set()  # a part, and a stage that has joined it

    def joins(self, op: Operation, examples: Slice) -> Iterator[Operation]:
        """Yields the operations that join the parts which other stages have sent.

        A replica joins a value only once, even if several of its stage's layers read the value.

        Args:
            op: the operation that reads the parts.
            examples: the examples of the replica that runs the operation.
        """
        stage = self.where.stage
        for value in op.reads:
            if value.kind not in (ValueKind.TENSOR, ValueKind.COTANGENT):
                continue
            key = self.named(value, examples), stage[op.layer]
            source = self.source(value, op.layer)
            is_elsewhere = stage[source] != stage[op.layer]
            if is_elsewhere and key not in self._joined:
                self._joined.add(key)
                yield from self._join(op, value, source, examples)

    def _join(
        self,
        op: Operation,
        value: Value,
        source: int,
        examples: Slice,
    ) -> Iterator[Operation]:
        """Yields the operation that makes a replica's part of an edge or of an edge's cotangent.

        Yields nothing if the other stage has sent exactly the part that is read.

        Args:
            op: the operation that reads the part.
            value: the whole value.
            source: the layer that the value comes from.
            examples: the slice of the replica that reads the part.
        """
        whole = Write.of(self.graph, value)
        size = self.part_bytes(value, whole.bytes, examples)
        write = Write(self.named(value, examples), size)
        joined = partial(
            Operation,
            layer=op.layer,
            microbatch=op.microbatch,
            writes=(write,),
            examples=examples,
        )
        ref = Ref(value.kind, value.index)
        spread = self.spread(value)
        slices = self.where.slices(op.layer)
        others = self.where.slices(source)
        theirs = tuple(self.named(value, other) for other in others)
        if spread.over is Over.ALONG:
            parts = [self.overlap(examples, other) for other in self.meeting(examples, source)]
            if parts != [examples]:
                reads = tuple(self.named(value, part) for part in parts)
                run = ConcatRun(ref, spread.axis)
                yield joined(
                    Kind.CONCAT,
                    reads=reads,
                    run=run,
                    forgets=reads,
                )
        elif slices == others:
            return
        elif spread.over in REDUCED:
            run = JoinRun(ref, self._weights(value, examples, others))
            yield joined(Kind.REDUCE, reads=theirs, run=run)
        elif value.kind is ValueKind.COTANGENT:
            # All replicas of this stage made the same edge, and their gradients will be added up.
            # To count the cotangent once, the first replica takes it, and the others take zeros.
            if examples == slices[0]:
                yield joined(Kind.REDUCE, reads=theirs, run=JoinRun(ref))
            else:
                yield joined(Kind.ZERO, reads=(), run=JoinRun(ref))

    def _weights(self, value: Value, examples: Slice, others: Sequence[Slice]) -> tuple[float, ...]:
        """Returns the weight of each sender's value in the value that a replica receives.

        If the value is a sum, replica e of the reading stage gets its share, so that the values of
        all replicas there again add up to the whole. If it is a mean, the replica gets the whole.
        Cotangents go the other way, by the transposed weights. Below, v and c are values and
        cotangents at the producing stage, v' and c' are those at the reading stage, and `share` is
        the fraction of all examples that a slice has:

                        a sum                       a mean
            tensor      v'_e = share_e sum(v)       v'_e = sum(share v)
            cotangent   c_e = sum(share' c')        c_e = share_e sum(c')

        Args:
            value: a tensor or its cotangent.
            examples: the slice of the replica that gets a value.
            others: the slices of the replicas that send values.
        """
        is_sum = self.spread(value).over is Over.SUM
        if is_sum == (value.kind is ValueKind.TENSOR):
            return (self.share(examples),) * len(others)
        return tuple(map(self.share, others))

    def delivered(
        self,
        op: Operation,
        number: int,
        examples: Slice,
    ) -> tuple[list[Delivery], list[Operation]]:
        """Returns the values that a replica delivers whole, and the operations that cut out parts.

        Args:
            op: the operation of all replicas.
            number: the replica's number.
            examples: the replica's examples.
        """
        where = self.where
        stage = where.stage[op.layer]
        direct: list[Delivery] = []
        to_cut: dict[Value, list[Delivery]] = {}  # by part
        for value, layers, _ in op.delivers:
            elsewhere = [layer for layer in layers if where.stage[layer] != stage]
            # An edge is delivered only to other stages; the maker's stage reads it where it is
            # made.
            match value.kind:
                case ValueKind.TENSOR | ValueKind.COTANGENT:
                    mine = self.named(value, examples)
                    for delivery in self._edges(op.layer, value, elsewhere, number, examples):
                        if delivery.value == mine:
                            direct.append(delivery)
                        else:
                            to_cut.setdefault(delivery.value, []).append(delivery)
                case ValueKind.AUX:
                    if examples in self.makers(value):
                        direct.append(Delivery(self.named(value, examples), layers))
                case ValueKind.STATE:
                    if examples is not None and self.is_shared(value):
                        # The first replica joins all parts (see `Slicing`).
                        first = where.slices(op.layer)[:1]
                        part = value._replace(examples=examples)
                        direct.append(Delivery(part, (op.layer,), first))
                    elif number == 0:
                        # All replicas of the stage make the whole leaf. The first delivers it.
                        readers = layers if examples is None else elsewhere
                        direct += self.to_all_replicas(value, readers)
                case _:
                    raise AssertionError(f"the target of {value} is not defined")
        if examples is not None:  # losses are summed at the place of the first replica
            for write in op.writes:
                if write.value.kind is ValueKind.LOSS:
                    direct.append(Delivery(self.named(write.value, examples), (op.layer,)))
        cuts = [self._cut(op, part, delivers, examples) for part, delivers in to_cut.items()]
        return direct, cuts

    def _edges(
        self,
        maker: int,
        value: Value,
        layers: Sequence[int],
        number: int,
        examples: Slice,
    ) -> Iterator[Delivery]:
        """Yields the parts of an edge or a cotangent that a replica sends to other stages.

        Args:
            maker: the layer that makes the value.
            value: the edge or its cotangent, of all replicas.
            layers: the layers of other stages that read the value.
            number: the replica's number.
            examples: the replica's examples.
        """
        over = self.spread(value).over
        mine = self.named(value, examples)
        senders = self.where.slices(maker)
        for layer in layers:
            receivers = self.where.slices(layer)
            if over is Over.ALONG:
                for theirs in self.meeting(examples, layer):
                    part = self.named(value, self.overlap(examples, theirs))
                    yield Delivery(part, (layer,), (theirs,))
            elif value.kind is ValueKind.TENSOR and over is Over.NONE:
                # Every replica has the whole value, so each sends it to some of the receivers.
                producer = self.graph.tensors[value.index].producer
                count = len(self.where.slices(producer))
                for e in receivers[number::count]:
                    yield Delivery(mine, (layer,), (e,))
            elif examples in receivers and len(receivers) == len(senders):
                yield Delivery(mine, (layer,), (examples,))
            elif over in REDUCED:
                yield Delivery(mine, (layer,), receivers)
            else:
                assert over is Over.NONE, (
                    f"the stages have different slices, but {value} has no axis of examples"
                )
                yield Delivery(mine, (layer,), receivers[:1])

    def _cut(
        self,
        op: Operation,
        part: Value,
        delivers: Sequence[Delivery],
        examples: Slice,
    ) -> Operation:
        """Makes the operation that cuts a part out of a replica's result.

        Args:
            op: the operation that makes the result.
            part: the part to cut out.
            delivers: where the part goes.
            examples: the replica's examples.
        """
        array = self.graph.tensors[part.index].array
        spread = self.spread(part)
        first = self.whole(examples).start
        rows = array.shape[spread.axis] // self.graph.examples  # along the axis, per example
        start, stop = ((bound - first) * rows for bound in self.whole(part.examples))
        write = Write(part, self.part_bytes(part, array.bytes, part.examples))
        run = SliceRun(
            Ref(part.kind, part.index),
            spread.axis,
            start,
            stop,
        )
        return Operation(
            Kind.SLICE,
            op.layer,
            op.microbatch,
            reads=(part._replace(examples=examples),),
            writes=(write,),
            run=run,
            delivers=tuple(delivers),
            examples=examples,
        )

    def to_all_replicas(self, value: Value, layers: Sequence[int]) -> list[Delivery]:
        """Makes deliveries of a whole value to all replicas of some layers."""
        return [Delivery(value, (layer,), self.where.slices(layer)) for layer in layers]
