"""A run can begin with weights of transformers: the model is then as the folder tells, or the
folder is refused.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jvpipe import models
from jvpipe.cli.command_line import parse
from jvpipe.cli.command_options import TrainOptions, fields_of
from jvpipe.cli.outputs import parameter_names
from jvpipe.cli.own_model import find_model
from jvpipe.cli.run_model import as_in_folder, first_params
from tests.commands import finished
from tests.models.test_weights import WEIGHTS, given


def options(name: str, **more: object) -> TrainOptions:
    return replace(TrainOptions(model=name, init_from=str(WEIGHTS / name)), **more)


def begun(asked: TrainOptions) -> tuple[TrainOptions, models.Workload]:
    known = as_in_folder(asked)
    return known, find_model(known.model, known.size, fields_of(known))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "qwen3", "gemma"])
def test_the_model_is_as_the_folder_tells(name: str) -> None:
    known, workload = begun(options(name))
    config, params = given(name, WEIGHTS / name)
    assert workload.config == config
    jax.tree.map(np.testing.assert_array_equal, first_params(known, workload), params)


def test_what_is_given_wins() -> None:
    _, workload = begun(options("gpt2", set=("dropout=0.25",), sequence_length=8))
    assert (workload.config.dropout, workload.config.tokens, workload.config.positions) == (
        0.25,
        8,
        16,
    )
    _, workload = begun(TrainOptions(model="gpt2"))
    assert first_params(TrainOptions(model="gpt2"), workload) is workload.init


def test_a_size_is_to_be_that_of_the_folder() -> None:
    known, workload = begun(options("bert", size="tiny"))
    with pytest.raises(
        ValueError, match=r"word_embeddings.weight has the shape \[300, 16\] in the folder, but"
    ):
        first_params(known, workload)


def test_folders_and_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for asked, told in (
        (
            options("bert", init_from=str(WEIGHTS / "t5")),
            "has the weights of t5, but --model is bert: give --model t5",
        ),
        (
            options("bert", model="amoebanet"),
            "weights can be read for bert, gemma, gpt2, llama, qwen3, t5, but not for amoebanet",
        ),
        (options("bert", init_from=str(tmp_path)), "holds no weights"),
        (options("bert", sequence_length=64), "tokens=64 are more than the 16 positions"),
    ):
        with pytest.raises(ValueError, match=told):
            begun(asked)
    shutil.copytree(WEIGHTS / "gpt2", tmp_path / "gpt2")
    told = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    del told["n_head"]
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"config\.json has no 'n_head'"):
        begun(options("gpt2", init_from=str(tmp_path / "gpt2")))


@pytest.mark.thorough
def test_adapters_are_trained_and_given_back_to_transformers(tmp_path: Path) -> None:
    """From a folder to a folder, under a limit that full fine-tuning could not keep."""
    lines, tuned = tmp_path / "texts.jsonl", tmp_path / "tuned"
    texts = [f"The {i}th sentence is much like the {i + 1}th one." for i in range(400)]
    lines.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    base = shutil.copytree(WEIGHTS / "llama", tmp_path / "base")
    run = ["--run-dir", str(tmp_path / "run"), "--planner", "even", "--batch-size", "4"]
    asked = ["--model", "llama", "--init-from", str(base), "--lora", "2", "--data", str(lines)]
    done = finished(*asked, *run, "--steps", "2", "--export", str(tmp_path / "all.safetensors"))
    assert done.returncode == 0, done.stderr
    assert "reading the weights took" in done.stdout
    again = ["--resume", "--steps", "3", "--export-weights", str(tuned)]
    done = finished(*run[:2], *again, "--export", str(tmp_path / "all.safetensors"))
    assert done.returncode == 0, done.stderr
    trained = load_file(tmp_path / "all.safetensors")
    _, before = given("llama", base)
    config, after = given("llama", tuned)
    named = parameter_names(before)
    assert config.blocks == 3
    for name, array in parameter_names(after).items():
        wanted = np.asarray(named[name])
        np.testing.assert_array_equal(trained[name], wanted)  # the base stays as it is
        adapter = name.replace(".kernel", ".lora.lora_")
        if f"{adapter}a" in trained:
            assert np.abs(trained[f"{adapter}b"]).max() > 0
            wanted = wanted + trained[f"{adapter}a"] @ trained[f"{adapter}b"]
        np.testing.assert_allclose(np.asarray(array), wanted, rtol=2**-8, atol=1e-6)  # bfloat16
    assert (tuned / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_options_of_weights_that_do_not_go_together(tmp_path: Path) -> None:
    there = str(WEIGHTS / "llama")
    for asked, told in (
        (["--lora-on", "*"], r"--lora-on \* needs --lora, the rank"),
        (["--lora", "0"], "--lora must be a whole number of at least 1, not 0"),
        (["--export-weights", str(tmp_path / "new")], "needs --init-from, the folder whose layout"),
        (["--init-from", there, "--export-weights", there], "exists already: name a new folder"),
        (
            ["--init-from", there, "--export-weights", str(tmp_path / "no" / "new")],
            "there is no folder",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            parse(["--model", "llama", *asked])
