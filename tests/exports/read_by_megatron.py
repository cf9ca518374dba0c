"""Run by the Python of an environment with megatron-core: what its configuration makes of options.

On the command line: how many micro-batches there are, and files of options. A line of JSON per
file: the blocks and the rank of each stage, which blocks keep their inputs alone, and the order of
each rank's forwards and backwards.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from megatron.core.pipeline_parallel import schedules  # pyright: ignore[reportMissingImports]
from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
    TransformerConfig,
)


def options(path: str) -> dict[str, Any]:
    """The options of a file as the fields that they set."""
    words = shlex.split(Path(path).read_text(), comments=True)
    pairs = zip(words[::2], words[1::2], strict=True)
    fields = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}
    return {name: int(value) if value.isdecimal() else value for name, value in fields.items()}


def order_of(rank: int, ranks: int, chunks: int, microbatches: int) -> list[tuple[int, str, int]]:
    """What a rank does: warm-up forwards, then one forward and one backward, by its own table."""
    state = schedules.parallel_state
    state.get_pipeline_model_parallel_world_size = lambda: ranks
    state.get_pipeline_model_parallel_rank = lambda: rank
    state.get_virtual_pipeline_model_parallel_world_size = lambda: chunks if chunks > 1 else None
    total, _, warm, _ = schedules.get_pp_rank_microbatches(microbatches, chunks, ranks)
    table = schedules.get_schedule_table(microbatches, chunks, ranks)
    forwards = [(chunk * ranks + rank, "F", m) for m, chunk in table]
    backwards = [((chunks - 1 - chunk) * ranks + rank, "B", m) for m, chunk in table]
    steps = forwards[:warm]
    for k in range(total):
        steps += [*forwards[warm + k : warm + k + 1], backwards[k]]
    return steps


def main() -> None:
    microbatches = int(sys.argv[1])
    for path in sys.argv[2:]:
        config = TransformerConfig(
            hidden_size=64, num_attention_heads=4, pipeline_dtype=torch.float32, **options(path)
        )
        layout = config.pipeline_model_parallel_layout
        ranks, chunks = config.pipeline_model_parallel_size, len(layout.layout[0])
        blocks, first = [], 0
        for stage in range(ranks * chunks):
            kinds = [kind.name for kind in layout.layout[stage % ranks][stage // ranks]]
            count = kinds.count("decoder")
            assert kinds == ["embedding"] * (not stage) + ["decoder"] * count + ["loss"] * (
                stage == ranks * chunks - 1
            )
            blocks.append(list(range(first, first + count)))
            first += count
        again = config.recompute_num_layers or 0
        print(
            json.dumps(
                {
                    "blocks": blocks,
                    "ranks": [stage % ranks for stage in range(len(blocks))],
                    "order": [order_of(r, ranks, chunks, microbatches) for r in range(ranks)],
                    "again": [block for stage in blocks for block in stage[:again]],
                }
            )
        )


main()
