"""Weights of transformers give the logits of transformers; `tests/data/make_weights.py` made them."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jvpipe import models
from jvpipe.cli.export import parameter_names
from jvpipe.models import bert, gpt2, t5
from jvpipe.models.weights import Format, open_folder, read_params

WEIGHTS = Path(__file__).parents[1] / "data" / "weights"
MODELS = {"bert": bert, "gpt2": gpt2, "t5": t5}


def given(name: str, path: Path, **options: Any) -> tuple[Any, Any]:
    """The configuration and the parameters of a folder."""
    form: Format = MODELS[name].FORMAT
    folder = open_folder(path)
    config = models.load(name, **(form.fields(folder.told) | options)).config
    shapes = jax.eval_shape(MODELS[name].parts(config).init, jax.random.key(0))
    return config, read_params(folder, form, config, shapes)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers(name: str) -> None:
    config, params = given(name, WEIGHTS / name)
    told = load_file(WEIGHTS / name / "logits.safetensors")
    batch = {key: jnp.asarray(value) for key, value in told.items() if key != "logits"}
    if name == "bert":
        batch["positions"] = jnp.broadcast_to(jnp.arange(12), (2, 12))
    logits = jax.jit(MODELS[name].logits_function(config))(params, batch, None)
    assert float(np.std(told["logits"])) > 0.1
    np.testing.assert_allclose(logits[:, :, ::7], told["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_anew_has_the_same_parameters(name: str) -> None:
    config, params = given(name, WEIGHTS / name)
    fresh = MODELS[name].parts(config).init(jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("options", [{"gated": True}, {"tied": False}, {"gated": True, "tied": False}])
def test_each_parameter_of_later_t5s_has_a_source(options: dict[str, bool]) -> None:
    config = models.load("t5", "tiny", published=True, **options).config
    shapes = jax.eval_shape(t5.parts(config).init, jax.random.key(0))
    assert sorted(t5.FORMAT.sources(config)) == sorted(parameter_names(shapes))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("bert", {"width": 32}, r"embeddings.word_embeddings.weight is \[300, 16\] there, \[300, 32\] here"),
        ("gpt2", {"blocks": 3}, r"h.2.ln_1.weight is missing there, \[16\] here"),
        ("t5", {"blocks": 1}, r"decoder.block.1.layer.0.SelfAttention.k.weight is \[12, 16\] there, missing here"),
    ],
)
def test_the_first_tensor_that_differs_is_named(name: str, options: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is of another architecture: {told}"):
        given(name, WEIGHTS / name, **options)


def test_old_names_parts_and_half_precision_are_read(tmp_path: Path) -> None:
    shutil.copy(WEIGHTS / "bert" / "config.json", tmp_path)
    tensors = load_file(WEIGHTS / "bert" / "model.safetensors")
    old = {"weight": "gamma", "bias": "beta"}
    renamed = {
        ".".join([*name.split(".")[:-1], old[name.split(".")[-1]]]) if "LayerNorm" in name else name: value
        for name, value in tensors.items()
    } | {"bert.pooler.dense.weight": np.ones((16, 16), np.float16)}
    names = sorted(renamed)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({name: renamed[name] for name in names if weight_map[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, expected = given("bert", WEIGHTS / "bert")
    _, found = given("bert", tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_no_folder_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no weights: it should have .* \(.*config.json: No such file"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        open_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="holds no weights"):
        open_folder(tmp_path)


def test_a_setting_that_is_not_known_is_refused() -> None:
    told = json.loads((WEIGHTS / "t5" / "config.json").read_text())
    with pytest.raises(ValueError, match="feed_forward_proj 'gated-silu': of such models only 'relu' or 'gated-gelu'"):
        t5.FORMAT.fields(told | {"feed_forward_proj": "gated-silu"})
