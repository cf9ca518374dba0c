"""The logits of a folder, and those that float64 NumPy computes from its tensors."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jvpipe.models import llama
from jvpipe.models.checkpoints import from_folder

SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
"""Heads of 64 numbers, as wide as those of Llama 3.2 1B: some pairs rotate slowly."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def tensors() -> dict[str, np.ndarray]:
    """Random weights of a Llama of this shape."""
    draw = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (128, 128), "self_attn.o_proj": (128, 128)}
    shapes |= {"self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128)}
    shapes |= {"mlp.gate_proj": (24, 128), "mlp.up_proj": (24, 128), "mlp.down_proj": (128, 24)}
    shapes |= {"input_layernorm": (128,), "post_attention_layernorm": (128,)}
    of_block = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    ends = {"model.embed_tokens.weight": (300, 128), "model.norm.weight": (128,)}
    return {
        name: draw.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in (of_block | ends | {"lm_head.weight": (300, 128)}).items()
    }


def rates(scaling: Any) -> np.ndarray:
    """The angle per position of each pair of a head, by the published rules."""
    plain = 1e4 ** (-np.arange(32) / 32)
    if scaling is None:
        return plain
    stretched = plain / scaling["factor"]
    if scaling.get("type") == "linear":
        return stretched
    turns = plain * 256 / (2 * np.pi)
    between = (turns - 1) / (4 - 1) * plain + (1 - (turns - 1) / (4 - 1)) * stretched
    return np.where(turns < 1, stretched, np.where(turns > 4, plain, between))


def plain_logits(given: dict[str, np.ndarray], ids: np.ndarray, scaling: Any) -> np.ndarray:
    """The logits [T, V] of one text."""
    wide = {name.removesuffix(".weight"): x.astype(float) for name, x in given.items()}
    of = {name.removeprefix("model.layers.0."): x for name, x in wide.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * of[name]

    angles = np.exp(1j * np.outer(np.arange(len(ids)), rates(scaling)))

    def turned(x: np.ndarray) -> np.ndarray:  # pairs of numbers as complex ones
        return (x[:, :32] + 1j * x[:, 32:]) * angles

    x = of["model.embed_tokens"][ids]
    y = norm(x, "input_layernorm")
    keys, values = turned(y @ of["self_attn.k_proj"].T), y @ of["self_attn.v_proj"].T
    heads = []
    for queries in np.split(y @ of["self_attn.q_proj"].T, 2, axis=1):
        scores = np.real(turned(queries) @ keys.conj().T) / 8
        weights = np.tril(np.exp(scores - scores.max()))
        heads.append(weights / weights.sum(1, keepdims=True) @ values)
    x = x + np.concatenate(heads, 1) @ of["self_attn.o_proj"].T
    y = norm(x, "post_attention_layernorm")
    gate = y @ of["mlp.gate_proj"].T
    hidden = gate / (1 + np.exp(-gate)) * (y @ of["mlp.up_proj"].T)
    return norm(x + hidden @ of["mlp.down_proj"].T, "model.norm") @ of["lm_head"].T


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}, LLAMA3])
def test_the_folder_alone_determines_the_angles(tmp_path: Path, scaling: Any) -> None:
    given, ids = tensors(), np.random.default_rng(1).integers(0, 300, 500)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"rope_scaling": scaling}))
    save_file(given, tmp_path / "model.safetensors")
    workload, lazy = from_folder(tmp_path, jax.random.key(0))
    params, batch = jax.tree.map(np.asarray, lazy), {"tokens": ids[None]}
    ours = llama.logits_function(workload.config)(params, batch, None)[0]
    np.testing.assert_allclose(ours, plain_logits(given, ids, scaling), rtol=0, atol=1e-3)
