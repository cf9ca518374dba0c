"""Writes checkpoints in another thread during the training, one at a time.

The caller copies the state to the host before the write begins. So no step changes the arrays that
are written. Training waits for the disk only if a checkpoint is due while the previous one is still
being written.

Orbax is a library for checkpoints, and its CheckpointManager also writes in a thread. It is not
used here for four reasons. Its format has no digests of files. It has no states with micro-batches
in flight. It expects arrays that all processes share, whereas in jvpipe each array belongs to
one process. And the manager names and deletes folders by its own rules. Only its thread would be of
use here.
"""

import threading
from collections.abc import Callable


class Writer:
    """A context manager that runs one write at a time in another thread.

    If a write fails, the next call of a method raises the error of the write. At its end, the
    context waits for the last write. If that write failed, the context raises its error, unless the
    code inside the context has raised an error itself.

    >>> with Writer() as writer:
    ...     writer.begin(lambda: print("written"))
    written
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Waits for the last write, raises its error if it failed, and begins another write."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run,
            args=(write,),
            name="jvpipe-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raises the error of the last write, if the write has failed by now."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until the last write has ended; raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()  # if Ctrl-C interrupts this, the thread is still waited for later
            self._thread = None
        # An error is raised only once, so that the writer can be used again afterwards.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, write: Callable[[], None]) -> None:
        """Runs a write in the thread, and keeps its error for the next call."""
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
