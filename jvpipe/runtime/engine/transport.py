"""Transport: how arrays get from the devices of one process to those of another."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.trace.keys import implementation_of, is_key

_RUN_BITS = 24
"""Rows of one run of a step: the number of a copy is that of the run, and these bits of the row's."""
_NEVER = (1 << 62) - 1
"""A number that no copy has."""


@runtime_checkable
class Transport(Protocol):
    """Offers arrays to other processes and asks for theirs; both return at once, with futures like any array."""

    def begin(self) -> None:
        """Begins another run of rows: numbers of rows mean other copies from here on."""
        ...

    def offer(self, process: int, number: int, array: jax.Array) -> None:
        """Lets a process have an array, which may be let go of but not be overwritten until it has arrived.

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
            like: its shape and type, and where it is to lie: over a group of devices as it does at its source.
        """
        ...

    def lost(self) -> list[int]:
        """Lists the processes that are gone; asking does not wait."""
        ...


class TransferServers:
    """Copies through the transfer servers of all processes, which match offers and asks by number.

    Of every other process it asks something that nobody will offer: the answer comes when the connection ends.

    Args:
        server: this process's.
        links: the connections to the others' servers, by process.
    """

    def __init__(self, server: Any, links: Mapping[int, Any]) -> None:
        self._server, self._links = server, links
        (device, *_) = jax.local_devices()
        like = _jax.placed(jax.ShapeDtypeStruct((), np.int32), device)
        self._ends = {process: link.pull(_NEVER, [like])[0] for process, link in links.items()}
        self._run = 0

    def begin(self) -> None:
        """Begins another run of rows."""
        self._run += 1

    def offer(self, process: int, number: int, array: jax.Array) -> None:
        """Lets a process pull an array; one without elements nobody pulls.

        Args:
            process: that may have it.
            number: of the row that copies it.
            array: of this process.
        """
        if array.size:
            words = jax.random.key_data(array) if is_key(array) else array
            self._server.await_pull(self._run << _RUN_BITS | number, [words])

    def ask(self, process: int, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Pulls an array; one without elements is made here.

        Args:
            process: that offers it.
            number: of the row that copies it.
            like: its shape and type, and where it is to lie: over a group of devices as it does at its source.
        """
        if not like.size:
            return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
        words = jax.eval_shape(jax.random.key_data, like) if is_key(like) else like
        there = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=like.sharding)
        (array,) = self._links[process].pull(self._run << _RUN_BITS | number, [there])
        return (
            jax.random.wrap_key_data(array, impl=implementation_of(like.dtype))
            if is_key(like)
            else array
        )

    def lost(self) -> list[int]:
        """Lists the processes whose connection has ended."""
        return [process for process, end in self._ends.items() if _jax.is_ready(end)]


def transfer_servers(address: str, publish: Callable[[str], Mapping[int, str]]) -> TransferServers:
    """Makes the transport over this process's transfer server.

    Args:
        address: of this host on the cluster's network; the server's port is any that is free.
        publish: tells all processes this one's address, and returns those of the others.
    """
    server = _jax.transfer_server(address)
    return TransferServers(
        server,
        {process: server.connect(told) for process, told in publish(server.address()).items()},
    )


def to_host(array: jax.Array) -> Any:
    """A copy on the host that no later step can overwrite."""
    if is_key(array):
        words = jax.numpy.asarray(np.array(jax.random.key_data(array)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return np.array(array)
