"""The place of each value of an optimizer: the home and the phase that compute the value.

Layers and the global program take turns, in phases. In each phase the layers run first and send
values to the global program. The global program of the same phase reads these values, and the
layers read its results in the next phase:

    phase 0                 phase 1
    layers    global        layers    global        time runs to the right
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jvpipe import _jax
from jvpipe._jax import Atom, Var
from jvpipe.programs.pieces import Slot
from jvpipe.programs.scans import SplitScan

Home = int | Literal["everywhere", "global"]
"""A layer by its number, everywhere, or the global program."""


class Place(NamedTuple):
    """The home and the phase in which a value is computed."""

    home: Home
    phase: int

    def ready(self, reader: Home) -> int:
        """Returns the first phase in which a layer or the global program can read the value."""
        if self.home == "everywhere":
            # Layers read a result of the global program one phase later than the global program
            # itself. For a value that is made everywhere, `phase` is the phase of the layers.
            return max(self.phase - 1, 0) if reader == "global" else self.phase
        return self.phase + (reader not in ("global", self.home))


class Input(NamedTuple):
    """The home of an input of the optimizer, and the path of its parameter, if any."""

    home: Home
    parameter: str = ""


@dataclass(frozen=True)
class Output:
    """A result of the optimizer.

    Attributes:
        atom: the value.
        home: the home that needs the value, or "everywhere": all homes with a copy of the slot.
        slot: the name of the result.
    """

    atom: Atom
    home: Home
    slot: Slot


@dataclass(frozen=True)
class VariablePlaces:
    """The place of each variable, and the scans to split, by the index of their equation."""

    places: Mapping[Var, Place]
    splits: Mapping[int, SplitScan]

    def of(self, atom: Atom) -> Place:
        """Returns the place of an atom; constants are everywhere."""
        return Place("everywhere", 0) if isinstance(atom, _jax.Literal) else self.places[atom]
