"""Options are defined whole, read, and on the page of options; a wrong value of each is told in one
line.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cli.command_line import parse, read_options
from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.plan_command import PlanOptions
from jvpipe.cli.train_command import main
from jvpipe.session.arguments import whole_number
from jvpipe.session.options import PipelineOptions
from jvpipe.util.given import checked_path
from jvpipe.util.option import PIPELINE, PLAN_FOR, Taker, option, options_of
from tests.docs.options_page import PAGE, page, takers

HOUSE = Path(jvpipe.__file__).parent
HOLDERS = ("options", "self", "settings", "question", "told", "pins", "schedule")
"""Names of what has options."""


@cache
def read_names() -> frozenset[str]:
    """The names that somebody reads of options, in the rooms that have them."""
    files = [
        HOUSE / "pipeline.py",
        *(f for room in ("cli", "session") for f in (HOUSE / room).glob("*.py")),
    ]
    return frozenset(name for file in files for name in names_read(ast.parse(file.read_text())))


def names_read(tree: ast.AST) -> Iterator[str]:
    """Attributes and entries of what has options, and names that are looped over."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner), name) if owner in HOLDERS:
                yield name
            case ast.Attribute(ast.Attribute(attr="options" | "settings"), name):
                yield name
            case ast.Subscript(ast.Name(owner), ast.Constant(str(name))) if owner in HOLDERS:
                yield name
            case ast.Call(ast.Name("take"), [ast.Constant(str(name))]):
                yield name
            case ast.Tuple(parts) | ast.List(parts):
                yield from (
                    x.value for x in parts if isinstance(x, ast.Constant) and type(x.value) is str
                )


def complaints(holder: type[PipelineOptions], text: str) -> list[str]:
    """What the definitions of options lack."""
    told = [f"{x.name}: no definition" for x in fields(holder) if "option" not in x.metadata]
    if told:
        return told
    for name, each in options_of(holder).items():
        lacks = {
            "check": not callable(each.check),
            "help": not re.fullmatch(r"\S.*\.", each.help, re.DOTALL),
            "unit": bool({int, float} & {*each.kinds}) and not each.unit,
            "place in docs/options.md": f"| `{each.flag}` |" not in text
            and f"| `{name}` |" not in text,
            "reader": name not in read_names(),
        }
        told += [f"{name}: no {what}" for what, missing in lacks.items() if missing]
    return told


@pytest.mark.parametrize("holder", [PipelineOptions, TrainOptions, PlanOptions])
def test_options_are_defined_whole_and_read(holder: type[PipelineOptions]) -> None:
    assert complaints(holder, PAGE.read_text()) == []


DEFINED: dict[str, Any] = {"check": whole_number, "help": "Clips.", "unit": "norm"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ["reader"]),
        ({"help": ""}, ["help", "reader"]),
        ({"unit": ""}, ["unit", "reader"]),
    ],
)
def test_an_option_that_lacks_something_is_told(change: dict[str, Any], told: list[str]) -> None:
    said = DEFINED | change

    @dataclass(frozen=True)
    class Added(TrainOptions):
        grad_clip: int | None = option(None, group="model", **said)

    assert complaints(Added, f"{PAGE.read_text()}| `--grad-clip` |") == [
        f"grad_clip: no {x}" for x in told
    ]
    said.pop("check")
    with pytest.raises(TypeError, match="check"):
        option(None, group="model", **said)
    assert "grad_clip: no place in docs/options.md" in complaints(Added, PAGE.read_text())


def test_a_field_that_is_no_option_is_told() -> None:
    @dataclass(frozen=True)
    class Added(TrainOptions):
        grad_clip: int | None = None

    assert complaints(Added, "") == ["grad_clip: no definition"]


def test_the_page_is_that_of_the_definitions() -> None:
    assert PAGE.read_text() == page(), "python -m tests.docs.options_page writes it anew"


def test_the_page_names_the_calls_that_take_an_option() -> None:
    for call in (jvpipe.Pipeline, jvpipe.plan_for):
        taken = {*inspect.signature(call).parameters}
        if call is jvpipe.Pipeline:
            taken.remove("devices")  # its devices are no number
        options = options_of(PipelineOptions)
        told = {name for name, each in options.items() if call.__name__ in takers(each)}
        assert told == taken & options.keys()


@pytest.mark.parametrize(
    ("call", "taker", "beside"),
    [
        (jvpipe.Pipeline.__init__, PIPELINE, {"self", "loss_fn", "optimizer", "devices"}),
        (
            jvpipe.plan_for,
            PLAN_FOR,
            {"loss_fn", "params", "batch", "planner", "optimizer", "model_state", "title"},
        ),
    ],
)
def test_calls_take_the_options_that_are_defined_for_them(
    call: Callable[..., Any], taker: Any, beside: set[str]
) -> None:
    wanted = {name: x for name, x in options_of(PipelineOptions).items() if taker in x.takers}
    given = {n: p for n, p in inspect.signature(call).parameters.items() if n not in beside}
    assert given.keys() == wanted.keys()
    usual = {name: p.default for name, p in given.items() if p.default is not None}
    assert {n: v for n, v in usual.items() if n != "microbatches"} == {
        n: x.default for n, x in wanted.items() if n in usual and n != "microbatches"
    }
    text = inspect.getdoc(jvpipe.Pipeline if taker is PIPELINE else call) or ""
    assert [name for name in given if not re.search(rf"^ *{name}: ", text, re.MULTILINE)] == []


