"""Each example trains from the command line, with the bits of one device, and is short."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jvpipe
from jvpipe.cli.own_model import find_model
from tests.commands import finished
from tests.end_to_end.test_libraries import permissive
from tests.grid import grid

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = {
    "llama.py": "llama",
    "plain.py": "Spiral",
    "lora.py": "lora",
    "unet.py": "unet",
    "experts.py": "experts",
    "with_linen.py": "Shapes",
    "with_nnx.py": "Adding",
    "with_equinox.py": "Waves",
    "with_haiku.py": "Brackets",
}
PROGRAMS = {"finetune_lora.py"}
"""Those that are no model for the command line; they have tests of their own."""
ALSO_ALONE = ("plain.py", "lora.py")
"""Parameters, and frozen ones beside them; `make thorough` tries the second and a state too."""


def test_examples_are_all_tried_and_short() -> None:
    found = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert found.keys() == NAMES.keys() | PROGRAMS
    lengths = {name: len(text.splitlines()) for name, text in found.items()}
    assert lengths["llama.py"] < 100  # README.md and docs/start.md promise this
    assert max(lengths.values()) <= 130
    for file, name in NAMES.items():
        assert f"--model examples/{file}:{name} --stages 2" in found[file]


def trained(file: str, stages: int, run: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of two steps of an example, and its parameters then."""
    model = (
        "--model",
        f"{EXAMPLES / file}:{NAMES[file]}",
        "--batch-size",
        "8",
        "--microbatches",
        "2",
        "--steps",
        "2",
    )
    weights = ("--export", str(run.with_suffix(".safetensors")))
    done = finished(
        *model, "--stages", str(stages), "--planner", "even", "--run-dir", str(run), *weights
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return losses, load_file(weights[1])


@pytest.mark.parametrize("file", grid(NAMES, "plain.py"))
def test_an_example_has_the_bits_of_one_device(file: str, tmp_path: Path) -> None:
    losses, params = trained(file, 2, tmp_path / "two")
    expected, alone = trained(file, 1, tmp_path / "one")
    assert losses == expected
    assert params.keys() == alone.keys()
    for name, values in params.items():
        np.testing.assert_array_equal(values, alone[name])


@pytest.mark.parametrize("file", grid(sorted(NAMES.keys() - ALSO_ALONE), "with_nnx.py"))
def test_an_example_trains(file: str, tmp_path: Path) -> None:
    losses, params = trained(file, 2, tmp_path / "two")
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert params


@pytest.mark.thorough
@permissive
def test_the_llamas_plan_holds_what_its_run_holds() -> None:
    llama = find_model(f"{EXAMPLES / 'llama.py'}:llama")
    batch, optimizer = llama.abstract_batch(8), llama.optimizer(10)
    given = {"hardware": "h100", "microbatches": 4, "optimizer": optimizer}
    found = jvpipe.plan_for(llama.loss_fn, llama.init, batch, 2, **given)
    assert sum(found.plan.cuts) >= llama.config.layers
    run = llama.open_data(None, Path(), 0, 8)
    pipe = jvpipe.Pipeline(llama.loss_fn, optimizer, found.plan, 4)
    state, metrics = pipe.step(pipe.init(llama.init, batch, jax.random.key(0)), next(run.train))
    assert float(metrics["loss"]) == pytest.approx(np.log(256), rel=0.2)
    jax.block_until_ready(state)
    assert found.held_bytes == [pipe.ledger.peak_bytes[device] for device in jax.devices()[:2]]
