"""Fine-tunes a language model of the package transformers by LoRA, on two devices.

python examples/finetune_lora.py BASE LINES.jsonl TUNED [STEPS [LEARNING_RATE]]

The folder BASE has config.json, model.safetensors (or its parts) and tokenizer.json. A line of
LINES.jsonl is, for example, {"prompt": "2+3=", "answer": "5"}. The model learns to write only the
answers: tokens of prompts and padding have the weight 0 in the loss. The program writes the tuned
model into the folder TUNED.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

import jvpipe
from jvpipe.models.checkpoints import from_folder, to_folder

TOKENS, BATCH = 64, 16


def records(lines, tokenizer):
    """Returns TOKENS + 1 token ids for each line, and which of the tokens belong to the answer."""
    shape = (len(lines), TOKENS + 1)
    ids = np.zeros(shape, np.int32)
    learned = np.zeros(shape, np.float32)
    for i, line in enumerate(map(json.loads, lines)):
        prompt = tokenizer.encode(line["prompt"]).ids
        answer = tokenizer.encode(line["answer"], add_special_tokens=False).ids
        both = (prompt + answer)[: TOKENS + 1]
        ids[i, : len(both)] = both
        learned[i, len(prompt) : len(both)] = 1  # prompts and padding stay 0
    return ids, learned


def batches(ids, learned, seed):
    """Yields batches without end; each has BATCH records, drawn at random."""
    generator = np.random.default_rng(seed)
    while True:
        i = generator.integers(len(ids), size=BATCH)
        yield {  # each value is [BATCH, TOKENS]
            "tokens": ids[i, :-1],
            "targets": ids[i, 1:],
            "weights": learned[i, 1:],
        }


def main(base, lines, tuned, steps=100, rate=1e-3):
    if jax.default_backend() == "cpu":
        jax.config.update("jax_num_cpu_devices", 2)
    tokenizer = Tokenizer.from_file(str(Path(base) / "tokenizer.json"))
    workload, params = from_folder(
        base,
        jax.random.key(0),
        lora=8,
        tokens=TOKENS,
        dropout=0.0,
    )
    rows = Path(lines).read_text().splitlines()
    ids, learned = records(rows, tokenizer)
    data = batches(ids, learned, seed=0)
    steps = int(steps)
    recipe = replace(workload.recipe, learning_rate=float(rate))
    optimizer = recipe.optimizer(steps)
    pipe = jvpipe.Pipeline(
        workload.loss_fn,
        optimizer,
        stages=2,
        microbatches=4,
    )
    state = pipe.init(params, next(data), jax.random.key(1))
    print(pipe.explain())
    for step in range(1, steps + 1):
        state, metrics = pipe.step(state, next(data))
        print(f"step {step}: loss {metrics['loss']:.4f}")
    to_folder(workload, pipe.params(state), like=base, into=tuned)


if __name__ == "__main__":
    main(*sys.argv[1:])
