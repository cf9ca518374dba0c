"""Transport: how arrays get from the devices of one process to those of another.

    source    offer(1, 17, array)      lets the array be pulled under a number, and returns at once
    target    ask(0, 17, like)         pulls what is offered under it; both may come first

A number is that of the row that copies, together with the run of rows that it belongs to: all
processes count alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.trace.keys import implementation_of, is_key

_RUN_BITS = 24
"""The low half of a copy's number, which is the row's; above them is the number of the run."""
_NEVER = (1 << 62) - 1
"""A number that no copy has."""


@runtime_checkable
class Transport(Protocol):
    """Offers arrays to other processes and asks for theirs.

    Both return at once, with futures like any array.
    """

    def begin(self) -> None:
        """Begins another run of rows: numbers of rows mean other copies from here on."""
        ...

    def offer(self, process: int, number: int, array: jax.Array) -> None:
        """Lets a process have an array, which may be dropped but not be overwritten until it has arrived.

        Args:
            process: that may have it.
            number: of the row that copies it.
            array: of this process.
        """
        ...

    def ask(self, process: int, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Asks for the array that a process offers, on a device of this one.

        Args:
            process: that offers it.
            number: of the row that copies it.
            like: its shape and type, and where it is to lie: over a group of devices as it does at
                its source.
        """
        ...

    def lost(self) -> list[int]:
        """Lists the processes that are gone; asking does not wait."""
        ...


class TransferServers:
    """Copies through the transfer servers of all processes, which match offers and asks by number.

    To notice when a process is gone, it asks every other one for something that is never offered:
    that ask fails when the connection ends.

    Args:
        server: this process's.
        links: the connections to the others' servers, by process.
    """

    def __init__(self, server: Any, links: Mapping[int, Any]) -> None:
        self._server = server
        self._links = links
        self._run = 0
        (device, *_) = jax.local_devices()
        like = _jax.placed(jax.ShapeDtypeStruct((), np.int32), device)
        self._ends = {process: link.pull(_NEVER, [like])[0] for process, link in links.items()}

    def begin(self) -> None:
        """Begins another run of rows."""
        self._run += 1

    def offer(self, process: int, number: int, array: jax.Array) -> None:
        """Lets a process pull an array; nobody pulls one without elements.

        Args:
            process: that may have it.
            number: of the row that copies it.
            array: of this process.
        """
        if array.size:
            # Keys go as their words, which is all that the server knows to carry.
            words = jax.random.key_data(array) if is_key(array) else array
            self._server.await_pull(self._run << _RUN_BITS | number, [words])

    def ask(self, process: int, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Pulls an array; one without elements is made here.

        Args:
            process: that offers it.
            number: of the row that copies it.
            like: its shape and type, and where it is to lie: over a group of devices as it does at
                its source.
        """
        if not like.size:
            return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
        words = jax.eval_shape(jax.random.key_data, like) if is_key(like) else like
        placed = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=like.sharding)
        (array,) = self._links[process].pull(self._run << _RUN_BITS | number, [placed])
        if not is_key(like):
            return array
        return jax.random.wrap_key_data(array, impl=implementation_of(like.dtype))

    def lost(self) -> list[int]:
        """Lists the processes whose connection has ended."""
        return [process for process, end in self._ends.items() if _jax.is_ready(end)]


def transfer_servers(address: str, publish: Callable[[str], Mapping[int, str]]) -> TransferServers:
    """Starts this process's transfer server, and returns the transport over it.

    Args:
        address: of this host on the cluster's network; the server takes any free port.
        publish: tells all processes this one's address, and returns those of the others.
    """
    server = _jax.transfer_server(address)
    addresses = publish(server.address())
    links = {process: server.connect(of_other) for process, of_other in addresses.items()}
    return TransferServers(server, links)


def to_host(array: jax.Array) -> Any:
    """Returns a copy on the host that no later step can overwrite."""
    if is_key(array):
        # NumPy holds no typed keys: their words are copied, and wrapped again.
        words = jax.numpy.asarray(np.array(jax.random.key_data(array)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return np.array(array)
