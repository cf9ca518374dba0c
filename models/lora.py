"""Low-rank adapters (LoRA, arXiv:2106.09685): a linear map x W becomes x W + x A B.

Only A and B are trained, and W [inputs, outputs] is fixed. r is the rank. A [inputs, r] is
initially random, and B [r, outputs] is initially zero, so the adapted map initially equals the
original map. The paper also scales x A B by alpha / r, which is 1 here.

In the tree of parameters, A and B are beside the kernel that they adapt:

    blocks/attention/queries/kernel         W
    blocks/attention/queries/lora/lora_a    A
    blocks/attention/queries/lora/lora_b    B
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

_ADAPTER = "lora"
TRAINED = f"*/{_ADAPTER}/*"
"""The pattern that the paths of adapters match."""

Build = Callable[[nnx.Rngs], nnx.Module]
Tree = Mapping[str, Any]
"""Nested dicts of arrays or shapes."""


def with_adapters(build: Build, name: str, rank: int, patterns: str, dtype: str) -> Build:
    """Wraps `build`, so that each linear map whose path matches a pattern gets an adapter.

    Args:
        build: makes the module without adapters. Adapters do not change its initial parameters.
        name: the module's name, which begins all paths. Paths do not contain the numbers of blocks.
        rank: r; 0 for no adapters.
        patterns: patterns of paths, such as "*attention*", separated by commas.
        dtype: the type in which A and B are multiplied.
    """
    if not rank:
        return build

    def adapted(rngs: nnx.Rngs) -> nnx.Module:
        # Adapters are added after the build, so they do not change the random numbers of `build`.
        module = build(rngs)
        for path, linear in list(nnx.iter_modules(module)):
            whole_path = "/".join((name, *map(str, path)))
            if isinstance(linear, nnx.Linear) and _matches(whole_path, patterns):
                part = _with_adapter(linear, rank, dtype, rngs)
                module = _replaced(module, path, part)
        return module

    return adapted


def _matches(path: str, patterns: str) -> bool:
    return any(fnmatchcase(path, pattern.strip()) for pattern in patterns.split(","))


def _with_adapter(linear: nnx.Linear, rank: int, dtype: str, rngs: nnx.Rngs) -> nnx.LoRALinear:
    """Makes a linear map with an adapter, and with the kernel and the bias of `linear`."""
    adapted = nnx.LoRALinear(
        linear.in_features,
        linear.out_features,
        lora_rank=rank,
        lora_dtype=jnp.dtype(dtype),
        use_bias=linear.use_bias,
        dtype=linear.dtype,
        rngs=rngs,
    )
    adapted.kernel, adapted.bias = linear.kernel, linear.bias
    return adapted


def _replaced(module: nnx.Module, path: tuple[Any, ...], part: nnx.Module) -> nnx.Module:
    """Replaces the part of a module at a path. An empty path replaces the module itself."""
    if not path:
        return part
    *above, last = path
    holder = module
    for name in above:
        holder = getattr(holder, name)
    setattr(holder, last, part)
    return module


def check_adapted(params: Tree, patterns: str) -> None:
    """Checks that a model has an adapter.

    Args:
        params: nested dicts of arrays or shapes.
        patterns: the patterns that the user gave.

    Raises:
        ValueError: there is no adapter; the message lists the maps that can be adapted.
    """
    if adapters_alone(params):
        return
    # The numbers of blocks are left out, because patterns do not contain them either.
    names = {"/".join(part for part in path if not part.isdigit()) for path in _kernels(params)}
    maps = ", ".join(sorted(names))
    raise ValueError(f"lora_on={patterns!r} matches no linear map: there are {maps}")


def _kernels(params: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths of linear maps."""
    for name, part in params.items():
        if name == "kernel":
            yield path
        elif isinstance(part, Mapping):
            yield from _kernels(part, (*path, name))


def without_adapters(params: Tree) -> dict[str, Any]:
    """Returns the parameters without adapters, as in the model before it was adapted.

    >>> without_adapters({"head": {"kernel": 1, "lora": {"lora_a": 2, "lora_b": 3}}})
    {'head': {'kernel': 1}}
    """
    return {
        name: without_adapters(part) if isinstance(part, Mapping) else part
        for name, part in params.items()
        if name != _ADAPTER
    }


def adapters_alone(params: Tree) -> dict[str, Any]:
    """Returns only the adapters of the parameters, each at its path.

    >>> head = {"kernel": 1, "lora": {"lora_a": 2, "lora_b": 3}}
    >>> adapters_alone({"head": head, "norm": {"scale": 4}})
    {'head': {'lora': {'lora_a': 2, 'lora_b': 3}}}
    """
    alone = {
        name: part if name == _ADAPTER else adapters_alone(part)
        for name, part in params.items()
        if isinstance(part, Mapping)
    }
    return {name: part for name, part in alone.items() if part}


def joined_params(base: Tree, adapters: Tree) -> dict[str, Any]:
    """Joins the parameters that `without_adapters` and `adapters_alone` separated."""
    both = {name: base[name] for name in base.keys() - adapters.keys()}
    for name, part in adapters.items():
        both[name] = joined_params(base[name], part) if name in base else part
    return both


def merged_params(params: Tree) -> dict[str, Any]:
    """Adds each adapter to its kernel on the host: W + A B.

    The result has the parameters of a plain model that computes the same function, up to rounding.

    Args:
        params: nested dicts of arrays. W, A and B of stacked layers have one more leading axis.
    """
    plain = {
        name: merged_params(part) if isinstance(part, Mapping) else part
        for name, part in params.items()
        if name != _ADAPTER
    }
    if _ADAPTER in params:
        adapter = params[_ADAPTER]
        a = np.asarray(adapter["lora_a"], np.float32)  # [..., inputs, r]
        b = np.asarray(adapter["lora_b"], np.float32)  # [..., r, outputs]
        kernel = np.asarray(params["kernel"])
        plain["kernel"] = kernel + (a @ b).astype(kernel.dtype)
    return plain
