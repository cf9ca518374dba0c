"""A resumed run has the options that it had, but for those that are given, and those of one process
alone.
"""

from pathlib import Path
from typing import Any

import pytest

from jvpipe.cli.command_line import parse
from jvpipe.cli.command_options import FIXED, NOT_KEPT, OF_PROCESSES, TrainOptions
from jvpipe.cli.run_folder import RunDir


def saved(folder: Path, **options: Any) -> list[str]:
    """The command that resumes a run with these options."""
    RunDir(folder).write_config(options)
    return ["--run-dir", str(folder), "--resume"]


def test_given_options_win_over_saved_ones_and_these_over_the_defaults(tmp_path: Path) -> None:
    resume = saved(tmp_path, stages=3, schedule="gpipe", seed=7, steps=None)
    options = parse([*resume, "--stages", "4"])
    assert (options.stages, options.schedule, options.seed, options.steps) == (4, "gpipe", 7, None)
    assert options.microbatches == TrainOptions().microbatches
    assert parse([]) == TrainOptions()


def test_values_of_options_that_may_be_given_several_times_are_joined_each_once(
    tmp_path: Path,
) -> None:
    resume = saved(tmp_path, track=["trackio"], set=["blocks=2", "heads=4"], frozen=["base/*"])
    file = tmp_path / "options.json"
    file.write_text('{"set": ["heads=2"], "track": ["trackio"], "frozen": ["head/*"]}')
    again = ("--set", "blocks=2", "--track", "trackio")
    options = parse([*resume, "--config", str(file), *again], writes=False)
    assert options.track == ("trackio",)
    assert options.set == ("heads=4", "heads=2", "blocks=2")
    assert options.frozen == ("base/*", "head/*")


def test_what_holds_for_one_process_is_not_taken_over(tmp_path: Path) -> None:
    resume = saved(tmp_path, export="elsewhere.safetensors", remeasure=True, data="prose.txt")
    options = parse(resume)
    assert (options.export, options.remeasure, options.data) == (None, False, "prose.txt")
    assert {
        "config",
        "export",
        "export_weights",
        "figure",
        "profile",
        "remeasure",
        "resume",
        "trust",
        "tokenizer",
        *OF_PROCESSES,
    } == set(NOT_KEPT)
    assert not set(FIXED) & set(NOT_KEPT)


def test_saved_data_are_said_where_they_are_taken_for_granted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = saved(tmp_path, data="prose.txt")
    parse(resume)
    assert "data: prose.txt, as the run in" in capsys.readouterr().out
    parse([*resume, "--data", "other.txt"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "stages", "devices"),
    [
        ([], 2, 2),
        (["--stages", "3"], 3, 3),
        (["--replicas", "3:1"], 2, 4),
        (["--replicas", "auto", "--devices", "5"], None, 5),
        (["--replicas", "auto", "--stages", "99"], 99, 99),
    ],
)
def test_how_many_stages_and_devices_there_are(
    options: list[str], stages: int | None, devices: int
) -> None:
    found = parse(options)
    assert (found.stages_asked, found.devices_asked) == (stages, devices)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--resume"], "--resume needs --run-dir"),
        (["--stages", "0"], "--stages must be a whole number of at least 1, not 0"),
        (
            ["--steps", "99999999999999999999"],
            "--steps must be a whole number of at most 2147483647, not 99999999999999999999",
        ),
        (["--devices", "2"], "--devices 2 needs --replicas auto"),
        (
            ["--replicas", "2;1"],
            "each of --replicas must be a whole number of at least 1, not '2;1'",
        ),
        (
            ["--replicas", "2,1", "--stages", "3"],
            "--replicas 2,1 is for 2 stages, but --stages is 3",
        ),
        (
            ["--checkpoint-every", "-1"],
            "--checkpoint-every must be a whole number of at least 1, not -1",
        ),
        (["--seed", "-1"], "--seed must be a whole number of at least 0, not -1"),
        (["--warmup", "-1"], "--warmup must be a whole number of at least 0, not -1"),
        (["--learning-rate", "0"], "--learning-rate must be a number above 0, not 0"),
        (["--learning-rate", "nan"], "--learning-rate must be a number above 0, not nan"),
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stages": "three"}, r"config\.json is not what a run wrote: stages is 'three'"),
        ({"adapt": 1}, "adapt is 1"),
        ({"nas": True}, "--nas cannot be resumed"),
    ],
)
def test_a_configuration_that_no_run_wrote_is_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        parse(saved(tmp_path, **options))
