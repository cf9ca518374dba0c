"""The homes of an optimizer's equations: a layer, everywhere, or the global program.

If the operands of an equation belong to one layer, the equation runs with that layer. If every
layer has copies of all operands, the equation runs everywhere: each layer that needs the result
computes it. If the operands belong to several layers, the equation runs with the layer of the only
large operand, or in the global program if no operand is large. Only values under `SMALL_BYTES`, and
vectors of which each layer has one, may leave their layer.

Layers and the global program take turns, in phases (see `jvpipe.programs.places`). One pass over
the equations, in their order, places all of them. The place of an equation depends on the places of
its operands, and on the layers whose results need it (`destinations`). A second pass moves some
equations to the global program (`send_early`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.programs.places import Home, Input, Output, Place, VariablePlaces
from jvpipe.programs.scans import SplitScan, split_scan
from jvpipe.programs.transformations import transformation
from jvpipe.trace import jaxprs

SMALL_BYTES = 1024
"""The limit: smaller values, and vectors of which each layer has one, may leave their layer."""


def place_operands(
    eqns: Sequence[JaxprEqn],
    inputs: Mapping[Var, Input],
    outputs: Sequence[Output],
) -> VariablePlaces:
    """Finds a place for every equation of an optimizer.

    Args:
        eqns: the equations, without calls and branches (`straight_line`).
        inputs: the homes of the equations' free variables.
        outputs: the results of the optimizer.

    Raises:
        ValueError: an equation mixes large arrays of several layers, or has side effects.
    """
    work = _Placing(eqns, inputs, destinations(eqns, outputs))
    for index, eqn in enumerate(eqns):
        work.place(index, eqn)
    for_layers = [out.atom for out in outputs if out.home != "global"]
    work.send_early(jaxprs.variables(for_layers))
    return VariablePlaces(work.places, work.splits)


def check_owned(
    eqns: Sequence[JaxprEqn],
    inputs: Mapping[Var, Input],
    outputs: Sequence[Output],
    at: VariablePlaces,
) -> None:
    """Checks that no layer makes a large result that another home needs.

    Args:
        eqns: the equations that were placed.
        inputs: the homes of the equations' free variables.
        outputs: the results of the optimizer.
        at: the places of the equations.

    Raises:
        ValueError: there is such a result.
    """
    for out in outputs:
        home = at.of(out.atom).home
        is_elsewhere = isinstance(home, int) and home != out.home
        if is_elsewhere and not _is_small(out.atom):
            makers = (transformation(eqn) for eqn in eqns if out.atom in eqn.outvars)
            name = next(makers, "") or "it"
            origins = _origins(eqns, inputs, [out.atom])
            raise ValueError(
                f"the optimizer cannot be cut by layers: {name} makes {out.slot.kind} "
                f"{out.slot.index} of {origins}, which belong to another layer"
            )


def destinations(eqns: Sequence[JaxprEqn], outputs: Iterable[Output]) -> dict[Var, Home]:
    """Returns, for each value, the only layer whose results depend on the value.

    The entry is "everywhere" if results of several layers depend on the value, or if a result that
    belongs to no single layer does.
    """
    reached: dict[Var, Home] = {}
    several: Home = "everywhere"

    def add(atoms: Iterable[Atom], home: Home) -> None:
        for var in jaxprs.variables(atoms):
            reached[var] = home if reached.get(var, home) == home else several

    for out in outputs:
        add([out.atom], out.home if isinstance(out.home, int) else several)
    for eqn in reversed(eqns):
        for var in eqn.outvars:
            if var in reached:
                add(eqn.invars, reached[var])
    return reached


class _Placing:
    """The places of the equations that were placed so far, one after another.

    Args:
        eqns: all equations.
        inputs: the homes of the equations' free variables.
        goes_to: for each value, the only layer whose results depend on it (see `destinations`).
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        inputs: Mapping[Var, Input],
        goes_to: Mapping[Var, Home],
    ) -> None:
        self.eqns = eqns
        self.inputs = inputs
        self.goes_to = goes_to
        self.places = {var: Place(of_input.home, 0) for var, of_input in inputs.items()}
        self.splits: dict[int, SplitScan] = {}
        self.reductions: set[Var] = set()  # scalars that are computed from whole arrays

    def place(self, index: int, eqn: JaxprEqn) -> None:
        """Places the next equation, whose position is `index`.

        Raises:
            ValueError: the equation has side effects, or mixes large arrays of several layers.
        """
        if eqn.effects:
            raise ValueError(
                f"an optimizer with side effects cannot be cut: {eqn.primitive.name} in "
                f"{transformation(eqn)}"
            )
        operands = {v: self.places[v] for v in jaxprs.variables(eqn.invars)}
        layers = {place.home for place in operands.values() if isinstance(place.home, int)}
        # An equation cannot read large arrays of several layers. A scan is split by layers if
        # possible. Otherwise the optimizer is refused.
        large_operands = [v for v in operands if not _is_small(v)]
        large_homes = {operands[v].home for v in large_operands}
        large = layers & large_homes
        if len(large) > 1 and not _stacks_vectors(eqn):
            self._split(index, eqn, operands)
            return
        home = self._home_of(eqn, operands, layers, large)
        phase = max((p.ready(home) for p in operands.values()), default=0)
        self.places |= dict.fromkeys(eqn.outvars, Place(home, phase))
        if self._is_reduction(eqn):
            self.reductions.update(eqn.outvars)

    def _home_of(
        self,
        eqn: JaxprEqn,
        operands: Mapping[Var, Place],
        layers: set[int],
        large: Collection[Home],
    ) -> Home:
        """Returns the home of an equation.

        If the operands belong to several layers, the equation runs with the layer of the only large
        operand, or globally if none is large. If they belong to one layer, it runs there, unless it
        continues a reduction over layers (`_continues_a_reduction`). If they belong to no layer, it
        runs everywhere, unless the global program should run it once (`_belongs_together`).

        Args:
            eqn: the equation.
            operands: the places of the equation's operands.
            layers: the layers that operands belong to.
            large: the layers of large operands; at most one, unless the equation stacks vectors.
        """
        if len(layers) > 1:
            return next(iter(large)) if len(large) == 1 else "global"
        if layers:
            (layer,) = layers
            return "global" if self._continues_a_reduction(eqn, operands, layer) else layer
        return "global" if self._belongs_together(eqn, operands) else "everywhere"

    def send_early(self, results: Iterable[Var]) -> None:
        """Moves a layer's scalar arithmetic into the global program if no layer reads the result.

        For example, a norm adds up the sums of squares of all parameters in the order of the tree.
        Without the move, the first layer would add up its own sums, but the other layers would not.
        So the first layer could not share its program with layers of equal structure.

        Args:
            results: the results that layers need.
        """
        read_by_layers = set(results)
        for eqn in reversed(self.eqns):
            home, phase = self.places[eqn.outvars[0]]
            is_for_global = isinstance(home, int) and read_by_layers.isdisjoint(eqn.outvars)
            if is_for_global and _is_scalar_arithmetic(eqn):
                self.places |= dict.fromkeys(eqn.outvars, Place("global", phase))
            elif home != "global":
                read_by_layers.update(jaxprs.variables(eqn.invars))

    def _belongs_together(self, eqn: JaxprEqn, operands: Mapping[Var, Place]) -> bool:
        """Tells whether the global program should run an equation once, and send its results.

        Several layers must need the results, and the results must not be larger than the operands.
        The results must also have the type of an operand that the global program made. Then no
        additional vector is sent, because one vector holds all values of one type.
        """
        if not any(self.goes_to.get(v) == "everywhere" for v in eqn.outvars):
            return False
        global_operands = [v for v, p in operands.items() if p.home == "global"]
        types = {_jax.aval(v).dtype for v in global_operands}
        reduces = eqn.primitive.name.startswith("reduce_")
        read = sum(map(jaxprs.size_of, eqn.invars))
        for v in eqn.outvars:
            is_small = (_is_small(v) or reduces) and jaxprs.size_of(v) <= read
            if not is_small or _jax.aval(v).dtype not in types:
                return False
        return True

    def _continues_a_reduction(
        self,
        eqn: JaxprEqn,
        operands: Mapping[Var, Place],
        layer: Home,
    ) -> bool:
        """Tells whether a layer's scalar is combined with a global one, as in a sum over layers.

        An example is the sum of squares over all parameters. The result stays global; otherwise
        each layer would have to wait for the layer before it.
        """
        mixes = any(p.home == "global" for p in operands.values())
        serves_others = any(self.goes_to.get(v, layer) != layer for v in eqn.outvars)
        if not (mixes and serves_others):
            return False
        of_layer = [v for v, place in operands.items() if place.home == layer]
        are_numbers = all(jaxprs.size_of(v) == 1 for v in operands)
        return are_numbers and self.reductions.issuperset(of_layer)

    def _is_reduction(self, eqn: JaxprEqn) -> bool:
        """Tells whether an equation computes a scalar from an array, or from such scalars."""
        if any(jaxprs.size_of(v) != 1 for v in eqn.outvars):
            return False
        if eqn.primitive.name.startswith(("reduce_", "dot_general")):
            return True
        operands = jaxprs.variables(eqn.invars)
        return any(jaxprs.size_of(v) > 1 or v in self.reductions for v in operands)

    def _split(
        self,
        index: int,
        eqn: JaxprEqn,
        operands: Mapping[Var, Place],
    ) -> None:
        """Places the results of a scan over several layers as if each layer had its own scan.

        Raises:
            ValueError: the equation is not a scan, or a result depends on several layers.
        """
        layers: list[frozenset[int]] = []
        for v in eqn.invars:
            home = operands[v].home if isinstance(v, Var) else "everywhere"
            layers.append(frozenset([home] if isinstance(home, int) else []))
        used = [v in self.goes_to for v in eqn.outvars]
        # Only the body of a scan shows which results depend on which operands.
        split = split_scan(eqn, layers, used) if eqn.primitive.name == "scan" else None
        if split is None or not split.separates:
            raise ValueError(self._complaint(eqn))
        self.splits[index] = split
        phase = max(p.phase for p in operands.values())
        for var, of_result in zip(eqn.outvars, split.layers, strict=True):
            self.places[var] = Place(min(of_result) if of_result else "everywhere", phase)

    def _complaint(self, eqn: JaxprEqn) -> str:
        """Returns the message for an equation that mixes large arrays of several layers."""
        large = [v for v in jaxprs.variables(eqn.invars) if not _is_small(v)]
        # If this equation only stacks arrays, the message names the equation that reads the stack.
        readers = (reader for reader in self.eqns if eqn.outvars[0] in reader.invars)
        mixing = next(readers, eqn) if _stacks(eqn) else eqn
        name = transformation(mixing) or "it"
        origins = _origins(self.eqns, self.inputs, large)
        return (
            f"the optimizer cannot be cut by layers: {name} combines arrays of several layers in "
            f"one {mixing.primitive.name}. The arrays are computed from {origins}. Only values "
            f"under {SMALL_BYTES} bytes, such as a norm, and vectors of which each layer has one, "
            "may cross from layer to layer"
        )


