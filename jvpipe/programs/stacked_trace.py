"""An optimizer traced over stacked parameters and run on their slices, which layers own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from jvpipe.ir.optimizer import Optimizer
from jvpipe.programs.frozen import without_frozen
from jvpipe.programs.optimizer_trace import (
    TracedOptimizer,
    arrays_of,
    evaluate,
    mean,
    norm,
    straight_line,
    trace_optimizer,
)
from jvpipe.programs.slicewise import Rows, apply, slices_of, stacked, whole
from jvpipe.trace.stacks import Slices, Stacks

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
    frozen: Collection[int] = (),
) -> TracedOptimizer:
    """Traces an optimizer as `trace_optimizer` does; it sees parameters as the caller does.

    What it freezes by itself is found, too.

    Args:
        optimizer: any `optax.GradientTransformation`.
        params: arrays or shapes, of each stack its slices.
        readers: per leaf of these, how many gradient accumulators there are to be summed.
        microbatches: what the sums are divided by; None if it is an input.
        grad_norm: also return the norm of the gradients.
        stacks: which leaves the optimizer sees as arrays; None: it sees slices.
        frozen: leaves of `params` that it does not see; of a stack all slices.
    """
    whole = {"grad_norm": grad_norm, "frozen": frozen}
    traced = (
        _trace_stacks(optimizer, params, readers, microbatches, stacks, **whole)
        if stacks
        else trace_optimizer(optimizer, params, readers, microbatches, **whole)
    )
    return without_frozen(traced, readers, frozen)


def _trace_stacks(
    optimizer: Optimizer,
    params: Tree,
    readers: Sequence[int],
    microbatches: int | None,
    stacks: Stacks,
    *,
    grad_norm: bool,
    frozen: Collection[int],
) -> TracedOptimizer:
    """Traces an optimizer over stacks (`trace_stacked` has the arguments)."""
    given, parameters = stacks.join(params, _stacked_shape), _Split(stacks.lengths)
    hidden = [i for i, start in enumerate(parameters.starts[:-1]) if start in frozen]
    core = trace_optimizer(
        optimizer, given, [1] * len(stacks.lengths), 1, grad_norm=False, frozen=hidden
    )
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    state = _settled(core, parameters, leaves)
    shapes = state.shapes(_state(core))
    sums = [[x] * n for x, n in zip(leaves, readers, strict=True)]
    weight = None if microbatches is not None else jax.ShapeDtypeStruct((), np.float32)

    def update(sums: list[list[Any]], weight: Any, params: Any, own: Any) -> list[Any]:
        by = np.float32(microbatches) if weight is None else weight
        grads = [
            x if i in frozen else mean(parts, by, x.dtype)
            for i, (parts, x) in enumerate(zip(sums, params, strict=True))
        ]
        given = [*parameters.joined(grads), *parameters.joined(params), *state.joined(own)]
        made = evaluate(core.update, given, apply)
        new = [*parameters.taken_apart(made), *state.taken_apart(made[len(stacks.lengths) :])]
        seen = [grad for i, grad in enumerate(grads) if i not in frozen]
        return [*new, *([norm(seen)] if grad_norm else [])]

    def init(params: Any) -> list[Any]:
        return state.taken_apart(evaluate(core.init, parameters.joined(params), apply))

    tree = jax.tree.unflatten(core.state_tree, state.slices(shapes))
    return TracedOptimizer(
        straight_line(update, sums, weight, leaves, shapes),
        straight_line(init, leaves),
        arrays_of(tree),
        jax.tree.structure(tree),
        state.parameter_of(parameters, core.parameter_of),
    )


@dataclass(frozen=True)
class _Split:
    """How leaves are taken apart along their first axis: into how many slices, None: not at all.

    >>> split = _Split((2, None))
    >>> split.taken_apart(split.joined([1.0, 2.0, 3.0]))[2]
    3.0
    """

    lengths: tuple[int | None, ...]

    @property
    def starts(self) -> list[int]:
        """The position of the first slice of each leaf among all."""
        return [0, *accumulate(1 if n is None else n for n in self.lengths)]

    def slices(self, values: Sequence[Any]) -> list[Any]:
        """The slices of each leaf, those of one that is taken apart as `Slices`."""
        spans = zip(self.starts, self.lengths, strict=False)
        return [values[at] if n is None else Slices(values[at : at + n]) for at, n in spans]

    def joined(self, values: Sequence[Any]) -> list[Any]:
        """The leaves that these are the slices of."""
        leaves = self.slices(values)
        return [x if n is None else stacked(x) for x, n in zip(leaves, self.lengths, strict=True)]

    def taken_apart(self, values: Sequence[Any]) -> list[Any]:
        """The slices of these leaves."""
        slices: list[Any] = []
        for value, n in zip(values, self.lengths, strict=False):
            slices += [whole(value)] if n is None else slices_of(value, 0, n)
        return slices

    def shapes(self, leaves: Shapes) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the slices of these leaves."""
        split: list[jax.ShapeDtypeStruct] = []
        for x, n in zip(leaves, self.lengths, strict=True):
            shape = x.shape if n is None else x.shape[1:]
            slice_ = jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)
            split += [slice_] * (1 if n is None else n)
        return split

    def parameter_of(
        self, parameters: "_Split", known: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """The slice of a parameter that each slice of the state belongs to.

        Args:
            parameters: how these are taken apart.
            known: the parameter that each leaf of the state belongs to.
        """
        found: list[int | None] = []
        for n, leaf in zip(self.lengths, known, strict=True):
            count = 1 if n is None else n
            if leaf is None or parameters.lengths[leaf] != n:
                found += [None] * count
            else:
                found += range(parameters.starts[leaf], parameters.starts[leaf] + count)
        return tuple(found)


def _settled(core: TracedOptimizer, parameters: _Split, leaves: Shapes) -> _Split:
    """How the state is taken apart.

    Slices are what belongs to a stack and is as long, and what an update makes of slices.
    """
    shapes = _state(core)
    own = [None if p is None else parameters.lengths[p] for p in core.parameter_of]
    state = _Split(
        tuple(n if n and x.shape[:1] == (n,) else None for n, x in zip(own, shapes, strict=True))
    )
    while True:
        made: list[Any] = []

        def update(grads: Any, params: Any, own: Any, state: _Split = state) -> None:
            given = [*parameters.joined(grads), *parameters.joined(params), *state.joined(own)]
            made[:] = evaluate(core.update, given, apply)  # noqa: B023 - it is called at once

        jax.eval_shape(update, leaves, leaves, state.shapes(shapes))
        new = made[len(parameters.lengths) :]
        grown = tuple(
            len(x.given) if n is None and _is_stack(x) else n
            for n, x in zip(state.lengths, new, strict=True)
        )
        if grown == state.lengths:
            return state
        state = _Split(grown)


def _is_stack(value: Any) -> bool:
    return isinstance(value, Rows) and value.axis == 0 and value.parts[0].shape[0] == 1


def _state(core: TracedOptimizer) -> Shapes:
    """The shapes of the state as the optimizer sees it."""
    avals = core.init.out_avals
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]


def _stacked_shape(*slices: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(slices), *slices[0].shape), slices[0].dtype)
