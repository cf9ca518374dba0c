"""Run by the Python of an environment with torch: a step of a stack of layers under a CSV, a
process for each rank.

On the command line: the file, and how many stages and micro-batches it is for. Prints the largest
difference, over all stages, between the gradients of the pipeline and those of the whole batch at
once.
"""

import csv
import os
import sys
import tempfile
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.multiprocessing as processes  # pyright: ignore[reportMissingImports]
from torch.distributed.pipelining import (  # pyright: ignore[reportMissingImports]
    PipelineStage,
    schedules,
)

WIDTH = 8


def run(rank: int, path: str, stages: int, microbatches: int, store: str, out: str) -> None:
    """One rank: its stages are those that its line names."""
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(rows))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(stages)]
    data, target = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    here = sorted(
        {int(cell.split("F")[0]) for cell in rows[rank] if cell.split("F")[0].isdecimal()}
    )
    there = [PipelineStage(layers[s], s, stages, torch.device("cpu")) for s in here]
    loss = torch.nn.functional.mse_loss
    runtime = schedules._PipelineScheduleRuntime(there, microbatches, loss_fn=loss)
    runtime._load_csv(path, format="compute_comms")
    runtime.step(*([data] if 0 in here else []), target=target if stages - 1 in here else None)
    whole = data
    copies = [layer.weight.detach().clone().requires_grad_() for layer in layers]
    for weight in copies:
        whole = whole @ weight.T
    loss(whole, target).backward()
    apart = max(float((layers[s].weight.grad - copies[s].grad).abs().max()) for s in here)
    Path(out, str(rank)).write_text(str(apart))
    dist.destroy_process_group()


def main() -> None:
    path, stages, microbatches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(path, newline="") as file:
        ranks = len(list(csv.reader(file)))
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/out")
        arguments = (path, stages, microbatches, f"{folder}/store", f"{folder}/out")
        processes.spawn(run, arguments, nprocs=ranks)
        print(max(float(Path(folder, "out", str(rank)).read_text()) for rank in range(ranks)))


if __name__ == "__main__":
    main()
