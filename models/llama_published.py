"""The format of published weights of Llama, Qwen 3, and Gemma 1, 2 and 3 (text).

Each type of model has an entry in `KINDS`, with the fields that all its models share. It also has
an entry in `_USUAL`, with the default values of keys that its config.json may omit.

A folder determines every field of the shape. What it left out would come from the size that is
loaded with it, which is of another model.
"""

from collections.abc import Mapping
from typing import Any

from jvpipe.models.folder_settings import Settings
from jvpipe.models.weight_folder import Folder
from jvpipe.models.weights import Format, Source

Fields = Mapping[str, Any]
_LLAMA: dict[str, Any] = {
    "activation": "silu",
    "offset_norms": False,
    "scaled_embedding": False,
    "after_norms": False,
    "normed_heads": False,
}
_GEMMA = _LLAMA | {"activation": "gelu", "offset_norms": True, "scaled_embedding": True}
KINDS: Mapping[str, Fields] = {
    "llama": _LLAMA,
    "qwen3": _LLAMA | {"normed_heads": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"after_norms": True},
    "gemma3_text": _GEMMA | {"after_norms": True, "normed_heads": True},
}
"""The fields that all models of a type share, by `model_type`."""
_USUAL: Mapping[str, Fields] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}
"""The default values of keys that config.json may omit, by `model_type`, as in transformers."""
_ACTIVATIONS = {"silu": ("silu",), "gelu": ("gelu_pytorch_tanh", "gelu")}
"""The names of activations in config.json. Gemma's "gelu" also means the tanh approximation."""


def _fields(settings: Settings, folder: Folder) -> dict[str, Any]:
    """Reads the fields of a `LlamaConfig` from config.json, and rejects unsupported settings."""
    kind = settings["model_type"]
    usual = {"tie_word_embeddings": True, **_USUAL[kind]}
    names = _ACTIVATIONS[KINDS[kind]["activation"]]
    settings.only("hidden_act", *names)
    settings.only("hidden_activation", None, *names)
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.only("attention_dropout", 0.0)
    settings.only("use_bidirectional_attention", None, False)
    settings.only("is_encoder_decoder", False)
    length = 512  # the most tokens of a record; fewer if the model has fewer positions
    heads = settings.count("num_attention_heads")
    optional = lambda key: settings.number(key, usual.get(key), null=0.0)  # noqa: E731
    fields = {
        "blocks": settings.count("num_hidden_layers"),
        "width": settings.count("hidden_size"),
        "heads": heads,
        "groups": settings.count("num_key_value_heads", null=heads),
        "hidden": settings.count("intermediate_size"),
        "vocabulary": settings.count("vocab_size"),
        "tokens": min(length, settings.count("max_position_embeddings", length)),
        "epsilon": settings.number("rms_norm_eps", 1e-6, or_zero=True),
        "head_width": settings.count("head_dim", usual.get("head_dim"), null=0),
        "score_width": optional("query_pre_attn_scalar"),
        "score_cap": optional("attn_logit_softcapping"),
        "logit_cap": optional("final_logit_softcapping"),
        "tied": settings.flag("tie_word_embeddings", usual["tie_word_embeddings"]),
    }
    return {**KINDS[kind], **fields, **_spans(settings, usual), **_turns(settings, usual)}


def _spans(settings: Settings, usual: Fields) -> dict[str, Any]:
    """Reads which blocks are local, and the window of local blocks.

    A newer config.json lists the type of each block. An older one says that every nth block is
    global, or (Qwen) that all blocks after the first n are local.
    """
    blocks = settings.count("num_hidden_layers")
    window = settings.count("sliding_window", usual.get("sliding_window"), null=0)
    every = settings.count("_sliding_window_pattern", null=usual.get("sliding_window_pattern", 0))
    every = settings.count("sliding_window_pattern", null=every)
    first = settings.count("max_window_layers", blocks, least=0)
    if not settings.flag("use_sliding_window", "sliding_window" in usual) or not window:
        window, first = 0, blocks
    kinds = {"full_attention": "G", "sliding_attention": "L"}
    if settings.get("layer_types") is not None:
        listed = settings.listed("layer_types")
        unknown = sorted(set(map(str, listed)) - set(kinds))
        if unknown or len(listed) != blocks:
            kinds_known = " or ".join(kinds)
            raise ValueError(
                f"config.json has layer_types {listed}: it must list {blocks} blocks, each as "
                f"{kinds_known}"
            )
        spans = "".join(map(kinds.__getitem__, listed))
    elif "sliding_window_pattern" in usual:
        numbers = range(1, blocks + 1)
        spans = "".join("L" if i % every else "G" for i in numbers)
    else:
        spans = ("G" * first + "L" * blocks)[:blocks]
    if "L" not in spans:
        return {"spans": "", "window": 0}
    # Unlike a letter per block, a period stays valid if a user changes `blocks`.
    return {"spans": _period(spans), "window": window}


