"""Shapes with their cuts, for one micro-batch size and one order of devices: least seconds under caps.

Legend: H_e(i, m) is the best way found to put the layers from cut i on into e stages on the last m devices of an order:
counted from the end, so that a stage's micro-batches in flight are known. m tells where a stage lies, hence its links.

    H_e(i, m) = min over j, r of t(i, j, r) + c + H_(e-1)(j, m - r), where t and c keep the cap; devices may be left out

A stage's all-reduce A counts as far as the backwards before it do not hide it: the part that shows of a suffix is
max(A of its first stage, what showed before - B of its first stage). One way is kept for each (e, i, m), by the sum of
seconds and of what shows beyond the least backward of the layers before i; so it is not exact, and what segments take
is counted roughly (`local_segments.py`): every way is counted again (`stage_cost.py`) and simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jvpipe.planners.model.local_segments import LocalSegments, least_through_s
from jvpipe.planners.model.segments import Grid, between, sums
from jvpipe.planners.model.shapes import Path, Shape

OverM = Float[np.ndarray, "n m"]


@dataclass(frozen=True)
class Ground:
    """What is searched: micro-batches of a size, an order of devices, replica counts, and places to cut."""

    segments: LocalSegments
    size: int
    order: tuple[int, ...]
    counts: tuple[int, ...]
    at: Int[np.ndarray, "n"]  # positions in the coarse cuts
    unit: int = 1  # stages begin at its multiples in the order
    replicas: tuple[int, ...] | None = None  # of each stage, if they are given

    @property
    def cuts(self) -> Int[np.ndarray, "n"]:
        """The cuts themselves."""
        return self.segments.coarse[self.at]

    def share(self, index: int) -> int:
        """The examples of a replica's share, by the index of the replica count."""
        return self.segments.share(self.size, self.counts[index])

    @cached_property
    def backward_s(self) -> list[Grid]:
        """Backward of a micro-batch, for each replica count."""
        every = (self.segments.backward_s(self.share(k)) for k in range(len(self.counts)))
        return [between(backward_s, self.cuts, self.cuts) for backward_s in every]

    def _here(self, grid: Grid) -> Grid:
        """What is between the places to cut, of a grid of all coarse cuts."""
        return grid[self.at[:, None], self.at]

    @cached_property
    def crossing_bytes(self) -> Grid:
        """What each segment receives and returns of a micro-batch."""
        return self._here(self.segments.crossing_bytes(self.size))

    def fitting_s(self, index: int, behind: int) -> Grid:
        """Seconds, infinite where the memory limit is not kept.

        Args:
            index: of the replica count.
            behind: stages from this one on.
        """
        return self._here(self.segments.fitting_s(self.size, self.counts[index], behind))

    @cached_property
    def least_s(self) -> Float[np.ndarray, "n"]:
        """What a micro-batch takes at least before each cut."""
        return sums(least_through_s(self.segments, self.size, self.counts))[self.cuts]

    @cached_property
    def hides_s(self) -> Float[np.ndarray, "n 1"]:
        """What backwards before each cut take at least: so much of an all-reduce behind it they hide."""
        shares = (self.share(k) for k in range(len(self.counts)))
        every = [self.segments.backward_s(b)[self.cuts] for b in shares]
        return np.min(every, axis=0)[:, None]

    @cached_property
    def where(self) -> "_Where":
        """The machines of stages at each place in the order."""
        return _Where.of(self)

    @cached_property
    def reduces(self) -> list[tuple[Float[np.ndarray, "n k n"], Int[np.ndarray, "m"]]]:
        """A for each replica count: grids of the kinds of places, and the kind of each place that has so many."""
        every = []
        for k, r in enumerate(self.counts):
            units, cluster = r // self.unit, self.segments.shapes.cluster
            _, firsts, kinds = np.unique(
                self.where.held[units:, k], axis=0, return_index=True, return_inverse=True
            )
            starts = (len(self.order) - (units + m) * self.unit for m in firsts.tolist())
            links = (cluster.reducing(self.order[start:][:r]) for start in starts)
            grids = [self._here(self.segments.reduce_s(self.share(k), link)) for link in links]
            every.append((np.stack(grids, axis=1), kinds.ravel()))
        return every


