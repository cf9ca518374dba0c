"""Exported parameters are read by the safetensors library alone."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jvpipe.export import write_safetensors


def test_keys_are_paths_and_values_survive(tmp_path: Path) -> None:
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    params = {"layers": [{"kernel": kernel.T}, {"bias": jnp.ones(3, jnp.bfloat16)}], "scale": np.float32(2.5)}
    write_safetensors(tmp_path / "model.safetensors", params)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == ["layers.0.kernel", "layers.1.bias", "scale"]
        np.testing.assert_array_equal(file.get_tensor("layers.0.kernel"), kernel.T)
        assert file.get_tensor("scale") == 2.5
        assert file.get_tensor("layers.1.bias").dtype == jnp.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
