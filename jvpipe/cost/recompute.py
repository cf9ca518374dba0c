"""The work that a layer's backward recomputes, depending on which candidates its forward keeps.

A candidate is a value in the layer that the forward may keep for the backward. A candidate
that is not kept is dropped. This file derives the work from one program: the backward that
keeps no candidate. In this program, equations with names mark the candidates. Equations that
depend on no cotangent repeat the forward, and all others compute cotangents and gradients.

    inputs --e1--> a --e2--> b --e3--> c --e4--> d        e1 to e4   equations of the forward
                                                          a, c       candidates
                                                          d          read to compute cotangents

The backward always repeats e4, because d is read and is not a candidate. It repeats e2 and e3
if c is dropped. It also repeats e1 if both a and c are dropped, because e2 reads a. A candidate
is needed if it is read by a repeated equation or by an equation that computes cotangents. In
the drawing, a is not needed if c is kept. Then a costs no bytes, even if a plan keeps it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from jvpipe._jax import Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.measuring_effort import OPTIONS
from jvpipe.cost.roofline import equation_seconds
from jvpipe.programs.layer import LayerPrograms
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations


@dataclass(frozen=True)
class Recompute:
    """The candidates of a layer, and what dropping them costs.

    Only n candidates matter: those that the backward reads, those that are read to recompute the
    first ones, and so on. All attributes except the first number them from 0 to n - 1. Equations
    matter only if they take time and are repeated for some sets of kept candidates, but not for
    all.

    Attributes:
        candidates: the names of all candidates of the layer.
        names: the names of the n candidates.
        bytes: their sizes.
        free: the candidates that exist in any case, because they are results of the layer.
        parents: n + 1 sets of candidates. The first n sets are the candidates that are read
            to recompute each candidate. The last set is read by the backward in any case.
        behind: an array of (n, equations) that tells whether recomputing a candidate from
            its parents repeats an equation.
        seconds: an array of (equations,) with the seconds of each equation.
    """

    candidates: tuple[str, ...]
    names: tuple[str, ...]
    bytes: tuple[int, ...]
    free: frozenset[int]
    parents: tuple[frozenset[int], ...]
    behind: np.ndarray
    seconds: np.ndarray

    def dropping(self, kept: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Returns which of the kept candidates are needed, and which others are recomputed.

        The walk begins at the candidates that the backward reads in any case. From each
        candidate that is not kept, it goes on to the parents. It ends because it goes on from
        each candidate once.
        """
        # Results of the layer exist anyway, so the backward reads them as if they were kept.
        kept = self.free.union(kept)
        used = set()
        recomputed = set()
        todo = set(self.parents[-1])
        while todo:
            c = todo.pop()
            if c in kept:
                used.add(c)
            elif c not in recomputed:
                recomputed.add(c)
                todo |= self.parents[c]
        return frozenset(used), frozenset(recomputed)

    def extra_s(self, recomputed: Collection[int]) -> float:
        """Returns the seconds of recomputing candidates together; each equation counts once."""
        if not recomputed:
            return 0.0
        repeated = self.behind[sorted(recomputed)].any(0)
        return float(self.seconds[repeated].sum())

    def kept_bytes(self, used: Iterable[int]) -> int:
        """Counts the bytes of kept candidates, except free ones, which are counted elsewhere."""
        return sum(self.bytes[c] for c in used if c not in self.free)

    @cached_property
    def choices(self) -> frozenset[int]:
        """The candidates that may be kept or dropped."""
        return frozenset(range(len(self.names))) - self.free

    def subsets(self) -> list[frozenset[int]]:
        """Returns the sets of needed candidates that are worth keeping, by rising bytes.

        A set is worth keeping if it saves more seconds than every tried set of no more
        bytes. With few candidates, all sets are tried. With many, the minimum cuts at
        several prices of a byte are tried (`cut`). Minimum cuts find only sets on the
        lower convex hull of bytes and seconds. So the sets that differ from a found set in
        one candidate are tried, too.
        """
        order = sorted(self.choices)
        if len(order) <= OPTIONS.all_subsets:
            counts = range(len(order) + 1)
            tried = [frozenset(kept) for n in counts for kept in combinations(order, n)]
        else:
            cuts = [frozenset[int](), self.choices]
            cuts += map(self.cut, self._prices())
            hull = {self.dropping(kept)[0] for kept in cuts}
            neighbors = [kept ^ {c} for kept in hull for c in order]
            tried = [*hull, *neighbors]
        return self._pareto({self.dropping(kept)[0] for kept in tried})

    def _pareto(self, subsets: Iterable[frozenset[int]]) -> list[frozenset[int]]:
        """Returns each subset that takes fewer seconds than every other subset of no more bytes.

        If subsets are equal in bytes and seconds, only one of them is returned.
        """
        points = []
        for used in subsets:
            extra_s = self.extra_s(self.dropping(used)[1])
            points.append((self.kept_bytes(used), extra_s, sorted(used)))
        best = []
        least_s = float("inf")
        for _, extra_s, used in sorted(points):
            if extra_s < least_s:
                least_s = extra_s
                best.append(frozenset(used))
        return best

    def _prices(self) -> np.ndarray:
        """Returns rising prices of a byte in seconds; the higher the price, the less is kept.

        At the highest price even the smallest candidate costs more than recomputing everything.
        """
        smallest = min((self.bytes[c] for c in self.choices), default=1)
        highest = self.seconds.sum() / max(smallest, 1)
        if not highest:
            return np.array([])
        return np.geomspace(highest * 1e-5, highest * 2, OPTIONS.prices)

    def cut(self, price: float) -> frozenset[int]:
        """Finds by a minimum cut which candidates to keep so that seconds + price * bytes is least.

        Each candidate c has two nodes, needed[c] and recomputed[c], and each equation has
        one. A node on the source's side of the cut is true. An edge u -> v costs its
        capacity if u is true and v is not, so the cut's capacity is the sum to minimize.
        The result is exact except for the rounding of capacities to whole numbers.

            edge                          capacity           meaning
            source -> needed[p]           endless            the backward itself reads p
            needed[c] -> recomputed[c]    price * bytes[c]   a needed c is kept or recomputed
            recomputed[c] -> needed[p]    endless            recomputing c reads p
            recomputed[c] -> e            endless            recomputing c repeats equation e
            e -> sink                     seconds[e]         a repeated equation costs its seconds
        """
        # Few models need SciPy, so it is imported only here. It would add an eighth to the time of
        # `import jvpipe`.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        n, columns = self.behind.shape
        source = 0
        sink = 1
        needed = np.arange(n) + 2
        recomputed = needed + n
        equation = np.arange(columns) + 2 + 2 * n
        size = 2 + 2 * n + columns
        weights = np.array([price * size_bytes for size_bytes in self.bytes], float)
        weights[list(self.free)] = 0.0
        total = weights.sum() + self.seconds.sum()
        scale = OPTIONS.flow_units / max(total, 1e-300)
        # No minimum cut contains an endless edge: it exceeds the sum of all finite capacities.
        endless = 2 * OPTIONS.flow_units
        edges = [(source, needed[p], endless) for p in self.parents[-1]]
        for c in range(n):
            again = recomputed[c]
            capacity = int(weights[c] * scale)
            edges.append((needed[c], again, capacity))
            edges += [(again, needed[p], endless) for p in self.parents[c]]
            repeated = self.behind[c].nonzero()[0]
            edges += [(again, equation[e], endless) for e in repeated]
        for e in range(columns):
            # The capacity is at least 1, so an equation whose seconds round to 0 is not free.
            capacity = max(int(self.seconds[e] * scale), 1)
            edges.append((equation[e], sink, capacity))
        tails, heads, capacities = (np.array(x, np.int32) for x in zip(*edges, strict=True))
        graph = csr_array((capacities, (tails, heads)), shape=(size, size))
        flow = maximum_flow(graph, source, sink).flow
        residual = (graph - flow).maximum(0)
        # The source's side of the cut has the nodes that it reaches by edges with capacity left.
        reached = breadth_first_order(residual, source, return_predecessors=False)
        is_true = np.isin(np.arange(size), reached)
        is_kept = is_true[needed] & ~is_true[recomputed]
        return frozenset(c for c in self.choices if is_kept[c])


