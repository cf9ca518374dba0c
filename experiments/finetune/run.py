"""From a folder of transformers to a tuned one on two devices, under a limit that whole training
could not keep.

Usage: python -m experiments.finetune.run [--steps N]. It needs `make peers`:
build/peers/transformers.
"""

import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from jvpipe.cli.run_folder import RunDir
from jvpipe.models import llama, load
from jvpipe.models.weight_folder import open_folder
from jvpipe.models.weights import nested, read_fields
from jvpipe.util.sizes import format_bytes, parse_bytes

ROOT = Path(__file__).parents[2]
PEER = ROOT / "build" / "peers" / "transformers" / "bin" / "python"
RANK, SLACK = 4, 1.05
COUNTED = ("parameter", "optimizer", "gradient", "residual")
"""What is held of base, adapters with their state, and kept values."""


def published(*arguments: str) -> None:
    """Runs the side of transformers."""
    script = Path(__file__).with_name("published.py")
    subprocess.run([str(PEER), str(script), *arguments], check=True, timeout=300)


def trained(folder: Path, name: str, *options: str) -> Path:
    """Trains from the folder `base`; the folder of the run."""
    run = folder / name
    command = [
        *(sys.executable, "-m", "jvpipe.train", "--model", "llama", "--stages", "2"),
        *("--microbatches", "8", "--batch-size", "16", "--sequence-length", "32"),
        *("--init-from", str(folder / "base"), "--run-dir", str(run), *options),
    ]
    subprocess.run(command, check=True, timeout=900, cwd=ROOT)
    return run


def peak_bytes(run: Path) -> list[int]:
    """The most that each device held."""
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return list(json.loads(last)["peak_bytes"].values())


def counted_bytes(run: Path) -> int:
    """What the fuller device holds at its peak of what the limit is to be made of."""
    peaks = re.findall(r"^  peak at .*?: (.*)$", RunDir(run).explanation.read_text(), re.M)
    held = [dict(part.split(" ", 1) for part in peak.split(", ")) for peak in peaks]
    return max(sum(parse_bytes(each.get(of, "0")) or 0 for of in COUNTED) for each in held)


def own_logits(base: Path, trained_file: Path, tokens: Any) -> np.ndarray:
    """Ours, of the parameters with their adapters as the run has left them."""
    fields = read_fields(open_folder(base), llama.FORMAT) | {"tokens": 32, "lora": RANK}
    config = load("llama", "1b", **fields).config
    params = nested(load_file(trained_file))
    return np.asarray(jax.jit(llama.logits_function(config))(params, {"tokens": tokens}, None))


def main(steps: int) -> None:
    """Prints the table."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        published("make", str(folder / "base"))
        lora = ("--lora", str(RANK), "--steps", str(steps))
        whole = trained(folder, "whole", "--steps", "2")
        free = trained(folder, "free", *lora)
        limit = int(SLACK * counted_bytes(free))
        export, tuned = folder / "all.safetensors", folder / "tuned"
        files = ("--export", str(export), "--export-weights", str(tuned))
        limited = trained(folder, "limited", *lora, *files, "--memory-limit", str(limit))
        losses = [
            [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in (free, limited)
        ]
        published("logits", str(tuned), str(folder / "logits.safetensors"))
        theirs = load_file(folder / "logits.safetensors")
        apart = np.abs(own_logits(folder / "base", export, theirs["tokens"]) - theirs["logits"])
        print(f"| run of {steps} steps | fullest device |\n|---|---|")
        for told, run in (
            ("all parameters trained", whole),
            (f"adapters of rank {RANK}", free),
            (f"the same under {format_bytes(limit)}", limited),
        ):
            print(f"| {told} | {format_bytes(max(peak_bytes(run)))} |")
        print(f"\nlosses {losses[0][0]:.4f} to {losses[0][-1]:.4f}, ", end="")
        print(
            f"under the limit {'the same bits' if losses[0] == losses[1] else 'OTHERS'}; ", end=""
        )
        print(f"logits of transformers at most {apart.max():.1e} from ours")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    main(parser.parse_args().steps)
