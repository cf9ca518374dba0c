"""Weights of transformers give the logits of transformers; `tests/data/make_weights.py` made
them.
"""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jvpipe import models
from jvpipe.cli.outputs import parameter_names
from jvpipe.models import bert, gemma, gpt2, llama, qwen3, t5
from jvpipe.models.weight_folder import Folder, open_folder
from jvpipe.models.weights import Format, read_fields, read_params, write_params
from jvpipe.models.workload import OF_FOLDERS
from tests.grid import grid

WEIGHTS = Path(__file__).parents[1] / "data" / "weights"
MODELS: dict[str, Any] = {
    "bert": bert,
    "bert_untied": bert,
    "gpt2": gpt2,
    "gpt2_untied": gpt2,
    "t5": t5,
    "t5_untied": t5,
    "llama": llama,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma,
    "gemma3_text": gemma,
}


def given(name: str, path: Path, **options: Any) -> tuple[Any, Any]:
    """The configuration and the parameters of a folder."""
    form: Format = MODELS[name].FORMAT
    folder = open_folder(path)
    known = OF_FOLDERS[folder.told["model_type"]]
    workload = models.load(known, **(read_fields(folder, form) | options))
    shapes = jax.eval_shape(workload.init, jax.random.key(0))
    return workload.config, read_params(folder, form, workload.config, shapes)


