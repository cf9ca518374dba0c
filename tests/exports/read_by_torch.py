"""Run by the Python of an environment with torch: what its own loader, validator and simulator make of CSV files.

A line of JSON per file: the number of stages and micro-batches that it is for comes before it on the command line.
"""

import csv
import json
import sys
from typing import Any

from torch.distributed.pipelining import schedules as torch_s  # pyright: ignore[reportMissingImports]


def main() -> None:
    for text in sys.argv[1:]:
        path, count, lists = json.loads(text)
        runtime = object.__new__(torch_s._PipelineScheduleRuntime)  # without processes and modules
        runtime._stages, runtime._num_stages, runtime._n_microbatches = [], count[0], count[1]
        with open(path, newline="") as file:
            runtime.pp_group_size = len(list(csv.reader(file)))
        runtime._load_csv(path, format="compute_comms")
        took = simulated(runtime)
        action = torch_s._Action.from_str
        alone = {rank: list(map(action, line.split())) for rank, line in enumerate(lists)}
        mapping, rows = runtime.stage_index_to_group_rank, runtime.pipeline_order_with_comms
        reduced = {rank: torch_s._add_reduce_grad(row, count[1]) for rank, row in alone.items()}
        sent = torch_s._add_send_recv(alone, lambda s, m=mapping: m[s], count[0])
        sends = (torch_s.SEND_F, torch_s.RECV_F, torch_s.SEND_B, torch_s.RECV_B)
        same = sent == without(rows, torch_s.REDUCE_GRAD) and reduced == without(rows, *sends)
        print(json.dumps({"steps": max(map(len, took.values())), "as_torch": same}))


def without(rows: dict[int, list[Any]], *kinds: Any) -> dict[int, list[Any]]:
    """The actions of each rank that are of none of some kinds."""
    return {rank: [x for x in row if x.computation_type not in kinds] for rank, row in rows.items()}


def simulated(runtime: Any) -> dict[int, list[Any]]:
    """What its simulator makes of the actions that it knows; it raises if ranks wait for ever."""
    known = without(runtime.pipeline_order_with_comms, torch_s.REDUCE_GRAD)
    mapping = runtime.stage_index_to_group_rank
    return torch_s._simulate_comms_compute(known, lambda s: mapping[s], runtime._num_stages)


main()
