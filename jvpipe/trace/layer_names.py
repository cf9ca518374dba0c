"""The names of layers, after the modules of their parameters."""

import os
from collections.abc import Sequence
from itertools import takewhile

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.ir.values import ValueKind
from jvpipe.trace.body import Body
from jvpipe.trace.primitives import is_heavy


def layer_names(
    bodies: Sequence[Body],
    runs: Sequence[Sequence[JaxprEqn]],
    paths: Sequence[str],
) -> list[str]:
    """Names each layer by the common module of the parameters that no earlier layer reads.

    If a layer has no such parameters, all parameters that it reads are used. If there is no common
    module, the layer is named by the common scope of its heavy equations, else by the module of its
    first parameter, else by its number.

    Args:
        bodies: the layers.
        runs: the main equations of each layer.
        paths: the paths of all parameters.
    """
    seen: set[int] = set()
    names = []
    for i, (body, run) in enumerate(zip(bodies, runs, strict=True)):
        parameters = [ref.index for ref in body.reads if ref.kind is ValueKind.PARAMETER]
        fresh = [p for p in parameters if p not in seen]
        seen.update(fresh)
        modules = [_module(paths[p]) for p in fresh or parameters]
        scopes = [_jax.scope(eqn) for eqn in run if is_heavy(eqn)]
        first = modules[0] if modules else f"layer{i}"
        names.append(_common(modules) or _common(scopes) or first)
    return names


def _module(path: str) -> str:
    """Returns a parameter's module: its path without the last word, unless that is a number."""
    module, word = os.path.split(path)
    return path if word.isdigit() else module or path


def _common(paths: Sequence[str]) -> str:
    """Returns the longest common parent of some paths; empty if there is none."""
    steps = zip(*(path.split("/") for path in paths), strict=False)
    shared = takewhile(lambda step: len(set(step)) == 1, steps)
    return "/".join(step[0] for step in shared)