def logits(name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Those of a folder's model, and those that transformers found for the folder of this name."""
    config, lazy = given(name, path)
    params, told = jax.tree.map(np.asarray, lazy), load_file(WEIGHTS / name / "logits.safetensors")
    batch = {key: jnp.asarray(value) for key, value in told.items() if key != "logits"}
    if MODELS[name] is bert:
        batch["positions"] = jnp.broadcast_to(jnp.arange(12), (2, 12))
    assert float(np.std(told["logits"])) > 0.1
    return np.asarray(
        jax.jit(MODELS[name].logits_function(config))(params, batch, None)[:, :, ::7]
    ), told["logits"]


def changed(name: str, into: Path, **settings: Any) -> Path:
    """A copy of a folder whose config.json has other settings; None: it lacks them."""
    shutil.copytree(WEIGHTS / name, into)
    told = json.loads((into / "config.json").read_text()) | settings
    (into / "config.json").write_text(
        json.dumps({key: value for key, value in told.items() if value is not None})
    )
    return into


@pytest.mark.parametrize("name", grid(MODELS, *list(MODELS)[::2]))
def test_the_logits_are_those_of_transformers(name: str) -> None:
    ours, theirs = logits(name, WEIGHTS / name)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    there, form = shutil.copytree(WEIGHTS / name, tmp_path / "before"), MODELS[name].FORMAT
    (there / "tokenizer.json").write_text("{}")
    (there / "pytorch_model.bin").write_bytes(b"weights of before")
    config, lazy = given(name, there)
    write_params(open_folder(there), form, config, lazy, tmp_path / "after")
    files = {file.name for file in there.iterdir()} - {"pytorch_model.bin", "logits.safetensors"}
    assert {file.name for file in (tmp_path / "after").iterdir()} == files
    for file in files:
        before, after = there / file, tmp_path / "after" / file
        if file.endswith(".safetensors"):
            tensors, written = load_file(before), load_file(after)
            assert {k: (v.dtype, v.tobytes()) for k, v in tensors.items()} == {
                k: (v.dtype, v.tobytes()) for k, v in written.items()
            }
            with safe_open(after, "numpy") as opened:
                assert opened.metadata() == {"format": "pt"}
        else:
            assert before.read_bytes() == after.read_bytes()


@pytest.mark.parametrize(
    ("name", "settings", "factor"),
    [
        ("t5", {"scale_decoder_outputs": False}, 16**0.5),
        ("t5_untied", {"scale_decoder_outputs": True}, 16**-0.5),
        ("t5", {"scale_decoder_outputs": None}, 1),
        ("t5_untied", {"scale_decoder_outputs": None, "tie_word_embeddings": False}, 1),
    ],
)
def test_whether_logits_are_scaled_is_told_apart_from_whose_head_it_is(
    tmp_path: Path, name: str, settings: dict[str, bool | None], factor: float
) -> None:
    ours, theirs = logits(name, changed(name, tmp_path / "t5", **settings))
    np.testing.assert_allclose(ours, factor * theirs, rtol=0, atol=1e-4 * max(1, factor))


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        (
            "gpt2",
            {"rope_theta": 1e4},
            "config.json has rope_theta 10000.0, which jvpipe does not know: .* remove the key",
        ),
        (
            "t5",
            {"quantization_config": {"bits": 8}},
            "has quantization_config {'bits': 8}, which jvpipe does not know",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "idx True: only False is supported",
        ),
        (
            "gpt2",
            {"tie_word_embeddings": False},
            r"lm_head.weight is missing in the folder, but has \[300, 16\]",
        ),
        ("llama", {"attention_bias": True}, "attention_bias True: only False"),
        ("qwen3", {"hidden_act": "relu"}, "hidden_act 'relu': only 'silu' is supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'yarn': only 'default', 'linear' or 'llama3' is supported",
        ),
        (
            "gemma",
            {"rope_parameters": {"rope_theta": 1e4, "beta_fast": 32}},
            "config.json, in its RoPE settings, has beta_fast 32, which jvpipe does not know",
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            r"layer_types .*: it must list 3 blocks, each as full_attention or sliding_attention",
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 50.0},
                    "sliding_attention": {"rope_type": "linear", "factor": 4.0},
                }
            },
            "sliding_attention in rope_parameters of config.json has rope_type 'linear': only",
        ),
        ("bert", {"is_decoder": True}, "is_decoder True: only False is supported"),
        (
            "bert",
            {"attention_probs_dropout_prob": 0.0},
            "prob 0.0: only 0.1 is supported",
        ),
        (
            "bert",
            {"pruned_heads": {"0": [1]}},
            "pruned_heads {'0': .1.}: only {} or None is supported",
        ),
        (
            "t5",
            {"dense_act_fn": "gelu"},
            "dense_act_fn 'gelu': only 'relu' is supported",
        ),
        (
            "t5",
            {"feed_forward_proj": "gated-silu"},
            "'gated-silu': only 'relu' or 'gated-gelu'",
        ),
        ("t5", {"d_kv": None}, "config.json has no 'd_kv'"),
    ],
)
def test_a_setting_that_may_change_what_is_computed_is_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        given(name, changed(name, tmp_path / name, **settings))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "stretch", 1.0),
        ("llama", "stretch_from", 0),
        ("qwen3", "theta", 50.0),
        ("gemma2", "window", 5),
        ("gemma2", "spans", "GL"),
        ("gemma2", "score_width", 6.0),
        ("gemma2", "score_cap", 0.0),
        ("gemma2", "logit_cap", 0.0),
        ("gemma3_text", "spans", "L"),
        ("gemma3_text", "local_theta", 50.0),
        ("gemma3_text", "stretch", 1.0),
    ],
)
def test_each_field_of_the_family_matters(name: str, field: str, value: Any) -> None:
    config, lazy = given(name, WEIGHTS / name)
    assert getattr(config, field) != value
    other, told = (
        replace(config, **{field: value}),
        load_file(WEIGHTS / name / "logits.safetensors"),
    )
    params, batch = jax.tree.map(np.asarray, lazy), {"tokens": jnp.asarray(told["tokens"])}
    ours = llama.logits_function(other)(params, batch, None)[:, :, ::7]
    assert np.abs(ours - told["logits"]).max() > 5e-4, "far from what logits may differ by"


