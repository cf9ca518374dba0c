"""The folder of a run: what is last and whole in it, and whether it may be continued."""

from pathlib import Path

import pytest

from jvpipe.rundir import RunDir

CONFIG = {
    "model": "bert",
    "size": "mini",
    "batch_size": 32,
    "parameters": {"embed.kernel": "float32[100, 8]", "head.bias": "float32[100]"},
}


def with_checkpoints(path: Path, *names: str) -> RunDir:
    for name in names:
        (path / "checkpoints" / name / "arrays").mkdir(parents=True)
    return RunDir(path)


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, "00000020", "00000100", "00000110.orbax-checkpoint-tmp-7")
    assert run.checkpoints() == [run.checkpoint(20), run.checkpoint(100)]


def test_the_last_two_checkpoints_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, *(f"{step:08d}" for step in (10, 20, 30, 40)), "00000050.tmp", "00000005.deleted")
    run.prune()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["00000030", "00000040"]


def test_a_new_run_does_not_overwrite_another(tmp_path: Path) -> None:
    RunDir(tmp_path).refuse_if_used()
    with pytest.raises(ValueError, match="--resume"):
        with_checkpoints(tmp_path, "00000001").refuse_if_used()


def test_the_same_configuration_may_go_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG | {"stages": 2})
    run.check(CONFIG)


def test_what_differs_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_config(CONFIG)
    other = CONFIG | {"size": "base", "parameters": {"embed.kernel": "float32[100, 16]", "head.bias": "float32[9]"}}
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


@pytest.mark.parametrize("content", [None, '{"model": "be'])
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="holds no run to resume"):
        RunDir(tmp_path).read_config()
