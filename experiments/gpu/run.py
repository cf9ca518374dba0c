"""The first hour on a GPU, in parts of at most ten minutes.

    python -m experiments.gpu.run                  # says which parts there are
    python -m experiments.gpu.run copies ledger    # runs some, one after another
    python -m experiments.gpu.run all toy          # anywhere: a small model, on a CPU

Each case is a process of its own and a line as soon as it is there; one that fails is a line too.
What was compiled and tuned is kept in a folder for the next case, unless the case is about that.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.gpu.measure import SCALES, Found
from experiments.max_batch.largest import largest

PART_S = 600.0
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
UNTUNED = f"{DETERMINISTIC} --xla_gpu_autotune_level=0"
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
SMALL_MEMORY = "0.15"
"""The part of the memory under which the largest batches are sought: so they are found in
minutes.
"""


@dataclass(frozen=True)
class Case:
    """One thing to measure; `flags` are XLA's, `fresh` has nothing compiled or tuned before,
    `seeks` the largest.
    """

    label: str
    measure: str
    arguments: Found = field(default_factory=dict)
    flags: str = ""
    fresh: bool = False
    seeks: bool = False


Run = Callable[[Case, float], Found]
"""Measures a case within so many seconds."""


def _pipelines(flags: str = "", **more: Any) -> list[Case]:
    """One pipeline for each fate, and one that is cut."""
    told = f" {flags}" if flags else ""
    cases = [
        Case(f"{fates}{told}", "pipeline", {"fates": fates, **more}, flags)
        for fates in ("keep", "recompute", "swap")
    ]
    cut = {"stages": 2, "schedule": "1f1b", **more}
    return [*cases, Case(f"keep, 2 stages{told}", "pipeline", cut, flags)]


PARTS: dict[str, tuple[str, list[Case]]] = {
    "copies": (
        "copies to the host and back, and what of them a product hides",
        [Case("", "copies")],
    ),
    "ahead": ("temporaries as compiled here and without the device", [Case("", "ahead")]),
    "ledger": (
        "the ledger's peak beside the device's",
        [Case(x, "pipeline", {"fates": x}) for x in ("keep", "recompute", "swap", "plan")],
    ),
    "step": (
        "a step of one stage, what of it is dispatch, and one jit of the whole model",
        [
            Case("jit", "plain"),
            Case("jit, all computed again", "plain", {"remat": "all"}),
            Case("jit, offloaded", "plain", {"remat": "offload"}),
            Case("one stage", "pipeline"),
            Case("one stage, no graphs", "pipeline", flags=NO_GRAPHS),
            Case("two stages", "pipeline", {"stages": 2}),
        ],
    ),
    "bits": (
        "parameters after some steps, as the compiler likes",
        [*_pipelines(steps=3), Case("keep, tuned anew", "pipeline", {"steps": 3}, fresh=True)],
    ),
    "deterministic": ("the same, with XLA's switch", _pipelines(DETERMINISTIC, steps=3)),
    "untuned": ("the same, without tuning", _pipelines(UNTUNED, steps=3)),
    "largest": (
        f"the largest micro-batch under {SMALL_MEMORY} of the memory",
        [
            Case(label, measure, {**arguments, "steps": 2}, seeks=True)
            for label, measure, arguments in (
                ("jit", "plain", {}),
                ("jit, all computed again", "plain", {"remat": "all"}),
                ("jit, offloaded", "plain", {"remat": "offload"}),
                ("keep", "pipeline", {}),
                ("recompute", "pipeline", {"fates": "recompute"}),
                ("swap", "pipeline", {"fates": "swap"}),
                ("plan", "pipeline", {"fates": "plan"}),
            )
        ],
    ),
}


def main(words: list[str], run: Run | None = None) -> None:
    """Runs parts, or says which there are.

    Raises:
        ValueError: there is no such part.
    """
    scale = "toy" if "toy" in words else "real"
    asked = [word for word in words if word != "toy"]
    if not asked:
        print("\n".join(f"{name:14} {told}" for name, (told, _) in PARTS.items()))
        return
    if unknown := set(asked) - {*PARTS, "all"}:
        raise ValueError(f"unknown part {min(unknown)!r}: there are {', '.join(PARTS)} and all")
    with tempfile.TemporaryDirectory() as folder:
        measured = run or in_a_process(scale, Path(folder))
        for name in PARTS if "all" in asked else asked:
            told, cases = PARTS[name]
            print(f"\n## {name}: {told}\n", flush=True)
            for line in table(cases, measured, SCALES[scale].micro):
                print(line, flush=True)


def table(cases: list[Case], run: Run, near: int) -> Iterator[str]:
    """Yields the lines of a part's table, each as soon as it is known.

    Args:
        cases: of the part.
        run: measures one.
        near: where the largest micro-batch is sought first.
    """
    until_s, columns, first = time.monotonic() + PART_S, (), ""
    for case in cases:
        found = _sought(case, run, near, until_s) if case.seeks else _tried(case, run, until_s)
        if "bits" in found:
            first = first or found["bits"]
            found["as the first"] = "yes" if found["bits"] == first else "NO"
        if "told" in found:
            yield f"| {case.label} | {found['told']} |"
            continue
        if tuple(found) != columns:
            columns = tuple(found)
            yield f"| | {' | '.join(map(_title, columns))} |\n|{'---|' * (len(columns) + 1)}"
        yield f"| {case.label} | {' | '.join(_shown(*item) for item in found.items())} |"


def _tried(case: Case, run: Run, until_s: float) -> Found:
    """What was measured, or what became of it."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return {"told": "no time left"}
    try:
        found = run(case, left_s)
    except subprocess.TimeoutExpired:
        return {"told": "no time left"}
    except RuntimeError as error:
        return {"told": f"failed: {error}"}
    return found if found.get("fits", True) else {"told": "does not fit"}


