"""What transformers does of it, in an environment of its own: makes a folder, and finds the logits
of one.

python published.py make FOLDER
python published.py logits FOLDER FILE
"""

# pyright: reportMissingImports=false
import sys

import torch
import transformers
from safetensors.torch import save_file

VOCABULARY = 1000


def make(folder: str) -> None:
    """Writes a Llama with drawn weights, in several parts."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=352,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1MB")


def logits(folder: str, file: str) -> None:
    """Writes tokens and the logits that the model of a folder finds for them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(input_ids=tokens).logits
    save_file({"tokens": tokens.int(), "logits": found.contiguous()}, file)


if __name__ == "__main__":
    {"make": make, "logits": logits}[sys.argv[1]](*sys.argv[2:])
