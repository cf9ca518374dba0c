"""Text as training data: records of tokens, examples, and the loss of a simple baseline."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from jvpipe.models.batches import Transform, fixed_batches, train_batches
from jvpipe.models.chats import Chats, ChatTemplate, learned_tokens, read_template
from jvpipe.models.documents import (
    PACKED,
    Documents,
    Form,
    are_conversations,
    open_documents,
)
from jvpipe.models.streams import stream_batches
from jvpipe.models.tokens import SEP, Marks, cached, marks_of, open_tokenizer
from jvpipe.models.workload import Batch, Data


def open_text(
    data_path: Path | None,
    run_dir: Path,
    seed: int,
    batch_size: int,
    *,
    vocabulary: int,
    tokens: int,
    first: int,
    transform: Callable[[int, Marks], Transform],
    form: Form = PACKED,
    held_out_tokens: int = 32768,
) -> Data:
    """Opens text as batches of records of `tokens` ids. The tokenizer is stored in `run_dir`.

    Args:
        data_path: a file or folder, or the name of a data set on the hub, which is streamed.
        run_dir: the folder of the run.
        seed: determines the order of records.
        batch_size: the number of records in a batch.
        vocabulary: the largest vocabulary that the tokenizer may have.
        tokens: the length of a record.
        first: the least id that the baseline predicts, or `Marks.first` if that is less.
        transform: maps the size of the vocabulary and the marks to a function that makes an example
            from a record.
        form: makes records of documents.
        held_out_tokens: how many tokens to evaluate at most, but always one record.

    Raises:
        ValueError: as in `open_documents` and `open_tokenizer`; or the text is too short for one
            record.
    """
    documents = open_documents(data_path, form.field)
    tokenizer = open_tokenizer(run_dir, documents.first, vocabulary)
    records, held_out_records = _records(documents, tokenizer, form, tokens)
    if not len(records) or not len(held_out_records):
        raise ValueError(
            f"'{data_path}' gives {len(records)} records of {tokens} tokens to train on and "
            f"{len(held_out_records)} to hold out: give more text"
        )
    vocab_size = tokenizer.get_vocab_size()
    marks = marks_of(tokenizer)
    example_of = transform(vocab_size, marks)
    evaluated = held_out_records[: max(1, held_out_tokens // tokens)]
    held_out = fixed_batches(evaluated, example_of, batch_size)
    if documents.stream is None:
        train = train_batches(records, example_of, seed, batch_size)
    else:
        streamed = form.streamed(documents.stream, tokenizer, tokens)
        train = stream_batches(streamed, example_of, seed, batch_size)
    least = min(first, marks.first)
    return Data(
        train=train,
        example=held_out[0],
        held_out=held_out,
        digest=documents.digest,
        # If there is a stream, the baseline counts only the ids at the stream's beginning.
        baseline_loss=frequency_loss(_texts(records), held_out, vocab_size, least),
    )


def _records(
    documents: Documents,
    tokenizer: Tokenizer,
    form: Form,
    tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the records to train on and the held-out records. Both are cached for later runs.

    Args:
        documents: the documents; their stream is not read.
        tokenizer: turns documents into token ids.
        form: makes records of documents.
        tokens: the length of a record.
    """

    def records_of(part: Sequence[str]) -> np.ndarray:
        rows = partial(form.records, part, tokenizer, tokens)
        return cached(f"{form.name}-{tokens}", part, tokenizer, rows)

    return records_of(documents.first), records_of(documents.held_out)


def _texts(records: Int32[np.ndarray, "N ..."]) -> Int32[np.ndarray, "..."]:
    """Returns the ids of records; for conversations, only the ids that the loss counts."""
    if records.ndim == 2:
        return records
    ids, learned = records[:, 0], records[:, 1]
    return ids[learned == 1]