def _origins(
    eqns: Sequence[JaxprEqn],
    inputs: Mapping[Var, Input],
    atoms: Iterable[Atom],
) -> str:
    """Returns the names of the parameters that values are computed from, for a message."""
    origins: dict[str, None] = {}
    for atom in atoms:
        read = jaxprs.free_variables(jaxprs.prune(eqns, [atom]))
        named = (inputs[v].parameter for v in [*read, atom] if v in inputs)
        origins |= dict.fromkeys(filter(None, named))
    names = [f"'{name}'" for name in origins]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _stacks(eqn: JaxprEqn) -> bool:
    """Tells whether an equation stacks arrays along an axis in which each has one element."""
    if eqn.primitive.name != "concatenate":
        return False
    axis = eqn.params["dimension"]
    return all(_jax.aval(v).shape[axis] == 1 for v in eqn.invars)


def _stacks_vectors(eqn: JaxprEqn) -> bool:
    """Tells whether an equation stacks vectors, for example the column norms of several layers."""
    return _stacks(eqn) and all(map(_is_vector, eqn.invars))


def _is_vector(atom: Atom) -> bool:
    """Tells whether an array has at most one axis of more than one element."""
    longer = [size for size in _jax.aval(atom).shape if size > 1]
    return len(longer) <= 1


def _is_scalar_arithmetic(eqn: JaxprEqn) -> bool:
    """Tells whether an equation computes scalars from scalars, all of one type."""
    atoms = [*eqn.invars, *eqn.outvars]
    types = {_jax.aval(atom).dtype for atom in atoms}
    return len(types) == 1 and all(jaxprs.size_of(atom) == 1 for atom in atoms)


def _is_small(atom: Atom) -> bool:
    return jaxprs.bytes_of(atom) < SMALL_BYTES