@dataclass(frozen=True)
class _Where:
    """For stages with m units of the order from their first on, and replica counts: rows m, columns counts."""

    pattern: Int[np.ndarray, "m r"]  # alike where slices stay in their machines
    single: Int[np.ndarray, "m r"]  # the machine, or -1 if there are several
    held: Int[np.ndarray, "m r 3"]  # how many machines, and the most and the least devices of one

    @staticmethod
    def of(ground: Ground) -> "_Where":
        machine = np.array(ground.segments.shapes.cluster.machines_of(ground.order))
        G, counts = len(ground.order), np.array(ground.counts)
        upto = np.zeros((G + 1, machine.max() + 1), dtype=np.int64)
        upto[1:] = np.cumsum(machine[:, None] == np.arange(machine.max() + 1), axis=0)
        starts = G - np.arange(G // ground.unit + 1)[:, None] * ground.unit
        held = upto[np.minimum(starts + counts, G)] - upto[starts]
        known: dict[bytes, int] = {}
        pattern = [
            known.setdefault(each.tobytes(), len(known))
            for each in held.reshape(-1, held.shape[-1])
        ]
        machines, most = (held > 0).sum(-1), held.max(-1)
        least = np.where(held > 0, held, G).min(-1)
        single = np.where(machines == 1, held.argmax(-1), -1)
        return _Where(
            np.array(pattern).reshape(machines.shape),
            single,
            np.stack([np.maximum(1, machines), most, least], axis=-1),
        )

    def transfer_s(
        self, ground: Ground, k: int, m: slice, after: "_Ways", there: tuple[slice, slice]
    ) -> OverM:
        """What `Cluster.way` takes both ways.

        Args:
            ground: what is searched.
            k: the count of the senders.
            m: where they begin, counted from the end of the order.
            after: ways whose first stages read.
            there: which of them.
        """
        cluster, readers = ground.segments.shapes.cluster, after.readers
        sizes, single = after.bytes[there], readers.single[there]
        ways = np.minimum(ground.counts[k], readers.replicas[there])
        inside = self.pattern[m, k] == readers.pattern[there]
        inside |= (self.single[m, k] == single) & (single >= 0)
        nets = np.minimum(
            ways, cluster.networks * np.minimum(self.held[m, k, 0], readers.machines[there])
        )
        peer, network = cluster.peer, cluster.network
        near = 2 * peer.latency_s + sizes / ways / peer.bytes_per_s
        far = 2 * network.latency_s + sizes / nets / network.bytes_per_s
        return np.where(sizes > 0, np.where(inside, near, far), 0.0)


class _Readers(NamedTuple):
    """Where the first stages of ways are, and their replicas."""

    pattern: Int[np.ndarray, "n m"]
    single: Int[np.ndarray, "n m"]
    machines: Int[np.ndarray, "n m"]
    replicas: Int[np.ndarray, "n m"]


class _Ways:
    """H_e: rows i, columns m; infinite sums where there is none. `begin` is m without the devices left out.

    What is derived is so once no more are taken, and they are settled.
    """

    def __init__(self, ground: Ground) -> None:
        shape = len(ground.at), len(ground.order) // ground.unit + 1
        self.ground = ground
        self.cost, self.total = (
            np.full(shape, np.inf),
            np.full(shape, np.inf),
        )  # with what shows, and without
        self.shown = np.zeros(shape)
        self.count, self.cut, self.begin = (np.zeros(shape, dtype=np.int64) for _ in range(3))

    @cached_property
    def there(self) -> Bool[np.ndarray, "n m"]:
        """Where there is one."""
        return np.isfinite(self.total)

    def take(
        self,
        there: tuple[slice, slice],
        k: int,
        cost: OverM,
        total: OverM,
        shown: OverM,
        cut: Int[np.ndarray, "i c"],
    ) -> None:
        """Puts ways that begin with a stage of count k in place of worse ones that are there.

        Args:
            there: their cuts i, and their m.
            k: of their first stage.
            cost: what they are compared by.
            total: sums of t and c.
            shown: what shows of all-reduces.
            cut: where the first stage ends.
        """
        better = cost < self.cost[there]
        if better.any():
            np.copyto(self.cost[there], cost, where=better)
            np.copyto(self.total[there], total, where=better)
            np.copyto(self.shown[there], shown, where=better)
            np.copyto(self.count[there], k, where=better)
            np.copyto(self.cut[there], cut, where=better)

    def settle(self, worth_s: Float[np.ndarray, "n"]) -> None:
        """Leaves out ways that take more than is worth it from each cut on; the first devices may stay idle."""
        self.cost[self.cost >= worth_s[:, None]] = np.inf
        least = np.minimum.accumulate(self.cost, axis=1)
        new = np.concatenate(
            [np.ones((len(least), 1), dtype=bool), least[:, 1:] < least[:, :-1]], axis=1
        )
        self.begin = np.maximum.accumulate(np.where(new, np.arange(least.shape[1]), 0), axis=1)
        rows = np.arange(len(least))[:, None]
        self.total = np.where(np.isfinite(least), self.total[rows, self.begin], np.inf)
        self.shown, self.count, self.cut = (
            self.shown[rows, self.begin],
            self.count[rows, self.begin],
            self.cut[rows, self.begin],
        )

    @cached_property
    def bytes(self) -> OverM:
        """What their first stages receive and return."""
        return self.ground.crossing_bytes[np.arange(len(self.cut))[:, None], self.cut]

    @cached_property
    def readers(self) -> _Readers:
        """Their first stages as readers."""
        at, where, counts = (
            (self.begin, self.count),
            self.ground.where,
            np.array(self.ground.counts),
        )
        return _Readers(
            where.pattern[at], where.single[at], where.held[..., 0][at], counts[self.count]
        )


def paths(ground: Ground, cap_s: float, most_stages: int, most_s: float = np.inf) -> Iterator[Path]:
    """Yields the best way found for each number of stages.

    Args:
        ground: what is searched.
        cap_s: of t and c.
        most_stages: that there may be.
        most_s: of t, c and what shows, together; ways of more than two stages that take more are left out.
    """
    pins = ground.segments.pins
    replicas = ground.replicas or pins.replicas
    places = len(ground.order) // ground.unit + 1
    worth_s = most_s - ground.least_s
    levels: list[_Ways] = []
    for e in range(1, most_stages + 1):
        level = _Ways(ground)
        for k, r in enumerate(ground.counts):
            if replicas is not None and r != replicas[-e]:
                continue
            if r % ground.unit == 0 and r // ground.unit < places:
                t = ground.fitting_s(k, e)
                t = np.where(t <= cap_s, t, np.inf)
                if levels:
                    _extend(ground, level, levels[-1], k, t, cap_s)
                else:
                    _end(ground, level, k, t)
        level.settle(worth_s if e > 2 else np.full(len(ground.at), np.inf))
        levels.append(level)
        if level.there[0, -1]:
            if (len(replicas) if replicas else pins.count) in (None, e):
                yield _path(ground, levels)
        elif not level.there.any():
            return


def _end(ground: Ground, level: _Ways, k: int, t: Grid) -> None:
    """Puts all layers from each cut on into a last stage of count k."""
    there = slice(None), slice(ground.counts[k] // ground.unit, None)
    grids, kinds = ground.reduces[k]
    shown = grids[:, kinds, -1]
    total = np.repeat(t[:, -1:], shown.shape[1], 1)
    cost = total + np.maximum(shown - ground.hides_s, 0.0)
    level.take(there, k, cost, total, shown, np.full(total.shape, len(t) - 1))


def _extend(ground: Ground, level: _Ways, after: _Ways, k: int, t: Grid, cap_s: float) -> None:
    """Puts a stage of count k before the ways that there are; in arrays of cuts, m, and where the stage ends."""
    units = ground.counts[k] // ground.unit
    there = after.there[:, : after.there.shape[1] - units]
    ends, rest = _span(there, 1), _span(there, 0)
    rows = _span(np.isfinite(t[:, ends]), 1)
    if rows.stop <= rows.start:
        return
    m, some = slice(rest.start + units, rest.stop + units), (ends, rest)
    grids, kinds = ground.reduces[k]
    c = ground.where.transfer_s(ground, k, m, after, some)
    later = np.where(c <= cap_s, after.total[some] + c, np.inf).T
    hidden = ground.backward_s[k][rows, None, ends] + (c / 2 - after.shown[some]).T
    reduce_s = grids[rows, :, ends]
    shown = np.maximum(reduce_s[:, kinds[rest]] if reduce_s.shape[1] > 1 else reduce_s, -hidden)
    total = t[rows, None, ends] + later
    cost = total + np.maximum(shown - ground.hides_s[rows, :, None], 0.0)
    at = cost.argmin(-1)
    best = at + np.arange(at.size).reshape(at.shape) * cost.shape[-1]
    level.take((rows, m), k, cost.take(best), total.take(best), shown.take(best), at + ends.start)


def _span(there: Bool[np.ndarray, "_ _"], over: int) -> slice:
    """From the first to the last place where something is, anywhere over an axis; empty if there is none."""
    every = np.flatnonzero(there.any(over))
    return slice(int(every[0]), int(every[-1]) + 1) if len(every) else slice(0, 0)


def _path(ground: Ground, levels: Sequence[_Ways]) -> Path:
    """The shape and cuts behind the last level's whole model on all devices."""
    i, m, G = 0, len(ground.order) // ground.unit, len(ground.order)
    bounds, starts, replicas = [0], [], []
    for level in reversed(levels):
        k, begin, j = int(level.count[i, m]), int(level.begin[i, m]), int(level.cut[i, m])
        replicas.append(ground.counts[k])
        starts.append(G - begin * ground.unit)
        bounds.append(int(ground.cuts[j]))
        i, m = j, begin - ground.counts[k] // ground.unit
    return Shape.along(ground.order, starts, replicas, ground.size), tuple(bounds)
