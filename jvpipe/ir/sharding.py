"""Sharding: the rules by which a user cuts parameters over the devices of a place.

A place may be a mesh of several devices with named axes. A spec names, for each dimension of an
array, the axes along which that dimension is cut. Rules give specs by the paths of parameters.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jvpipe.ir.layers import Array, Spec


@dataclass(frozen=True)
class Sharding:
    """Rules that map paths of parameters to specs, and the sizes of the axes.

    A rule is a regular expression that matches a whole path. If no rule matches a parameter, each
    device of a place has a whole copy of it. If there is a `batch_axis`, the examples of a batch
    are divided along this axis.

    >>> sharding = Sharding({".*/kernel": (None, "model")}, {"model": 2})
    >>> sharding.specs({"up/kernel": (4, 8), "up/bias": (8,)})
    {'up/kernel': (None, 'model'), 'up/bias': ()}
    >>> sharding.laid(Array("up/kernel", (4, 8), "float32", 128), (None, "model")).bytes
    64
    """

    rules: Mapping[str, Spec]
    axes: Mapping[str, int]
    batch_axis: str | None = None

    def specs(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Spec]:
        """Returns the spec of each parameter, by its path.

        Args:
            shapes: the shapes of the parameters, by their paths.

        Raises:
            ValueError: a rule matches no parameter, two rules give a parameter different specs, or
                a parameter cannot be cut as its rule says.
        """
        specs: dict[str, Spec] = dict.fromkeys(shapes, ())
        rule_of: dict[str, str] = {}
        for rule, spec in self.rules.items():
            for path in _matched(rule, list(shapes)):
                other = rule_of.setdefault(path, rule)
                if self.rules[other] != spec:
                    raise ValueError(
                        f"sharding rules '{other}' and '{rule}' both match parameter "
                        f"'{path}', but cut it by {words(self.rules[other])} and {words(spec)}: "
                        "let one of them match fewer parameters"
                    )
                self._check(path, shapes[path], spec)
                specs[path] = spec
        return specs

    def laid(self, array: Array, spec: Spec) -> Array:
        """Returns an array cut by a spec; its `bytes` are then those of the part on one device.

        Args:
            array: the whole array.
            spec: the axes along which it is cut.
        """
        # Every spec cuts into equal parts (`divides`), so the division leaves no remainder.
        parts = math.prod(map(self._parts, spec))
        return replace(array, spec=spec, bytes=array.bytes // parts)

    def divides(self, shape: tuple[int, ...], spec: Spec) -> bool:
        """Tells whether a spec cuts an array into parts of equal shape, as every spec must.

        Args:
            shape: the shape of the array.
            spec: the axes along which it is to be cut.
        """
        return all(size % parts == 0 for size, parts in self._cut(shape, spec))

    def batch(self, array: Array) -> Array:
        """Returns a leaf of a micro-batch, cut by examples along `batch_axis` if there is one.

        Raises:
            ValueError: the size of that axis does not divide the number of examples.
        """
        if self.batch_axis is None:
            return array
        parts = self._parts(self.batch_axis)
        if array.shape[0] % parts:
            raise ValueError(
                f"batch_axis='{self.batch_axis}' cannot cut the {array.shape[0]} examples of a "
                f"micro-batch into {parts} equal parts: change the number of micro-batches, or the "
                "size of this axis"
            )
        return self.laid(array, (self.batch_axis,))

    def _parts(self, axes: str | tuple[str, ...] | None) -> int:
        return math.prod(self.axes[axis] for axis in _several(axes))

    def _check(self, path: str, shape: tuple[int, ...], spec: Spec) -> None:
        """Raises ValueError if a parameter cannot be cut by a spec."""
        if len(spec) > len(shape):
            raise ValueError(
                f"sharding {words(spec)} has {len(spec)} entries, but parameter "
                f"'{path}' has {len(shape)} dimensions, its shape is {list(shape)}: write at most "
                "one entry per dimension"
            )
        for size, parts in self._cut(shape, spec):
            if size % parts:
                raise ValueError(
                    f"sharding {words(spec)} cannot cut a dimension of size {size} of parameter "
                    f"'{path}', whose shape is {list(shape)}, into {parts} equal parts: cut "
                    "another dimension, or change the size of the mesh axis"
                )

    def _cut(self, shape: tuple[int, ...], spec: Spec) -> Iterator[tuple[int, int]]:
        """Returns, for each dimension that a spec names, its size and the number of its parts."""
        # A spec may be shorter than the shape: the dimensions behind it are not cut.
        return zip(shape, map(self._parts, spec), strict=False)


def _matched(rule: str, paths: Sequence[str]) -> list[str]:
    """Returns the paths that a rule matches; raises ValueError if there are none."""
    matched = [path for path in paths if re.fullmatch(rule, path)]
    if not matched:
        some = ", ".join(f"'{path}'" for path in paths[:4])
        more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
        raise ValueError(
            f"sharding rule '{rule}' matches no parameter: a rule must match a whole path, and "
            f"the paths are {some}{more}"
        )
    return matched


def _several(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the axes along which a dimension is cut, as a tuple.

    >>> _several(None), _several("model"), _several(("data", "model"))
    ((), ('model',), ('data', 'model'))
    """
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else axes


def named_axes(spec: Spec) -> tuple[str, ...]:
    """Returns the axes that a spec names, dimension by dimension."""
    return tuple(axis for axes in spec for axis in _several(axes))


def words(spec: Spec) -> str:
    """Writes a spec in the form in which users write it.

    >>> words((None, "model"))
    "P(None, 'model')"
    """
    return f"P({', '.join(map(repr, spec))})"
