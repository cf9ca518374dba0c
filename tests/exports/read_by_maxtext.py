"""Run by the Python of an environment with MaxText: what its configuration makes of ours.

On the command line: how many micro-batches there are, and files of YAML. A line of JSON per file:
the blocks and the rank of each stage, and which blocks keep their inputs alone.
"""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=12"}

from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]


def main() -> None:
    microbatches = int(sys.argv[1])
    given = ["skip_jax_distributed_system=true", f"per_device_batch_size={microbatches}"]
    for path in sys.argv[2:]:
        config = pyconfig.initialize(["", path, *given])  # devices beyond the stages are replicas
        stages = config.ici_pipeline_parallelism
        each = config.num_layers_per_pipeline_stage
        assert config.using_pipeline_parallelism == (stages > 1)
        assert config.num_pipeline_repeats == 1
        assert config.num_pipeline_microbatches == microbatches
        assert stages * each == config.num_decoder_layers
        blocks = [list(range(s * each, (s + 1) * each)) for s in range(stages)]
        again = config.set_remat_policy_on_pipeline_iterations
        assert config.remat_policy == ("full" if again else None)
        flat = [block for stage in blocks for block in stage]
        print(
            json.dumps(
                {"blocks": blocks, "ranks": list(range(stages)), "again": flat if again else []}
            )
        )


main()
