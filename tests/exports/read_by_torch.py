"""Run by the Python of an environment with torch: what its own loader, validator and simulator make
of CSV files.

On the command line: how many micro-batches there are, and the files. A line of JSON per file: the
rank of each stage, and what each rank computes in which order. Fails unless torch, given that order
alone, adds the sends and the sums of gradients that the file has.
"""

import csv
import json
import sys
from typing import Any

from torch.distributed.pipelining import schedules as torch_s  # pyright: ignore[reportMissingImports]

SENDS = (torch_s.SEND_F, torch_s.RECV_F, torch_s.SEND_B, torch_s.RECV_B)
LETTERS = {
    torch_s.FORWARD: "F",
    torch_s.FULL_BACKWARD: "B",
    torch_s.BACKWARD_INPUT: "I",
    torch_s.BACKWARD_WEIGHT: "W",
}


def main() -> None:
    microbatches = int(sys.argv[1])
    for path in sys.argv[2:]:
        runtime = object.__new__(torch_s._PipelineScheduleRuntime)  # without processes and modules
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
        stages = {torch_s._Action.from_str(cell).stage_index for row in rows for cell in row}
        runtime._stages, runtime._num_stages = [], len(stages)
        runtime._n_microbatches, runtime.pp_group_size = microbatches, len(rows)
        runtime._load_csv(path, format="compute_comms")
        actions, rank = runtime.pipeline_order_with_comms, runtime.stage_index_to_group_rank
        assert simulated(runtime, rank), path
        alone = without(actions, *SENDS, torch_s.REDUCE_GRAD)
        reduced = {r: torch_s._add_reduce_grad(row, microbatches) for r, row in alone.items()}
        assert reduced == without(actions, *SENDS), path
        order = [
            [(x.stage_index, LETTERS[x.computation_type], x.microbatch_index) for x in alone[r]]
            for r in sorted(alone)
        ]
        # it takes each action out of what it is given
        sent = torch_s._add_send_recv(alone, lambda s, rank=rank: rank[s], len(stages))
        assert sent == without(actions, torch_s.REDUCE_GRAD), path
        print(json.dumps({"ranks": [rank[s] for s in sorted(stages)], "order": order}))


def without(rows: dict[int, list[Any]], *kinds: Any) -> dict[int, list[Any]]:
    """The actions of each rank that are of none of some kinds."""
    return {rank: [x for x in row if x.computation_type not in kinds] for rank, row in rows.items()}


def simulated(runtime: Any, rank: dict[int, int]) -> dict[int, list[Any]]:
    """What its simulator makes of the actions that it knows; it raises if ranks wait for ever."""
    known = without(runtime.pipeline_order_with_comms, torch_s.REDUCE_GRAD)
    return torch_s._simulate_comms_compute(known, lambda s: rank[s], runtime._num_stages)


main()
