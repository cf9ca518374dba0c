"""The command line as a user meets it: in processes of its own, stopped and killed, always under a
time limit.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from safetensors.numpy import load_file

import jvpipe
from experiments.faults.runs import page
from jvpipe import models
from jvpipe.cli import run_folder
from jvpipe.cli.command_line import parse
from jvpipe.cli.keeping import Keeper
from jvpipe.util.sizes import format_bytes
from tests.commands import ended, finished, running
from tests.forks import LIMIT_S, environment
from tests.saved import load_checkpoint
from tests.session.test_sealed_anew import changed, put


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of prose to train on."""
    return page(tmp_path_factory.mktemp("data") / "page.txt")


def arguments(text: Path, run: Path, *more: str) -> list[str]:
    base = ["--size", "tiny", "--planner", "even", "--data", str(text)]
    return [*base, "--batch-size", "8", "--run-dir", str(run), *more]


def fresh(*command: str) -> subprocess.CompletedProcess[str]:
    """A command that imports everything itself."""
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def train(text: Path, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return finished(*arguments(text, run, *more))


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps that nothing disturbed."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    more = ("--steps", "6", "--stages", "2", "--export", str(run.parent / "whole.safetensors"))
    done = fresh(sys.executable, "-m", "jvpipe.train", *arguments(text, run, *more))
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout
    assert "predicting by frequency alone" in done.stdout
    assert done.stderr == ""
    (run.parent / "whole.out").write_text(done.stdout)
    return run


def test_without_a_terminal_a_run_says_what_it_does(whole: Path) -> None:
    first, *said = (whole.parent / "whole.out").read_text().splitlines()
    assert first == f"jvpipe {jvpipe.__version__}: bert"
    begun = next(
        i for i, line in enumerate(said) if line.startswith("bert tiny: steps 1 to 6, run in ")
    )
    phases = dict.fromkeys(
        m[1] for line in said[:begun] if (m := re.fullmatch(r"(.+) took \d+\.\d\d s", line))
    )
    assert list(phases) == [
        "opening the data",
        "tracing and cutting the loss",
        "tracing and cutting the optimizer",
        "measuring layers and links",
        "planning",
        "compiling, or loading what was compiled",
        "making and placing the parameters",
    ]
    step = re.compile(r"step (\d) of 6: loss \d+\.\d{4}, .* examples/s, bubble \d+%, peak .*iB")
    first, *_, last = [m[1] for line in said[begun:] if (m := step.fullmatch(line))]
    assert (first, last) == ("1", "6")


def test_the_run_directory_holds_what_is_promised(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    promised = {
        "config.json",
        "plan.json",
        "plan.txt",
        "metrics.jsonl",
        "timeline.json",
        "checkpoints",
        "tokenizer.json",
    }
    assert names == promised
    assert jvpipe.Plan.load(whole / "plan.json").schedule == "1f1b"
    assert [p.name for p in (whole / "checkpoints").iterdir()] == ["00000006"]
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= line["bubble_fraction"] < 1
    assert set(line["peak_bytes"]) == {"cpu:0", "cpu:1"}
    assert line["tokens_per_s"] == pytest.approx(16 * line["examples_per_s"])
    assert line["elapsed_s"] >= line["seconds"]
    assert {"mfu", "aux", "held_out_loss"}.isdisjoint(line), (
        "a CPU's peak is not known, and there is no more to tell"
    )
    rows = [
        e["args"]["name"]
        for e in json.loads((whole / "timeline.json").read_text())["traceEvents"]
        if e["name"] == "thread_name"
    ]
    assert {"cpu:0", "cpu:1"} <= set(rows)


@pytest.mark.thorough
def test_a_profile_and_its_timeline_tell_tasks_by_name_bytes_and_copies(
    text: Path, tmp_path: Path
) -> None:
    run, picture = tmp_path / "run", tmp_path / "run.svg"
    wanted = ("--profile", "2", "--figure", str(picture))
    done = train(text, run, "--steps", "5", "--stages", "2", "--microbatches", "4", *wanted)
    assert done.returncode == 0, done.stderr
    stages = json.loads((run / "plan.json").read_text())["stages"]
    layers = [(s, layer) for s, stage in enumerate(stages) for layer in stage["layers"]]
    tasks = {
        f"{s}{kind}{m}[layer {layer}]" for s, layer in layers for kind in "FB" for m in range(4)
    }
    (written,) = (run / "profile").rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(written))
    seen = Counter(
        event.name for plane in data.planes for line in plane.lines for event in line.events
    )
    assert {name: seen[name] for name in tasks} == dict.fromkeys(tasks, 2)  # steps
    assert {name: seen[f"dispatch {name}"] for name in tasks} == dict.fromkeys(tasks, 2)
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    shown = Counter(
        (e["name"], e["args"]["layer"]) for e in events if e["ph"] == "X" and e["cat"] in "FB"
    )
    assert shown == {
        (task.split("[")[0], layer): 2
        for s, layer in layers
        for task in tasks
        if f"layer {layer}]" in task
    }
    labels = {
        e["args"]["layer"]: e["args"]["layer_name"]
        for e in events
        if e["ph"] == "X" and e["cat"] == "F"
    }
    told = (run / "plan.txt").read_text()
    assert all(re.search(rf"layer +{layer} {labels[layer]} ", told) for _, layer in layers)
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) >= 2 * 2 * 4
    most = {
        p: max(e["args"]["bytes"] for e in events if e["name"] == f"{p} bytes")
        for p in ("cpu:0", "cpu:1")
    }
    assert most == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["peak_bytes"]
    drawn = picture.read_text()
    for place, held in most.items():
        assert f"<!-- {place}: {format_bytes(held)} -->" in drawn
    assert any(
        f"<!-- {m} -->" in drawn for m in range(4)
    )  # a task that is wide enough has its micro-batch


