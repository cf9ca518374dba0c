"""An optimizer traced over stacked parameters and run on their slices, which layers own.

A loss that scans over layers has the parameters of these layers stacked in one array. Each slice of
the array belongs to a layer, but the optimizer should see the stacks that the user passed. So the
optimizer is traced over the stacks, and each traced equation runs on separate slices if it can
(`jvpipe.programs.slicewise`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from jvpipe.ir.optimizer import Optimizer
from jvpipe.programs.cut_arrays import Rows, slices_of, stacked, whole
from jvpipe.programs.frozen import without_frozen
from jvpipe.programs.optimizer_trace import (
    TracedOptimizer,
    arrays_of,
    mean,
    norm,
    trace_optimizer,
)
from jvpipe.programs.slicewise import apply
from jvpipe.programs.straight_line import straight_line
from jvpipe.trace import jaxprs
from jvpipe.trace.stacks import Slices, Stacks, stacked_shape

Tree = Any
Shapes = Sequence[jax.ShapeDtypeStruct]


def trace_stacked(
    optimizer: Optimizer,
    params: Tree,
    readers: Sequence[int],
    microbatches: int | None,
    *,
    grad_norm: bool,
    stacks: Stacks | None,
    weight_type: str = "float32",
    frozen: Collection[int] = (),
) -> TracedOptimizer:
    """Traces an optimizer over stacks, to run on their slices; without stacks, over `params`.

    Parameters that the optimizer itself leaves unchanged are found and frozen.

    Args:
        optimizer: any `optax.GradientTransformation`.
        params: arrays or shapes, with slices in place of stacks.
        readers: for each leaf of `params`, the number of gradient accumulators to add up.
        microbatches: the number by which the sums are divided; None if the divisor is an input.
        grad_norm: whether the update also returns the norm of the gradients.
        stacks: which leaves form stacks that the optimizer sees; None if it sees the slices.
        weight_type: the type of a divisor that is an input.
        frozen: leaves of `params` that the optimizer does not see; all slices of a stack, or none.
    """
    trace = partial(_trace_stacks, stacks=stacks) if stacks else trace_optimizer
    traced = trace(
        optimizer,
        params,
        readers,
        microbatches,
        grad_norm=grad_norm,
        weight_type=weight_type,
        frozen=frozen,
    )
    return without_frozen(traced, readers)


def _trace_stacks(
    optimizer: Optimizer,
    params: Tree,
    readers: Sequence[int],
    microbatches: int | None,
    *,
    stacks: Stacks,
    grad_norm: bool,
    weight_type: str,
    frozen: Collection[int],
) -> TracedOptimizer:
    """Traces an optimizer over stacks; `trace_stacked` explains the arguments."""
    core = _core(optimizer, params, stacks, frozen)
    parameters = _Split(stacks.lengths)
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    first = _Split(_stack_lengths(core, parameters))
    on_slices = _OnSlices(core, parameters, first).settled(leaves)
    state, shapes = on_slices.state, on_slices.shapes
    sums = [[x] * n for x, n in zip(leaves, readers, strict=True)]
    weight = None if microbatches is not None else jax.ShapeDtypeStruct((), weight_type)

    def update(
        sums: list[list[Any]],
        weight: Any,
        params: Any,
        moments: Any,
    ) -> list[Any]:
        """Returns the slices of the parameters and of the state, and the gradient's norm if asked.

        Args:
            sums: for each slice of a parameter, its gradient accumulators: one for each reader.
            weight: the scalar that divides the sums; None if it is a number of micro-batches.
            params: the slices of the parameters.
            moments: the slices of the optimizer's state.
        """
        by = np.float32(microbatches) if weight is None else weight
        # The gradient of a frozen parameter is not read, so the parameter serves as placeholder.
        grads = list(params)
        for i, parts in enumerate(sums):
            if i not in frozen:
                grads[i] = mean(parts, by, params[i].dtype)
        new = on_slices.updated(grads, params, moments)
        seen = [grad for i, grad in enumerate(grads) if i not in frozen]
        return [*new, norm(seen)] if grad_norm else new

    # The pipeline sees the state with `Slices` in place of the leaves that were cut into slices.
    tree = jax.tree.unflatten(core.state_tree, state.slices(shapes))
    return TracedOptimizer(
        update=straight_line(update, sums, weight, leaves, shapes),
        init=straight_line(on_slices.first_state, leaves),
        state=arrays_of(tree),
        state_tree=jax.tree.structure(tree),
        parameter_of=state.parameter_of(parameters, core.parameter_of),
        frozen=frozenset(frozen),
    )


def _core(
    optimizer: Optimizer,
    params: Tree,
    stacks: Stacks,
    frozen: Collection[int],
) -> TracedOptimizer:
    """Traces an optimizer over stacks, with an update that takes one gradient for each stack.

    The mean gradients and their norm are computed outside of this update, slice by slice.

    Args:
        optimizer: any `optax.GradientTransformation`.
        params: arrays or shapes, with slices in place of stacks.
        stacks: which leaves of `params` form stacks.
        frozen: leaves of `params` that the optimizer does not see.
    """
    first_slices = _Split(stacks.lengths).starts[:-1]
    hidden = [i for i, start in enumerate(first_slices) if start in frozen]
    return trace_optimizer(
        optimizer,
        stacks.join(params, stacked_shape),
        readers=[1] * len(stacks.lengths),
        microbatches=1,
        grad_norm=False,
        frozen=hidden,
    )


@dataclass(frozen=True)
class _Split:
    """A way to cut leaves into slices along their first axis.

    `lengths` has the number of slices of each leaf; None for a leaf that is not cut.

    >>> split = _Split((2, None))
    >>> split.taken_apart(split.joined([1.0, 2.0, 3.0]))[2]
    3.0
    """

    lengths: tuple[int | None, ...]

    @property
    def starts(self) -> list[int]:
        """The position of each leaf's first slice among all slices."""
        counts = [1 if n is None else n for n in self.lengths]
        return list(accumulate(counts, initial=0))

    def slices(self, values: Sequence[Any]) -> list[Any]:
        """Returns the leaves, with `Slices` for each leaf that is cut."""
        spans = zip(self.starts, self.lengths, strict=False)
        return [values[at] if n is None else Slices(values[at : at + n]) for at, n in spans]

    def joined(self, values: Sequence[Any]) -> list[Any]:
        """Joins slices into leaves."""
        pairs = zip(self.slices(values), self.lengths, strict=True)
        return [x if n is None else stacked(x) for x, n in pairs]

    def taken_apart(self, values: Sequence[Any]) -> list[Any]:
        """Returns the slices of some leaves."""
        slices: list[Any] = []
        for value, n in zip(values, self.lengths, strict=False):
            slices += [whole(value)] if n is None else slices_of(value, 0, n)
        return slices

    def shapes(self, leaves: Shapes) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the slices of some leaves."""
        split: list[jax.ShapeDtypeStruct] = []
        for x, n in zip(leaves, self.lengths, strict=True):
            shape = x.shape if n is None else x.shape[1:]
            slice_ = jax.ShapeDtypeStruct(
                shape,
                x.dtype,
                weak_type=x.weak_type,
            )
            split += [slice_] * (1 if n is None else n)
        return split

    def parameter_of(
        self, parameters: "_Split", of_leaves: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """Returns the slice of a parameter that each slice of the state belongs to.

        Args:
            parameters: how the parameters are cut.
            of_leaves: the parameter that each leaf of the state belongs to, or None.
        """
        of_slices: list[int | None] = []
        for n, leaf in zip(self.lengths, of_leaves, strict=True):
            count = 1 if n is None else n
            if leaf is None or parameters.lengths[leaf] != n:
                of_slices += [None] * count
            else:
                start = parameters.starts[leaf]
                of_slices += range(start, start + count)
        return tuple(of_slices)


@dataclass(frozen=True)
class _OnSlices:
    """An optimizer that is traced over stacks, and that runs on their slices.

    Attributes:
        core: the optimizer, traced over stacks.
        parameters: how the parameters are cut into slices.
        state: how the state is cut into slices.
    """

    core: TracedOptimizer
    parameters: _Split
    state: _Split

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the state's slices."""
        return self.state.shapes(_state(self.core))

    def first_state(self, params: Sequence[Any]) -> list[Any]:
        """Returns the slices of the first state, given the slices of the parameters."""
        joined = self.parameters.joined(params)
        state = jaxprs.evaluate_jaxpr(self.core.init, joined, apply)
        return self.state.taken_apart(state)

    def updated(
        self,
        grads: Sequence[Any],
        params: Sequence[Any],
        moments: Sequence[Any],
    ) -> list[Any]:
        """Returns the slices of the parameters and then of the state after an update.

        Args:
            grads: the slices of the gradients.
            params: the slices of the parameters, which have the same shapes.
            moments: the slices of the state.
        """
        results = self._results(grads, params, moments)
        count = len(self.parameters.lengths)
        new_params = self.parameters.taken_apart(results[:count])
        new_state = self.state.taken_apart(results[count:])
        return new_params + new_state

    def _results(
        self,
        grads: Sequence[Any],
        params: Sequence[Any],
        moments: Sequence[Any],
    ) -> list[Any]:
        """Runs the update; each result may be an array, `Rows` or `Even`."""
        arrays = [
            *self.parameters.joined(grads),
            *self.parameters.joined(params),
            *self.state.joined(moments),
        ]
        return jaxprs.evaluate_jaxpr(self.core.update, arrays, apply)

    def settled(self, leaves: Shapes) -> "_OnSlices":
        """Returns the same optimizer, with as many leaves of the state in slices as possible.

        A leaf is cut if it belongs to a stack and is as long as the stack, or if an update yields
        it in slices. Leaves of the second kind are found by running the update on shapes. With such
        a leaf in slices, the update may yield further leaves in slices, so it runs again. The
        recursion ends, because each call cuts another leaf.

        Args:
            leaves: the shapes of the parameters' slices.
        """
        results: list[Any] = []

        def update(*arguments: Any) -> None:
            results[:] = self._results(*arguments)

        jax.eval_shape(update, leaves, leaves, self.shapes)
        lengths: list[int | None] = []
        new_state = results[len(self.parameters.lengths) :]
        for n, x in zip(self.state.lengths, new_state, strict=True):
            is_new_stack = n is None and _is_stack(x)
            lengths.append(len(x.pieces) if is_new_stack else n)
        if tuple(lengths) == self.state.lengths:
            return self
        grown = replace(self, state=_Split(tuple(lengths)))
        return grown.settled(leaves)


def _stack_lengths(core: TracedOptimizer, parameters: _Split) -> tuple[int | None, ...]:
    """Returns the length of each state leaf that belongs to a stack of that length, else None."""
    lengths: list[int | None] = []
    for owner, shape in zip(core.parameter_of, _state(core), strict=True):
        n = None if owner is None else parameters.lengths[owner]
        lengths.append(n if n and shape.shape[:1] == (n,) else None)
    return tuple(lengths)


def _is_stack(value: Any) -> bool:
    return isinstance(value, Rows) and value.axis == 0 and value.parts[0].shape[0] == 1


def _state(core: TracedOptimizer) -> Shapes:
    """Returns the shapes of the state as the optimizer sees it."""
    shape = jax.ShapeDtypeStruct
    return [shape(x.shape, x.dtype, weak_type=x.weak_type) for x in core.init.out_avals]
