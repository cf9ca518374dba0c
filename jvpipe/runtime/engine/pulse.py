"""The pulses of processes: heartbeats that each process sends to all others."""

import secrets
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

BEAT_S = 0.25
"""Seconds between two pulses of a process."""
_WORD_BYTES = 64
"""The most bytes that are read from a datagram; a word and the number of a process are shorter."""


class Pulse(NamedTuple):
    """The address where a process receives pulses, and the secret word that they must contain."""

    host: str
    port: int
    word: str


class Pulses:
    """The pulses of several processes: datagrams that each process sends to all others.

    A process that only waits still sends pulses. A process that is stopped or cut off sends none.
    A process that has never sent a pulse does not count as silent, because some networks
    block datagrams.

    Args:
        address: the address of this host on the network of the processes.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self.own = Pulse(address, self._socket.getsockname()[1], secrets.token_hex(8))
        self._heard_s: dict[int, float] = {}

    def begin(self, process: int, others: Mapping[int, Pulse]) -> None:
        """Starts to send pulses to the others, and to receive theirs.

        Args:
            process: the number of this process.
            others: the addresses and words of the others, by process.
        """
        for act in (partial(self._tell, process, others), partial(self._hear, set(others))):
            threading.Thread(target=act, name="jvpipe-pulse", daemon=True).start()

    def silent_s(self, process: int) -> float:
        """Returns the seconds since the last pulse of a process; 0 if there was none."""
        heard_s = self._heard_s.get(process)
        return 0.0 if heard_s is None else time.monotonic() - heard_s

    def _tell(self, process: int, others: Mapping[int, Pulse]) -> None:
        """Sends pulses to the other processes until this process ends."""
        while True:
            for other in others.values():
                try:
                    self._socket.sendto(f"{other.word} {process}".encode(), other[:2])
                except OSError:  # the transport notices that a process is gone
                    continue
            time.sleep(BEAT_S)

    def _hear(self, others: set[int]) -> None:
        """Records the times at which pulses of the other processes arrive."""
        senders = {f"{self.own.word} {other}".encode(): other for other in others}
        while True:
            try:
                word = self._socket.recv(_WORD_BYTES)
            except OSError:  # the system reports here that an earlier datagram could not be sent
                continue
            if word in senders:
                self._heard_s[senders[word]] = time.monotonic()