def _sought(case: Case, run: Run, near: int, until_s: float) -> Found:
    """What was measured at the largest micro-batch that works; of those tried, where time ran
    out.
    """
    tried: dict[int, Found] = {}

    def works(micro: int) -> bool:
        sized = replace(case, arguments={**case.arguments, "micro": micro})
        found = _tried(sized, run, until_s)
        if found.get("told", "does not fit") != "does not fit":
            raise TimeoutError(found["told"])
        if "told" not in found:
            tried[micro] = found
        return "told" not in found

    try:
        largest(works, near, bits=2)
        ended = "found"
    except TimeoutError as error:
        ended = str(error)
    if not tried:
        return {"told": "none fits" if ended == "found" else ended}
    best = max(tried)
    return {"micro": best, "search": ended, "step_s": tried[best]["step_s"]}


def in_a_process(scale: str, folder: Path) -> Run:
    """Measures cases in processes of their own, which keep in a folder what they have compiled."""

    def run(case: Case, left_s: float) -> Found:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        less = {"XLA_PYTHON_CLIENT_MEM_FRACTION": SMALL_MEMORY} if case.seeks else {}
        flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {case.flags}".strip()}
        command = [sys.executable, "-m", "experiments.gpu.case", scale, case.measure]
        done = subprocess.run(
            [*command, json.dumps(case.arguments)],
            env=os.environ | flags | less | ({} if case.fresh else kept),
            capture_output=True,
            text=True,
            timeout=left_s,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise RuntimeError(last[0][:200])
        return json.loads(done.stdout.splitlines()[-1])

    return run


def _title(name: str) -> str:
    """A name with the unit in which it is shown."""
    for ending, unit in (("_gb_per_s", "GB/s"), ("_bytes", "MiB"), ("_s", "ms")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)} {unit}".replace("_", " ")
    return name.replace("_", " ")


def _shown(name: str, value: Any) -> str:
    """A number in the unit that its title says."""
    if value is None:
        return "not reported"
    if name.endswith("_bytes"):
        return f"{value / 2**20:.1f}"
    if name.endswith("_per_s"):
        return f"{value:.1f}"
    if name.endswith("_s"):
        return f"{1e3 * value:.3f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(sys.argv[1:])
