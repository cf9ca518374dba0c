"""Checks the reductions that a user chose for leaves of aux and of the model state.

Aux is what a loss returns besides its value. A reduction says how a leaf for the whole batch
follows from the leaves of the batch's parts. Users choose a reduction for each pattern of paths.
This file checks that the reduction fits the types of the matching leaves.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom
from jvpipe.ir.reductions import AuxReduction, Reductions, StateReduction, chosen
from jvpipe.trace.keys import is_key


def chosen_aux(
    reductions: Reductions,
    paths: Sequence[str],
    leaves: Sequence[Sequence[jax.ShapeDtypeStruct]],
) -> tuple[AuxReduction | None, ...]:
    """Returns the reduction that the user chose for each leaf of aux; None if they chose none.

    Args:
        reductions: the user's choices, by pattern.
        paths: the paths of the leaves.
        leaves: the shapes of the values of each leaf; a `Weighted` leaf has two values.

    Raises:
        ValueError: a pattern matches nothing, or a reduction does not fit its leaf.
    """
    said = chosen("aux_reduce", reductions.aux, paths)
    for path, reduction, parts in zip(paths, said, leaves, strict=True):
        why = None if reduction is None else _unfit(reduction, parts)
        if why:
            raise ValueError(f"aux_reduce says '{reduction}' for leaf '{path}' of aux, {why}")
    return said


def _unfit(reduction: AuxReduction, parts: Sequence[jax.ShapeDtypeStruct]) -> str | None:
    """Returns why a reduction does not fit a leaf of aux, and a cure; None if it fits."""
    dtype = parts[0].dtype
    if len(parts) > 1:
        return (
            "which is jvpipe.Weighted and always reduced to sum(total) / sum(weight): choose a "
            "pattern that does not match it, or return total alone"
        )
    if reduction is AuxReduction.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        return (
            f"which is of type {dtype}: cast it to float32 in the loss, or choose 'sum', 'max' or "
            "'last'"
        )
    if reduction is AuxReduction.SUM and dtype == np.bool_:
        return (
            "which is of type bool: cast it to int32 in the loss, or choose 'max', which tells "
            "whether any value is true"
        )
    return None


def check_state_reduction(
    path: str,
    leaf: Atom,
    reduction: StateReduction,
) -> None:
    """Checks that the reduction that the user chose fits a leaf of the model state.

    Args:
        path: the path of the leaf.
        leaf: the leaf's new value, which the loss makes.
        reduction: the reduction that the user chose.

    Raises:
        ValueError: the reduction does not fit the leaf's type.
    """
    dtype = _jax.aval(leaf).dtype
    is_number = not is_key(_jax.aval(leaf)) and dtype != np.bool_
    fits = {
        StateReduction.MEAN: is_number and jnp.issubdtype(dtype, jnp.inexact),
        StateReduction.SUM: is_number,
        StateReduction.SAME: True,
    }
    if not fits[reduction]:
        others = ", ".join(repr(other.value) for other, fit in fits.items() if fit)
        raise ValueError(
            f"model_state_reduce says '{reduction}' for '{path}', which is of type {dtype}: choose "
            f"{others}, or keep it in float32"
        )