def recompute_of(
    nothing: LayerPrograms,
    sizes: Mapping[str, int],
    results: Collection[str | None],
    device: Accelerator,
) -> Recompute:
    """Finds what dropping the candidates of a layer costs.

    Args:
        nothing: the layer's programs that keep no candidate.
        sizes: the bytes of each candidate, by name.
        results: the names of candidates that are results of the layer, which always exist.
        device: the device whose seconds the roofline estimates.
    """
    backward = merged_equations(nothing.backward).jaxpr
    repeated, needed = _repeated(backward, len(nothing.signature.sources))
    ancestry = _Ancestry(backward, repeated, sizes)
    direct = ancestry.lineage(needed)
    lineages = ancestry.lineages(direct.names)
    names = [name for name in sizes if name in lineages]
    parents = [lineages[name].names for name in names]
    parents.append(direct.names)
    seconds_of = equation_seconds(backward.eqns, backward.outvars, device)
    # Equations that are repeated for any choice, or that take no time, are left out: choices do not
    # differ in them.
    in_any = set[int]().union(*(lineage.equations for lineage in lineages.values()))
    columns = [i for i in sorted(in_any - direct.equations) if seconds_of[i]]
    behind = [np.isin(columns, list(lineages[name].equations)) for name in names]
    free = [c for c, name in enumerate(names) if name in results]
    places = (frozenset(map(names.index, needs)) for needs in parents)
    return Recompute(
        candidates=tuple(sizes),
        names=tuple(names),
        bytes=tuple(sizes[name] for name in names),
        free=frozenset(free),
        parents=tuple(places),
        behind=np.array(behind, bool).reshape(len(names), len(columns)),
        seconds=np.array([seconds_of[i] for i in columns], float),
    )


