"""A metric that is still to come is used like an array, and says who is lost only where it is
read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.runtime.engine.awaited import Awaited
from jvpipe.runtime.engine.failures import HostLost

HALF, PAIR = jnp.float32(0.5), jnp.arange(2.0)
READ: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
    "format": "{:.2f}".format,
    "repr": repr,
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: np.asarray(x).tolist(),
    "another type": lambda x: np.asarray(x, np.float64).dtype,
    "sum": lambda x: float(x + 1),
    "sum with an array": lambda x: float(HALF + x),
    "order": lambda x: bool(x < 1),
    "stacked": lambda x: jnp.stack([x, x]).tolist(),
    "jax.numpy": lambda x: float(jnp.asarray(x)),
    "device_get": lambda x: float(jax.device_get({"loss": x})["loss"]),
    "block_until_ready": lambda x: jax.block_until_ready([x])[0].item(),
}


def lost(array: jax.Array) -> None:
    raise HostLost("process 1 is gone")


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_it_is_read_like_the_array_and_says_who_is_lost(read: Callable[[Any], Any]) -> None:
    assert read(Awaited(HALF, jax.block_until_ready)) == read(HALF)
    with pytest.raises(HostLost, match="process 1 is gone"):
        read(Awaited(HALF, lost))


def test_parts_are_read_too() -> None:
    pair = Awaited(PAIR, jax.block_until_ready)
    assert [*map(float, pair)] == [float(pair[0]), float(pair[1])] == [0.0, 1.0]
    assert len(pair) == 2


def test_what_is_known_before_it_has_come_is_told_without_waiting() -> None:
    loss = Awaited(HALF, lost)
    assert (loss.shape, loss.dtype, loss.ndim, loss.size) == ((), jnp.float32, 0, 1)
    assert loss.is_ready()
    assert jax.tree.leaves([loss])[0] is loss


def test_an_array_that_is_copied_can_be_written() -> None:
    value = jnp.arange(3.0)
    awaited = Awaited(value, jax.block_until_ready)
    copied = np.array(awaited)
    copied[0] = 7.0
    assert copied.tolist() == [7.0, 1.0, 2.0]
    assert np.asarray(awaited).tolist() == [0.0, 1.0, 2.0]
