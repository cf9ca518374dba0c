"""A compiler is asked in a child: what it says is what compiling here says, once, and its refusals
are one line.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe import _jax
from jvpipe.cost.archive import Archive
from jvpipe.cost.compiling import Compiler, Refusal, Sizes
from jvpipe.cost.presets import P40, PRESETS
from jvpipe.cost.targets import TARGETS, Target, find_target, target_of
from jvpipe.util.extras import MissingExtraError

SHAPES = [jax.ShapeDtypeStruct((64, 32 + 8 * i), jnp.float32) for i in range(5)]
CPU = TARGETS["cpu"]


def gram(x: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.tanh(x @ x.T)
    return y @ y, total + x


def text_of(shape: Any, platform: str) -> str:
    jitted = jax.jit(gram, donate_argnums=1)
    return jitted.trace(shape, shape).lower(lowering_platforms=(platform,)).as_text()


def compiled_here(shape: Any) -> Sizes:
    jitted = jax.jit(gram, donate_argnums=1)
    options = _jax.exact("cpu")
    needs = jitted.lower(shape, shape).compile(compiler_options=options).memory_analysis()
    assert needs
    each = (shape.size * 4, shape.size * 4), (shape.shape[0] ** 2 * 4, shape.size * 4)
    return Sizes(needs.temp_size_in_bytes, *each)


@pytest.mark.thorough
def test_the_child_says_what_compiling_here_says() -> None:
    texts = [text_of(shape, "cpu") for shape in SHAPES]
    compiler = Compiler(CPU)
    assert compiler.sizes([*texts, texts[0]]) == [
        compiled_here(shape) for shape in [*SHAPES, SHAPES[0]]
    ]
    assert compiler.asked == len(SHAPES)


@pytest.mark.thorough
def test_what_was_said_is_kept_on_the_disk(tmp_path: Path) -> None:
    texts = [text_of(shape, "cpu") for shape in SHAPES[:2]]
    first, second = (Compiler(CPU, Archive(tmp_path)) for _ in range(2))
    assert first.sizes(texts[:1]) == second.sizes(texts)[:1]
    assert (first.asked, second.asked) == (1, 1)
    other = Compiler(replace(CPU, topology="another"), Archive(tmp_path))
    other.sizes(texts[:1])
    assert other.asked == 1, "what one target's compiler says is nothing to another's"


def test_a_program_that_is_refused_is_told_apart_from_those_beside_it(tmp_path: Path) -> None:
    good, bad = text_of(SHAPES[0], "cpu"), "module { func.func @main() -> tensor<2xf33> }"
    compiler = Compiler(CPU, Archive(tmp_path))
    with pytest.raises(Refusal, match=r"^the compiler for cpu says: .*") as refused:
        compiler.sizes([good, bad])
    assert refused.value.text == bad
    assert "\n" not in str(refused.value)


def test_a_compiler_that_cannot_start_says_so_in_one_line() -> None:
    nowhere = Target("moon", "moon", package="jaxlib")
    with pytest.raises(ValueError, match=r"^the compiler for moon does not start: .*moon"):
        Compiler(nowhere).sizes([text_of(SHAPES[0], "cpu")])


def test_a_child_that_dies_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho out of memory >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"cpu ended \(exit code 3\): out of memory"):
        Compiler(CPU).sizes(["module {}"])


def test_a_target_without_its_extra_names_it() -> None:
    absent = Target("h1000", "cuda", package="no-such-plugin", extra="aot-cuda")
    with pytest.raises(MissingExtraError, match=r"^the compiler for h1000 is not installed: pip"):
        Compiler(absent).sizes([""])


def test_every_device_of_a_preset_is_a_target_or_is_refused_by_name() -> None:
    known = {"h100", "h200", "v100-a", "a100-80gb", "a100-40gb", "rtx4090", "cpu"}
    for name in known | {"v4", "v5e", "v5p", "v6e"}:
        assert target_of(PRESETS[name].device).name.split("-")[0] in name
    with pytest.raises(ValueError, match="no compile target is known for Tesla P40: name one of"):
        target_of(P40)
    with pytest.raises(ValueError, match="unknown compile target 'h10': did you mean 'h100'"):
        find_target("h10")
    for wrong in ("v5e:big", "v5e:0x4", "v5p:2x2x0"):
        told = f"{wrong}: a topology is two or three counts of at least 1, such as v5"
        with pytest.raises(ValueError, match=told):
            find_target(wrong)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Plugins of compilers write to the error output as they wake: in the child alone."""
    before = {name for name in os.environ if name.startswith("TPU")}
    yield
    assert {name for name in os.environ if name.startswith("TPU")} == before


@pytest.mark.skipif(not find_spec("jax_cuda12_plugin"), reason="needs jvpipe[aot-cuda]")
def test_a_gpu_that_is_not_here_tells_its_bytes(quiet: None) -> None:
    (sizes,) = Compiler(find_target("h100")).sizes([text_of(SHAPES[0], "cuda")])
    assert sizes.temp_size_in_bytes >= 64 * 64 * 4, "the product before the last one is no result"


@pytest.mark.skipif(not find_spec("libtpu"), reason="needs jvpipe[aot-tpu]")
def test_a_tpu_that_is_not_here_tells_its_bytes_with_padding(quiet: None) -> None:
    (sizes,) = Compiler(find_target("v5e")).sizes([text_of(SHAPES[0], "tpu")])
    assert sum(sizes.each_argument) == 2 * 32 * 128 * 4, (
        "the 64 are stored as 128, in tiles of 8 x 128"
    )