def test_a_name_of_a_release_ago_is_taken_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass(frozen=True)
    class Renamed(PlanOptions):
        clip: int | None = option(None, **DEFINED, group="model", was=("grad_clip",))

    for word in ("--grad-clip=3", "--grad_clip=3"):
        assert read_options(Renamed, [word], "jvpipe.plan") == {"clip": 3}
        assert "warning: grad_clip is called clip now" in capsys.readouterr().err
    assert read_options(Renamed, ["--clip", "4"], "jvpipe.plan") == {"clip": 4}
    assert capsys.readouterr().err == ""


FORMER: dict[type[PipelineOptions], str] = {
    TrainOptions: "stages replicas devices microbatches schedule planner stacked frozen memory_limit "
    "host_memory_limit checkpoint remeasure size dtype sequence_length set batch_size config "
    "model plan steps optimizer learning_rate warmup data tokenizer init_from lora lora_on "
    "export_weights seed run_dir resume trust checkpoint_every keep eval_every early_stop "
    "track adapt nas nas_steps timeline_steps profile export coordinator process_id "
    "num_processes distributed host_address secret_file host_timeout",
    PlanOptions: "stages replicas devices microbatches cuts schedule planner hardware stacked frozen "
    "memory_limit size dtype sequence_length set batch_size model graph compare export lossy "
    "no_lossy import json figure timeline",
}
"""The names of options before this release."""


