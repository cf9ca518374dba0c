"""JaxPP under one of its schedules, both stages in one process; its sources have to be on
PYTHONPATH.

Usage: NPROC=1 python -m experiments.peers.by_jaxpp (Std1F1B | ZeroBubble) REFERENCE [--cut
HALF_BLOCKS]
"""

import json
from typing import Any

import jax
import jaxpp.api as jaxpp  # pyright: ignore[reportMissingImports]
import numpy as np

from experiments.peers import work
from experiments.peers.by_jit import micro_batches
from experiments.throughput.data import MICRO_BATCHES, Sizes, transformer_params
from experiments.throughput.model import transformer_loss

WAYS = ("Std1F1B", "ZeroBubble")
STAGES = 2


def ready(schedule: str, cut: int, sizes: Sizes) -> work.Ready:
    mesh = jaxpp.MpmdMesh(
        jax.sharding.Mesh(np.array(jax.devices()).reshape(STAGES, 1), ("stage", "data")), "stage"
    )

    def loss(params: Any, part: Any) -> Any:
        def before(half: int, x: jax.Array) -> jax.Array:
            return jaxpp.mark_stage_end(x) if half == cut else x

        return jaxpp.mark_stage_end(transformer_loss(params, part, None, before))

    def run(params: Any, parts: Any) -> Any:
        order = getattr(jaxpp, schedule)(STAGES)
        return jaxpp.treduce(
            lambda part: jax.value_and_grad(loss)(params, part), parts, schedule=order
        )

    given = transformer_params(sizes), micro_batches(sizes)
    compiled = jaxpp.mpmd_jit_with_loop(run, mpmd_mesh=mesh).compile(*given)
    placed = jax.tree.map(lambda x, at: everywhere(mesh, x, at), given, compiled.in_shardings[0])
    losses, sums = compiled(*placed)
    gradients = {name: local(x) / MICRO_BATCHES for name, x in work.named(sums).items()}
    return work.Ready(
        lambda: jax.block_until_ready(compiled(*placed)), float(np.mean(local(losses))), gradients
    )


def everywhere(mesh: Any, x: np.ndarray, at: Any) -> Any:
    """Puts an array on the stages that read it."""
    shardings = (jax.sharding.NamedSharding(mesh.unstack[i], at.spec) for i in sorted(at.mesh_ids))
    return jaxpp.MpmdArray(
        [jax.device_put(x, sharding) for sharding in shardings], mpmd_sharding=at
    )


def local(x: Any) -> np.ndarray:
    return np.asarray(x.first_mpmd_replica)


def main() -> None:
    options = work.options(__doc__, WAYS)
    jax.config.update("jax_num_cpu_devices", STAGES)
    made = ready(options.way, options.cut, options.sizes)
    print(json.dumps(work.told(made, options) | {"version": f"JAX {jax.__version__}"}))


if __name__ == "__main__":
    main()