class _Lineage(NamedTuple):
    """The nearest candidates that values are computed from, and the equations in between."""

    names: set[str]
    equations: set[int]


class _Ancestry:
    """The candidates and the equations from which the values of a forward are computed.

    Attributes:
        maker: for each value, the equation that makes it.
        named: for each value that is a candidate, its name.
    """

    def __init__(
        self,
        backward: Jaxpr,
        repeated: Iterable[int],
        candidates: Collection[str],
    ) -> None:
        """Finds the makers and the names of all values.

        Args:
            backward: the backward that keeps nothing.
            repeated: its equations that repeat the forward.
            candidates: the names of all candidates.
        """
        self._equations = backward.eqns
        self.maker: dict[Var, int] = {}
        self.named: dict[Var, str] = {}
        for i in repeated:
            equation = backward.eqns[i]
            name = _name(equation)
            for v in equation.outvars:
                self.maker[v] = i
                if name in candidates:
                    self.named[v] = name

    def _operands(self, v: Var) -> list[Var]:
        maker = self._equations[self.maker[v]]
        return jaxprs.variables(maker.invars)

    def lineage(self, values: Iterable[Var]) -> _Lineage:
        """Finds the nearest candidates that values depend on, and the equations in between."""
        found = _Lineage(set(), set())
        todo = list(values)
        while todo:
            v = todo.pop()
            if v in self.named:
                found.names.add(self.named[v])
                continue
            if v not in self.maker or self.maker[v] in found.equations:
                continue
            found.equations.add(self.maker[v])
            todo += self._operands(v)
        return found

    def lineages(self, direct: Iterable[str]) -> dict[str, _Lineage]:
        """Finds the lineages of some candidates, of the candidates in these lineages, and so on."""
        operands = {name: self._operands(v) for v, name in self.named.items()}
        found: dict[str, _Lineage] = {}
        todo = sorted(direct)
        while todo:
            name = todo.pop()
            # Each lineage is found once, so the loop ends.
            if name in found:
                continue
            found[name] = self.lineage(operands[name])
            todo += sorted(found[name].names)
        return found


def _repeated(backward: Jaxpr, sources: int) -> tuple[list[int], list[Var]]:
    """Finds the equations that repeat the forward, and which of their results the rest reads.

    Args:
        backward: the backward that keeps nothing.
        sources: the number of its inputs that come from the forward. They are the first
            inputs; the others are cotangents and partial sums.
    """
    pulled = set(backward.invars[sources:])  # cotangents, sums, and all that depends on them
    repeated: list[int] = []
    read = list(backward.outvars)
    for i, eqn in enumerate(backward.eqns):
        if pulled.isdisjoint(jaxprs.variables(eqn.invars)):
            repeated.append(i)
        else:
            pulled.update(eqn.outvars)
            read += eqn.invars
    outputs = {v for i in repeated for v in backward.eqns[i].outvars}
    return repeated, [v for v in jaxprs.variables(read) if v in outputs]


def _name(eqn: JaxprEqn) -> str:
    return eqn.params["name"] if eqn.primitive.name == "name" else ""
