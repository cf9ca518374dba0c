"""Several processes train to the bits of one, hold the bytes of one, and tell when one of them
dies.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from experiments.hosts.run import free_port
from jvpipe.cli.shell import ExitCode
from tests.bits import digest
from tests.forks import LIMIT_S, Fork, Main, environment, forked
from tests.grid import grid
from tests.hosts import dying, enduring, worker
from tests.saved import load_checkpoint

ROOT = Path(__file__).parents[2]
SKIPS, TIED = "three-readers,1f1b,recompute", "pre-norm,1f1b,keep,even,{}"
WEIGHTED = "with-aux,1f1b,keep,even"
NORMS = "resnet,gpipe,swap,even,,1.1+2.0"  # all layers move inside a step, and back between two
VEE = "chained-keys,zb-v,swap"  # two stages on a device, backwards in halves
STREAM = "one-hot,pipedream,swap,even,{},1.2"  # all layers move while it flows
ADAPTED, MODELS = "adapt,mlp,1f1b,13", "models"  # groups come while a move is prepared
MARKS_BYTES = 8  # of layers that move: what tells a place that they have arrived, from both others


@contextmanager
def started(main: Main, count: int, *arguments: str) -> Iterator[list[Fork]]:
    """A script's processes, which meet; none outlives the block."""
    port = str(free_port())
    with ExitStack() as stack:
        yield [
            stack.enter_context(forked(main, str(i), str(count), port, *arguments))
            for i in range(count)
        ]


def runs(count: int, *cases: str, main: Main = worker.main) -> list[list[dict]]:
    """What each process saw of each case."""
    with started(main, count, *cases) as processes:
        ends = [process.ended() for process in processes]
    for end in ends:
        assert end.returncode == 0, "\n=====\n".join(e.stderr[-2500:] for e in ends)
    told = (
        [line for line in end.stdout.splitlines() if line[:1] == "{"] for end in ends
    )  # Gloo talks too
    return [list(map(json.loads, lines)) for lines in told]


def saved_cases(folder: Path, who: str) -> list[str]:
    """Cases that save on their way: a synchronous run, and a stream in flight."""
    return [case.format(folder / f"{i}{who}") for i, case in enumerate((TIED, STREAM))]


def assert_as_one(whole: dict, told: Sequence[dict], marks_bytes: int | None = None) -> None:
    """Asserts that processes together saw of a case what one process did.

    Args:
        whole: what one process saw.
        told: what each of several processes saw; they may have begun with what was saved.
        marks_bytes: how much higher peaks may be than those of one process; None if the run began
            elsewhere, so that peaks need not be equal.
    """
    begun = len(told[0]["losses"]) == len(whole["losses"])
    evaluated = [x["evaluated"] for x in whole["looked at"]]
    for seen in told:
        assert seen["losses"] == whole["losses"][-len(seen["losses"]) :]
        assert [x["evaluated"] for x in seen["looked at"]] == evaluated
        assert seen["moves"] == (whole["moves"] if begun else [])
    assert told[0]["looked at"] == whole["looked at"]
    others = [x["parameters"] for seen in told[1:] for x in seen["looked at"]]
    assert not any(others), "the first process alone has them all"
    assert merged("live", told) == whole["live"]
    peaks = merged("peaks", told)
    assert peaks.keys() == whole["peaks"].keys()
    if marks_bytes is not None:
        assert all(0 <= peaks[at] - peak <= marks_bytes for at, peak in whole["peaks"].items())


def merged(what: str, told: Sequence[dict]) -> dict:
    """What the processes saw of their own places, for all places."""
    return {at: n for seen in told for at, n in seen[what].items()}


def test_two_processes_have_the_bits_and_the_bytes_of_one(tmp_path: Path) -> None:
    """They save what one saves, and go on with what one saved."""
    by_one, by_two = saved_cases(tmp_path, "1"), saved_cases(tmp_path, "2")
    ((skips, weighted, *saved),) = runs(1, SKIPS, WEIGHTED, *by_one)
    first, second, *rest = zip(*runs(2, SKIPS, WEIGHTED, *by_one, *by_two), strict=True)
    assert_as_one(skips, first, 0)
    assert_as_one(weighted, second, 0)
    for whole, told in zip(saved * 2, rest, strict=True):
        assert_as_one(whole, told)
    for paths in zip(by_one, by_two, strict=True):
        (arrays, meta), (others, told) = (load_checkpoint(case.split(",")[4]) for case in paths)
        assert digest(arrays) == digest(others)
        assert {kind: named.keys() for kind, named in arrays.items()} == {
            kind: n.keys() for kind, n in others.items()
        }
        told.pop("parts")
        assert meta == told, "the ledger of versions too is that of one"
        assert "flight" not in meta or len(meta["flight"]["legs"]) == 2, (
            "it has not left its first plan behind"
        )


