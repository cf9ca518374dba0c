"""Plain JAX on one device: a jit per micro-batch, or one jit with a scan over them; `reference`
keeps what it computes.

Usage: NPROC=1 python -m experiments.peers.by_jit (loop | scan | reference) REFERENCE
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.peers import work
from experiments.throughput.data import MICRO_BATCHES, Sizes, transformer_batch, transformer_params
from experiments.throughput.model import transformer_loss

WAYS = ("loop", "scan", "reference")
Gradients = Callable[[], tuple[Any, Any]]  # losses, summed gradients


def micro_batches(sizes: Sizes) -> Any:
    """The batch with a leading axis of micro-batches."""
    return jax.tree.map(
        lambda x: x.reshape(MICRO_BATCHES, -1, *x.shape[1:]), transformer_batch(sizes)
    )


def loop(sizes: Sizes) -> Gradients:
    params, parts = jax.device_put(transformer_params(sizes)), jax.device_put(micro_batches(sizes))
    parts = [jax.tree.map(lambda x, m=m: x[m], parts) for m in range(MICRO_BATCHES)]
    grad = jax.jit(jax.value_and_grad(transformer_loss))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)

    def step() -> tuple[Any, Any]:
        losses, sums = [], None
        for part in parts:
            loss, found = grad(params, part, None)
            losses.append(loss)
            sums = found if sums is None else add(sums, found)
        return losses, sums

    return step


def scan(sizes: Sizes) -> Gradients:
    params, parts = jax.device_put(transformer_params(sizes)), jax.device_put(micro_batches(sizes))

    @jax.jit
    def run(params: Any, parts: Any) -> Any:
        def body(sums: Any, part: Any) -> tuple[Any, jax.Array]:
            loss, found = jax.value_and_grad(transformer_loss)(params, part, None)
            return jax.tree.map(jnp.add, sums, found), loss

        sums, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        return losses, sums

    return lambda: run(params, parts)


def ready(way: str, sizes: Sizes) -> work.Ready:
    gradients = scan(sizes) if way == "scan" else loop(sizes)
    losses, sums = gradients()
    means = {name: np.asarray(x) / MICRO_BATCHES for name, x in work.named(sums).items()}
    return work.Ready(lambda: jax.block_until_ready(gradients()), float(np.mean(losses)), means)


def main() -> None:
    options = work.options(__doc__, WAYS)
    made = ready(options.way, options.sizes)
    if options.way == "reference":
        work.save(options.reference, made)
    else:
        print(json.dumps(work.told(made, options) | {"version": f"JAX {jax.__version__}"}))


if __name__ == "__main__":
    main()
