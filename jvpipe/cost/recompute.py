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

from jvpipe._jax import Jaxpr, Var
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
            tried = [kept for n in counts for kept in combinations(order, n)]
        else:
            cuts = [frozenset[int](), self.choices, *map(self.cut, self._prices())]
            hull = {self.dropping(kept)[0] for kept in cuts}
            tried = [*hull, *(kept ^ {c} for kept in hull for c in order)]
        points = []
        for used in {self.dropping(kept)[0] for kept in tried}:
            extra_s = self.extra_s(self.dropping(used)[1])
            points.append((self.kept_bytes(used), extra_s, sorted(used)))
        # If subsets are equal in bytes and seconds, only one of them is returned.
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
        smallest = min(self.bytes[c] for c in self.choices)
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
        size = 2 + 2 * n + columns
        source, sink = 0, 1
        needed, recomputed, equation = np.split(np.arange(2, size), [n, 2 * n])
        weights = price * np.array(self.bytes, float)
        weights[list(self.free)] = 0.0
        total = weights.sum() + self.seconds.sum()
        scale = OPTIONS.flow_units / max(total, 1e-300)
        # No minimum cut contains an endless edge: it exceeds the sum of all finite capacities.
        endless = 2 * OPTIONS.flow_units
        edges = [(source, needed[p], endless) for p in self.parents[-1]]
        edges += zip(needed, recomputed, weights * scale, strict=True)
        for again, parents in zip(recomputed, self.parents[:-1], strict=True):
            edges += [(again, needed[p], endless) for p in parents]
        edges += [(recomputed[c], equation[e], endless) for c, e in np.argwhere(self.behind)]
        # The capacity is at least 1, so an equation whose seconds round to 0 is not free.
        costs = np.maximum(self.seconds * scale, 1)
        edges += [(e, sink, cost) for e, cost in zip(equation, costs, strict=True)]
        tails, heads, capacities = (np.array(x).astype(np.int32) for x in zip(*edges, strict=True))
        graph = csr_array((capacities, (tails, heads)), shape=(size, size))
        flow = maximum_flow(graph, source, sink).flow
        residual = (graph - flow).maximum(0)
        # The source's side of the cut has the nodes that it reaches by edges with capacity left.
        reached = breadth_first_order(residual, source, return_predecessors=False)
        is_kept = np.isin(needed, reached) & ~np.isin(recomputed, reached)
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
    found: dict[Var, _Lineage] = {}
    of_candidate: dict[str, _Lineage] = {}
    for i in repeated:
        eqn = backward.eqns[i]
        lineage = _lineage(jaxprs.variables(eqn.invars), found)
        name = eqn.params["name"] if eqn.primitive.name == "name" else ""
        if name in sizes:
            of_candidate[name] = lineage
            lineage = _Lineage(frozenset({name}), frozenset())
        else:
            lineage = _Lineage(lineage.names, lineage.equations | {i})
        found |= dict.fromkeys(eqn.outvars, lineage)
    direct = _lineage(needed, found)
    reached: set[str] = set()
    todo = direct.names
    while todo:
        reached |= todo
        todo = frozenset[str]().union(*(of_candidate[name].names for name in todo)) - reached
    names = [name for name in sizes if name in reached]
    lineages = [of_candidate[name] for name in names]
    seconds_of = equation_seconds(backward.eqns, backward.outvars, device)
    # Equations that are repeated for any choice, or that take no time, are left out: choices do not
    # differ in them.
    in_any = frozenset[int]().union(*(lineage.equations for lineage in lineages))
    columns = [i for i in sorted(in_any - direct.equations) if seconds_of[i]]
    behind = [[i in lineage.equations for i in columns] for lineage in lineages]
    parents = (frozenset(map(names.index, read.names)) for read in (*lineages, direct))
    return Recompute(
        candidates=tuple(sizes),
        names=tuple(names),
        bytes=tuple(sizes[name] for name in names),
        free=frozenset(c for c, name in enumerate(names) if name in results),
        parents=tuple(parents),
        behind=np.array(behind, bool).reshape(len(names), len(columns)),
        seconds=np.array(seconds_of)[columns],
    )


class _Lineage(NamedTuple):
    """The nearest candidates that values are computed from, and the equations in between."""

    names: frozenset[str]
    equations: frozenset[int]


def _lineage(values: Iterable[Var], found: Mapping[Var, _Lineage]) -> _Lineage:
    """Joins the lineages of several values; values that are not in `found` have none."""
    lineages = [found[v] for v in values if v in found]
    names = (lineage.names for lineage in lineages)
    equations = (lineage.equations for lineage in lineages)
    return _Lineage(frozenset[str]().union(*names), frozenset[int]().union(*equations))


def _repeated(backward: Jaxpr, sources: int) -> tuple[list[int], list[Var]]:
    """Finds the equations that repeat the forward, and the values that the others read or yield.

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
    return repeated, jaxprs.variables(read)
