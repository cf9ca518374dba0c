"""The folder of a run: what is last and whole in it, and whether it may be continued."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname

import numpy as np
import pytest

from jvpipe.cli import run_folder
from jvpipe.cli.run_folder import RunDir, hold_new
from jvpipe.ir.plan import Plan
from jvpipe.runtime.state.checkpoints.checkpoint import save_checkpoint
from jvpipe.runtime.state.checkpoints.generations import DamageError
from jvpipe.runtime.state.checkpoints.held_folder import HeldError
from tests.saved import load_checkpoint

CONFIG = {
    "model": "bert",
    "size": "mini",
    "batch_size": 32,
    "parameters": {"embed.kernel": "float32[100, 8]", "head.bias": "float32[100]"},
}


def with_checkpoints(path: Path, *names: str) -> RunDir:
    for name in names:
        (path / "checkpoints" / name / "generation-000001").mkdir(parents=True)
    return RunDir(path)


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, "00000020", "00000100", "00000120.deleted")
    (tmp_path / "checkpoints" / "00000110" / "generation-000001.draft").mkdir(parents=True)
    assert run.checkpoints() == [run.checkpoint(20), run.checkpoint(100)]


def test_the_last_two_checkpoints_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    steps = (f"{step:08d}" for step in (10, 20, 30, 40))
    run = with_checkpoints(tmp_path, *steps, "00000005.deleted")
    (tmp_path / "checkpoints" / "00000035" / "generation-000001.draft").mkdir(parents=True)
    run.prune(2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["00000030", "00000040"]


def test_as_many_as_asked_for_are_kept_and_the_best(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, *(f"{step:08d}" for step in (10, 20, 30, 40, 50)))
    run.prune(3, 20)
    assert run.checkpoints() == [run.checkpoint(step) for step in (20, 30, 40, 50)]
    run.prune(1, 50)
    assert run.checkpoints() == [run.checkpoint(50)]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, *(f"{step:08d}" for step in (10, 20, 30)))
    mine = [
        tmp_path / "checkpoints" / name
        for name in ("notes.txt", "best/arrays", "20240131/x", "00000010/why.txt")
    ]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run.prune(2)
    assert all(path.is_file() for path in mine)
    assert run.checkpoints() == [run.checkpoint(20), run.checkpoint(30)]


def test_a_new_run_does_not_overwrite_another(tmp_path: Path) -> None:
    RunDir(tmp_path).refuse_if_used()
    with pytest.raises(ValueError, match="--resume"):
        with_checkpoints(tmp_path, "00000001").refuse_if_used()


@pytest.mark.parametrize("name", ["config.json", "plan.json", "metrics.jsonl", "plan.txt"])
def test_a_new_run_does_not_overwrite_a_file_that_is_not_of_a_run(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text('{"steps": 2}')
    told = f"would overwrite {file}, which is not what a run wrote: move it away, or give another"
    with pytest.raises(ValueError, match=told):
        RunDir(tmp_path).refuse_if_used()


def test_a_run_that_failed_before_its_first_checkpoint_may_begin_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG | {"data_digest": "a"})
    run.metrics.touch()
    run.refuse_if_used()


def test_the_same_configuration_may_go_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG | {"stages": 2})
    run.check(CONFIG)


def test_a_field_that_is_nan_is_the_same_here_and_there(tmp_path: Path) -> None:
    run, fields = RunDir(tmp_path), {"model_config": {"rate": float("nan")}}
    run.write_config(fields)
    run.check(fields)
    with pytest.raises(ValueError, match=r"model_config: rate is nan there, 0\.1 here"):
        run.check({"model_config": {"rate": 0.1}})


def test_what_differs_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    other = CONFIG | {
        "size": "base",
        "parameters": {"embed.kernel": "float32[100, 16]", "head.bias": "float32[9]"},
    }
    with pytest.raises(ValueError) as caught:
        run.check(other)
    told = str(caught.value)
    assert "size is mini there, base here" in told
    assert "parameters: embed.kernel is float32[100, 8] there, float32[100, 16] here" in told
    assert "head.bias" not in told


def test_a_parameter_that_one_of_them_lacks_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    with pytest.raises(ValueError, match=r"head\.bias is float32\[100\] there, missing here"):
        run.check({"parameters": {"embed.kernel": "float32[100, 8]"}})


@pytest.mark.parametrize("content", [None, b'{"model": "be', b"[1]", b'{"model": "\xff"}'])
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        RunDir(tmp_path).read_config()
    assert "\n" not in str(caught.value)


def test_a_configuration_without_a_digest_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(DamageError, match=r"config\.json has lost its digest: put it back"):
        RunDir(tmp_path).read_config()


@pytest.mark.parametrize("name", ["model_config", "parameters", "files", "data_digest"])
@pytest.mark.parametrize("value", [None, 3, [], [[1]], {"a": [1]}, {"a": {"b": 1}}])
def test_what_is_no_entry_of_a_configuration_is_named(
    name: str, value: object, tmp_path: Path
) -> None:
    RunDir(tmp_path).write_config({name: value})
    if name == "model_config" and isinstance(value, dict):
        assert RunDir(tmp_path).read_config() == {name: value}
        return
    with pytest.raises(ValueError, match=rf"config\.json: {name}.* must be ") as caught:
        RunDir(tmp_path).read_config()
    assert "\n" not in str(caught.value)


def test_a_bit_that_flips_in_the_configuration_is_noticed_or_harmless(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    content, noticed = run.config.read_bytes(), 0
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 7
        run.config.write_bytes(damaged)
        try:
            found = run.read_config()
        except DamageError:
            noticed += 1
        else:  # between words, or in the name of the digest
            assert {name: found[name] for name in CONFIG} == CONFIG


def test_a_plan_of_a_run_is_a_plan(tmp_path: Path) -> None:
    run, plan = RunDir(tmp_path), Plan.from_cuts([2, 1], schedule="gpipe")
    run_folder.write_sealed(run.plan, plan.to_json())
    assert Plan.load(run.plan) == plan
    run.plan.write_text(run.plan.read_text().replace("gpipe", "1f1b"))
    with pytest.raises(DamageError, match=r"plan\.json is not what the run wrote"):
        run_folder.read_sealed(run.plan)


def test_files_of_a_run_are_known_by_their_digests(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("of a run that failed")
    digests = run.adopt({"tokenizer.json": b"new"})
    assert (tmp_path / "tokenizer.json").read_text() == "new"
    run.check_files(digests)
    (run.path / "tokenizer.json").write_text("nev")
    with pytest.raises(
        DamageError,
        match=r"tokenizer\.json has changed since the run began: restore it, or delete it",
    ):
        run.check_files(digests)
    (run.path / "tokenizer.json").unlink()
    run.check_files(digests)


def test_two_runs_are_not_in_one_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    told = rf"another run is at work in {run.path} \(process {os.getpid()}, started by {os.getppid()}, on "
    run.path.mkdir()
    seen = run.identity()
    with run.held():
        assert run.identity() == seen, "which the processes of several hosts compare"
        with pytest.raises(HeldError, match=told + gethostname()), RunDir(tmp_path / "run").held():
            pass
        run.holder.write_bytes(b"\xff\0")
        with pytest.raises(HeldError, match=f"at work in {run.path}: stop it"), run.held():
            pass
        assert run.holder.exists()
    with run.held():
        pass


def test_a_run_that_is_killed_leaves_its_folder_free(tmp_path: Path) -> None:
    holding = (
        f"import fcntl, os; fcntl.flock(os.open({str(tmp_path)!r}, 0), fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(HeldError, match="another run is at work"), RunDir(tmp_path).held():
            pass
        other.kill()
    with RunDir(tmp_path).held():
        pass


def test_a_folder_that_stays_empty_goes_again(tmp_path: Path) -> None:
    with RunDir(tmp_path / "runs" / "first").held():
        assert (tmp_path / "runs" / "first").is_dir()
    assert list(tmp_path.iterdir()) == []
    with RunDir(tmp_path / "runs" / "first").held():
        (tmp_path / "runs" / "first" / "config.json").touch()
    assert (tmp_path / "runs" / "first" / "config.json").exists()


def test_two_new_runs_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    with ExitStack() as held:
        names = [hold_new(held, str(tmp_path / "bert")).path.name for _ in range(3)]
    assert names == ["bert", "bert-2", "bert-3"]


def test_the_older_checkpoint_that_is_whole_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2, 3):
        told = {"step": step, "extra": {}}
        save_checkpoint(run.checkpoint(step), {"parameter": {"a": np.full(3, step)}}, told)

    def restore() -> None:
        with run.advising():
            run.check_last()
            load_checkpoint(run.checkpoints()[-1])

    restore()
    whole = [
        f"{run.checkpoint(2)} is whole: to resume from it, move {run.checkpoint(3)} away",
        f"{run.checkpoint(1)} is whole",
    ]
    for step, what in zip((3, 2, 1), (*whole, "no older checkpoint is whole"), strict=True):
        damaged = run.checkpoint(step) / "generation-000001" / "arrays.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        with pytest.raises(DamageError, match=f"^{run.checkpoint(3)} is damaged: .*{what}"):
            restore()


def test_a_checkpoint_of_another_step_is_said_and_none_that_is_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2, 3, 4):
        told = {"step": step, "extra": {}}
        save_checkpoint(run.checkpoint(step), {"parameter": {"a": np.full(3, step)}}, told)
    run.check_last()
    for a, b, inside in ((3, 4, ""), (1, 2, "generation-000001")):
        between, (one, other) = (
            tmp_path / "x",
            (run.checkpoint(a) / inside, run.checkpoint(b) / inside),
        )
        for old, new in ((one, between), (other, one), (between, other)):
            old.rename(new)
    with pytest.raises(DamageError) as caught, run.advising():
        run.check_last()
    wrong = f"{run.checkpoint(4)} has the state of step 3, not of step 4 as its name says"
    assert str(caught.value) == f"{wrong}; no older checkpoint is whole"


def test_a_run_from_before_there_was_a_field_had_the_usual_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config({"model_config": {"width": 16}})
    usual = {"model_config": {"width": 8, "epsilon": 1e-6}}
    run.check({"model_config": {"width": 16, "epsilon": 1e-6}}, usual)
    with pytest.raises(ValueError, match=r"model_config: epsilon is 1e-06 there, 0\.1 here"):
        run.check({"model_config": {"width": 16, "epsilon": 0.1}}, usual)
    with pytest.raises(ValueError, match="model_config: width is 16 there, 8 here"):
        run.check({"model_config": {"width": 8, "epsilon": 1e-6}}, usual)
