"""Makes tests/data/weights: tiny random BERT, GPT-2 and T5s as transformers saves them, each with its logits.

    python tests/data/make_weights.py tests/data/weights

It needs torch, transformers, numpy and safetensors, which nothing else here does.
"""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

TOKENS, VOCABULARY = 12, 300


def ids(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)


def bert() -> tuple[Any, dict[str, Any]]:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    model = transformers.BertForMaskedLM(config)
    return model, {"tokens": ids(1)}


def gpt2() -> tuple[Any, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16
    )
    return transformers.GPT2LMHeadModel(config), {"tokens": ids(2)}


def t5(**more: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=6,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        **more,
    )
    return transformers.T5ForConditionalGeneration(config), {"inputs": ids(3), "tokens": ids(4)}


def t5_untied() -> tuple[Any, dict[str, Any]]:
    """As version 1.1: gated, with a head of its own, which config.json does not tell."""
    model, batch = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 16))
    return model, batch


def shaken(model: Any) -> None:
    """No parameter is left as it begins, zero or one: each is to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def main(folder: Path) -> None:
    for make in (bert, gpt2, t5, t5_untied):
        torch.manual_seed(0)
        model, batch = make()
        shaken(model)
        model.eval()
        given = {
            "decoder_input_ids": batch["tokens"],
            "input_ids": batch.get("inputs", batch["tokens"]),
        }
        if make not in (t5, t5_untied):
            del given["decoder_input_ids"]
        with torch.no_grad():
            logits = model(**given).logits
        into = folder / make.__name__
        model.save_pretrained(into)
        config = json.loads((into / "config.json").read_text())
        (into / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        (into / "generation_config.json").unlink(missing_ok=True)
        told = {name: value.numpy().astype(np.int32) for name, value in batch.items()}
        save_file(
            told | {"logits": logits[:, :, ::7].contiguous().numpy()}, into / "logits.safetensors"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
