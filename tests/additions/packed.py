"""What a forward leaves, in 16 bits until its backward reads it."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe.programs.layer import LayerPrograms
from jvpipe.trace.flatten import flatten


def packed(programs: LayerPrograms, names: Collection[str]) -> LayerPrograms:
    """Packs the residuals of some names that have 32 bits."""
    signature = programs.signature
    arrays = enumerate(signature.residuals)
    thin = {i for i, array in arrays if array.name in names and array.dtype == "float32"}
    if not thin:
        return programs
    forward, backward = map(_jax.jaxpr_as_fun, (programs.forward, programs.backward))
    first = len(programs.forward.out_avals) - len(signature.residuals)
    wide = [source[0] == "residual" and source[1] in thin for source in signature.sources]
    wide += [False] * (len(programs.backward.in_avals) - len(wide))

    def packing(*xs: Any) -> list[Any]:
        out = enumerate(forward(*xs))
        return [x.astype(jnp.bfloat16) if i - first in thin else x for i, x in out]

    def unpacking(*xs: Any) -> Any:
        pairs = zip(xs, wide, strict=True)
        return backward(*(x.astype(jnp.float32) if is_wide else x for x, is_wide in pairs))

    takes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in programs.forward.in_avals]
    reads = [
        jax.ShapeDtypeStruct(a.shape, jnp.bfloat16 if is_wide else a.dtype)
        for a, is_wide in zip(programs.backward.in_avals, wide, strict=True)
    ]
    residuals = tuple(
        replace(array, dtype="bfloat16", bytes=array.bytes // 2) if i in thin else array
        for i, array in enumerate(signature.residuals)
    )
    return LayerPrograms(
        flatten(packing, *takes),
        flatten(unpacking, *reads),
        replace(signature, residuals=residuals),
    )