def test_the_export_is_readable_without_jvpipe(whole: Path) -> None:
    arrays = load_file(whole.parent / "whole.safetensors")
    config = json.loads((whole / "config.json").read_text())
    assert {k: f"{v.dtype}{list(v.shape)}" for k, v in arrays.items()} == config["parameters"]


def test_a_stopped_run_resumes_under_another_cut_to_the_bit(
    text: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--steps", "6", "--stages", "2")
    with running(*arguments(text, run, *options)) as command:
        command.wait_for(
            lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()
        )
        command.send(signal.SIGTERM)
        stopped = command.ended()
    if stopped.returncode != 0:  # it may have been too fast to be stopped
        assert stopped.returncode == 128 + signal.SIGTERM
        assert "--resume" in stopped.stderr
    resumed = train(text, run, "--resume", "--stages", "3", "--schedule", "gpipe")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(run) == losses(whole)


@pytest.mark.thorough
def test_a_killed_run_keeps_its_last_checkpoint_whole(
    text: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "tokenizer.json").write_text("of a run that failed here before its first step")
    with running(
        *arguments(text, run, "--steps", "400", "--stages", "1", "--checkpoint-every", "1")
    ) as command:
        command.wait_for((run / "checkpoints" / "00000003").exists)
        time.sleep(0.1)
        command.kill()
    last = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    resumed = train(text, run, "--resume", "--steps", str(last + 1))
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(run)) == last + 1


