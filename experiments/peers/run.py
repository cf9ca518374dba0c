"""jvpipe beside JaxPP, torch.distributed.pipelining and plain jit, each in a process of its own,
taking turns.

Usage: python -m experiments.peers.run [--rounds 3] [--jaxpp-python PYTHON --jaxpp-src FOLDER]
[--torch-python PYTHON]

A peer whose environment is not given is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
WORST_ERROR = 1e-4

Environment = Literal["jvpipe", "JaxPP", "torch"]


@dataclass(frozen=True)
class Way:
    """One way to compute the same: a script of this folder, what it is told, and whose environment
    it needs.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    environment: Environment = "jvpipe"


def pipelines(names: Sequence[str]) -> list[Way]:
    """jvpipe's schedules on two stages."""
    return [Way(f"jvpipe, two stages, {name}", "by_jvpipe", (name,)) for name in names]


WAYS = (
    Way("jit per micro-batch", "by_jit", ("loop",)),
    Way("jit of a scan", "by_jit", ("scan",)),
    Way("jit of a scan, JaxPP's JAX", "by_jit", ("scan",), "JaxPP"),
    Way("jvpipe, one stage", "by_jvpipe", ("1f1b", "--stages", "1")),
    *pipelines(("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "auto")),
    Way("JaxPP, 1F1B", "by_jaxpp", ("Std1F1B",), "JaxPP"),
    Way("JaxPP, zero-bubble", "by_jaxpp", ("ZeroBubble",), "JaxPP"),
    Way("torch, 1F1B", "by_torch", ("1F1B",), "torch"),
    Way("torch, zero-bubble", "by_torch", ("ZeroBubble",), "torch"),
)


@dataclass(frozen=True)
class Bench:
    """The interpreters, the file that all are compared with, and what all are told."""

    pythons: dict[Environment, str]
    jaxpp_src: str
    reference: str
    more: tuple[str, ...] = ()

    def runs(self, way: Way) -> dict[str, Any]:
        """What one way prints, measured in a process of its own, each of its devices on a core of
        its own.
        """
        command = [
            self.pythons[way.environment],
            "-m",
            f"experiments.peers.{way.script}",
            way.arguments[0],
        ]
        command += [self.reference, *way.arguments[1:], *self.more]
        path = os.pathsep.join(filter(None, [str(ROOT), self.jaxpp_src]))
        environment = os.environ | {"NPROC": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


def check(way: Way, rounds: Sequence[dict[str, Any]]) -> None:
    """All must compute the same."""
    arrays, error = rounds[-1]["arrays"], rounds[-1]["error"]
    assert arrays == rounds[-1]["wanted"], (way.name, arrays)
    assert error < WORST_ERROR, (way.name, error)


def rows(found: dict[Way, list[dict[str, Any]]]) -> list[str]:
    """The table: medians over rounds, and how they compare with the best of the peers on two
    devices.
    """
    step_s = {
        way: statistics.median(each["step_s"] for each in rounds) for way, rounds in found.items()
    }
    rivals = [step_s[way] for way in found if way.script in ("by_jaxpp", "by_torch")]
    table = [
        "| way | s per step | least, most | over the best peer | worst error | cuts |",
        "|---|---|---|---|---|---|",
    ]
    for way, rounds in found.items():
        taken = sorted(each["step_s"] for each in rounds)
        over = f"{step_s[way] / min(rivals):.2f}" if rivals else "-"
        error, cuts = max(each["error"] for each in rounds), rounds[-1].get("cuts", "")
        shown = [
            way.name,
            f"{step_s[way]:.3f}",
            f"{taken[0]:.3f}, {taken[-1]:.3f}",
            over,
            f"{error:.0e}",
            cuts,
        ]
        table.append(f"| {' | '.join(map(str, shown))} |")
    return table


def main() -> None:
    """Takes turns between the ways, so that a slow minute of the machine hits all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jaxpp-python", default="")
    parser.add_argument("--jaxpp-src", default="", help="the folder src of JaxPP's repository")
    parser.add_argument("--torch-python", default="")
    parser.add_argument(
        "--only", default="", help="ways whose name has one of these in it, with commas between"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: dispatch alone")
    options = parser.parse_args()
    pythons: dict[Environment, str] = {
        "jvpipe": sys.executable,
        "JaxPP": options.jaxpp_python,
        "torch": options.torch_python,
    }
    for name in (name for name, python in pythons.items() if not python):
        print(f"{name} is left out: --{name.lower()}-python is not given")
    only = options.only.split(",")
    ways = [
        way for way in WAYS if pythons[way.environment] and any(name in way.name for name in only)
    ]
    found: dict[Way, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        reference = str(Path(folder) / "reference.npz")
        bench = Bench(
            pythons,
            options.jaxpp_src,
            reference,
            ("--tiny", "--steps", "40") if options.tiny else (),
        )
        bench.runs(Way("reference", "by_jit", ("reference",)))
        for _ in range(options.rounds):
            for way in ways:
                found[way].append(bench.runs(way))
                check(way, found[way])
                print(f"{way.name}: {found[way][-1]['step_s']:.3f} s", flush=True)
            print("", *rows(found), "", sep="\n", flush=True)
    versions = {way.environment: rounds[-1]["version"] for way, rounds in found.items()}
    print(", ".join(f"{environment}: {version}" for environment, version in versions.items()))


if __name__ == "__main__":
    main()