@pytest.mark.parametrize("holder", FORMER)
def test_names_of_a_release_ago_are_in_the_changelog(
    holder: type[PipelineOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (PAGE.parents[1] / "CHANGELOG.md").read_text()
    today = {x.flag for x in options_of(holder).values()}
    flags = [f"--{name.replace('_', '-')}" for name in FORMER[holder].split()]
    flags += [f"--{old}" for x in options_of(holder).values() for old in x.was]
    for flag in (x for x in flags if x not in today):
        read_options(holder, [flag], "jvpipe")
        assert f"warning: {flag}" in capsys.readouterr().err
        assert f"`{flag}`" in text


# A wrong value of each option of the page: one line, with the value, and what would do.

NUMBER = "must be a whole number"
WRONG: dict[str, tuple[str, str]] = {
    "--stages": ("0", NUMBER),
    "--replicas": ("2;1", "each of --replicas must be a whole number"),
    "--devices": ("0", NUMBER),
    "--microbatches": ("1000000", "of at most 100000"),
    "--schedule": ("1f1p", "did you mean '1f1b'"),
    "--planner": ("evn", "did you mean 'even'"),
    "--stacked": ("layers", "must be None .* or 'per_layer'"),
    "--frozen": ("", "must be patterns of the paths"),
    "--memory-limit": ("2GX", "write bytes, or a text such as '16GiB'"),
    "--host-memory-limit": ("-1", "write bytes"),
    "--checkpoint": ("alwys", "did you mean 'always'"),
    "--state-fates": ("swap", "such as"),
    "--model": ("", "must be a name"),
    "--size": ("", "must be a name"),
    "--dtype": ("", "must be a name"),
    "--sequence-length": ("many", NUMBER),
    "--set": ("blocks", "NAME=VALUE"),
    "--batch-size": ("1.5", NUMBER),
    "--optimizer": ("adamx", "did you mean 'adam"),
    "--learning-rate": ("-1", "above 0"),
    "--warmup": ("-1", NUMBER),
    "--lora": ("0", NUMBER),
    "--lora-on": ("q", "needs --lora"),
    "--export-weights": ("new", "needs --init-from"),
    "--seed": ("-1", NUMBER),
    "--track": ("tensorbord", "did you mean 'tensorboard'"),
    "--checkpoint-every": ("0", NUMBER),
    "--keep": ("0", NUMBER),
    "--eval-every": ("0", NUMBER),
    "--early-stop": ("3", "needs --eval-every"),
    "--nas-steps": ("0", NUMBER),
    "--timeline-steps": ("0", NUMBER),
    "--steps": ("1" * 20, "of at most 2147483647"),
    "--profile": ("0", NUMBER),
    "--figure": ("run.exe", "exe"),
    "--export": ("run.txt", "name the file run.safetensors"),
    "--config": ("nowhere.toml", "cannot be read"),
    "--coordinator": ("host", "HOST:PORT, such as host0:12345"),
    "--process-id": ("-1", NUMBER),
    "--num-processes": ("0", NUMBER),
    "--host-address": ("", "must be a name"),
    "--host-timeout": ("0", "above 0"),
    **dict.fromkeys(
        ("--data", "--tokenizer", "--init-from", "--plan", "--run-dir", "--secret-file"),
        ("x" * 300, "more than 255 bytes"),
    ),
    **dict.fromkeys(
        ("--resume", "--trust", "--adapt", "--nas", "--distributed", "--remeasure", "--group"),
        ("5", "5"),
    ),
    "--whole-layers": ("5", "5"),
}
PLANS: dict[str, tuple[str, str]] = {
    "--cuts": ("x", "each of --cuts must be a whole number"),
    "--hardware": ("h10", "did you mean 'h100'"),
    "--graph": ("x" * 300, "more than 255 bytes"),
    "--compare": ("evn", "did you mean 'even'"),
    "--export": ("megatrn", "did you mean 'megatron'"),
    "--import": ("megatron", "FORMAT:FILE, such as"),
    "--lossy": ("5", "5"),
    "--compile": ("5", "5"),
    "--target": ("h10", "--compile"),
    "--json": ("nowhere/plan.json", "make it, or give another path"),
    "--timeline": ("nowhere/plan.json", "make it, or give another path"),
}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, OSError)) as found:
        call()
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_wrong_value_of_every_option_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {x.flag for x in options_of(TrainOptions).values()} == WRONG.keys()
    assert {x.flag for x in options_of(PlanOptions).values()} <= WRONG.keys() | PLANS.keys()
    for flag, (value, told) in WRONG.items():
        line = refusal(partial(parse, [f"{flag}={value}"]))
        assert re.search(told, line), line
        assert value[:30] in line, line
        assert flag in line or told in line or "memory limit" in line or "unknown" in line, line
    shared = {x.flag for x in options_of(PlanOptions).values()} & WRONG.keys()
    for flag, (value, told) in ({flag: WRONG[flag] for flag in shared} | PLANS).items():
        more = [] if flag == "--graph" else ["--model", "bert"]
        words = [*more, f"{flag}={value}"]
        line = refusal(
            lambda w=words: PlanOptions(**read_options(PlanOptions, w, "jvpipe.plan")).check()
        )
        assert re.search(told, line), line
        assert value[:30] in line, line
    assert main(["--steps", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_empty_path_is_refused() -> None:
    flags = [x.flag for x in options_of(TrainOptions).values() if x.check is checked_path]
    assert {"--run-dir", "--data", "--config", "--export", "--figure"} <= {*flags}
    for words in [*([f"{flag}="] for flag in flags), ["--run-dir=", "--resume"]]:
        line = refusal(partial(parse, words))
        told = "is the empty text '': give a path; the current folder is ."
        assert line == f"{words[0][:-1]} {told}"


SAID: dict[str, tuple[Any, str]] = {
    "stages": (0, "whole number"),
    "replicas": ((2, 0), "whole number"),
    "devices": (0, "whole number"),
    "microbatches": ("2", "whole number"),
    "cuts": ("3:x", "whole number"),
    "schedule": ("1f1p", "did you mean"),
    "planner": ("evn", "did you mean"),
    "hardware": ("h10", "did you mean"),
    "stacked": (True, "per_layer"),
    "frozen": ("base", r"such as \['base/\*'\]"),
    "speeds": ([0], "above 0, such as"),
    "sharding": ({}, "such as sharding="),
    "batch_axis": (3, "must be a name"),
    "aux_reduce": ({"a": "total"}, "use one of 'mean'"),
    "model_state_reduce": ({"a": "total"}, "use one of 'mean'"),
    "compile": ("h10", "did you mean"),
    "memory_limit": (-1, "write bytes"),
    "host_memory_limit": ("much", "write bytes"),
    "checkpoint": ("alwys", "did you mean"),
    "fates": ({1: "swap"}, "such as"),
    "state_fates": ("swap", "such as"),
    **dict.fromkeys(
        ("has_aux", "has_state", "deferred_batch_norm", "grad_norm", "group", "remeasure"),
        (1, "True or False"),
    ),
    "whole_layers": (1, "True or False"),
}


def test_a_wrong_value_of_every_option_of_python_is_told_in_one_line() -> None:
    assert SAID.keys() == options_of(PipelineOptions).keys()
    row = np.ones(4, np.float32)
    loss = lambda params, batch, rng: 0.0  # noqa: E731
    calls: dict[Taker, Callable[..., object]] = {
        PIPELINE: partial(jvpipe.Pipeline, loss, optax.sgd(0.1)),
        PLAN_FOR: partial(jvpipe.plan_for, loss, row, row),
    }
    for taker, call in calls.items():
        for name in (n for n, x in options_of(PipelineOptions).items() if taker in x.takers):
            value, told = SAID[name]
            line = refusal(partial(call, **{name: value}))
            assert re.search(told, line), line
            words = re.findall(r"\w+", str(value)) or [str(value)]
            assert any(word in line for word in words), line
