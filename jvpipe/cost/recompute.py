"""The work that a layer's backward recomputes, depending on which candidates its forward keeps.

It is read off the backward that keeps nothing, in which every candidate still bears its name. An
equation that depends on no cotangent repeats the forward:

    inputs --e1--> a --e2--> b --e3--> c --e4--> what cotangents' equations read       a, c: candidates

e4 is always repeated, because no candidate lies behind it. e2 and e3 are repeated
if c is dropped, and e1 too if a is dropped, because e2 reads a. A candidate is needed if a repeated
equation, or one of the cotangents', reads it; kept candidates that nobody needs cost no bytes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from jvpipe._jax import Atom, Jaxpr, JaxprEqn, Var
from jvpipe.cost.effort import OPTIONS
from jvpipe.programs.layer import LayerPrograms
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations

EquationSeconds = Callable[[Sequence[JaxprEqn], Sequence[Atom]], Sequence[float]]


@dataclass(frozen=True)
class Recompute:
    """A layer's candidates and what dropping them costs.

    Attributes:
        candidates: the names of all.
        names: those of the n candidates that can matter.
        bytes: their sizes.
        free: those that are kept anyway, because they are results of the layer.
        parents: for each of the n the candidates that recomputing it needs; at -1 those that the
            backward needs itself.
        behind: (n, equations), whether recomputing a candidate repeats an equation.
        seconds: (equations,), of each.
    """

    candidates: tuple[str, ...]
    names: tuple[str, ...]
    bytes: tuple[int, ...]
    free: frozenset[int]
    parents: tuple[frozenset[int], ...]
    behind: np.ndarray
    seconds: np.ndarray

    def dropping(self, kept: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Finds which of these kept candidates are needed, and which others are recomputed.

        Walks from what the backward needs to what that is made of, and stops at kept candidates.
        Each candidate is expanded once.
        """
        # Results of the layer exist anyway, so nothing behind them runs again for the backward.
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
        """Returns the seconds of recomputing these candidates; equations they share run once."""
        if not recomputed:
            return 0.0
        repeated = self.behind[sorted(recomputed)].any(0)
        return float(self.seconds[repeated].sum())

    def kept_bytes(self, used: Iterable[int]) -> int:
        """Counts the bytes of kept candidates; free ones lie elsewhere."""
        return sum(self.bytes[c] for c in used if c not in self.free)

    @cached_property
    def choices(self) -> frozenset[int]:
        """The candidates whose fate is open."""
        return frozenset(range(len(self.names))) - self.free

    def subsets(self) -> list[frozenset[int]]:
        """Returns the sets of candidates worth keeping, by bytes, each without what nobody needs.

        If candidates are few these are all Pareto points of bytes and seconds. If not, they are the
        efficient ones among minimum cuts at many prices of a byte, and among sets that differ from
        these in one candidate: a cut alone finds only points of the convex hull.
        """
        order = sorted(self.choices)
        if len(order) <= OPTIONS.all_subsets:
            tried = [frozenset(compress(order, chosen)) for chosen in _choices(len(order))]
        else:
            cuts = [frozenset[int](), self.choices, *map(self.cut, self._prices())]
            hull = {self.dropping(kept)[0] for kept in cuts}
            neighbours = [kept ^ {c} for kept in hull for c in order]
            tried = [*hull, *neighbours]
        return self._pareto({self.dropping(kept)[0] for kept in tried})

    def _pareto(self, subsets: Iterable[frozenset[int]]) -> list[frozenset[int]]:
        """Returns the subsets that take fewer seconds than all subsets of no more bytes."""
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
        """Returns seconds per byte, from where everything is kept to where nothing is."""
        smallest = min((self.bytes[c] for c in self.choices), default=1)
        highest = self.seconds.sum() / max(smallest, 1)
        if not highest:
            return np.array([])
        return np.geomspace(highest * 1e-5, highest * 2, OPTIONS.prices)

    def cut(self, price: float) -> frozenset[int]:
        """Finds the candidates to keep so that seconds + price x bytes kept are least: a minimum
        cut.

        Each candidate has two nodes, needed and recomputed, each equation one. The nodes on the
        side of the source are true:

            source -> needed[p]              p is needed by the backward itself
            needed[c] -> recomputed[c]       cut if c is kept, at its price
            recomputed[c] -> needed[p]       recomputing c needs p
            recomputed[c] -> e -> sink       and repeats equation e, cut at its seconds
        """
        # Late: this takes an eighth of the seconds of `import jvpipe`, and few models need it.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        n, columns = self.behind.shape
        source, sink = 0, 1
        needed = np.arange(n) + 2
        recomputed = needed + n
        equation = np.arange(columns) + 2 + 2 * n
        size = 2 + 2 * n + columns
        weights = np.array([price * size_bytes for size_bytes in self.bytes], float)
        weights[list(self.free)] = 0.0
        total = weights.sum() + self.seconds.sum()
        scale = OPTIONS.flow_units / max(total, 1e-300)
        # More than all finite capacities together, so that no minimum cut contains such an edge.
        endless = 2 * OPTIONS.flow_units
        edges = [(source, needed[p], endless) for p in self.parents[-1]]
        for c in range(n):
            edges.append((needed[c], recomputed[c], int(weights[c] * scale)))
            edges += [(recomputed[c], needed[p], endless) for p in self.parents[c]]
            repeated = self.behind[c].nonzero()[0]
            edges += [(recomputed[c], equation[e], endless) for e in repeated]
        for e in range(columns):
            # At least one unit: an equation whose seconds round to nothing is not free.
            capacity = max(int(self.seconds[e] * scale), 1)
            edges.append((equation[e], sink, capacity))
        rows, cols, capacities = (np.array(column, np.int32) for column in zip(*edges, strict=True))
        graph = csr_array((capacities, (rows, cols)), shape=(size, size))
        residual = graph - maximum_flow(graph, source, sink).flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        # What the source still reaches is its side of a minimum cut.
        reached = breadth_first_order(residual, source, return_predecessors=False)
        is_true = np.isin(np.arange(size), reached)
        is_kept = is_true[needed] & ~is_true[recomputed]
        return frozenset(c for c in self.choices if is_kept[c])


