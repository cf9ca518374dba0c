"""Several processes train to the bits of one, hold the bytes of one, and tell when one of them dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.hosts.run import free_port
from jvpipe.runtime.checkpoints.checkpoint import load_checkpoint
from tests.bits import digest

ROOT = Path(__file__).parents[2]
LIMIT_S = 150
SKIPS, TIED = "three-readers,1f1b,recompute", "pre-norm,1f1b,keep,even,{}"
NORMS = "resnet,gpipe,swap,even,,1.1+2.0"  # all layers move inside a step, and back between two
STREAM = "one-hot,pipedream,keep,even,{},1.2"  # all layers move while it flows
ADAPTED, MODELS = "adapt,mlp,1f1b", "models"
MARKS_BYTES = 8  # of layers that move: what tells a place that they have arrived, from both others


def started(script: str, count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, f"tests/hosts/{script}.py", str(i), str(count), str(port), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What each wrote, once all have ended; none outlives the test."""
    until_s = time.monotonic() + LIMIT_S
    try:
        return [process.communicate(timeout=max(1, until_s - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()


def runs(count: int, *cases: str, script: str = "worker") -> list[list[dict]]:
    """What each process saw of each case."""
    told = []
    processes = started(script, count, *cases)
    for process, (out, errors) in zip(processes, ended(processes), strict=True):
        assert process.returncode == 0, errors[-3000:]
        told.append([json.loads(line) for line in out.splitlines()])
    return told


def test_several_processes_have_the_bits_and_the_bytes_of_one(tmp_path: Path) -> None:
    by_one, by_two = ([case.format(tmp_path / f"{i}{who}") for i, case in enumerate((TIED, STREAM))] for who in "12")
    (one,) = runs(1, SKIPS, NORMS, *by_one, ADAPTED, MODELS)  # these save on their way, a stream in flight
    skips, norms, tied, stream, adapted, models = one
    *two, moved = zip(*runs(2, SKIPS, *by_one, *by_two, *by_two, ADAPTED), strict=True)  # saved, and restored then
    *three, switched = zip(*runs(3, NORMS, *by_two, MODELS), strict=True)
    expected = (skips, *(tied, stream) * 3, norms, tied, stream)
    for whole, told in zip(expected, (*two, *three), strict=True):
        for seen in told:
            assert seen["losses"] == whole["losses"][-len(seen["losses"]) :]
            assert [x["evaluated"] for x in seen["looked at"]] == [x["evaluated"] for x in whole["looked at"]]
        assert told[0]["looked at"] == whole["looked at"]
        others = [x["parameters"] for seen in told[1:] for x in seen["looked at"]]
        assert not any(others), "the first process alone has them all"
        begun = len(told[0]["losses"]) == len(whole["losses"])
        assert all(seen["moves"] == (whole["moves"] if begun else []) for seen in told)
        live, peaks = ({at: n for seen in told for at, n in seen[what].items()} for what in ("live", "peaks"))
        assert live == whole["live"]
        assert peaks.keys() == whole["peaks"].keys()
        marks = MARKS_BYTES if whole is norms else 0
        if whole in (skips, norms):
            assert all(0 <= peaks[at] - peak <= marks for at, peak in whole["peaks"].items())
    for seen in moved:
        assert seen["losses"] == adapted["losses"]
        assert seen["moves"] == ["step 16: [1, 2, 2], stage 0 takes 2.5 times what was planned"]
    assert moved[0]["parameters"] == adapted["parameters"]
    for seen in switched:
        assert (seen["losses"], seen["moves"]) == (models["losses"], models["moves"])
    assert switched[0]["parameters"] == models["parameters"]
    assert {at: n for seen in switched for at, n in seen["live"].items()} == models["live"]
    assert sum(seen["parked"] for seen in switched) == models["parked"] > 0
    for saved in zip(by_one, by_two, strict=True):
        (arrays, meta), (others, told) = (load_checkpoint(case.split(",")[4]) for case in saved)
        assert digest(arrays) == digest(others)
        assert {kind: named.keys() for kind, named in arrays.items()} == {kind: n.keys() for kind, n in others.items()}
        told.pop("parts")
        assert meta == told, "the ledger of versions too is that of one"
        assert "flight" not in meta or len(meta["flight"]["legs"]) == 2, "it has not left its first plan behind"


def test_two_processes_are_fed_what_they_need_keep_a_limit_and_hold_no_more_after_many_steps() -> None:
    (one,), two = runs(1, script="enduring"), runs(2, script="enduring")
    (alone,), (first,), (second,) = one, *two
    assert alone["needs"] == ["x", "y"]
    assert first["explained"] == second["explained"] == alone["explained"], "the peaks of all devices are told"
    assert (first["needs"], second["needs"]) == (["x"], ["y"])
    assert "is a shape, and a stage of this process reads it: give an array" in first["refused"]
    assert first["losses"] == second["losses"] == alone["losses"]
    assert first["limit"] == second["limit"]
    for seen in (first, second):
        assert all(peak <= seen["limit"] for peak in seen["peaks"].values())
        (bytes_before, arrays_before), (bytes_after, arrays_after) = seen["levels"]
        assert arrays_after <= arrays_before
        assert bytes_after - bytes_before < 8 * 2**20, "100 steps bring 12 MiB across"
        assert seen["ahead"] <= 3, "who is late is waited for"


def test_who_lives_on_names_the_process_that_was_killed() -> None:
    alive, dies = processes = started("dying", 2)
    try:
        assert dies.stdout
        assert dies.stdout.readline() == "trains\n"
        time.sleep(0.2)
        dies.send_signal(signal.SIGKILL)
    finally:
        (out, _), _ = ended(processes)
    assert re.search(r"lost: process 1 \(host .*\) is gone, go on from the last checkpoint: step \d+[:,] .*failed", out)
    assert alive.returncode == 75


def test_who_lives_on_names_the_process_that_was_killed_while_layers_moved() -> None:
    processes = started("dying", 2, "moving")
    (out, errors), _ = ended(processes)
    assert [process.returncode for process in processes] == [75, -signal.SIGKILL], errors[-3000:]
    assert re.search(r"lost: process 1 \(host .*\) is gone, go on from the last checkpoint", out)
    assert "RECEIPT" in out, "it waited for what it had offered"


@pytest.mark.parametrize("dies", [0, 1])
def test_whoever_is_killed_in_a_save_the_older_checkpoint_is_whole(dies: int, tmp_path: Path) -> None:
    processes = started("dying", 2, "saving", str(tmp_path), str(dies))
    told = ended(processes)
    assert processes[dies].returncode == -signal.SIGKILL, told[dies][1][-3000:]
    assert processes[1 - dies].returncode in (75, -signal.SIGABRT), "JAX ends who loses the first process"
    assert dies == 0 or "lost: process 1" in told[0][0]
    assert load_checkpoint(tmp_path)[1]["step"] == 1
