"""torch.distributed.pipelining under one of its schedules: two processes of one thread and one
core, over gloo.

Usage: python -m experiments.peers.by_torch (1F1B | ZeroBubble) REFERENCE [--cut HALF_BLOCKS]
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import distributed, nn  # pyright: ignore[reportMissingImports]
from torch.distributed import pipelining  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from experiments.peers import work
from experiments.throughput.data import (
    HEADS,
    MICRO_BATCHES,
    Sizes,
    transformer_batch,
    transformer_params,
)

WAYS = ("1F1B", "ZeroBubble")
STAGES = 2


class Embedding(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(sizes.vocabulary, sizes.width))
        self.pos = nn.Parameter(torch.empty(sizes.tokens, sizes.width))

    def forward(self, tokens: Any) -> Any:
        return functional.embedding(tokens, self.embed) + self.pos


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width, bias=False)
        self.wqkv, self.wo = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: Any) -> Any:
        parts = self.wqkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return x + self.wo(
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln2 = nn.LayerNorm(width, bias=False)
        self.w1, self.w2 = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Any) -> Any:
        return x + self.w2(functional.gelu(self.w1(self.ln2(x)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.lnf, self.out = (
            nn.LayerNorm(sizes.width, bias=False),
            nn.Linear(sizes.width, sizes.vocabulary, bias=False),
        )

    def forward(self, x: Any) -> Any:
        return self.out(self.lnf(x))


def layers(sizes: Sizes) -> list[tuple[str, Any]]:
    """The layers of the model and what the names of their parameters begin with."""
    halves = [
        (f"blocks.{i}.", half(sizes.width))
        for i in range(sizes.blocks)
        for half in (Attention, FeedForward)
    ]
    return [("", Embedding(sizes)), *halves, ("", Head(sizes))]


def parameters(layers: list[tuple[str, Any]]) -> Iterator[tuple[str, bool, Any]]:
    """Name, whether it is stored transposed, parameter."""
    for prefix, layer in layers:
        for name, module in layer.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                yield prefix + (name or own), isinstance(module, nn.Linear), parameter


def ready(way: str, rank: int, cut: int, sizes: Sizes) -> work.Ready:
    """One of the two stages."""
    mine = layers(sizes)[: cut + 1] if rank == 0 else layers(sizes)[cut + 1 :]
    given = work.named(transformer_params(sizes))
    with torch.no_grad():
        for name, transposed, parameter in parameters(mine):
            parameter.copy_(torch.from_numpy(given[name].T if transposed else given[name]))
    stage = pipelining.PipelineStage(
        nn.Sequential(*(layer for _, layer in mine)), rank, STAGES, torch.device("cpu")
    )
    common: dict[str, Any] = {
        "n_microbatches": MICRO_BATCHES,
        "loss_fn": mean_loss,
        "scale_grads": False,
    }
    if way == "1F1B":
        schedule = pipelining.Schedule1F1B(stage, **common)
    else:
        schedule = pipelining.ScheduleInterleavedZeroBubble([stage], **common)
    tokens, targets = (
        torch.from_numpy(transformer_batch(sizes)[name]).long() for name in ("tokens", "targets")
    )

    def run() -> list[Any]:
        losses: list[Any] = []
        schedule.step(*([tokens] if rank == 0 else []), target=targets, losses=losses)
        return losses

    def step() -> None:
        distributed.barrier()
        stage.submod.zero_grad()
        run()
        distributed.barrier()

    losses = run()
    loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    distributed.broadcast(loss, STAGES - 1)
    gradients = {
        name: (p.grad.T if t else p.grad).numpy().copy() / MICRO_BATCHES
        for name, t, p in parameters(mine)
    }
    return work.Ready(step, float(loss), gradients)


def mean_loss(logits: Any, targets: Any) -> Any:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ranks() -> None:
    """Starts a process per stage and tells what they found together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.peers.by_torch", *sys.argv[1:]]
        common = os.environ | {
            "PEER_MEETING": str(Path(folder) / "meeting"),
            "OMP_NUM_THREADS": "1",
        }
        started = [
            subprocess.Popen(
                command, env=common | {"PEER_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(STAGES)
        ]
        try:
            told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
        finally:
            for process in started:
                process.kill()
    both = {
        "arrays": sum(each["arrays"] for each in told),
        "error": max(each["error"] for each in told),
    }
    print(json.dumps(told[-1] | both))


def main() -> None:
    options = work.options(__doc__, WAYS)
    if "PEER_RANK" not in os.environ:
        ranks()
        return
    rank = int(os.environ["PEER_RANK"])
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    meeting = f"file://{os.environ['PEER_MEETING']}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=STAGES)
    found = work.told(ready(options.way, rank, options.cut, options.sizes), options)
    print(json.dumps(found | {"version": f"torch {torch.__version__}"}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