def test_a_complete_run_is_evaluated_and_exported_wherever_it_lies(
    whole: Path, text: Path, tmp_path: Path
) -> None:
    run, export = tmp_path / "elsewhere", tmp_path / "params.safetensors"
    shutil.copytree(whole, run)
    assert parse(["--run-dir", str(run), "--resume"]).export is None  # though the run had one
    again = ("--run-dir", str(run), "--resume", "--export", str(export))
    done = ended(*again, largest_file_bytes=20_000)  # as on a disk that is nearly full
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot write {export}: ")
    assert (
        f"the state is in {run / 'checkpoints' / '00000006'}; to export it, run: python -m jvpipe.train"
        in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1
    done = finished(*again)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"data: {text}, as the run in {run} used it" in done.stdout
    assert "all 6 steps are done" in done.stdout
    assert "held-out loss" in done.stdout
    assert export.read_bytes() == (whole.parent / "whole.safetensors").read_bytes()
    assert losses(run) == losses(whole)


def test_damage_is_one_line(text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    last = run / "checkpoints" / "00000006"
    changed(last, run / "checkpoints" / "00000003", put("step", value=3))
    for name, told in (
        (
            "checkpoints/00000006/generation-000001/arrays.safetensors",
            "00000003 is whole: to resume from it, move .*00000006 away",
        ),
        ("tokenizer.json", "restore it, or delete it to make it again from the data"),
        ("plan.json", "plan.json is not what the run wrote"),
    ):
        content = (run / name).read_bytes()
        at = content.index(b"1", len(content) // 2)
        (run / name).write_bytes(content[:at] + b"0" + content[at + 1 :])
        refused = train(text, run, "--resume", "--steps", "7")
        assert refused.returncode == 2
        assert re.search(told, refused.stderr), refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        (run / name).write_bytes(content)
    config = json.loads((run / "config.json").read_text())
    del config["digest"]
    run_folder.write_sealed(run / "config.json", config | {"stages": "two"})
    with pytest.raises(ValueError, match=r"config\.json is not what a run wrote: stages is 'two'"):
        parse(["--run-dir", str(run), "--resume"])


def test_mistakes_are_one_line_and_exit_2(text: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for more, told in (
        (("--schedule", "1f1p"), "unknown schedule '1f1p': did you mean '1f1b'"),
        (("--microbatches", "3"), "3 micro-batches do not divide the 8 examples"),
        (("--data", str(tmp_path / "empty.txt")), "empty.txt"),
    ):
        refused = train(text, tmp_path / "new" / "run", *more)
        assert refused.returncode == 2
        assert told in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        assert not (tmp_path / "new").exists()
    other = train(text, whole, "--resume", "--size", "mini", "--steps", "7")
    assert other.returncode == 2
    assert "size is tiny there, mini here" in other.stderr


def test_a_stream_is_trained_and_saved_in_flight(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "stream"
    done = train(text, run, "--steps", "3", "--schedule", "pipedream")
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 3
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert sorted(set(line["staleness"])) == [0, 1]
    assert line["grad_norm"] is None
    other = train(text, run, "--resume", "--schedule", "1f1b", "--steps", "4")
    assert other.returncode == 2
    assert "was saved in flight under pipedream" in other.stderr


@pytest.mark.thorough
def test_a_stream_under_a_given_plan_is_resumed_under_it(
    text: Path, whole: Path, tmp_path: Path
) -> None:
    """Although the planner would plan otherwise: that another plan is refused is what the stream
    above shows.
    """
    given, run = tmp_path / "given.json", tmp_path / "run"
    first, last = jvpipe.Plan.load(whole / "plan.json").cuts
    plan = jvpipe.Plan.from_cuts([first + 1, last - 1], schedule="pipedream")
    plan.save(given)
    begun = train(text, run, "--steps", "1", "--plan", str(given))
    assert begun.returncode == 0, begun.stderr
    resumed = train(text, run, "--resume", "--steps", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert jvpipe.Plan.load(run / "plan.json").cuts == plan.cuts
    assert len(losses(run)) == 2


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoints(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its optimizer's third update is none."""
    run, load = tmp_path / "run", models.load

    def rates(n: Any) -> Any:
        return jnp.where(n < 3, -1e-3, jnp.nan)

    def loaded(*args: Any, **options: Any) -> models.Workload:
        return replace(
            load(*args, **options), optimizer=lambda updates, local: optax.scale_by_schedule(rates)
        )

    monkeypatch.setattr(models, "load", loaded)
    for more, told in (
        (
            ("--checkpoint-every", "1"),
            r"error: after step 4 parameter '.*' is NaN: the state is not saved",
        ),
        (
            ("--checkpoint-every", "9", "--resume"),
            r"error: the loss of step 5 is nan at stage 0, and parameter '.*' is",
        ),
    ):
        done = train(text, run, "--steps", "9", "--stages", "1", *more)
        assert done.returncode == 2
        assert re.match(told, done.stderr)
        assert len(done.stderr.splitlines()) == 1
        assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["00000002", "00000003"]
    finite = [loss is not None for loss in losses(run)]
    assert finite[:5] == [True] * 4 + [False]
    assert finite[5:] in ([], [False])  # another step may have begun before the loss was there


def test_a_signal_in_the_last_step_is_heard(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the step is saved."""
    run, save = tmp_path / "run", Keeper.save

    def saved(*given: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        save(*given)

    monkeypatch.setattr(Keeper, "save", saved)
    done = train(text, run, "--steps", "1", "--stages", "1")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "stopped; to go on: python -m jvpipe.train" in done.stderr
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["00000001"]


@pytest.mark.thorough
def test_architectures_are_searched_and_a_stop_keeps_the_last(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "search"
    options = ("--model", "evolved-transformer", "--nas", "--nas-steps", "1", "--steps", "400")
    metrics = run / "metrics.jsonl"
    with running(*arguments(text, run, *options)) as command:
        command.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
        command.send(signal.SIGINT)
        stopped = command.ended()
    assert stopped.returncode == 128 + signal.SIGINT
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert f"stopped; the last architecture is in {checkpoint}" in stopped.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(losses(run)) == int(checkpoint.name)
    assert lines[0]["architecture"] != lines[1]["architecture"]
    assert jvpipe.checkpoint_extra(checkpoint)["architecture"] == lines[-1]["architecture"]
    saved = {name.split("/")[0] for name in load_checkpoint(checkpoint)[0]["parameter"]}
    assert saved == {"embeddings", "last", "head", *lines[-1]["architecture"]}
    for folder, more, mistake in (
        (run, ("--resume",), "--nas cannot be resumed"),
        (
            tmp_path / "other",
            ("--model", "bert", "--nas"),
            "--nas needs a model whose architecture can be searched",
        ),
    ):
        refused = train(text, folder, *more)
        assert refused.returncode == 2
        assert mistake in refused.stderr
