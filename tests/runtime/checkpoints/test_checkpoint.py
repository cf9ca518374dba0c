"""Checkpoints outlive whatever happens while they are written, and damage to them is told."""

import resource
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.runtime.state.checkpoints.checkpoint import (
    checkpoint_extra,
    save_checkpoint,
)
from tests.moments import copied_at_every_operation
from tests.saved import load_checkpoint

META = {"step": 1, "extra": {}}


def arrays(value: float) -> dict[str, dict[str, Any]]:
    return {
        "parameter": {"a/b": np.full((3, 4), value, np.float32), "": np.asarray(value, np.float32)},
        "state": {},
    }


def value_in(path: Path) -> float:
    return float(load_checkpoint(path)[0]["parameter"]["a/b"][0, 0])


def test_a_folder_with_a_line_break_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/\u00e9\\n' holds no checkpoint that jvpipe saved"):
        checkpoint_extra(tmp_path / "\u00e9\n")
    (tmp_path / "a\nb").touch()
    with pytest.raises(ValueError, match=r"/a\\nb' is a file, and a checkpoint is a folder"):
        save_checkpoint(tmp_path / "a\nb", arrays(1.0), META)


def test_whenever_a_save_is_cut_short_the_newest_whole_one_is_restored(tmp_path: Path) -> None:
    saved, copies = tmp_path / "there" / "saved", tmp_path / "copies"
    save_checkpoint(saved, arrays(1.0), META)
    with copied_at_every_operation(saved.parent, copies):
        save_checkpoint(saved, arrays(2.0), META)
    values = [value_in(moment / "saved") for moment in sorted(copies.iterdir())]
    assert len(values) > 12
    assert values == sorted(values)
    assert set(values) == {1.0, 2.0}
    for moment in list(copies.iterdir())[
        ::10
    ]:  # what a killed process left does not mislead the next one
        save_checkpoint(moment / "saved", arrays(3.0), META)
        assert value_in(moment / "saved") == 3.0
        assert len(list((moment / "saved").iterdir())) == 1


def test_a_file_in_the_way_is_named_and_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(
        ValueError, match="notes is a file, and a checkpoint is a folder: save under another name"
    ):
        save_checkpoint(tmp_path / "notes", arrays(1.0), META)
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_full_disk_is_one_error_and_the_older_checkpoint_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, arrays(1.0), META)
    noise = np.random.default_rng(0)
    large = {f"a{i}": noise.random((100, 100)) for i in range(10)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            OSError, match=f"cannot write the checkpoint {tmp_path}: .*File too large"
        ):
            save_checkpoint(tmp_path, {"parameter": large}, META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capfd.readouterr().err == ""
    assert value_in(tmp_path) == 1.0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_bit_that_flips_anywhere_is_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = np.random.default_rng(0).random((30, 30)).astype(np.float32)
    save_checkpoint(tmp_path, {"parameter": {"a": values}}, META)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert any(path.stat().st_size > values.nbytes // 2 for path in files)
    for path in files:
        content = path.read_bytes()
        for at in {0, len(content) // 2, len(content) - 1}:
            damaged = bytearray(content)
            damaged[at] ^= 1 << at % 8
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"^{tmp_path} is damaged: .*") as told:
                load_checkpoint(tmp_path)
            assert "\n" not in str(told.value)
        path.write_bytes(content)
    assert (load_checkpoint(tmp_path)[0]["parameter"]["a"] == values).all()
    assert capfd.readouterr().err == ""


def test_arrays_of_every_kind_come_back(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    some = np.random.default_rng(0).random((4, 6)).astype(np.float32)
    given = {
        "turned": some.T,
        "scalar": some[0, 0, None].reshape(()),
        "nothing": np.zeros((0, 3), jnp.bfloat16),
        "keys": keys,
        "no keys": keys[:0],
    }
    given |= {
        str(t): some.astype(t)
        for t in (jnp.bfloat16, jnp.int4, jnp.float8_e5m2, np.complex64, np.complex128)
    }
    save_checkpoint(
        tmp_path, {"parameter": given, "state": {"alone": np.zeros((4, 0))}, "empty": {}}, META
    )
    loaded, _ = load_checkpoint(tmp_path)
    assert loaded["state"]["alone"].shape == (4, 0)
    assert loaded["empty"] == {}
    assert loaded["parameter"].keys() == given.keys()
    for name, x in given.items():
        y = loaded["parameter"][name]
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        if "keys" in name:
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)
