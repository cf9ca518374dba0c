"""Parameters that are stacked along their first axis, one slice per layer, for a scan over layers.

`flax.linen.scan` and plain `lax.scan` take parameters in this form. jvpipe makes each slice a
parameter of its own, so that different stages can hold different layers.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, TreeDef
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.inline import SLICEWISE, jvpipe_stack_layers
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.primitives import is_heavy
from jvpipe.util.names import nearest
from jvpipe.util.paths import path_names

Tree = Any


@jax.tree_util.register_pytree_with_keys_class
class Slices(tuple[Any, ...]):
    """The slices of a stack, which replace the stack in a tree of parameters.

    The parts of the optimizer's state that mirror the parameters have `Slices`, too.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Returns the slices with their positions, for JAX."""
        keys = map(jax.tree_util.SequenceKey, range(len(self)))
        return list(zip(keys, self, strict=True)), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Iterable[Any]) -> "Slices":
        """Returns slices with other children, for JAX."""
        return cls(children)


def _is_slices(tree: Tree) -> bool:
    return isinstance(tree, Slices)


@dataclass(frozen=True)
class Stacks:
    """The stacks among the parameters.

    Attributes:
        tree: the structure of the parameters.
        lengths: for each leaf, the number of its slices; None if the leaf is not a stack.

    >>> import numpy as np
    >>> stacks = Stacks(jax.tree.structure({"blocks": 0, "head": 0}), (2, None))
    >>> parts = stacks.split({"blocks": np.array([[1, 2], [3, 4]]), "head": np.array([5])})
    >>> parts
    {'blocks': (array([1, 2]), array([3, 4])), 'head': array([5])}
    >>> stacks.join(parts)["blocks"].tolist()
    [[1, 2], [3, 4]]
    """

    tree: TreeDef
    lengths: tuple[int | None, ...]

    def __bool__(self) -> bool:
        return any(length is not None for length in self.lengths)

    def split(self, params: Tree) -> Tree:
        """Returns the parameters (arrays or shapes) with `Slices` in place of each stack."""
        leaves = self.tree.flatten_up_to(params)
        split = []
        for leaf, length in zip(leaves, self.lengths, strict=True):
            split.append(leaf if length is None else _slices(leaf, length))
        return self.tree.unflatten(split)

    def named(self, patterns: Sequence[str]) -> tuple[bool, ...]:
        """Tells for each leaf of the caller's parameters whether a pattern matches its path.

        Raises:
            ValueError: a pattern matches no leaf.

        >>> Stacks(jax.tree.structure({"base": [0, 0], "head": 0}), (None,) * 3).named(["base/*"])
        (True, True, False)
        """
        paths = list(self._lengths)
        for pattern in patterns:
            matching = (path for path in paths if fnmatchcase(path, pattern))
            if next(matching, None) is None:
                close = " or ".join(f"'{path}'" for path in nearest(pattern, paths))
                raise ValueError(
                    f"frozen pattern '{pattern}' matches no parameter: did you mean "
                    f"{close or 'none'}?"
                )

        def is_named(path: str) -> bool:
            return any(fnmatchcase(path, pattern) for pattern in patterns)

        return tuple(map(is_named, paths))

    def check_next(self, later: "Stacks") -> None:
        """Checks that the parameters of a later model are cut like those of this one.

        The slices of a stack have paths of their own. So without this check, an array that only
        one of the losses scans over would lose its trained values, and only the first slices of a
        stack that gets longer would keep theirs.

        Raises:
            ValueError: a path is a stack in only one model, or stacks of different lengths.
        """
        before = self._lengths
        for path, length in later._lengths.items():
            if before.get(path, length) == length:
                continue
            now, then = (
                "one array" if n is None else f"{n} layers that the loss scans over"
                for n in (length, before[path])
            )
            raise ValueError(
                f"parameter '{path}' is {now} in the new model, {then} in the present one: scan "
                "over it in both, or give it another path, so that each keeps its own values"
            )

    @property
    def _lengths(self) -> dict[str, int | None]:
        """The length of each parameter that is a stack, by path; None for one that is not."""
        paths = path_names(self.tree.unflatten(range(len(self.lengths))))
        return dict(zip(paths, self.lengths, strict=True))

    def slices_named(self, patterns: Sequence[str]) -> frozenset[int]:
        """Returns the numbers of the leaves, counted after `split`, that patterns match.

        If a pattern matches a stack, it matches all slices of the stack.

        Args:
            patterns: patterns of the paths of the caller's parameters.
        """
        matched: list[bool] = []
        for is_named, n in zip(self.named(patterns), self.lengths, strict=True):
            matched += [is_named] * (1 if n is None else n)
        return frozenset(i for i, is_named in enumerate(matched) if is_named)

    def join(
        self, tree: Tree, stack: Callable[..., Any] = lambda *slices: np.stack(slices)
    ) -> Tree:
        """Stacks the slices in a tree that `split` returned, or in an optimizer state like it.

        Args:
            tree: a tree with `Slices`.
            stack: the function that stacks slices.

        Raises:
            ValueError: the slices of a stack have different structures.
        """

        def joined(part: Tree) -> Tree:
            if not _is_slices(part):
                return part
            if len(set(map(jax.tree.structure, part))) > 1:
                raise ValueError(
                    "the optimizer keeps other arrays for some layers of a stacked parameter than "
                    "for other layers, so the arrays cannot be stacked: choose the optimizer's "
                    "masks and labels by path, not by layer or leaf number"
                )
            return jax.tree.map(stack, *part)

        return jax.tree.map(joined, tree, is_leaf=_is_slices)

    def split_like(self, split: Tree, tree: Tree) -> Tree:
        """Splits a joined tree again; this is the inverse of `join`.

        Args:
            split: a tree with `Slices` in the same places as the result.
            tree: the joined tree.

        Raises:
            ValueError: the two trees have different structures.
        """

        def sliced(part: Tree, whole: Tree) -> Tree:
            if not _is_slices(part):
                return whole
            picks = map(operator.itemgetter, range(len(part)))
            return Slices(jax.tree.map(pick, whole) for pick in picks)

        return jax.tree.map(sliced, split, tree, is_leaf=_is_slices)

    def of_slices(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss as a function that takes split parameters, for `trace_loss`."""

        @wraps(loss_fn, assigned=(), updated=())  # errors show the user's function
        def sliced(params: Tree, *rest: Any) -> Any:
            return loss_fn(self.join(params, jvpipe_stack_layers), *rest)

        return sliced


def find_stacks(loss: LossJaxpr, params: Tree) -> Stacks:
    """Returns the stacks among the parameters: the leaves that only scans over layers read.

    A scan may also read a cast of the parameter.

    Args:
        loss: the traced loss.
        params: its parameters.
    """
    # `source` has, for each variable that is a parameter or a cast of one, the parameter's number.
    # `others` has the parameters that something other than a scan over layers reads. These must
    # stay whole, even if a scan over layers reads them as well.
    lengths: dict[int, int] = {}
    others: set[int | None] = set()
    parameters = loss.inputs_of(ValueKind.PARAMETER)
    source = {v: loss.inputs[v].index for v in parameters}
    for eqn in loss.eqns:
        read = [None if isinstance(v, _jax.Literal) else source.get(v) for v in eqn.invars]
        if eqn.primitive.name in SLICEWISE and read[0] is not None:
            source[eqn.outvars[0]] = read[0]
        elif eqn.primitive.name == "scan":
            *rest, xs = _jax.scan_operands(eqn, read)
            over_layers = _is_over_layers(eqn, [i is not None for i in xs])
            if over_layers:
                scanned = [i for i in xs if i is not None]
                lengths |= dict.fromkeys(scanned, eqn.params["length"])
            others.update(*rest, () if over_layers else xs)
        else:
            others.update(read)
    outputs = jaxprs.variables(atom for atom, _ in loss.outputs)
    others.update(source.get(v) for v in outputs)
    leaves, tree = jax.tree.flatten(params)
    stacked = [lengths.get(i) if i not in others else None for i in range(len(leaves))]
    return Stacks(tree, tuple(stacked))


def _is_over_layers(eqn: JaxprEqn, stacked: list[bool]) -> bool:
    """Tells whether a scan's iterations do heavy work, such as products, with slices of parameters.

    The iterations of a scan over time do not, because each of them reads whole parameters.
    """
    body = eqn.params["jaxpr"]
    flat = flatten(_jax.jaxpr_as_fun(body), *body.in_avals).jaxpr
    *_, xs = _jax.scan_operands(eqn, flat.invars)
    sliced = {v for v, is_slice in zip(xs, stacked, strict=True) if is_slice}
    for inner in flat.eqns:
        read = set(jaxprs.variables(inner.invars))
        if is_heavy(inner) and not read.isdisjoint(sliced):
            return True
        # A value that is made only of slices, such as a cast, counts as a slice.
        if read and read <= sliced:
            sliced.update(inner.outvars)
    return False


def _slices(x: Any, length: int) -> Slices:
    if type(x) is jax.ShapeDtypeStruct:
        of_slice = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return Slices((of_slice,) * length)
    return Slices(x[i] for i in range(length))


def stacked_shape(*slices: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a stack, given its slices as arrays or shapes."""
    first = slices[0]
    return jax.ShapeDtypeStruct((len(slices), *first.shape), first.dtype)