def _period(letters: str) -> str:
    """Returns the shortest text that gives these letters if it is repeated.

    >>> _period("LLGLLGLL")
    'LLG'
    """
    count = len(letters)
    starts = (letters[:n] for n in range(1, count + 1))
    # `letters` itself is the last candidate, so there is always a result.
    return next(start for start in starts if (start * count)[:count] == letters)


def _turns(settings: Settings, usual: Fields) -> dict[str, Any]:
    """Reads the rotation of queries and keys.

    An older config.json has top-level keys instead of `rope_parameters`.
    """
    local = settings.number("rope_local_base_freq", usual.get("rope_local_base_freq", 0.0))
    theta = settings.number("rope_theta", usual.get("rope_theta", 1e4))
    of_all = settings.table("rope_parameters")
    scaling = settings.table("rope_scaling")
    if "full_attention" in of_all:
        where = "rope_parameters of config.json"
        parts = Settings(of_all, where)
        of_local = Settings(parts.table("sliding_attention"), f"sliding_attention in {where}")
        # `stretch` does not change the angles of local blocks.
        of_local.only("rope_type", "default")
        of_local.only("type", "default")
        local = _stretch(of_local, local, settings)["theta"]
        of_all = parts.table("full_attention")
        parts.all_understood(())
    # If both keys exist, `rope_scaling` only repeats `rope_parameters`.
    turns = _stretch(of_all or scaling, theta, settings)
    return turns | {"local_theta": local}


def _stretch(scaling: Fields, theta: float, settings: Settings) -> dict[str, Any]:
    """Reads the angles of rotation from one group of settings."""
    where = "config.json, in its RoPE settings,"
    rope = Settings(scaling, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"config.json has rope_type {kind!r}: only 'default', 'linear' or 'llama3' is "
            "supported for models of this type"
        )
    rope.only("partial_rotary_factor", 1.0, None)
    fields = {
        "theta": rope.number("rope_theta", theta),
        "stretch": 1.0 if kind == "default" else rope.number("factor"),
        "stretch_low": 1.0,
        "stretch_high": 4.0,
        "stretch_from": 0,
    }
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise ValueError(
                f"{where} has low_freq_factor {low} and high_freq_factor {high}: the second must "
                "be larger"
            )
        original = rope.count("original_max_position_embeddings", null=0)
        original = original or settings.count("max_position_embeddings")
        fields |= {"stretch_low": low, "stretch_high": high, "stretch_from": original}
    rope.all_understood(())
    return fields


_BLOCK = {
    "attention_norm.norm.scale": "input_layernorm",
    "attention.queries.kernel": "self_attn.q_proj",
    "attention.keys.kernel": "self_attn.k_proj",
    "attention.values.kernel": "self_attn.v_proj",
    "attention.output.kernel": "self_attn.o_proj",
    "gate.kernel": "mlp.gate_proj",
    "expand.kernel": "mlp.up_proj",
    "contract.kernel": "mlp.down_proj",
}
_NORMED_HEADS = {
    "attention.query_norm.norm.scale": "self_attn.q_norm",
    "attention.key_norm.norm.scale": "self_attn.k_norm",
}
# In Llama, "post_attention_layernorm" is the norm before the feed-forward network. In Gemma 2 and
# 3, whose blocks have four norms, it is the norm after attention.
_BETWEEN = {"feed_forward_norm.norm.scale": "post_attention_layernorm"}
_AFTER = {
    "mixed_norm.norm.scale": "post_attention_layernorm",
    "feed_forward_norm.norm.scale": "pre_feedforward_layernorm",
    "contracted_norm.norm.scale": "post_feedforward_layernorm",
}


def _sources(config: Any) -> dict[str, Source]:
    """Maps each parameter to its tensors in a folder."""
    block = _BLOCK | (_AFTER if config.after_norms else _BETWEEN)
    if config.normed_heads:
        block |= _NORMED_HEADS
    ends = {"tokens.embedding": "embed_tokens", "norm.norm.scale": "norm"}
    if not config.tied:
        ends["head.kernel"] = "lm_head"
    sources = {}
    for ours, theirs in block.items():
        # The tensors of all blocks are stacked into one parameter [blocks, ...], because of the
        # scan.
        names = (f"layers.{{}}.{theirs}.weight",)
        sources[f"blocks.{ours}"] = Source(names, ours.endswith("kernel"), config.blocks)
    for ours, theirs in ends.items():
        sources[ours] = Source((f"{theirs}.weight",), ours.endswith("kernel"))
    return sources


FORMAT = Format(
    _fields,
    _sources,
    harmless=("initializer_range", "pretraining_tp", "cache_implementation"),
    copies={"lm_head.weight": "embed_tokens.weight"},
    ignored=("layers.*.self_attn.rotary_emb.inv_freq",),
)
"""LlamaForCausalLM, Qwen3ForCausalLM, GemmaForCausalLM, Gemma2ForCausalLM and Gemma3ForCausalLM."""
