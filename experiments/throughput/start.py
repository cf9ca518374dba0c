"""Times the start of BERT-48 on 4 stages, from the import of JAX to the end of the first step;
prints one JSON object.

Usage: python -m experiments.throughput.start CACHE_FOLDER [group | apart]. Run twice with one
folder: the second start finds what the first one compiled.
"""

import json
import sys
import time

GROUP = {"": None, "group": True, "apart": False}
"""What is said of groups."""


def main() -> None:
    """One start, in this process."""
    start_s = time.perf_counter()
    import jax
    import numpy as np
    import optax

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import jvpipe
    from jvpipe.models import load

    workload = load("bert", "48", width=128, heads=2, vocabulary=2000, tokens=32)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), workload.abstract_batch(8))
    imported_s = time.perf_counter() - start_s
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        optax.adamw(1e-3),
        stages=4,
        microbatches=4,
        group=GROUP[" ".join(sys.argv[2:])],
    )
    state = pipe.init(workload.init, batch, jax.random.key(0))
    initialized_s = time.perf_counter() - start_s
    state, _ = pipe.step(state, batch)
    jax.block_until_ready(state)
    found = {
        "imported_s": imported_s,
        "initialized_s": initialized_s,
        "start_s": time.perf_counter() - start_s,
    }
    session = pipe.session
    print(
        json.dumps(
            found
            | {"layers": len(session.graph.layers), "programs": len(session.compiled.executables)}
        )
    )


if __name__ == "__main__":
    main()