@pytest.mark.thorough
def test_three_processes_go_on_with_what_two_saved(tmp_path: Path) -> None:
    by_one, by_two = saved_cases(tmp_path, "1"), saved_cases(tmp_path, "2")
    ((norms, vee, models, *saved),) = runs(1, NORMS, VEE, MODELS, *by_one)
    runs(2, *by_two)
    moved, turned, switched, *rest = zip(*runs(3, NORMS, VEE, MODELS, *by_two), strict=True)
    assert_as_one(norms, moved, MARKS_BYTES)
    assert_as_one(vee, turned, 0)
    for whole, told in zip(saved, rest, strict=True):
        assert_as_one(whole, told)
    for seen in switched:
        assert (seen["losses"], seen["moves"]) == (models["losses"], models["moves"])
    assert switched[0]["parameters"] == models["parameters"]
    assert merged("live", switched) == models["live"]
    assert sum(seen["parked"] for seen in switched) == models["parked"] > 0


@pytest.mark.thorough
def test_two_processes_move_layers_as_one_does() -> None:
    ((adapted, vee),), two = runs(1, ADAPTED, VEE), runs(2, ADAPTED, VEE)
    moved, turned = zip(*two, strict=True)
    assert_as_one(vee, turned, 0)
    for seen in moved:
        assert seen["losses"] == adapted["losses"]
        assert seen["moves"] == ["step 16: [1, 2, 2], stage 0 takes 2.5 times what was planned"]
    assert moved[0]["parameters"] == adapted["parameters"]


def test_replicas_of_a_stage_may_lie_in_two_processes() -> None:
    cases = "replicas,1f1b", "replicas,pipedream", "shared,1e12", "shared,1"
    (one,), two = runs(1, *cases), runs(2, *cases)
    *run, fast, slow = zip(one, *two, strict=True)
    for decided, counts in (
        (fast, [3]),
        (slow, [1]),
    ):  # where one device is best a process has nothing to do
        assert [seen["replicas"] for seen in decided] == [counts] * 3
        assert decided[0]["losses"] == decided[1]["losses"] == decided[2]["losses"]
    for whole, first, second in run:
        assert first["losses"] == second["losses"] == whole["losses"]
        assert first["parameters"] == whole["parameters"]
        assert first["live"] | second["live"] == whole["live"]


@pytest.mark.thorough
def test_places_in_several_processes_may_be_meshes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "NPROC", "32"
    )  # with a thread per core XLA's CPU programs of several devices starve each other
    (one,), two = (runs(n, f"meshes,{tmp_path / str(n)}") for n in (1, 2))
    (whole,), (first,), (second,) = one, *two
    for seen in (first, second):
        assert seen["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert (
            "has devices of processes [0, 1]: the inner axes of a place cannot go over several"
            in seen["refused"]
        )
    for a, b in zip(first["parameters"], whole["parameters"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
def test_two_processes_are_fed_what_they_need_keep_a_limit_and_hold_no_more_after_many_steps() -> (
    None
):
    (one,), two = runs(1, main=enduring.main), runs(2, main=enduring.main)
    (alone,), (first,), (second,) = one, *two
    assert alone["needs"] == ["x", "y"]
    assert first["explained"] == second["explained"], "the peaks of all devices are told"
    assert len(first["explained"]) == len(alone["explained"])
    assert (first["needs"], second["needs"]) == (["x"], ["y"])
    assert "is a shape, and a stage of this process reads it: give an array" in first["refused"]
    assert first["losses"] == second["losses"] == alone["losses"]
    assert first["limit"] == second["limit"] < first["over"] == second["over"] == alone["over"], (
        "of a larger batch"
    )
    for seen in (first, second):
        assert all(peak <= seen["limit"] for peak in seen["peaks"].values())
        (bytes_before, arrays_before), (bytes_after, arrays_after) = seen["levels"]
        assert arrays_after <= arrays_before
        assert bytes_after - bytes_before < 8 * 2**20, "100 steps bring 12 MiB across"
        assert seen["ahead"] <= 3, "who is late is waited for"


DIFFERING = {
    "loss code": "the loss is 'equation 3, tanh to float32[2,4]",
    "closed-over array": "the loss is 'closed-over array 0 float32[4]",
    "optimizer": "the optimizer is 'update: ",
    "its rate": "the optimizer is 'update: equation",
    "init": "parameters is 'layers/0 float32[4, 4]",
    "parameters": "parameters is 'layers/2 float32[4, 4]",
    "model state": "model state is 'n float32[]",
    "key": "the key is 'key<fry>",
    "batch size": "the batch is 'x float32[8, 4]'",
    "batch": "the values of the batch is 'y float32[8, 4]",
    "stages": "stages is '2'",
    "micro-batches": "microbatches is '4'",
    "schedule": "schedule is '1f1b'",
    "memory limit": "memory_limit is '()'",
}


def test_whatever_two_processes_are_given_differently_is_named_by_both_and_they_go_on() -> None:
    """The two hash strings in unlike ways: what is compared is equal all the same where nothing
    differs.
    """
    port, variants = str(free_port()), [*DIFFERING, "mistake", "mistake in the loss"]
    with ExitStack() as stack:
        started = []
        for i in range(2):
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.hosts.differing",
                str(i),
                "2",
                port,
                *variants,
            ]
            where = environment() | {"PYTHONHASHSEED": str(i), "PYTHONPATH": str(ROOT)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, env=where, cwd=ROOT, **pipes))
            stack.callback(process.kill)
            started.append(process)
        ends = [process.communicate(timeout=LIMIT_S) for process in started]
    told = [
        dict(json.loads(line) for line in out.splitlines() if line[:1] == "[") for out, _ in ends
    ]
    assert [each.keys() for each in told] == [{*variants, "trained"}] * 2, (
        ends[0][1][-3000:] + ends[1][1][-3000:]
    )
    for variant, part in DIFFERING.items():
        first, second = (each[variant] for each in told)
        assert part in first, f"{variant}: {first}"
        assert " in process 0 and " in first
        assert first.endswith(" in process 1")
        assert " in process 1 and " in second
        assert second.endswith(" in process 0")
    for variant in ("mistake", "mistake in the loss"):
        assert told[0][variant].startswith("process 1 "), told[0][variant]
        assert told[1][variant] in told[0][variant], "all are told"
    assert told[0]["trained"] == told[1]["trained"]


