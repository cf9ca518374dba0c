"""Placed equations as pieces: who needs which value, what crosses between layers, what each computes in each phase."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.programs.ownership import Home, Output, Placement
from jvpipe.programs.pieces import Part, Piece, Slot, SlotKind
from jvpipe.trace import jaxprs
from jvpipe.trace.primitives import is_cheap


@dataclass(frozen=True)
class Flow:
    """Placed equations between named inputs and results.

    `layers` are those that own parameters; `shared` is the replicated state that the global program has a copy of.
    """

    eqns: Sequence[JaxprEqn]
    constants: Mapping[Var, Any]
    inputs: Mapping[Var, Slot]
    outputs: Sequence[Output]
    placement: Placement
    layers: Sequence[int]
    shared: frozenset[Slot] = frozenset()

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of all layers and of the global program, in an order in which they can run."""
        homes: list[Home] = [*self.layers, "global"]
        pieces = [piece for home in homes for piece in self._pieces_of(home)]
        return tuple(sorted(pieces, key=lambda piece: (piece.phase, piece.layer is None)))

    @cached_property
    def readers(self) -> dict[Var, set[Home]]:
        """The layers that need each value. What goes from layer to layer goes by the global program."""
        readers: dict[Var, set[Home]] = {var: set() for var in self.placement.places}
        for out in self.outputs:
            for var in jaxprs.variables([out.atom]):
                readers[var] |= self._holders(out)
        for eqn in reversed(self.eqns):
            asking = set().union(*(readers[v] for v in eqn.outvars))
            home = self.placement.of(eqn.outvars[0]).home
            for var in jaxprs.variables(eqn.invars):
                readers[var] |= {home} if asking and home != "everywhere" else asking
        for var, who in readers.items():
            home = self.placement.of(var).home
            if isinstance(home, int) and who - {home}:
                who.add("global")
        return readers

    @cached_property
    def _vectors(self) -> dict[Slot, list[Var]]:
        """The values that are packed into each vector between the layers and the global program."""
        vectors: dict[Slot, list[Var]] = {}
        for var, who in self.readers.items():
            home, phase = self.placement.of(var)
            dtype = str(_jax.aval(var).dtype)
            if isinstance(home, int) and "global" in who:
                vectors.setdefault(Slot(SlotKind.PARTIAL, phase, home, dtype), []).append(var)
            if home != "everywhere" and who - {home, "global"}:
                vectors.setdefault(Slot(SlotKind.GLOBAL, phase, 0, dtype), []).append(var)
        return vectors

    @cached_property
    def _eqns_of(self) -> dict[Home, list[JaxprEqn]]:
        eqns: dict[Home, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            eqns.setdefault(self.placement.of(eqn.outvars[0]).home, []).append(eqn)
        return eqns

    def _eqns_for(self, home: Home) -> list[JaxprEqn]:
        """The equations that a layer or the global program may run. For layers alike they are in the same order."""
        if home == "global":
            return [
                eqn
                for eqn in self.eqns
                if not isinstance(self.placement.of(eqn.outvars[0]).home, int)
            ]
        return [*self._eqns_of.get("everywhere", []), *self._eqns_of.get(home, [])]

    def _unchanged(self, out: Output) -> bool:
        return isinstance(out.atom, Var) and self.inputs.get(out.atom) == out.slot

    def _holders(self, out: Output) -> set[Home]:
        if out.home != "everywhere":
            return {out.home}
        return {*self.layers, *(["global"] if out.slot in self.shared else [])}

    def _sent_by(self, home: Home) -> dict[int, list[Slot]]:
        """The vectors that a layer or the global program makes, by phase."""
        sent: dict[int, list[Slot]] = {}
        for slot in self._vectors:
            if home == ("global" if slot.kind is SlotKind.GLOBAL else slot.source):
                sent.setdefault(slot.index, []).append(slot)
        return sent

    def _pieces_of(self, home: Home) -> Iterator[Piece]:
        """A piece for each phase in which something is sent; all results are made in the last."""
        results = [
            out for out in self.outputs if home in self._holders(out) and not self._unchanged(out)
        ]
        sent = self._sent_by(home)
        last = max(
            [*sent, *(self.placement.of(out.atom).ready(home) for out in results)], default=None
        )
        if last is None:
            return
        wanted: dict[int, list[Atom]] = {}
        for phase in sorted({*sent, last}):
            wanted[phase] = [v for slot in sent.get(phase, []) for v in self._vectors[slot]]
        wanted[last] += [out.atom for out in results]
        runs = self._runs(home, wanted)
        kept = self._kept(home, runs)
        for phase, (eqns, read) in runs.items():
            made = {v for eqn in eqns for v in eqn.outvars}
            yielded = [(out.atom, out.slot) for out in results if phase == last]
            yielded += [(v, slot) for v, slot in kept.items() if v in made]
            slots = {v: kept.get(v) or self._slot(v, home) for v in read}
            part = Part(eqns, self.constants, self._vectors, slots, sent.get(phase, []), yielded)
            yield part.piece(home if isinstance(home, int) else None, phase, last=phase == last)

    def _runs(
        self, home: Home, wanted: Mapping[int, Sequence[Atom]]
    ) -> dict[int, tuple[list[JaxprEqn], list[Var]]]:
        """Per phase, the equations that run and what they read. A costly layer equation runs once, others as needed."""
        eqns = self._eqns_for(home)
        runs = {}
        for phase, atoms in wanted.items():
            needed = jaxprs.prune(eqns, atoms)
            made = {v for eqn in needed for v in eqn.outvars}
            passed = [v for v in jaxprs.variables(atoms) if v not in made]
            read = dict.fromkeys([*jaxprs.free_variables(needed), *passed])
            runs[phase] = needed, [v for v in read if v not in self.constants]
            done = {id(eqn) for eqn in needed if home != "global" and not is_cheap(eqn)}
            eqns = [eqn for eqn in eqns if id(eqn) not in done]
        return runs

    def _kept(
        self, home: Home, runs: Mapping[int, tuple[list[JaxprEqn], list[Var]]]
    ) -> dict[Var, Slot]:
        """The results of costly equations that a layer reads in a later phase."""
        made = {
            v for eqns, _ in runs.values() for eqn in eqns if not is_cheap(eqn) for v in eqn.outvars
        }
        read = dict.fromkeys(v for _, variables in runs.values() for v in variables if v in made)
        return {
            v: Slot(SlotKind.KEPT, i, home) for i, v in enumerate(read) if isinstance(home, int)
        }

    def _slot(self, var: Var, reader: Home) -> Slot:
        home, phase = self.placement.of(var)
        dtype = str(_jax.aval(var).dtype)
        if home in ("everywhere", reader):
            return self.inputs[var]
        if isinstance(home, int) and reader == "global":
            return Slot(SlotKind.PARTIAL, phase, home, dtype)
        return Slot(SlotKind.GLOBAL, phase, 0, dtype)