def _choices(n: int) -> Iterator[list[bool]]:
    """Yields for each subset of n things whether it has each of them: 2^n lists."""
    for digits in range(2**n):
        yield [bool(digits >> i & 1) for i in range(n)]


def recompute_of(
    nothing: LayerPrograms,
    sizes: Mapping[str, int],
    results: Collection[str | None],
    seconds: EquationSeconds,
) -> Recompute:
    """Finds what dropping the candidates of a layer costs.

    Args:
        nothing: the layer's programs with no candidate kept.
        sizes: the bytes of each candidate, by name.
        results: candidates that the layer yields: they are kept whether chosen or not.
        seconds: returns the seconds of each of some equations, given them and their outputs.
    """
    backward = merged_equations(nothing.backward).jaxpr
    repeated, needed = _repeated(backward, len(nothing.signature.sources))
    maker: dict[Var, int] = {}
    named: dict[Var, str] = {}
    for i in repeated:
        name = _name(backward.eqns[i])
        for v in backward.eqns[i].outvars:
            maker[v] = i
            if name in sizes:
                named[v] = name

    def operands_of(v: Var) -> list[Var]:
        return jaxprs.variables(backward.eqns[maker[v]].invars)

    def made_of(start: Iterable[Var]) -> tuple[set[str], set[int]]:
        """Finds the candidates that some values are made of, and the equations since then."""
        names = set()
        eqns = set()
        todo = list(start)
        while todo:
            v = todo.pop()
            if v in named:
                names.add(named[v])
            elif v in maker and maker[v] not in eqns:
                eqns.add(maker[v])
                todo += operands_of(v)
        return names, eqns

    direct, always = made_of(needed)
    operands = {name: operands_of(v) for v, name in named.items()}
    # Ends: the lineage of each name is found once.
    lineage: dict[str, tuple[set[str], set[int]]] = {}
    todo = sorted(direct)
    while todo:
        if (name := todo.pop()) not in lineage:
            lineage[name] = made_of(operands[name])
            todo += sorted(lineage[name][0])
    names = [name for name in sizes if name in lineage]
    parents = [*(lineage[name][0] for name in names), direct]
    seconds_of = seconds(backward.eqns, backward.outvars)
    # Equations that are always repeated, and those that take no time, decide nothing.
    behind_any = set[int]().union(*(eqns for _, eqns in lineage.values()))
    columns = [i for i in sorted(behind_any - always) if seconds_of[i]]
    behind = np.zeros((len(names), len(columns)), bool)
    for c, name in enumerate(names):
        _, eqns = lineage[name]
        behind[c] = [i in eqns for i in columns]
    free = [c for c, name in enumerate(names) if name in results]
    places = (frozenset(map(names.index, needs)) for needs in parents)
    return Recompute(
        candidates=tuple(sizes),
        names=tuple(names),
        bytes=tuple(sizes[name] for name in names),
        free=frozenset(free),
        parents=tuple(places),
        behind=behind,
        seconds=np.array([seconds_of[i] for i in columns], float),
    )


def _repeated(backward: Jaxpr, sources: int) -> tuple[list[int], list[Var]]:
    """Finds the equations that depend on no cotangent, and their values that are read elsewhere.

    Args:
        backward: that keeps nothing.
        sources: the number of its inputs that the forward left; cotangents and sums follow.
    """
    pulled = set(backward.invars[sources:])  # and what is made of them
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
