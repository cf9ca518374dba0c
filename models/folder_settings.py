"""Checks the config.json of a folder of weights: every key must be read or be known as harmless.

To allow a key for all types of models, add it to one of the lists below.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SAMPLING = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)
"""Keys that determine how a trained model generates text."""
TOKENS = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "language",
    "mask_token_id",
    "model_max_length",
    "pad_token_id",
    "prefix",
    "sep_token_id",
    "tokenizer_class",
    "unk_token_id",
)
"""Keys of the tokenizer."""
TASKS = (
    "classifier_dropout",
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "task_specific_params",
    "_num_labels",
)
"""Keys for the heads of tasks that jvpipe's models do not have."""
EXECUTION = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "gradient_checkpointing",
    "model_type",
    "name",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "return_dict",
    "tf_legacy_loss",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
)
"""Keys that determine how transformers finds and runs a model."""
HARMLESS = (*SAMPLING, *TOKENS, *TASKS, *EXECUTION)
"""Keys that do not change what any of jvpipe's models computes."""
_PLAIN = (
    ("cross_attention_hidden_size", None),
    ("pruned_heads", {}, None),
    ("tie_encoder_decoder", False),
)
"""Keys that change nothing as long as they have one of the values listed after them."""


class Settings(Mapping[str, Any]):
    """The settings of a config.json, or of a part of it, with a record of which keys were read.

    Most methods read a value of a certain type. They return `usual` if the key is missing, and
    `null` if its value is null, or if it is missing and there is no `usual`.

    Raises:
        KeyError: the key is missing, and there is neither `usual` nor `null`.
        ValueError: the value has another type; the message has its key and value.
    """

    def __init__(self, settings: Mapping[str, Any], where: str = "config.json") -> None:
        self._told, self._asked, self._where = settings, set[str](), where

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._told[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)

    def count(
        self, key: str, usual: int | None = None, *, null: int | None = None, least: int = 1
    ) -> int:
        """Reads a whole number of at least `least`."""
        return self._read(
            key,
            usual,
            null,
            # Python's True is an instance of int, but JSON's true is not a number.
            lambda value: type(value) is int and value >= least,
            f"a whole number of at least {least}",
        )

    def number(
        self,
        key: str,
        usual: float | None = None,
        *,
        null: float | None = None,
        or_zero: bool = False,
    ) -> float:
        """Reads a positive finite number; it may be 0 if `or_zero`."""
        value = self._read(
            key,
            usual,
            null,
            lambda value: (
                type(value) in (int, float)
                and (0 < value <= sys.float_info.max or (or_zero and value == 0))
            ),
            f"{'0 or ' if or_zero else ''}a positive number",
        )
        return float(value)

    def flag(self, key: str, usual: bool) -> bool:
        """Reads true or false."""
        return self._read(key, usual, None, lambda value: type(value) is bool, "true or false")

    def table(self, key: str) -> Mapping[str, Any]:
        """Reads an object; it is empty if the key is missing or its value is null."""
        return self._read(key, None, {}, lambda value: isinstance(value, Mapping), "an object")

    def listed(self, key: str) -> list[Any]:
        """Reads a list."""
        return self._read(key, None, None, lambda value: isinstance(value, list), "a list")

    def _read(
        self, key: str, usual: Any, null: Any, fits: Callable[[Any], bool], expected: str
    ) -> Any:
        """Reads a value that `fits`."""
        if key not in self._told and usual is not None:
            return usual
        if self.get(key) is None and null is not None:
            return null
        value = self[key]
        if not fits(value):
            raise ValueError(f"{self._where} has {key} {value!r}: it must be {expected}")
        return value

    def only(self, key: str, *values: Any) -> None:
        """Checks a setting for which our model supports only `values`.

        If the setting is missing, the first value is assumed.

        Raises:
            ValueError: the setting has another value.
        """
        if self.get(key, values[0]) not in values:
            known_values = " or ".join(map(repr, values))
            raise ValueError(
                f"{self._where} has {key} {self[key]!r}: only {known_values} is supported for "
                "models of this type"
            )

    def all_understood(self, harmless: tuple[str, ...]) -> None:
        """Checks that each setting was read or is harmless.

        Args:
            harmless: keys that change nothing for this type of model, in addition to `HARMLESS`.

        Raises:
            ValueError: a setting was not read and may matter; the message has its key and value.
        """
        for key, *values in _PLAIN:
            self.only(key, *values)
        # An unknown key is an error, because it may mean that the model computes something else.
        for key in sorted(self._told.keys() - self._asked - {*HARMLESS, *harmless}):
            raise ValueError(
                f"{self._where} has {key} {self._told[key]!r}, which jvpipe does not know: the "
                "model may depend on it; if it does not, remove the key from the file"
            )