def open_next_tokens(
    data_path: Path | None,
    run_dir: Path,
    seed: int,
    batch_size: int,
    *,
    vocabulary: int,
    tokens: int,
) -> Data:
    """Opens text as batches in which every token is predicted from the tokens before it.

    If data has `messages` and no `text`, it holds conversations, and the loss counts only the
    assistant's messages.

    Raises:
        ValueError: as in `open_text`; or there is no chat template for conversations.
    """
    form, transform = PACKED, next_tokens
    if are_conversations(data_path):
        form, transform = Chats(_template(data_path, run_dir)), learned_tokens
    return open_text(
        data_path,
        run_dir,
        seed,
        batch_size,
        vocabulary=vocabulary,
        tokens=tokens + 1,  # the last token is only a target
        first=SEP,
        transform=lambda *_: transform,
        form=form,
    )


def _template(data_path: Path | None, run_dir: Path) -> ChatTemplate:
    if (template := read_template(run_dir)) is None:
        raise ValueError(
            f"'{data_path}' has conversations, but there is no chat template to format them: "
            "start with --init-from and a folder that has a template (in chat_template.jinja or "
            "tokenizer_config.json), or give data with a field 'text'"
        )
    return template


def next_tokens(record: Int32[np.ndarray, "T"], generator: np.random.Generator) -> Batch:
    """Makes an example: `tokens`, `targets` (the next token for each of them) and `weights` of 1.

    >>> example = next_tokens(np.array([1, 7, 8, 9], np.int32), np.random.default_rng(0))
    >>> example["tokens"].tolist(), example["targets"].tolist()
    ([1, 7, 8], [7, 8, 9])
    """
    return {
        "tokens": record[:-1],
        "targets": record[1:],
        "weights": np.ones(len(record) - 1, np.float32),
    }


def open_halves(
    data_path: Path | None,
    run_dir: Path,
    seed: int,
    batch_size: int,
    *,
    vocabulary: int,
    tokens: int,
) -> Data:
    """Opens text as batches of records whose second half is predicted from the first half."""
    return open_text(
        data_path,
        run_dir,
        seed,
        batch_size,
        vocabulary=vocabulary,
        tokens=2 * tokens + 1,
        first=SEP,
        transform=lambda *_: halves,
    )


def halves(record: Int32[np.ndarray, "T"], generator: np.random.Generator) -> Batch:
    """Makes an example whose second half is predicted.

    `inputs` is the first half, `tokens` is the second half, `targets` has the next token for each
    of `tokens`, and `weights` are 1.

    >>> example = halves(np.array([1, 7, 8, 9, 4], np.int32), np.random.default_rng(0))
    >>> example["inputs"].tolist(), example["tokens"].tolist(), example["targets"].tolist()
    ([1, 7], [8, 9], [9, 4])
    """
    half = len(record) // 2
    return {"inputs": record[:half]} | next_tokens(record[half:], generator)


def frequency_loss(
    records: Int32[np.ndarray, "..."], held_out: Sequence[Batch], vocabulary: int, first: int
) -> float:
    """Returns the held-out loss, in nats, of a predictor that knows only the frequency of each id.

    Args:
        records: the ids to count.
        held_out: batches with `targets` and `weights`.
        vocabulary: the number of ids.
        first: the least id that is predicted, unless a lower one is among the targets.
    """
    # A user's tokenizer may have an end mark below `first`, such as 0.
    learned = [batch["targets"][batch["weights"] > 0] for batch in held_out]
    first = int(np.concatenate(learned, axis=None).min(initial=first))
    # Laplace's rule adds 1 to each count. With a count of 0, a loss could be infinite.
    counts = np.bincount(records.reshape(-1), minlength=vocabulary)[first:] + 1.0
    losses = np.log(counts.sum()) - np.log(counts)
    total = weight = 0.0
    for batch in held_out:
        nats = losses[batch["targets"] - first]
        total += float((nats * batch["weights"]).sum())
        weight += float(batch["weights"].sum())
    return total / weight
