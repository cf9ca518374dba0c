"""The work that a layer's backward recomputes, depending on which candidates its forward keeps.

Read off the backward that keeps nothing: there every candidate still bears its name. An equation that depends on no
cotangent repeats the forward. Equations that the cotangents' equations need although every candidate is kept are
always repeated (elementwise values); the others lie behind a candidate and are repeated only if it is dropped
and needed.

Legend: a candidate is needed if a repeated equation, or one of the cotangents', reads it; kept candidates that
nobody needs cost no bytes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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

    `candidates` are the names of all; `names` and `bytes` those of the ones that can matter; `free` ones are kept
    anyway (results of the layer).
    `parents[c]` are the candidates that recomputing `c` needs, `parents[-1]` those that the backward needs itself;
    `behind[c]` the equations (columns) that recomputing `c` repeats, `seconds` how long each takes.
    """

    candidates: tuple[str, ...]
    names: tuple[str, ...]
    bytes: tuple[int, ...]
    free: frozenset[int]
    parents: tuple[frozenset[int], ...]
    behind: np.ndarray
    seconds: np.ndarray

    def dropping(self, kept: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Finds which of these kept candidates are needed, and which others are recomputed."""
        kept = self.free.union(kept)
        used, recomputed, todo = set(), set(), set(self.parents[-1])
        while todo:
            c = todo.pop()
            if c in kept:
                used.add(c)
            elif c not in recomputed:
                recomputed.add(c)
                todo |= self.parents[c]
        return frozenset(used), frozenset(recomputed)

    def extra_s(self, recomputed: Collection[int]) -> float:
        """The seconds that recomputing these candidates takes."""
        return (
            float(self.seconds[self.behind[sorted(recomputed)].any(0)].sum()) if recomputed else 0.0
        )

    def kept_bytes(self, used: Iterable[int]) -> int:
        """The bytes of kept candidates; free ones lie elsewhere."""
        return sum(self.bytes[c] for c in used if c not in self.free)

    @cached_property
    def choices(self) -> frozenset[int]:
        """The candidates whose fate is open."""
        return frozenset(range(len(self.names))) - self.free

    def subsets(self) -> list[frozenset[int]]:
        """The sets of candidates worth keeping, by bytes, each without what nobody needs.

        All Pareto points of bytes and seconds where candidates are few. Else minimum cuts at many prices of a byte, and
        what differs from them in one candidate.
        """
        order = sorted(self.choices)
        if len(order) <= OPTIONS.all_subsets:
            tried = (
                frozenset(c for i, c in enumerate(order) if bits >> i & 1)
                for bits in range(2 ** len(order))
            )
            subsets = {self.dropping(kept)[0] for kept in tried}
        else:
            hull = {
                self.dropping(kept)[0]
                for kept in (frozenset(), self.choices, *map(self.cut, self._prices()))
            }
            subsets = hull | {self.dropping(kept ^ {c})[0] for kept in hull for c in order}
        return self._pareto(subsets)

    def _pareto(self, subsets: Iterable[frozenset[int]]) -> list[frozenset[int]]:
        best = []
        least = float("inf")
        points = (
            (self.kept_bytes(used), self.extra_s(self.dropping(used)[1]), sorted(used))
            for used in subsets
        )
        for _, extra_s, used in sorted(points):
            if extra_s < least:
                least = extra_s
                best.append(frozenset(used))
        return best

    def _prices(self) -> np.ndarray:
        """Seconds per byte, from where everything is kept to where nothing is."""
        highest = self.seconds.sum() / max(min((self.bytes[c] for c in self.choices), default=1), 1)
        return (
            np.geomspace(highest * 1e-5, highest * 2, OPTIONS.prices) if highest else np.array([])
        )

    def cut(self, price: float) -> frozenset[int]:
        """The candidates to keep so that seconds + price x bytes kept are least: a minimum cut.

        Two nodes per candidate, needed and recomputed, and one per equation. What lies on the source's side is true:

            source -> needed[p]         p is needed by the backward itself
            needed[c] -> recomputed[c]       cut if c is kept, at its price
            recomputed[c] -> needed[p]       recomputing c needs p
            recomputed[c] -> e -> sink       and repeats equation e, cut at its seconds
        """
        from scipy.sparse import (
            csr_array,
        )  # an eighth of what `import jvpipe` would take, and few models need it
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        n, columns = self.behind.shape
        needed, recomputed, equation = (
            np.arange(n) + 2,
            np.arange(n) + 2 + n,
            np.arange(columns) + 2 + 2 * n,
        )
        weights = np.array([0.0 if c in self.free else price * self.bytes[c] for c in range(n)])
        scale = OPTIONS.flow_units / max(weights.sum() + self.seconds.sum(), 1e-300)
        endless = 2 * OPTIONS.flow_units
        edges = [(0, needed[p], endless) for p in self.parents[-1]]
        edges += [(needed[c], recomputed[c], int(weights[c] * scale)) for c in range(n)]
        edges += [(recomputed[c], needed[p], endless) for c in range(n) for p in self.parents[c]]
        edges += [
            (recomputed[c], equation[e], endless)
            for c, e in zip(*self.behind.nonzero(), strict=True)
        ]
        edges += [(equation[e], 1, max(int(self.seconds[e] * scale), 1)) for e in range(columns)]
        rows, cols, capacity = (np.array(column, np.int32) for column in zip(*edges, strict=True))
        size = 2 + 2 * n + columns
        graph = csr_array((capacity, (rows, cols)), shape=(size, size))
        left = graph - maximum_flow(graph, 0, 1).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        return frozenset(
            c for c in self.choices if needed[c] in reached and recomputed[c] not in reached
        )


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
        seconds: how long each of some equations takes, given them and their outputs.
    """
    backward = merged_equations(nothing.backward).jaxpr
    repeated, needed = _repeated(backward, len(nothing.signature.sources))
    maker = {v: i for i in repeated for v in backward.eqns[i].outvars}
    named = {
        v: _name(backward.eqns[i]) for v, i in maker.items() if _name(backward.eqns[i]) in sizes
    }

    def made_of(start: Iterable[Var]) -> tuple[set[str], set[int]]:
        """The candidates that some values are made of, and the equations since then."""
        names, eqns, todo = set(), set(), list(start)
        while todo:
            v = todo.pop()
            if v in named:
                names.add(named[v])
            elif v in maker and maker[v] not in eqns:
                eqns.add(maker[v])
                todo += jaxprs.variables(backward.eqns[maker[v]].invars)
        return names, eqns

    direct, always = made_of(needed)
    operands = {name: jaxprs.variables(backward.eqns[maker[v]].invars) for v, name in named.items()}
    lineage: dict[str, tuple[set[str], set[int]]] = {}
    todo = sorted(direct)
    while todo:
        if (name := todo.pop()) not in lineage:
            lineage[name] = made_of(operands[name])
            todo += sorted(lineage[name][0])
    names = [name for name in sizes if name in lineage]
    took = seconds(backward.eqns, backward.outvars)
    columns = sorted({i for _, eqns in lineage.values() for i in eqns if took[i]} - always)
    behind = np.array([[i in lineage[name][1] for i in columns] for name in names], bool)
    return Recompute(
        tuple(sizes),
        tuple(names),
        tuple(sizes[name] for name in names),
        frozenset(c for c, name in enumerate(names) if name in results),
        tuple(
            frozenset(map(names.index, kept))
            for kept in [*(lineage[name][0] for name in names), direct]
        ),
        behind.reshape(len(names), len(columns)),
        np.array([took[i] for i in columns], float),
    )


def _repeated(backward: Jaxpr, sources: int) -> tuple[list[int], list[Var]]:
    """The equations that depend on no cotangent, and what the others and the results read of theirs."""
    pulled = set(backward.invars[sources:])  # cotangents, sums, and what is made of them
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
