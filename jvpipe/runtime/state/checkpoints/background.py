"""Checkpoints written beside the training: one at a time, in a thread of its own.

What is written was copied to the host before, so no step waits for the disk, and none changes what
is written.

Orbax's CheckpointManager has a thread and a retention too, but a format of its own: without a
digest of every file, without parts per process (its arrays are global ones that all processes hold
together; ours lie with one process each, whatever the cut) and without states in flight. It also
names and deletes the folders by rules of its own. With a handler that writes generations, all that
would remain of it is the thread, which is this file.
"""

import threading
from collections.abc import Callable


class Writer:
    """Runs one write at a time; what a write fails with is raised by the next call.

    A context manager: at its end it waits for the write under way, and raises its failure unless
    the block has failed.

    >>> with Writer() as writer:
    ...     writer.begin(lambda: print("written"))
    written
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Begins a write once the one before is done; raises what that one failed with."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="jvpipe-checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises what the last write failed with, if it is known by now."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits for the write under way; raises what it failed with."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        # A failure is raised once: after it the writer can be used again.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:
                raise
