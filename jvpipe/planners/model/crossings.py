"""Counts the bytes of values and cotangents that cross the bounds of segments, for many at once.

A value goes forward from its producer to its readers, and its cotangent goes back the same way. For
a segment [i, j) of layers, arrows show what crosses its bounds:

    layers        ... i-1 |  i  ...  j-1 |  j ...
    received           ---|-->           |            values that the segment reads
    returned           <--|---           |            their cotangents
    sent                  |           ---|-->         values that later layers read, and ...
                          |           <--|---         ... the cotangents that come back

`spans.py` counts what enters segments. To count what leaves them, the model is mirrored: if its n
layers are counted from the end, what leaves [i, j) becomes what enters [n - j, n - i).

Two more numbers are the bytes of the early values and waiting cotangents that the legend of
`stage_bytes.py` describes. Early values depend on what is in flight on other stages, and waiting
cotangents on how far away their senders are. Both are sums of spans, too: a value that counts
several times has several spans (`_early`, `_late`).
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from jvpipe.cost.costs import Edge
from jvpipe.planners.model.spans import Cuts, Grid, Hops, Spans, hops


class Crossings:
    """The values of a model that cross bounds.

    Attributes:
        received: counts the bytes of values that segments read from earlier layers.
        returned: counts the bytes of the cotangents that segments return for these values.
    """

    def __init__(
        self,
        n: int,
        edges: Sequence[Edge],
        whole: Sequence[Edge],
    ) -> None:
        """Prepares the sums.

        Args:
            n: the number of layers.
            edges: the tensors between layers, with the bytes of the share of a micro-batch that a
                device works on. Early values and waiting cotangents have these bytes.
            whole: the same tensors, with the bytes of whole micro-batches. What is received,
                returned and sent has these bytes, whatever the shares of replicas are.
        """
        self._n = n
        self._values = _hops(edges)
        self._cotangents = _hops(e for e in edges if e.differentiable)
        self.received = Spans(*_hops(whole)[1:]).over
        self.returned = Spans(*_hops(e for e in whole if e.differentiable)[1:]).over
        # A value crosses all cuts up to its last reader, and its cotangent crosses them back.
        sent = ((e.producer, (max(e.readers),), (1 + e.differentiable) * e.bytes) for e in whole)
        self._sent = self._mirrored(*hops(tuple(sent))[1:])
        self._early_spans = cache(self._early)
        self._late_spans = cache(self._late)

    def sent(self, starts: Cuts, ends: Cuts) -> Grid:
        """Counts the bytes of values for later layers, and of the cotangents that come back."""
        return self._backwards(self._sent, starts, ends)

    def waiting_bytes(
        self,
        in_flight: Sequence[int],
        later: int,
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Counts the most bytes of values that arrive early and of cotangents that wait.

        Args:
            in_flight: the micro-batches in flight on each stage, up to and including the stage
                that the segments stand for.
            later: the number of stages after that stage.
            starts: where segments begin.
            ends: where they end.
        """
        producer, _, reader, _ = self._values
        _, sender, last, _ = self._cotangents
        reach = (reader - producer).max(initial=0)
        longest = int((last - sender).max(initial=0))
        more = [before - after for before, after in pairwise(in_flight)]
        early = self._early_spans(tuple(more[::-1][:reach]))
        late = self._late_spans(min(later, longest))
        return early.over(starts, ends) + self._backwards(late, starts, ends)

    def _mirrored(self, a: np.ndarray, b: np.ndarray, w: np.ndarray) -> Spans:
        """Makes spans with layers counted from the end, so that what leaves a segment enters it."""
        last = self._n - 1
        return Spans(last - b, last - a, w)

    def _backwards(
        self,
        spans: Spans,
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Sums spans of the mirrored model over segments; [i, j) is [n - j, n - i) there."""
        mirrored = spans.over(self._n - ends[::-1], self._n - starts[::-1])
        return mirrored[::-1, ::-1].T

    def _early(self, more: tuple[int, ...]) -> Spans:
        """Makes the spans of values that arrive early.

        A value counts once for each micro-batch that is in flight on the stage that makes
        the value but not on this stage. A value that is made d layers before the segment is
        made at most d stages before this one, because a stage has at least one layer.

        Args:
            more: for d = 1, 2, ...: the micro-batches in flight d stages before this one,
                minus those in flight d - 1 stages before this one. Most stages of a model
                without long edges have the same `more`, and share the result.
        """
        producer, a, b, sizes = self._values
        times = np.array(more, dtype=np.int64)[:, None]
        d = np.arange(1, len(more) + 1)[:, None]
        # A span that would begin after its end, because b is less than d away, is dropped.
        begin = np.maximum(a, producer + d - 1)
        return Spans(begin, b, times * sizes)

    def _late(self, count: int) -> Spans:
        """Makes the spans of waiting cotangents, in the mirrored model.

        A cotangent counts d times if its sender is d stages away. The sender is the stage
        with the value's next reader after the segment. Each layer from the segment's end up
        to and including this reader may be a stage of its own.

        Args:
            count: the most stages that a sender may be away: the number of stages after
                this one, or the layers of the longest hop, if fewer.
        """
        _, a, b, sizes = self._cotangents
        d = np.arange(1, count + 1)[:, None]
        return self._mirrored(a, b - d + 1, sizes)


def _hops(edges: Iterable[Edge]) -> Hops:
    """Makes the hops of edges, from producers to readers and from reader to reader."""
    return hops(tuple((edge.producer, edge.readers, edge.bytes) for edge in edges))
