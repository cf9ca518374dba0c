"""Sends arrays from the devices of one process to the devices of another.

The source offers an array under a number, and the target asks for it under the same number. Both
calls return at once, and either may come first. In this example, process 0 sends an array to
process 1:

    process 0    offer(1, 17, array)     lets process 1 pull the array under number 17
    process 1    ask(0, 17, like)        pulls the array that process 0 offers under number 17

The number of a copy has two parts: the number of its row, and the number of the run of rows. All
processes lower the same rows and run them in the same order, so they compute the same numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.trace.keys import implementation_of, is_key
from jvpipe.util.devices import placed

_RUN_BITS = 24
"""How many of the low bits in a copy's number are for its row; the rest counts the runs of rows."""
_NEVER = (1 << 62) - 1
"""A number that no copy has."""


class Transport:
    """The connections to the transfer servers, which match offers and requests by their numbers.

    A transport also notices when a process is gone. For this it asks every other process for an
    array that is never offered. The request fails when the connection to the process ends.

    Args:
        server: the transfer server of this process.
        links: the connections to the servers of the other processes, by process.
    """

    def __init__(self, server: Any, links: Mapping[int, Any]) -> None:
        self._server = server
        self._links = links
        self._run = 0
        (device, *_) = jax.local_devices()
        number = jax.ShapeDtypeStruct((), np.int32)
        like = placed(number, device)
        self._ends: dict[int, jax.Array] = {}  # by process: ready when the process is gone
        for process, link in links.items():
            (self._ends[process],) = link.pull(_NEVER, [like])

    def begin(self) -> None:
        """Begins a run of rows, in which the number of each row stands for a new copy."""
        self._run += 1

    def offer(self, number: int, array: jax.Array) -> None:
        """Offers an array to the process that asks for it; returns at once.

        This process may drop its reference at once, but must not overwrite the array until the
        array has arrived. An array without elements is not sent, because `ask` makes it.

        Args:
            number: the number of the row that copies the array.
            array: an array of this process.
        """
        if array.size:
            # The server cannot carry random keys, so it carries their integers.
            words = jax.random.key_data(array) if is_key(array) else array
            self._server.await_pull(self._copy(number), [words])

    def ask(self, process: int, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Asks for an array that a process offers; returns it on a device of this process.

        The values arrive later, like the values of a program's results.

        Args:
            process: the process that offers the array.
            number: the number of the row that copies it.
            like: the shape and type of the array, and its devices. On a mesh, the array must be
                cut as it is cut at the source.
        """
        if not like.size:
            return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
        words = jax.eval_shape(jax.random.key_data, like) if is_key(like) else like
        words_like = jax.ShapeDtypeStruct(
            words.shape,
            words.dtype,
            sharding=like.sharding,
        )
        (array,) = self._links[process].pull(self._copy(number), [words_like])
        if not is_key(like):
            return array
        return jax.random.wrap_key_data(array, impl=implementation_of(like.dtype))

    def _copy(self, number: int) -> int:
        """Returns the number of the copy that a row makes in the current run of rows."""
        return self._run << _RUN_BITS | number

    def lost(self) -> list[int]:
        """Returns, without waiting, the processes whose connections have ended."""
        return [process for process, end in self._ends.items() if _jax.is_ready(end)]


def transfer_servers(address: str, publish: Callable[[str], Mapping[int, str]]) -> Transport:
    """Starts this process's transfer server, and returns the transport that uses it.

    Args:
        address: the address of this host on the network; the server takes any free port.
        publish: sends the server's address to all processes; returns the others' addresses.
    """
    server = _jax.transfer_server(address)
    addresses = publish(server.address())
    links = {process: server.connect(of_other) for process, of_other in addresses.items()}
    return Transport(server, links)


def to_host(array: jax.Array) -> Any:
    """Returns a copy of an array on the host, which no later step can overwrite."""
    if is_key(array):
        # NumPy has no random keys, so the keys' integers are copied and wrapped as keys again.
        integers = np.array(jax.random.key_data(array))
        words = jax.numpy.asarray(integers)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return np.array(array)
