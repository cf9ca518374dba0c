"""Ends the process at every operation on files of a save: python -m experiments.faults.saves

A child process writes a checkpoint and leaves by `os._exit` before its n-th operation on files
(opening, making, renaming, deleting: what Python's audit events tell), for all n; or is ended by
the system in the middle of a write, at every 1/20 of the bytes. What is restored then must be the
checkpoint before, or the new one, whole, and the next save must not mind what lies there.
"""

import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jvpipe.cli.run_folder import RunDir
from jvpipe.runtime.state.checkpoints.checkpoint import save_checkpoint
from tests.saved import load_checkpoint

EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})
OLD, NEW = 1, 2
BYTES = 40_000


def save(path: Path, value: int) -> None:
    """A checkpoint all of whose numbers are the value."""
    parameters = {f"layer{i}/kernel": np.full((50, 50), value, np.float32) for i in range(4)}
    save_checkpoint(path, {"parameter": parameters}, {"step": value, "extra": {}})


def value_in(path: Path) -> int:
    """The value that a checkpoint was saved with; it must be whole."""
    arrays, meta = load_checkpoint(path)
    (value,) = {int(x) for array in arrays["parameter"].values() for x in np.unique(array)} | {
        int(meta["step"])
    }
    return value


def over(folder: Path) -> None:
    """A save over an older one."""
    save(folder / "saved", NEW)


def restored_over(folder: Path) -> int:
    """What is restored after a save over an older one."""
    return value_in(folder / "saved")


def in_a_run(folder: Path) -> None:
    """The third checkpoint of a run, of which the first goes."""
    run = RunDir(folder)
    save(run.checkpoint(NEW), NEW)
    run.prune(2)


def restored_in_a_run(folder: Path) -> int:
    """What a resumed run restores."""
    return value_in(RunDir(folder).checkpoints()[-1])


def ended(work: Callable[[], None], at: int | None = None, byte: int | None = None) -> bool:
    """Whether a child that does some work was ended, before an operation or while it wrote a file's
    byte.
    """
    if not (child := os.fork()):
        left = [at]

        def hook(event: str, args: object) -> None:
            if event in EVENTS and left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(1)

        sys.addaudithook(hook)
        if byte is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (byte, resource.RLIM_INFINITY))
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def swept(
    begin: Path, work: Callable[[Path], None], restored: Callable[[Path], int]
) -> Counter[str]:
    """What is restored from copies of a folder in which the work was ended at each of its
    moments.
    """
    counts: Counter[str] = Counter()
    folder = begin.with_name("now")

    def end(**when: int) -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begin, folder)
        if not ended(lambda: work(folder), **when):
            return False
        counts[f"restored {restored(folder)}"] += 1
        work(folder)
        assert restored(folder) == NEW, "the next save is the newest"
        return True

    while end(at=counts["operations"]):
        counts["operations"] += 1
    for byte in range(0, BYTES, BYTES // 20):
        counts["writes"] += end(byte=byte)
    return counts


def main() -> None:
    """Prints a table."""
    print(
        "| save | ended before an operation | ended in a write | the older restored | the new "
        "restored |"
    )
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name, work, restored in (
            ("over an older one", over, restored_over),
            ("in a run, then pruned", in_a_run, restored_in_a_run),
        ):
            begin = Path(temporary) / "begin"
            shutil.rmtree(begin, ignore_errors=True)
            save(begin / "saved", OLD)
            for step in (0, OLD):
                save(RunDir(begin).checkpoint(step), step)
            counts = swept(begin, work, restored)
            row = (
                counts[what]
                for what in ("operations", "writes", f"restored {OLD}", f"restored {NEW}")
            )
            print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
