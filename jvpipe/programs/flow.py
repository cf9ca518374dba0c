"""The data flow of an optimizer: its equations, divided into one piece per home and phase.

A home is a layer or the global program, and a piece is the part of the optimizer that a home runs
in one phase (see `jvpipe.programs.optimizer_pieces`). Layers send vectors (PARTIAL) to the global
program, which sends vectors (GLOBAL) back. Time runs to the right:

    layer 0    piece 0   PARTIAL >            > GLOBAL   piece 1
    layer 1    piece 0   PARTIAL >  global 0  > GLOBAL   piece 1

Values of one type that a home sends in one phase are packed into one vector, so that a piece has
few arguments. If a layer needs a value again in a later phase, it keeps a costly value (KEPT) and
computes a cheap one again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.programs.pieces import Part, Piece, Slot, SlotKind
from jvpipe.programs.places import Home, Output, VariablePlaces
from jvpipe.trace import jaxprs
from jvpipe.trace.primitives import is_cheap


@dataclass(frozen=True)
class Flow:
    """An optimizer's equations, their homes, and the slots of their inputs and results.

    Attributes:
        eqns: the equations, in their order.
        constants: the constants that the equations close over.
        inputs: the slot of each input.
        outputs: the results.
        placement: the home and the phase of each variable.
        layers: the layers that own parameters.
        shared: the slots of state of which the global program has a copy, as all layers do.
    """

    eqns: Sequence[JaxprEqn]
    constants: Mapping[Var, Any]
    inputs: Mapping[Var, Slot]
    outputs: Sequence[Output]
    placement: VariablePlaces
    layers: Sequence[int]
    shared: frozenset[Slot] = frozenset()

    def pieces(self) -> tuple[Piece, ...]:
        """Returns all pieces in an order in which they can run: by phase, the global piece last."""
        homes: list[Home] = [*self.layers, "global"]
        pieces = [piece for home in homes for piece in self._pieces_of(home)]
        return tuple(sorted(pieces, key=lambda piece: (piece.phase, piece.layer is None)))

    @cached_property
    def readers(self) -> dict[Var, set[Home]]:
        """The homes that need each value.

        The equations are visited from last to first. The operands of an equation are needed
        where the equation runs. If it runs everywhere, its operands are needed by all homes
        that need its results. A value that goes from layer to layer is also needed by the
        global program, which passes the value on.
        """
        # A result is needed by each home that holds a copy of it.
        readers: dict[Var, set[Home]] = {}
        for var in self.placement.places:
            readers[var] = set()
        for out in self.outputs:
            for var in jaxprs.variables([out.atom]):
                readers[var] |= self._holders(out)
        for eqn in reversed(self.eqns):
            asking = set().union(*(readers[v] for v in eqn.outvars))
            home = self._home(eqn)
            running: set[Home] = {home} if asking and home != "everywhere" else asking
            for var in jaxprs.variables(eqn.invars):
                readers[var] |= running
        for var, needing in readers.items():
            home = self.placement.of(var).home
            if isinstance(home, int) and needing - {home}:
                needing.add("global")
        return readers

    @cached_property
    def _vectors(self) -> dict[Slot, list[Var]]:
        """The values in each vector between layers and the global program, in order."""
        vectors: dict[Slot, list[Var]] = {}
        for var, needing in self.readers.items():
            home = self.placement.of(var).home
            if isinstance(home, int) and "global" in needing:
                slot = self._slot(var, "global")
                vectors.setdefault(slot, []).append(var)
            layers = needing - {home, "global"}
            if home != "everywhere" and layers:
                any_layer = next(iter(layers))  # all layers read the same vector
                slot = self._slot(var, any_layer)
                vectors.setdefault(slot, []).append(var)
        return vectors

    def _home(self, eqn: JaxprEqn) -> Home:
        """Returns the home that runs an equation, and so makes all its results."""
        return self.placement.of(eqn.outvars[0]).home

    @cached_property
    def _eqns_of(self) -> dict[Home, list[JaxprEqn]]:
        """The equations of each home, in their order."""
        eqns: dict[Home, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            eqns.setdefault(self._home(eqn), []).append(eqn)
        return eqns

    def _eqns_for(self, home: Home) -> list[JaxprEqn]:
        """Returns the equations that a layer or the global program may run.

        Layers of equal structure get their equations in the same order, so they share a program.
        """
        if home == "global":
            return [eqn for eqn in self.eqns if not isinstance(self._home(eqn), int)]
        # Each layer runs its own copy of the equations that run everywhere.
        everywhere = self._eqns_of.get("everywhere", [])
        return [*everywhere, *self._eqns_of.get(home, [])]

    def _unchanged(self, out: Output) -> bool:
        """Tells whether a result is the unchanged input of its slot."""
        if not isinstance(out.atom, Var):
            return False
        return self.inputs.get(out.atom) == out.slot

    def _holders(self, out: Output) -> set[Home]:
        """Returns the homes that have a copy of a result."""
        if out.home != "everywhere":
            return {out.home}
        holders: set[Home] = set(self.layers)
        if out.slot in self.shared:
            holders.add("global")
        return holders

    def _sent_by(self, home: Home) -> dict[int, list[Slot]]:
        """Returns, for each phase, the vectors that a layer or the global program sends."""
        sent: dict[int, list[Slot]] = {}
        for slot in self._vectors:
            # GLOBAL vectors are made by the global program, PARTIAL ones by the layer in `source`.
            maker = "global" if slot.kind is SlotKind.GLOBAL else slot.source
            if home == maker:
                sent.setdefault(slot.index, []).append(slot)
        return sent

    def _pieces_of(self, home: Home) -> Iterator[Piece]:
        """Yields the pieces of a home: one for each phase that sends vectors or makes results.

        All results are made in the last phase.
        """
        # No piece writes a result that is an unchanged input, such as a frozen parameter.
        of_home = (out for out in self.outputs if home in self._holders(out))
        results = [out for out in of_home if not self._unchanged(out)]
        sent = self._sent_by(home)
        ready = [self.placement.of(out.atom).ready(home) for out in results]
        last = max([*sent, *ready], default=None)
        if last is None:
            return
        needed: dict[int, list[Atom]] = {}
        for phase in sorted({*sent, last}):
            vectors = sent.get(phase, [])
            needed[phase] = []
            for slot in vectors:
                needed[phase] += self._vectors[slot]
        needed[last] += [out.atom for out in results]
        runs = self._runs(home, needed)
        kept = self._kept(home, runs)
        layer = home if isinstance(home, int) else None
        for phase, run in runs.items():
            is_last = phase == last
            yielded: list[tuple[Atom, Slot]] = []
            if is_last:
                yielded += [(out.atom, out.slot) for out in results]
            yielded += [(v, slot) for v, slot in kept.items() if v in run.computed]
            slots: dict[Var, Slot] = {}
            for v in run.reads:
                slots[v] = kept.get(v) or self._slot(v, home)
            vectors = sent.get(phase, [])
            part = Part(
                run.eqns,
                self.constants,
                self._vectors,
                slots,
                vectors,
                yielded,
            )
            yield part.piece(layer, phase, last=is_last)

    def _runs(
        self,
        home: Home,
        needed: Mapping[int, Sequence[Atom]],
    ) -> dict[int, "_Run"]:
        """Returns the equations that a home runs in each phase, with the values that they read.

        A layer runs a costly equation once, in the first phase that needs it. All other equations
        run in every phase that needs them.

        Args:
            home: the layer, or the global program.
            needed: for each phase, the values that the home sends or yields.
        """
        eqns = self._eqns_for(home)
        runs = {}
        for phase, atoms in needed.items():
            run = _Run.of(eqns, atoms, self.constants)
            runs[phase] = run
            # A layer keeps the results of costly equations, so later phases need not run them.
            if home != "global":
                done = {id(eqn) for eqn in run.eqns if not is_cheap(eqn)}
                eqns = [eqn for eqn in eqns if id(eqn) not in done]
        return runs

    def _kept(self, home: Home, runs: Mapping[int, "_Run"]) -> dict[Var, Slot]:
        """Returns the results of costly equations that a layer reads in a later phase."""
        if not isinstance(home, int):
            return {}
        costly: set[Var] = set()
        for run in runs.values():
            for eqn in run.eqns:
                if not is_cheap(eqn):
                    costly.update(eqn.outvars)
        # A run computes every value that it needs, unless an earlier run has computed the value. So
        # a costly value that a run reads as an argument comes from an earlier run.
        reads = [v for run in runs.values() for v in run.reads]
        kept = dict.fromkeys(v for v in reads if v in costly)
        return {v: Slot(SlotKind.KEPT, i, home) for i, v in enumerate(kept)}

    def _slot(self, var: Var, reader: Home) -> Slot:
        """Returns the slot from which a home reads a value: an input's slot, or a vector."""
        home, phase = self.placement.of(var)
        dtype = str(_jax.aval(var).dtype)
        if home in ("everywhere", reader):
            return self.inputs[var]
        if isinstance(home, int) and reader == "global":
            return Slot(SlotKind.PARTIAL, phase, home, dtype)
        return Slot(SlotKind.GLOBAL, phase, 0, dtype)


@dataclass(frozen=True)
class _Run:
    """The equations that a home runs in a phase, and the values that they read as arguments."""

    eqns: list[JaxprEqn]
    reads: list[Var]

    @cached_property
    def computed(self) -> set[Var]:
        """The values that the equations make."""
        return jaxprs.defined(self.eqns)

    @staticmethod
    def of(
        eqns: Sequence[JaxprEqn],
        atoms: Sequence[Atom],
        constants: Mapping[Var, Any],
    ) -> "_Run":
        """Returns a run that yields some values; values that no equation makes are only read.

        Args:
            eqns: equations in order; those that no needed value depends on are left out.
            atoms: the values that the run yields.
            constants: the values of the constants, which the run does not take as arguments.
        """
        needed = jaxprs.prune(eqns, atoms)
        computed = jaxprs.defined(needed)
        passed = [v for v in jaxprs.variables(atoms) if v not in computed]
        read = dict.fromkeys([*jaxprs.free_variables(needed), *passed])
        return _Run(needed, [v for v in read if v not in constants])
