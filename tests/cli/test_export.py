"""Exported parameters are read by the safetensors library alone."""

import os
import resource
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jvpipe.cli.outputs import check_writable, write_safetensors
from jvpipe.runtime.state.checkpoints.checkpoint import save_checkpoint


def test_keys_are_paths_and_values_survive(tmp_path: Path) -> None:
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    params = {
        "layers": [{"kernel": kernel.T}, {"bias": jnp.ones(3, jnp.bfloat16)}],
        "scale": np.float32(2.5),
    }
    write_safetensors(tmp_path / "model.safetensors", params)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == ["layers.0.kernel", "layers.1.bias", "scale"]
        np.testing.assert_array_equal(file.get_tensor("layers.0.kernel"), kernel.T)
        assert file.get_tensor("scale") == 2.5
        assert file.get_tensor("scale").shape == ()
        assert file.get_tensor("layers.1.bias").dtype == jnp.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "model.safetensors")
    for path, told in (
        (tmp_path, "this is a folder"),
        (tmp_path / "no" / "file", "there is no folder"),
        (
            tmp_path / "model.npz",
            "parameters are written in the format safetensors; name the file model.safetensors",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            check_writable(path)


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones(3)})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=f"cannot write {path}: .*File too large"):
            write_safetensors(path, {"a": np.ones(3000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_who_may_read_weights_follows_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(3)})
        save_checkpoint(tmp_path / "state", {"parameter": {"a": np.ones(3)}}, {})
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}