OLDER = {
    "llama": {
        "rope_parameters": None,
        "rope_theta": 50.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {"rope_parameters": None, "rope_theta": 1e4, "layer_types": None},
    "gemma": {"rope_parameters": None, "hidden_act": "gelu", "hidden_activation": None},
    "gemma2": {
        "rope_parameters": None,
        "layer_types": None,
        "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma3_text": {
        "rope_parameters": None,
        "rope_theta": 50.0,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    },
}
"""What older versions of transformers write in place of what there is."""


@pytest.mark.parametrize("name", OLDER)
def test_older_settings_say_the_same(tmp_path: Path, name: str) -> None:
    older, newer = changed(name, tmp_path / name, **OLDER[name]), WEIGHTS / name
    then, now = (read_fields(open_folder(x), llama.FORMAT) for x in (older, newer))
    assert then == now


def test_blocks_whose_windows_come_last() -> None:
    told = json.loads((WEIGHTS / "qwen3" / "config.json").read_text()) | {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
        "layer_types": None,
    }
    fields = read_fields(Folder(Path(), told, {}), llama.FORMAT)
    assert (fields["spans"], fields["window"]) == ("GGL", 4)


PUBLISHED = {
    "bert": {
        "finetuning_task": None,
        "gradient_checkpointing": False,
        "directionality": "bidi",
        "torch_dtype": "float16",
        "pooler_fc_size": 768,
        "pooler_type": "first_token_transform",
        "position_embedding_type": "absolute",
        "_name_or_path": "bert",
        "output_past": True,
        "id2label": {"0": "no"},
        "classifier_dropout": 0.5,
    },
    "gpt2": {
        "n_ctx": 16,
        "model_max_length": 16,
        "task_specific_params": {"text-generation": {"do_sample": True}},
        "gradient_checkpointing": False,
        "_num_labels": 1,
        "n_special": 0,
        "predict_special_tokens": True,
    },
    "t5": {
        "n_positions": 512,
        "output_past": True,
        "decoder_start_token_id": 0,
        "max_length": 20,
        "num_beams": 4,
        "task_specific_params": {"summarization": {"prefix": "summarize: "}},
        "tokenizer_class": "T5Tokenizer",
    },
}
"""What configurations of published models hold beside what newer ones do."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_models_are_understood(tmp_path: Path, name: str) -> None:
    folder = open_folder(changed(name, tmp_path / name, **PUBLISHED[name]))
    there = open_folder(WEIGHTS / name)
    assert read_fields(folder, MODELS[name].FORMAT) == read_fields(there, MODELS[name].FORMAT)


@pytest.mark.parametrize(
    ("name", "tensor", "source"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("t5", "encoder.embed_tokens.weight", "shared.weight"),
    ],
)
def test_a_tensor_that_repeats_another_is_to_be_equal_to_it(
    tmp_path: Path, name: str, tensor: str, source: str
) -> None:
    file = changed(name, tmp_path / name) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {tensor: tensors[source]}, file)
    given(name, file.parent)
    save_file(tensors | {tensor: tensors[source] + 1}, file)
    with pytest.raises(
        ValueError, match=f"{tensor} and .* differ in the folder, but are one parameter"
    ):
        given(name, file.parent)


def test_a_head_that_repeats_the_embedding_is_tied(tmp_path: Path) -> None:
    file = changed("t5", tmp_path / "t5") / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["shared.weight"]}, file)
    assert given("t5", file.parent)[0].tied
    with pytest.raises(ValueError, match=r"lm_head.weight and shared.weight differ in the folder"):
        given("t5_untied", WEIGHTS / "t5_untied", tied=True)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (
            {"h.0.attn.lora": np.ones(2, np.float32)},
            r"h.0.attn.lora has the shape \[2\] in the folder, but",
        ),
        (
            {"h.0.attn.c_attn.bias_scale": np.ones(1, np.float32)},
            r"bias_scale has the shape \[1\] in the folder, but is missing",
        ),
        ({"wte.weight": np.ones((300, 16), np.float32)}, "are two tensors for one parameter"),
        (
            {"transformer.ln_f.weight": np.ones(16, np.int8)},
            "ln_f.weight has the type I8: save the model with one of the types F64, F32",
        ),
    ],
)
def test_a_tensor_that_nobody_reads_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], told: str
) -> None:
    file = changed("gpt2", tmp_path / "gpt2") / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    with pytest.raises(ValueError, match=told):
        given("gpt2", file.parent)


def test_masks_and_positions_are_no_weights(tmp_path: Path) -> None:
    file = changed("gpt2", tmp_path / "gpt2") / "model.safetensors"
    buffers = {
        f"transformer.h.1.attn.{name}": np.ones((1, 1, 4, 4), np.float32)
        for name in ("bias", "masked_bias")
    }
    save_file(load_file(file) | buffers, file)
    jax.tree.map(
        np.testing.assert_array_equal,
        given("gpt2", file.parent)[1],
        given("gpt2", WEIGHTS / "gpt2")[1],
    )


def test_only_a_new_or_empty_folder_is_written(tmp_path: Path) -> None:
    config, lazy = given("gpt2", WEIGHTS / "gpt2")
    write = partial(write_params, open_folder(WEIGHTS / "gpt2"), gpt2.FORMAT, config, lazy)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"into=.*old exists already: name a new folder"):
        write(tmp_path / "old")
    with pytest.raises(ValueError, match=r"there is no folder .*none; make it first"):
        write(tmp_path / "none" / "new")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_anew_has_the_same_parameters(name: str) -> None:
    _, params = given(name, WEIGHTS / name)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert all(np.asarray(leaf).shape == leaf.shape for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "options", [{"gated": True}, {"tied": False}, {"gated": True, "tied": False}]
)
def test_each_parameter_of_later_t5s_has_a_source(options: dict[str, bool]) -> None:
    config = models.load("t5", "tiny", published=True, **options).config
    shapes = jax.eval_shape(t5.parts(config).init, jax.random.key(0))
    assert sorted(t5.FORMAT.sources(config)) == sorted(parameter_names(shapes))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        (
            "bert",
            {"width": 32},
            r"embeddings.word_embeddings.weight has the shape \[300, 16\] in the folder, "
            r"but has \[300, 32\]",
        ),
        ("gpt2", {"blocks": 3}, r"h.2.ln_1.weight is missing in the folder, but has \[16\]"),
        (
            "t5",
            {"blocks": 1},
            r"decoder.block.1.layer.0.SelfAttention.k.weight has the shape \[12, 16\] "
            "in the folder, but is missing",
        ),
    ],
)
def test_the_first_tensor_that_differs_is_named(
    name: str, options: dict[str, int], told: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} has another architecture: {told}"):
        given(name, WEIGHTS / name, **options)


def test_old_names_parts_and_half_precision_are_read(tmp_path: Path) -> None:
    shutil.copy(WEIGHTS / "bert" / "config.json", tmp_path)
    tensors = load_file(WEIGHTS / "bert" / "model.safetensors")
    old = {"weight": "gamma", "bias": "beta"}
    renamed = {
        ".".join([*name.split(".")[:-1], old[name.split(".")[-1]]])
        if "LayerNorm" in name
        else name: value
        for name, value in tensors.items()
    } | {"bert.pooler.dense.weight": np.ones((16, 16), np.float16)}
    names = sorted(renamed)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file(
            {name: renamed[name] for name in names if weight_map[name] == part}, tmp_path / part
        )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, expected = given("bert", WEIGHTS / "bert")
    _, found = given("bert", tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_no_folder_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"holds no weights: it should have .* \(.*config.json: No such file"
    ):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        open_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="holds no weights"):
        open_folder(tmp_path)
    for config in ("[1]", '"text"', "[" * 100_000):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match="holds no weights"):
            open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for index in ("[]", "{}", '{"weight_map": ["part"]}', '{"weight_map": {"a": [1]}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match="holds no weights"):
            open_folder(tmp_path)
