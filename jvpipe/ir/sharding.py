"""How parameters lie over the inner axes of a place of several devices: a user's rules, and what they come to."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jvpipe.ir.layers import Array, Spec


@dataclass(frozen=True)
class Sharding:
    """Rules from paths of parameters to axes, and the sizes of these axes.

    A path that no rule matches has its parameter whole on each device of a place. Batches are cut
    along `batch_axis`, example by example, if there is one.

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
        """Finds the axes that each parameter is cut along, by its path.

        Args:
            shapes: of the parameters, by their paths.

        Raises:
            ValueError: a rule matches nothing, two of them differ about a parameter, or one cannot
                be cut so.
        """
        ruled: dict[str, tuple[str, Spec]] = {}
        for rule, spec in self.rules.items():
            matched = [path for path in shapes if re.fullmatch(rule, path)]
            if not matched:
                some = ", ".join(f"'{path}'" for path in list(shapes)[:4])
                raise ValueError(
                    f"sharding rule '{rule}' matches no parameter: it has to match a whole path, and there are {some}"
                    + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")
                )
            for path in matched:
                other, before = ruled.setdefault(path, (rule, spec))
                if before != spec:
                    raise ValueError(
                        f"sharding rules '{other}' and '{rule}' both match parameter '{path}', and say {words(before)} "
                        f"and {words(spec)}: let one of them match less"
                    )
                self._check(path, shapes[path], spec)
        return {path: ruled[path][1] if path in ruled else () for path in shapes}

    def laid(self, array: Array, spec: Spec) -> Array:
        """Returns an array that is cut so; its bytes are those of one device.

        Args:
            array: as a whole.
            spec: the axes along which it is cut.
        """
        return replace(array, spec=spec, bytes=array.bytes // math.prod(map(self._parts, spec)))

    def divides(self, shape: tuple[int, ...], spec: Spec) -> bool:
        """Tells whether an array can be cut so, in parts that are alike.

        Args:
            shape: of the array.
            spec: the axes along which it is to be cut.
        """
        return all(size % self._parts(axes) == 0 for size, axes in zip(shape, spec, strict=False))

    def batch(self, array: Array) -> Array:
        """Returns a leaf of a micro-batch as it lies.

        Raises:
            ValueError: the devices of a place cannot share its examples evenly.
        """
        if self.batch_axis is None:
            return array
        if array.shape[0] % self.axes[self.batch_axis]:
            raise ValueError(
                f"batch_axis='{self.batch_axis}' cuts the {array.shape[0]} examples of a micro-batch in "
                f"{self.axes[self.batch_axis]} parts: use other micro-batches, or a mesh that divides them"
            )
        return self.laid(array, (self.batch_axis,))

    def _parts(self, axes: str | tuple[str, ...] | None) -> int:
        return math.prod(self.axes[axis] for axis in _several(axes))

    def _check(self, path: str, shape: tuple[int, ...], spec: Spec) -> None:
        """Raises ValueError if a parameter cannot be cut so."""
        if len(spec) > len(shape):
            raise ValueError(
                f"sharding {words(spec)} has {len(spec)} dimensions, parameter '{path}' has {len(shape)}: its shape is "
                f"{list(shape)}, write one entry for each at most"
            )
        for size, axes in zip(shape, spec, strict=False):
            if size % self._parts(axes):
                raise ValueError(
                    f"sharding {words(spec)} cuts {size} of parameter '{path}', whose shape is {list(shape)}, in "
                    f"{self._parts(axes)} parts: use another dimension, or a mesh that divides it"
                )


def _several(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the axes of a dimension.

    >>> _several(None), _several("model"), _several(("data", "model"))
    ((), ('model',), ('data', 'model'))
    """
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def named_axes(spec: Spec) -> tuple[str, ...]:
    """Finds the axes that a spec names."""
    return tuple(axis for axes in spec for axis in _several(axes))


def words(spec: Spec) -> str:
    """Writes a spec as a user does.

    >>> words((None, "model"))
    "P(None, 'model')"
    """
    return f"P({', '.join(map(repr, spec))})"
