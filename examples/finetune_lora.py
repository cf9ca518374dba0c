"""A folder as transformers writes it, tuned by LoRA on two devices, and written back for transformers to load.

python examples/finetune_lora.py FOLDER NEW_FOLDER [TEXTS.jsonl]

The folder is of a Llama, Qwen 3, Gemma, GPT-2, BERT or T5. No host holds all of it: each weight is read when it is
placed. What stays as it is has no gradient and no optimizer state.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

import jax

import jvpipe
from jvpipe.models.published import load_published, save_published

STEPS, BATCH = 20, 8


def main(folder: str, tuned: str, texts: str | None = None) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    workload, params = load_published(folder, tokens=16, lora=4, lora_on="*attention*")
    run = Path(mkdtemp())
    beside = Path(folder) / "tokenizer.json"
    if beside.exists():  # else one is trained on the texts
        (run / beside.name).write_bytes(beside.read_bytes())
    data = workload.open_data(Path(texts) if texts else None, run, 0, BATCH)

    pipe = jvpipe.Pipeline(workload.loss_fn, workload.optimizer(STEPS), stages=2, microbatches=4)
    state = pipe.init(params, data.example, jax.random.key(0))
    for _ in range(STEPS):
        state, metrics = pipe.step(state, next(data.train))
        print(f"step {state.step}: loss {float(metrics['loss']):.4f}")
    print({str(device): size for device, size in pipe.ledger.peak_bytes.items()})
    save_published(folder, tuned, workload, pipe.params(state))


if __name__ == "__main__":
    main(*sys.argv[1:])
