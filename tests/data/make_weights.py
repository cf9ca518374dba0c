"""Makes tests/data/weights: tiny random models as transformers saves them, each with its logits.

    python tests/data/make_weights.py tests/data/weights [NAMES]

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


def gpt2_untied() -> tuple[Any, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        tie_word_embeddings=False,
    )
    return transformers.GPT2LMHeadModel(config), {"tokens": ids(5)}


def bert_untied() -> tuple[Any, dict[str, Any]]:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return transformers.BertForMaskedLM(config), {"tokens": ids(6)}


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
}
"""Of Llama and its family; two heads share keys, and are not a quarter of the width."""


def llama() -> tuple[Any, dict[str, Any]]:
    """As 3.2: tied, with angles that are stretched."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config), {"tokens": ids(7)}


def qwen3() -> tuple[Any, dict[str, Any]]:
    """Untied."""
    config = transformers.Qwen3Config(**SHAPE)
    return transformers.Qwen3ForCausalLM(config), {"tokens": ids(8)}


def gemma() -> tuple[Any, dict[str, Any]]:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE)), {"tokens": ids(9)}


def gemma2() -> tuple[Any, dict[str, Any]]:
    """With windows and caps that matter."""
    config = transformers.Gemma2Config(
        **SHAPE,
        sliding_window=4,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )
    return transformers.Gemma2ForCausalLM(config), {"tokens": ids(10)}


def gemma3_text() -> tuple[Any, dict[str, Any]]:
    """Whose second block sees all, by other angles than the others'."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 8.0},
    }
    config = transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=4, layer_types=kinds, query_pre_attn_scalar=6, rope_parameters=rope
    )
    return transformers.Gemma3ForCausalLM(config), {"tokens": ids(11)}


MADE = (bert, gpt2, t5, t5_untied)
SMALL = (bert_untied, gpt2_untied, llama, qwen3, gemma, gemma2, gemma3_text)
"""Those that are written in bfloat16, in parts."""


def shaken(model: Any) -> None:
    """No parameter is left as it begins, zero or one: each is to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def main(folder: Path, names: list[str]) -> None:
    for make in (*MADE, *SMALL):
        if names and make.__name__ not in names:
            continue
        torch.manual_seed(0)
        model, batch = make()
        shaken(model)
        if make in SMALL:  # but for what is no parameter, such as the rates of angles
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
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
        if make in SMALL:
            model.to(torch.bfloat16)
        model.save_pretrained(into, max_shard_size="6KB" if make in SMALL else "5GB")
        config = json.loads((into / "config.json").read_text())
        (into / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        (into / "generation_config.json").unlink(missing_ok=True)
        told = {name: value.numpy().astype(np.int32) for name, value in batch.items()}
        save_file(
            told | {"logits": logits[:, :, ::7].contiguous().numpy()}, into / "logits.safetensors"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
