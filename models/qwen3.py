"""Qwen 3 (arXiv:2505.09388): a Llama that normalizes queries and keys head by head, in Flax NNX."""

from dataclasses import replace
from typing import Any

from jvpipe.models import llama
from jvpipe.models.llama import LlamaConfig, family
from jvpipe.models.workload import Workload

FORMAT, logits_function = llama.FORMAT, llama.logits_function
_SMALL = LlamaConfig(
    blocks=28,
    width=1024,
    heads=16,
    groups=8,
    hidden=3072,
    vocabulary=151936,
    tokens=32768,
    theta=1e6,
    tied=True,
    epsilon=1e-6,
    head_width=128,
    normed_heads=True,
)
# The published sizes have heads of width K = 128 for all widths D, so D = H K need not hold.
SIZES = {
    "tiny": replace(llama.SIZES["tiny"], normed_heads=True, head_width=6),
    "mini": replace(llama.SIZES["mini"], normed_heads=True),
    "0.6b": _SMALL,
    "1.7b": replace(_SMALL, width=2048, hidden=6144),
    "4b": replace(_SMALL, blocks=36, width=2560, heads=32, hidden=9728),
    "8b": replace(_SMALL, blocks=36, width=4096, heads=32, hidden=12288, tied=False),
}


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a Qwen 3 of a size (`tiny`, `mini`, `0.6b`, `1.7b`, `4b`, `8b`; `mini` by default).

    `options` replace fields of `LlamaConfig`.
    """
    return family("qwen3", SIZES, size, options)
