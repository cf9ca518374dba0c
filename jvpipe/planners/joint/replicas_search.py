"""Cuts, replicas and places for one micro-batch size and one order of devices: least seconds under caps.

Legend: H_e(i, m) is the best way found to put the layers from cut i on into e stages on the last m devices of an order:
counted from the end, so that a stage's micro-batches in flight are known. m tells where a stage lies, hence its links.

    H_e(i, m) = min over j, r of t(i, j, r) + c + H_(e-1)(j, m - r), where t and c keep the cap; devices may be left out

A stage's all-reduce A counts as far as the backwards before it do not hide it: the part that shows of a suffix is
max(A of its first stage, what showed before - B of its first stage). One way is kept for each (e, i, m), by the sum of
seconds and of what shows beyond the least backward of the layers before i; so it is not exact, and every way is counted
again (`replicas_stage.py`) and simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.model.replicas_plan import ReplicaPlan, placed
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.segments import Grid, between, sums

OverM = Float[np.ndarray, "n m"]


@dataclass(frozen=True)
class Ground:
    """What is searched: micro-batches of a size, an order of devices, replica counts, and places to cut."""

    tables: Tables
    size: int
    order: tuple[int, ...]
    counts: tuple[int, ...]
    at: Int[np.ndarray, "n"]  # positions in the tables' coarse cuts
    unit: int = 1  # stages begin at its multiples in the order

    @property
    def cuts(self) -> Int[np.ndarray, "n"]:
        """The cuts themselves."""
        return self.tables.coarse[self.at]

    @cached_property
    def backward_s(self) -> list[Grid]:
        """Backward of a micro-batch, for each replica count."""
        return [between(self.tables.local(self.size, r).backward_s, self.cuts, self.cuts) for r in self.counts]

    @cached_property
    def crossing_bytes(self) -> Grid:
        """What each segment receives and returns of a micro-batch."""
        return self.tables.local(self.size, 1).crossing_bytes[np.ix_(self.at, self.at)]

    def fitting_s(self, index: int, behind: int) -> Grid:
        """Seconds, infinite where the memory limit is not kept.

        Args:
            index: of the replica count.
            behind: stages from this one on.
        """
        return self.tables.fitting_s(self.size, self.counts[index], behind)[np.ix_(self.at, self.at)]

    @cached_property
    def least_s(self) -> Float[np.ndarray, "n"]:
        """What a micro-batch takes at least before each cut."""
        every = [self.tables.problem.local.compute_s(-(-self.size // r)) for r in self.counts]
        return sums(np.min(every, axis=0))[self.cuts]

    @cached_property
    def hides_s(self) -> Float[np.ndarray, "n 1"]:
        """What backwards before each cut take at least: so much of an all-reduce behind it they hide."""
        every = np.min([self.tables.local(self.size, r).backward_s[self.cuts] for r in self.counts], axis=0)
        return every[:, None]

    @cached_property
    def where(self) -> "_Where":
        """The machines of stages at each place in the order."""
        return _Where.of(self)

    @cached_property
    def reduces(self) -> list[tuple[Float[np.ndarray, "n n k"], Int[np.ndarray, "m"]]]:
        """A for each replica count: grids of the kinds of places, and the kind of each place."""
        frontiers = []
        for r in self.counts:
            local, kinds, rates = self.tables.local(self.size, r), [], []
            for m in range(len(self.order) // self.unit + 1):
                places = self.order[len(self.order) - m * self.unit :][:r]
                rate = self.tables.reduce_rate(places)
                if rate not in rates:
                    rates.append(rate)
                kinds.append(rates.index(rate))
            grids = [self.tables.exposed_s(local, *rate)[np.ix_(self.at, self.at)] for rate in rates]
            frontiers.append((np.stack(grids, axis=-1), np.array(kinds)))
        return frontiers


@dataclass(frozen=True)
class _Where:
    """For stages with m units of the order from their first on, and replica counts: rows m, columns counts."""

    pattern: Int[np.ndarray, "m r"]  # alike where slices stay in their machines
    single: Int[np.ndarray, "m r"]  # the machine, or -1 - itself if there are several
    machines: Int[np.ndarray, "m r"]

    @staticmethod
    def of(ground: Ground) -> "_Where":
        known: dict[tuple[int, ...], int] = {}
        machine = ground.tables.problem.cluster.machines_of(ground.order)
        G, u = len(ground.order), ground.unit
        shape = G // u + 1, len(ground.counts)
        pattern, single, machines = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        for m in range(shape[0]):
            for k, r in enumerate(ground.counts):
                places = machine[G - m * u :][:r]
                pattern[m, k] = known.setdefault(tuple(sorted(places)), len(known))
                machines[m, k] = max(1, len(set(places)))
                single[m, k] = places[0] if machines[m, k] == 1 and places else -1
        return _Where(pattern, single, machines)

    def transfer_s(self, ground: Ground, k: int, m: np.ndarray, sizes: OverM, k2: np.ndarray, m2: np.ndarray) -> OverM:
        """`Cluster.transfer_s` both ways.

        Args:
            ground: what is searched.
            k: the count of the senders.
            m: where they begin, counted from the end of the order.
            sizes: bytes both ways.
            k2: the counts of the readers.
            m2: where they begin.
        """
        cluster, counts = ground.tables.problem.cluster, np.array(ground.counts)
        ways = np.minimum(counts[k], counts[k2])
        inside = self.pattern[m, k] == self.pattern[m2, k2]
        inside |= (self.single[m, k] == self.single[m2, k2]) & (self.single[m2, k2] >= 0)
        nets = np.minimum(ways, cluster.networks * np.minimum(self.machines[m, k], self.machines[m2, k2]))
        peer, network = cluster.peer, cluster.network
        near = 2 * peer.latency_s + sizes / ways / peer.bytes_per_s
        far = 2 * network.latency_s + sizes / nets / network.bytes_per_s
        return np.where(sizes > 0, np.where(inside, near, far), 0.0)


@dataclass(frozen=True)
class _Ways:
    """H_e: rows i, columns m; infinite sums where there is none. `begin` is m without the devices left out."""

    hides_s: Float[np.ndarray, "n 1"]
    total: OverM
    shown: OverM
    bytes: OverM
    count: Int[np.ndarray, "n m"]
    begin: Int[np.ndarray, "n m"]
    cut: Int[np.ndarray, "n m"]

    @staticmethod
    def none(ground: Ground) -> "_Ways":
        shape = len(ground.at), len(ground.order) // ground.unit + 1
        whole = [np.zeros(shape, dtype=np.int64) for _ in range(3)]
        return _Ways(ground.hides_s, np.full(shape, np.inf), np.zeros(shape), np.zeros(shape), *whole)

    @property
    def cost(self) -> OverM:
        """What ways are compared by."""
        return self.total + np.maximum(self.shown - self.hides_s, 0.0)

    def take(
        self,
        rows: Int[np.ndarray, "i"],
        columns: Int[np.ndarray, "c"],
        k: int,
        total: OverM,
        shown: OverM,
        cut: Int[np.ndarray, "i c"],
        sizes: OverM,
    ) -> None:
        """Puts ways that begin with a stage of count k in place of worse ones that are there.

        Args:
            rows: their cuts i.
            columns: their m.
            k: of their first stage.
            total: sums of t and c.
            shown: what shows of all-reduces.
            cut: where the first stage ends.
            sizes: bytes that it receives and returns.
        """
        there = np.ix_(rows, columns)
        late = np.maximum(self.shown[there] - self.hides_s[rows], 0.0)
        better = total + np.maximum(shown - self.hides_s[rows], 0.0) < self.total[there] + late
        if not better.any():
            return
        begin = np.broadcast_to(columns, total.shape)
        new = {"total": total, "shown": shown, "bytes": sizes, "count": k, "begin": begin, "cut": cut}
        for name, values in new.items():
            mine = getattr(self, name)
            mine[there] = np.where(better, values, mine[there])

    def leaving_out(self, worth_s: Float[np.ndarray, "n"]) -> None:
        """Leaves out ways that take more than is worth it from each cut on; the first devices may stay idle."""
        self.total[self.cost >= worth_s[:, None]] = np.inf
        sums = self.cost
        least = np.minimum.accumulate(sums, axis=1)
        new = np.concatenate([np.ones((len(sums), 1), dtype=bool), least[:, 1:] < least[:, :-1]], axis=1)
        best = np.maximum.accumulate(np.where(new, np.arange(sums.shape[1]), 0), axis=1)
        for mine in (self.total, self.shown, self.bytes, self.count, self.begin, self.cut):
            mine[:] = np.take_along_axis(mine, best, axis=1)


def paths(ground: Ground, cap_s: float, most_stages: int, most_s: float = np.inf) -> Iterator[ReplicaPlan]:
    """Yields the best way found for each number of stages.

    Args:
        ground: what is searched.
        cap_s: of t and c.
        most_stages: that there may be.
        most_s: of t, c and what shows, together; ways of more than two stages that take more are left out.
    """
    pins = ground.tables.problem.pins
    places = len(ground.order) // ground.unit + 1
    worth_s = most_s - ground.least_s
    levels: list[_Ways] = []
    for e in range(1, most_stages + 1):
        level = _Ways.none(ground)
        for k, r in enumerate(ground.counts):
            if pins.replicas is not None and r != pins.replicas[-e]:
                continue
            if r % ground.unit == 0 and r // ground.unit < places:
                t = ground.fitting_s(k, e)
                t = np.where(t <= cap_s, t, np.inf)
                if levels:
                    _extend(ground, level, levels[-1], k, t, cap_s)
                else:
                    _end(ground, level, k, t)
        level.leaving_out(worth_s if e > 2 else np.full(len(ground.at), np.inf))
        levels.append(level)
        if np.isfinite(level.total[0, -1]):
            if pins.count in (None, e):
                yield _plan(ground, levels)
        elif not np.isfinite(level.total).any():
            return


def _end(ground: Ground, level: _Ways, k: int, t: Grid) -> None:
    """Puts all layers from each cut on into a last stage of count k."""
    m = np.arange(ground.counts[k] // ground.unit, level.total.shape[1])
    grids, kinds = ground.reduces[k]
    total = np.repeat(t[:, -1:], len(m), 1)
    cut, sizes = np.full(total.shape, len(t) - 1), np.repeat(ground.crossing_bytes[:, -1:], len(m), 1)
    level.take(np.arange(len(t)), m, k, total, grids[:, -1][:, kinds[m]], cut, sizes)


def _extend(ground: Ground, level: _Ways, after: _Ways, k: int, t: Grid, cap_s: float) -> None:
    """Puts a stage of count k before the ways that there are."""
    units = ground.counts[k] // ground.unit
    there = np.isfinite(after.total[:, : after.total.shape[1] - units])
    ends, rest = np.flatnonzero(there.any(1)), np.flatnonzero(there.any(0))
    rows = np.flatnonzero(np.isfinite(t[:, ends]).any(1))
    if not len(rows):
        return
    m, some = rest + units, np.ix_(ends, rest)
    grids, kinds = ground.reduces[k]
    c = ground.where.transfer_s(ground, k, m[None, :], after.bytes[some], after.count[some], after.begin[some])
    later = np.where(c <= cap_s, after.total[some] + c, np.inf)
    here = np.ix_(rows, ends)
    hidden = ground.backward_s[k][here][:, :, None] + (c / 2 - after.shown[some])[None]
    shown = np.maximum(grids[here][:, :, kinds[m]], -hidden)
    sums = t[here][:, :, None] + later[None]
    at = (sums + np.maximum(shown - ground.hides_s[rows][:, :, None], 0.0)).argmin(1)
    first, last = np.arange(len(rows))[:, None], np.arange(len(m))[None]
    cut = ends[at]
    sizes = ground.crossing_bytes[rows[:, None], cut]
    level.take(rows, m, k, sums[first, at, last], shown[first, at, last], cut, sizes)


def _plan(ground: Ground, levels: Sequence[_Ways]) -> ReplicaPlan:
    """The plan behind the last level's whole model on all devices."""
    i, m, G = 0, len(ground.order) // ground.unit, len(ground.order)
    bounds, starts, replicas = [0], [], []
    for level in reversed(levels):
        k, begin, j = int(level.count[i, m]), int(level.begin[i, m]), int(level.cut[i, m])
        replicas.append(ground.counts[k])
        starts.append(G - begin * ground.unit)
        bounds.append(int(ground.cuts[j]))
        i, m = j, begin - ground.counts[k] // ground.unit
    return ReplicaPlan(tuple(bounds), placed(ground.order, starts, replicas), ground.size)
