"""Every test and doctest sees the same process: CPU, eight devices, strict promotion, checked annotations."""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and compute little, so LLVM need not optimise; what they compare is compiled alike.
for flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

import jax  # noqa: E402
import optax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("jvpipe", "beartype.beartype")


def standard_promotion(function: Callable) -> Callable:
    """`function`, excepted from strict dtype promotion."""

    @functools.wraps(function)
    def excepted(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return excepted


def accept_optax() -> None:
    """Optax mixes step counts with floats: Adam's `decay**count` fails under strict promotion."""
    plain = optax.GradientTransformation.__new__

    def excepted(cls: type, init: Callable, update: Callable) -> optax.GradientTransformation:
        return plain(cls, standard_promotion(init), standard_promotion(update))

    optax.GradientTransformation.__new__ = excepted
    optax.GradientTransformationExtraArgs.__new__ = excepted


accept_optax()
