"""`--tokenizer`: a run whose text is read by a tokenizer that is there already."""

from pathlib import Path

from jvpipe import models
from jvpipe.cli.train_options import Options
from jvpipe.ir.extras import extra


def keep_tokenizer(options: Options, workload: models.Workload, folder: Path) -> None:
    """Puts the tokenizer of `--tokenizer`, if one is given, where a new run looks for its own.

    Args:
        options: of the command line.
        workload: whose text is read.
        folder: of the files that belong to the run.

    Raises:
        ValueError: it is none, or nothing would read it.
    """
    if options.tokenizer is None:
        return
    told = f"--tokenizer {options.tokenizer}"
    if options.resume:
        raise ValueError(f"{told}: a run that is resumed has its tokenizer, leave it out")
    if workload.name not in models.NAMES or "vocabulary" not in workload.settings:
        raise ValueError(
            f"{told}: {workload.name} reads no text by a tokenizer of jvpipe, leave it out"
        )
    with extra("models"):
        from jvpipe.models.tokens import read_tokenizer
    try:
        read_tokenizer(Path(options.tokenizer))
    except ValueError as problem:
        raise ValueError(
            f"--tokenizer: {problem}: it should be a tokenizer.json of the tokenizers package"
        ) from problem
    (folder / "tokenizer.json").write_bytes(Path(options.tokenizer).read_bytes())
