"""TrainOptions in a file: what is given wins, what is unknown is named, and a run's config.json is
one.
"""

import json
from pathlib import Path

import pytest

from jvpipe.cli import command_line
from jvpipe.cli.command_line import given, parse
from jvpipe.cli.command_options import NOT_KEPT, TrainOptions, kept_options
from jvpipe.cli.run_folder import RunDir

TOML = """
model = "gpt2"
batch-size = 16
learning_rate = 1
nas = false
set = { blocks = 3, dropout = 0.5, name = "a b" }
"""


def test_a_file_has_options_and_those_of_the_command_line_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    options = parse(["--config", str(file), "--batch-size", "4"])
    assert (options.model, options.batch_size, options.learning_rate) == ("gpt2", 4, 1.0)
    assert options.set == ("blocks=3", "dropout=0.5", "name=a b")
    assert options.stages == TrainOptions().stages
    more = parse(["--config", str(file), "--set", "blocks=4"])
    assert dict(each.split("=") for each in more.set)["blocks"] == "4"


YAML = """
model: gpt2
batch-size: 16
learning_rate: 1e-3
set:
  blocks: 3
  dropout: 0.5
track: [tensorboard]
"""


def test_a_file_may_be_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    options = given(["--config", str(file), "--batch-size", "4"])
    assert (options.model, options.batch_size, options.learning_rate) == ("gpt2", 4, 1e-3)
    assert options.set == ("blocks=3", "dropout=0.5")
    file.write_text("seed: 3\n<<: {stages: 2}")
    assert given(["--config", str(file)]).stages == 2
    assert options.track == ("tensorboard",)


def test_what_a_run_wrote_is_a_file_of_options(tmp_path: Path) -> None:
    file, wanted = (
        tmp_path / "config.json",
        TrainOptions(model="t5", stages=3, set=("blocks=4",), run_dir="there", resume=True),
    )
    recorded = {
        "model_config": {},
        "parameters": {},
        "data_digest": "a",
        "files": {},
        "digest": "b",
    }
    file.write_text(json.dumps(kept_options(wanted) | recorded))
    options = given(["--config", str(file)])
    assert (options.model, options.stages, options.set) == ("t5", 3, ("blocks=4",))
    assert (options.run_dir, options.resume) == (None, False)
    assert "config" in NOT_KEPT


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.toml", "batchsize = 3", "unknown option 'batchsize': did you mean 'batch_size'?"),
        ("a.toml", "batch_size = 1.5", "batch_size is 1.5, but must be a whole number"),
        ("a.json", '{"stages": true}', "stages is True, but must be a whole number"),
        ("a.json", '{"set": [1]}', r"set is \(1,\), but must be a list of texts"),
        ("a.json", '{"stages": 2', "cannot be read: Expecting"),
        ("a.json", "[2]", "must be a mapping from option names to values, not list"),
        ("a.toml", "stages 2", "cannot be read"),
        (
            "a.yaml",
            "stages: 2\nseed: 1\nstages: 3",
            "line 3: stages is in line 1 already: remove one",
        ),
        ("a.yaml", "seed: 1\nset: {a: 1, a: 2}", "line 2: a is in line 2 already"),
        ("a.yaml", "seed: 1\n1: 2", "line 2: a name must be a text, and 1 is one only in quotes"),
        ("a.yaml", "true: 2", "line 1: a name must be a text, and true is one only in quotes"),
        ("a.yaml", "null: 2", "line 1: a name must be a text, and null is one only in quotes"),
        ("a.json", '{"seed": 1, "seed": 2}', "'seed' is there twice: remove one of the two"),
        ("a.json", '{"set": {"a": 1, "a": 2}}', "'a' is there twice: remove one of the two"),
        ("a.yml", "stages: 2\nbatchsize: 3", "line 2: unknown option 'batchsize': did you mean"),
        ("a.yaml", "\nstages: 1.5", "line 2: stages is 1.5, but must be a whole number"),
        ("a.yaml", "stages: [2", "line 1: expected"),
        ("a.yaml", "a: " + "[" * 3000, "cannot be read: this YAML is nested too deeply"),
        ("a.yaml", "- 2", "must be a mapping from option names to values, not list"),
        ("a.yaml", "model: !!python/object:os.system x", "line 1: could not determine"),
        ("a.json", '{"seed": null}', "seed is None"),
        ("a.json", '{"learning_rate": 1' + 400 * "0" + "}", "learning_rate is 1.*, but must be a"),
        ("there/is/none.toml", "", "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_none_is_told_in_one_line(
    name: str, content: str, told: str, tmp_path: Path
) -> None:
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=told) as refused:
        given(["--config", str(tmp_path / name)])
    assert str(refused.value).startswith(f"--config {tmp_path / name}")
    assert "\n" not in str(refused.value)


def test_an_error_without_a_message_is_told_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: str) -> None:
        raise RecursionError

    monkeypatch.setattr(command_line, "read_yaml", unreadable)
    (tmp_path / "a.yaml").write_text("stages: 2")
    with pytest.raises(ValueError, match=r"cannot be read: RecursionError$"):
        given(["--config", str(tmp_path / "a.yaml")])


def test_a_resumed_run_takes_a_file_before_what_it_was(tmp_path: Path) -> None:
    RunDir(tmp_path).write_config({"stages": 3, "steps": 7, "seed": 1})
    (tmp_path / "more.toml").write_text("steps = 9\n")
    options = parse(
        [
            "--run-dir",
            str(tmp_path),
            "--resume",
            "--config",
            str(tmp_path / "more.toml"),
            "--seed",
            "2",
        ]
    )
    assert (options.stages, options.steps, options.seed) == (3, 9, 2)


def test_two_names_of_one_option_are_refused_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command_line.present
    (tmp_path / "a.yaml").write_text("grad_clip: 3\nsteps: 4\n")
    (tmp_path / "b.yaml").write_text("run_dir: a\nrun-dir: b\n")
    monkeypatch.setattr(
        command_line,
        "present",
        lambda holder, name: (
            "seed" if name == "grad_clip" and not print(name) else real(holder, name)
        ),
    )
    given(["--config", str(tmp_path / "a.yaml")])
    assert capsys.readouterr().out == "grad_clip\n"  # asked for, and so warned about, once
    with pytest.raises(ValueError, match=r"run_dir and run-dir are one option: give only run_dir$"):
        given(["--config", str(tmp_path / "b.yaml")])
