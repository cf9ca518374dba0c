"""Flips bits in the files of a run and resumes it: python -m experiments.faults.bits [--flips 60]

A stream under pipedream that has steps to go is copied, one bit of one of its files is turned, and
it is resumed. That must be told in one line, or do no harm: then the losses and the last parameters
have the bits of the undisturbed run. The files take turns; which bit is drawn.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax

from experiments.faults.runs import LIMIT_S, Run, page
from jvpipe.cli import train_command

STEPS = 6
OPTIONS = (
    "--schedule",
    "pipedream",
    "--planner",
    "even",
    "--steps",
    str(STEPS),
    "--checkpoint-every",
    "2",
)


def interrupted(folder: Path) -> tuple[Run, Run]:
    """A whole run of the command, exported, and a copy of it that has lost its last checkpoint."""
    whole = Run(folder / "whole", page(folder / "page.txt"), folder / "cache", OPTIONS)
    if told := whole.finish("--export", str(_exported(whole))):
        raise RuntimeError(told)
    run = replace(whole, path=folder / "interrupted")
    shutil.copytree(whole.path, run.path)
    shutil.rmtree(run.path / "checkpoints" / f"{STEPS:08d}")
    return whole, run


def flips(run: Run, count: int, seed: int = 0) -> Iterator[tuple[Path, int]]:
    """Files of a run, one after the other, each with the number of a bit."""
    rng = random.Random(seed)
    files = sorted(path for path in run.path.rglob("*") if path.is_file())
    for n in range(count):
        path = files[n % len(files)]
        yield path.relative_to(run.path), rng.randrange(8 * path.stat().st_size)


def outcome(whole: Run, run: Run, file: Path, bit: int) -> str:
    """What happens if a bit of a file is another one: noticed, harmless, or what is wrong."""
    copy = replace(run, path=run.path.with_name("flipped"))
    shutil.rmtree(copy.path, ignore_errors=True)
    shutil.copytree(run.path, copy.path)
    content = bytearray((copy.path / file).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (copy.path / file).write_bytes(content)
    if told := resumed(copy):
        return "noticed" if len(told.splitlines()) == 1 and told.startswith("error: ") else told
    if _exported(copy).read_bytes() != _exported(whole).read_bytes():
        return "the last parameters differ"
    return "harmless" if copy.losses()[-2:] == whole.losses()[-2:] else "losses differ"


def resumed(run: Run) -> str:
    """Resumes a run in a child of this process, which has imported everything; what it says if it
    fails.
    """
    with tempfile.TemporaryFile("w+") as told:
        if not (child := os.fork()):
            os.dup2(told.fileno(), sys.stderr.fileno())
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(run.cache)
            jax.config.update("jax_compilation_cache_dir", str(run.cache))
            signal.alarm(LIMIT_S)
            code = 1
            try:
                code = train_command.main(
                    ["--run-dir", str(run.path), "--resume", "--export", str(_exported(run))]
                )
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ended = os.waitpid(child, 0)[1]
        told.seek(0)
        return told.read() or f"ended by {ended}" if ended else ""


def _exported(run: Run) -> Path:
    return run.path.with_suffix(".safetensors")


def main() -> None:
    """Prints a line per flip, and a table by file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts: dict[Path, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole, run = interrupted(Path(folder))
        if told := outcome(whole, run, Path("plan.txt"), 0).replace("harmless", ""):
            raise RuntimeError(f"an undisturbed run does not go on: {told}")
        for file, bit in flips(run, given.flips, given.seed):
            found = outcome(whole, run, file, bit)
            print(f"{file}, bit {bit}: {found}", flush=True)
            counts.setdefault(file, Counter())[
                found if found in ("noticed", "harmless") else "wrong"
            ] += 1
    print("\n| file | noticed | harmless | wrong |\n|---|---|---|---|")
    for file, found in sorted(counts.items()):
        print(f"| {file} | {found['noticed']} | {found['harmless']} | {found['wrong']} |")


if __name__ == "__main__":
    main()
