"""Checkpoints that Orbax wrote for us once, before there were generations: read still, and removed when replaced."""

import shutil
from pathlib import Path

from jvpipe.runtime.checkpoints.array_file import Arrays
from jvpipe.runtime.checkpoints.generations import DamageError


def read_by_orbax(folder: Path) -> Arrays:
    """Reads all arrays; raises DamageError if Orbax cannot."""
    import orbax.checkpoint as ocp  # takes longer than all else that jvpipe imports

    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return dict(
                checkpointer.restore(
                    folder, ocp.args.Composite(arrays=ocp.args.StandardRestore())
                ).arrays
            )
    except Exception as problem:  # of any kind
        raise DamageError(f"{folder} is damaged: {str(problem).partition(' [')[0]}") from problem


def remove_orbax(folder: Path) -> None:
    """Deletes what Orbax wrote for us, if that is what is there."""
    if not (folder / "meta" / "metadata").is_file():
        return
    for path in (folder / "arrays", folder / "meta"):
        shutil.rmtree(path, ignore_errors=True)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (folder / name).unlink(missing_ok=True)
