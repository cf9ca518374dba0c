"""What is in flight between the steps of an asynchronous stream, and how it becomes a plain state.

A plain state has the arrays that lie on the devices when nothing is in flight; a state in flight has those of
`Step.after`: every live version of the weights, residuals, edges, sums of gradients.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jvpipe import _jax
from jvpipe.ir.buffers import HOST
from jvpipe.runtime.build import Build
from jvpipe.runtime.state import State
from jvpipe.runtime.tensors import Ledger

Key = tuple[Hashable, ...]


def names_of(build: Build, flight: int) -> tuple[Key, ...]:
    """The names of a state's arrays after so many steps of a stream."""
    if not flight:
        return tuple(buffer.key for buffer in build.persistent)
    return build.stream.step(flight - 1).after


def plain_arrays(build: Build, state: State) -> tuple[jax.Array, ...]:
    """The newest of everything that a plain state has; what is in flight is left out."""
    if not state.flight:
        return state.arrays
    arrays = dict(zip(names_of(build, state.flight), state.arrays, strict=True))
    newest: dict[Key, tuple[int, jax.Array]] = {}
    for key, array in arrays.items():
        if key[0] in ("parameter", "state"):
            name, number = ((key[0], key[1]), key[3]) if key[0] == "parameter" else ((key[0], key[1], key[3]), key[2])
            at = int(str(number))
            if name not in newest or at > newest[name][0]:
                newest[name] = at, array
    found = []
    for buffer in build.persistent:
        kind, index, *_ = buffer.key
        if kind in ("parameter", "state"):
            array = newest[(kind, index) if kind == "parameter" else (kind, index, buffer.key[3])][1]
            device = build.devices[buffer.device]
            found.append(array if array.devices() == {device} else jax.device_put(array, device))
        else:
            found.append(arrays[buffer.key])
    return tuple(found)


def lifted(build: Build, flight: int, values: Sequence[Any], ledger: Ledger) -> tuple[jax.Array, ...]:
    """The arrays of a state in flight, from host arrays in their order, each where it lay."""
    step = build.stream.step(flight - 1)
    found = []
    for b, value in zip(step.lowered.final, values, strict=True):
        buffer = step.lowered.buffers[b]
        ledger.hold(buffer.device, buffer.bytes)
        device = build.devices[buffer.device if buffer.device != HOST else _owner(build, buffer.key[1:])]
        array = jax.device_put(value, device, may_alias=False)
        found.append(_jax.swapper(device, "pinned_host")(array) if buffer.device == HOST else array)
    return tuple(found)


def _owner(build: Build, key: Key) -> int:
    """The device whose value has been swapped out."""
    if key[0] == "residual":
        return next(stage.devices[0] for stage in build.plan.stages if key[1] in stage.layers)
    return int(str(key[3]))
