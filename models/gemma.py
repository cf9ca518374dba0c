"""Gemma 1, 2 and 3 (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786), as variants of Llama.

They differ from Llama as follows. Norms multiply by one plus their scale, embeddings are multiplied
by the square root of the width, and GELU gates the feed-forward network. Since Gemma 2, norms come
before and after each sublayer, and some blocks attend only to a window of tokens.
"""

from dataclasses import replace
from typing import Any

from jvpipe.models import llama
from jvpipe.models.llama import LlamaConfig, family
from jvpipe.models.workload import Workload

FORMAT, logits_function = llama.FORMAT, llama.logits_function
# Gemma 2B: all heads share one group of keys and values (multi-query attention).
_FIRST = LlamaConfig(
    blocks=18,
    width=2048,
    heads=8,
    groups=1,
    hidden=16384,
    vocabulary=256000,
    tokens=8192,
    tied=True,
    epsilon=1e-6,
    head_width=256,
    activation="gelu",
    offset_norms=True,
    scaled_embedding=True,
)
# Gemma 2: every second block (L) sees only a window of tokens, and the others (G) see all tokens.
# Scores and logits are capped.
_SECOND = replace(
    _FIRST,
    blocks=26,
    width=2304,
    groups=4,
    hidden=9216,
    after_norms=True,
    score_width=256.0,
    score_cap=50.0,
    logit_cap=30.0,
    window=4096,
    spans="LG",
)
# Gemma 3: norms of queries and keys replace the caps, and one block in six sees all tokens.
_THIRD = replace(
    _SECOND,
    width=1152,
    heads=4,
    groups=1,
    hidden=6912,
    vocabulary=262144,
    tokens=32768,
    normed_heads=True,
    score_cap=0.0,
    logit_cap=0.0,
    window=512,
    spans="LLLLLG",
    theta=1e6,
    local_theta=1e4,
)
_TINY = {"width": 16, "heads": 4, "groups": 2, "hidden": 24, "vocabulary": 300, "tokens": 8}
SIZES = {
    # The window is half a record, so that local blocks differ from global ones.
    "tiny": replace(_THIRD, blocks=4, head_width=6, window=4, spans="LG", score_width=6.0, **_TINY),
    "mini": replace(
        _FIRST,
        blocks=4,
        width=256,
        heads=4,
        groups=2,
        hidden=688,
        vocabulary=2048,
        tokens=64,
        head_width=64,
    ),
    "2b": _FIRST,
    "7b": replace(_FIRST, blocks=28, width=3072, heads=16, groups=16, hidden=24576),
    "2-2b": _SECOND,
    "2-9b": replace(_SECOND, blocks=42, width=3584, heads=16, groups=8, hidden=14336),
    "3-1b": _THIRD,
}
"""Two small models, then Gemma 2B and 7B, Gemma 2 2B and 9B, and Gemma 3 1B."""


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a Gemma of a size; `mini` by default.

    The sizes are `tiny`, `mini`, `2b`, `7b`, `2-2b`, `2-9b` and `3-1b`. `options` replace fields of
    `LlamaConfig`.
    """
    return family("gemma", SIZES, size, options)
