"""Layers that also sleep: paced layers that leave the cores alone, on devices whose slowness can be
set.

The sleep is a call of the compiler's foreign function interface; `nap.cc` is compiled when it is
first asked for.
"""

import ctypes
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@cache
def _library() -> ctypes.CDLL:
    path = Path(tempfile.mkdtemp(prefix="jvpipe-nap-")) / "nap.so"
    source, include = Path(__file__).with_name("nap.cc"), jax.ffi.include_dir()
    options = ["-w", "-O1", "-std=c++17", "-fPIC", "-shared", "-I", include]
    subprocess.run(["g++", *options, str(source), "-o", str(path)], check=True)
    found = ctypes.CDLL(str(path))
    found.set_slowness.argtypes = [ctypes.c_int, ctypes.c_double]
    found.set_noise.argtypes = [ctypes.c_double, ctypes.c_double, ctypes.c_int]
    jax.ffi.register_ffi_target("nap", jax.ffi.pycapsule(found.nap), platform="cpu")
    return found


def set_slowness(device: int, factor: float) -> None:
    """From now on naps on this device take so many times as long."""
    _library().set_slowness(device, factor)


def set_noise(noise: float, outliers: float, seed: int = 0) -> None:
    """Naps take within `noise` of their time; a share `outliers` of them 1 + gamma(2, 1) times as
    long.
    """
    _library().set_noise(noise, outliers, seed)


def sleep(x: jax.Array, seconds: float) -> jax.Array:
    """A copy of `x` that takes so long."""
    _library()
    return jax.ffi.ffi_call("nap", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, seconds=np.float64(seconds)
    )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def nap(x: jax.Array, forward_s: float, backward_s: float) -> jax.Array:
    """`x`; its forward and its backward sleep."""
    return sleep(x, forward_s)


def _forward(x: jax.Array, forward_s: float, backward_s: float) -> tuple[jax.Array, None]:
    return sleep(x, forward_s), None


def _backward(forward_s: float, backward_s: float, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (sleep(g, backward_s),)


nap.defvjp(_forward, _backward)


def loss_fn(forward_s: float, backward_s: float) -> Any:
    """A chain of layers, as many as there are parameters."""

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = nap(jnp.tanh(x @ w), forward_s, backward_s)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss


def params(layers: int, width: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [
        draw.normal(size=(width, width), scale=width**-0.5).astype(np.float32)
        for _ in range(layers)
    ]


def batch(examples: int, width: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(examples, width)).astype(np.float32)
    return {"x": x, "y": np.zeros_like(x)}