def test_who_lives_on_names_the_process_that_was_killed() -> None:
    with started(dying.main, 2) as (alive, dies):
        dies.wait_for(lambda: dies.has_said("trains"))
        time.sleep(0.2)
        dies.send(signal.SIGKILL)
        end = alive.ended()
    told = r"lost: process 1 \(host .*\) is gone, go on from the last checkpoint: step \d+[:,] .*failed"
    assert re.search(told, end.stdout), end.stderr[-3000:]
    assert end.returncode == ExitCode.TRY_AGAIN


@pytest.mark.parametrize(
    "when", [("moving",), ("moving", "inside")], ids=["between two steps", "inside one"]
)
def test_who_lives_on_names_the_process_that_was_killed_while_layers_moved(
    when: tuple[str, ...],
) -> None:
    with started(dying.main, 2, *when) as processes:
        ends = [process.ended() for process in processes]
    assert [end.returncode for end in ends] == [ExitCode.TRY_AGAIN, -signal.SIGKILL], ends[
        0
    ].stderr[-3000:]
    assert re.search(
        r"lost: process 1 \(host .*\) is gone, go on from the last checkpoint", ends[0].stdout
    )
    assert "RECEIPT" in ends[0].stdout, "it waited for what it had offered"


@pytest.mark.parametrize("dies", [0, 1])
def test_whoever_is_killed_in_a_save_the_older_checkpoint_is_whole(
    dies: int, tmp_path: Path
) -> None:
    with started(dying.main, 2, "saving", str(tmp_path), str(dies)) as processes:
        ends = [process.ended() for process in processes]
    assert ends[dies].returncode == -signal.SIGKILL, ends[dies].stderr[-3000:]
    assert ends[1 - dies].returncode in (ExitCode.TRY_AGAIN, -signal.SIGABRT), (
        "JAX ends who loses the first process"
    )
    assert dies == 0 or "lost: process 1" in ends[0].stdout
    assert load_checkpoint(tmp_path)[1]["step"] == 1


@pytest.mark.parametrize("schedule", grid(["1f1b", "pipedream"], "1f1b"))
def test_each_process_groups_the_layers_of_its_own_places(schedule: str) -> None:
    ((apart, alone),) = runs(1, f"groups,{schedule},", f"groups,{schedule},yes")
    both = [told for (told,) in runs(2, f"groups,{schedule},yes")]
    assert [told["losses"] for told in (alone, *both)] == [apart["losses"]] * 3
    assert [told["parameters"] for told in (alone, *both)] == [apart["parameters"]] * 2 + [None]
    assert not any(apart["grouped"])
    assert all(told["grouped"][0] and told["grouped"][-1] for told in (alone, *both))


@pytest.mark.thorough
def test_one_process_in_groups_restores_and_switches_models_with_the_others(tmp_path: Path) -> None:
    ((alone,),) = runs(1, f"uneven,{tmp_path / 'one'}")
    assert [told for (told,) in runs(2, f"uneven,{tmp_path / 'two'}")] == [alone] * 2


@pytest.mark.thorough
def test_processes_that_prepared_a_move_in_unlike_ways_prepare_it_again_together() -> None:
    first, second = [told for (told,) in runs(2, "unlike")]
    assert (first["losses"], first["moves"]) == (second["losses"], second["moves"])
    assert len(first["moves"]) == 1


def test_an_evaluation_for_which_one_process_has_no_memory_is_refused_by_all() -> None:
    first, second = [told for (told,) in runs(2, "tight")]
    assert first["loss"] == second["loss"]
    assert all(" the limit is " in told["refused"] for told in (first, second)), first["refused"]


def test_what_the_loss_closes_over_is_not_taken_for_what_a_function_closes_over() -> None:
    for told in chain.from_iterable(runs(2, "closed")):
        assert told["found"] == pytest.approx(told["expected"])
