"""Run by the Python of an environment with torch: what its own loader, validator and simulator make of CSV files.

A line of JSON per file: the number of stages and micro-batches that it is for comes before it on the command line.
"""

import csv
import json
import sys

from torch.distributed.pipelining import schedules as torch_s  # pyright: ignore[reportMissingImports]


def main() -> None:
    for text in sys.argv[1:]:
        path, count, lists = json.loads(text)
        runtime = object.__new__(torch_s._PipelineScheduleRuntime)  # without processes and modules
        runtime._stages, runtime._num_stages, runtime._n_microbatches = [], count[0], count[1]
        with open(path, newline="") as file:
            runtime.pp_group_size = len(list(csv.reader(file)))
        runtime._load_csv(path, format="compute_comms")
        took = runtime._simulate()
        action = torch_s._Action.from_str
        alone = {rank: list(map(action, line.split())) for rank, line in enumerate(lists)}
        mapping = runtime.stage_index_to_group_rank
        expected = torch_s._add_send_recv(alone, lambda s, m=mapping: m[s], count[0])
        same = {rank: list(map(str, row)) for rank, row in expected.items()}
        read = {
            rank: list(map(str, row)) for rank, row in runtime.pipeline_order_with_comms.items()
        }
        print(json.dumps({"steps": max(map(len, took.values())), "as_torch": same == read}))


main()
