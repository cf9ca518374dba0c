"""The options of `jvpipe.train` and `jvpipe.plan` that no pipeline has, and checks between them.

Options of a pipeline are defined in session/options.py.
"""

import os
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from jvpipe.models.recipe import OPTIMIZERS
from jvpipe.session.arguments import (
    USUAL_STAGES,
    checked_name,
    one_of,
    positive,
    read_whole_numbers,
    whole_number,
)
from jvpipe.session.options import (
    TRAIN,
    Group,
    PipelineOptions,
    Taker,
    option,
    options_of,
    resumed,
)
from jvpipe.util.given import checked_flag, checked_path, several

MOST = 2**31 - 1
"""The largest count: steps are counted in 32 bits."""
_COUNT = partial(whole_number, most=MOST)


def file_option(flag: str, value: Any) -> Path:
    """Checks that a text can be a path, whether or not there is a file."""
    return checked_path(value, flag)


def name_option(flag: str, value: Any) -> str:
    """Checks that a value can be a name; what it names is looked up later."""
    return checked_name(flag, value, "tiny")


def _texts(flag: str, value: Any) -> list[str]:
    texts = several(value) or []
    return [checked_name(flag, text, "tensorboard") for text in texts]


def fields_option(flag: str, value: Any) -> dict[str, str]:
    """Returns values by the names of a model's fields, given as NAME=VALUE."""
    for text in value:
        if "=" not in text:
            raise ValueError(f"{flag} {text}: give a field of the model and its value, NAME=VALUE")
    parts = (text.partition("=") for text in value)
    return {name.strip(): text.strip() for name, _, text in parts}


def address_option(flag: str, value: Any) -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{flag} must be HOST:PORT, such as host0:12345, not {value}")
    return host, int(port)


@dataclass(frozen=True)
class ModelOptions(PipelineOptions):
    """What both command lines say of a model."""

    size: str | None = option(
        None,
        name_option,
        "Which of its sizes; the smallest one if left out, or your object as it is.",
        "model",
        "",
        resumed="fixed",
    )
    dtype: str | None = option(
        None,
        name_option,
        "The type to compute in (float32 or bfloat16); parameters are float32. The model's own if left out.",
        "model",
        "",
        resumed="fixed",
    )
    sequence_length: int | None = option(
        None,
        _COUNT,
        "Tokens of a record, for models that have this field or one called tokens.",
        "model",
        "tokens",
    )
    set: tuple[str, ...] = option(
        (),
        fields_option,
        "NAME=VALUE replaces a field of the model, such as blocks=12; may be given again and again.",
        "model",
        "NAME=VALUE",
    )
    batch_size: int | None = option(
        None,
        _COUNT,
        "Examples per step; the model's own if left out.",
        "data",
        "examples",
        resumed="fixed",
    )
    figure: str | None = option(
        None,
        file_option,
        "Draws the timeline to this file (png, svg or pdf), a plan's with memory under it.",
        "run",
        "file",
        resumed="start",
    )


@dataclass(frozen=True)
class TrainOptions(ModelOptions):
    """Trains a model as a pipeline over the devices of this machine."""

    taker: ClassVar[Taker] = TRAIN

    config: str | None = option(
        None,
        file_option,
        "A file with any of these options, TOML, YAML or JSON such as a run's config.json; those given here win.",
        "run",
        "file",
        resumed="start",
    )
    model: str = option(
        "bert",
        name_option,
        "Which model: one of jvpipe's or of an installed package, or your own, as file.py:NAME or package.module:NAME.",
        "model",
        "",
        resumed="fixed",
    )
    plan: str | None = option(
        None,
        file_option,
        "A plan to follow, such as the plan.json of a run: nothing is planned then.",
        "pipeline",
        "file",
        resumed="plans",
    )
    steps: int | None = option(
        None,
        _COUNT,
        "The total number of steps, those before a resume included; the model's own if left out.",
        "run",
        "steps",
    )
    optimizer: str | None = option(
        None,
        one_of("optimizer", OPTIMIZERS),
        f"What updates parameters: {', '.join(OPTIMIZERS)}, with a clipped gradient; the model's own if left out.",
        "model",
        "",
        resumed="fixed",
    )
    learning_rate: float | None = option(
        None,
        positive,
        "Its highest learning rate; the model's own if left out.",
        "model",
        "rate",
    )
    warmup: int | None = option(
        None,
        partial(whole_number, least=0, most=MOST),
        "In how many steps the learning rate rises to that; the model's own share of all steps if left out.",
        "model",
        "steps",
    )
    data: str | None = option(
        None,
        file_option,
        'A text file or a folder of them, .jsonl and .parquet files with a field "text" or "messages" among them, '
        "or OWNER/NAME of a hub; by default the "
        "English prose that comes with Python. For models of images a folder with a folder for each class; by default "
        "the digits of scikit-learn. For models that translate a folder with files such as train.en and train.de; by "
        "default the message catalogues of Django.",
        "data",
        "path",
    )
    tokenizer: str | None = option(
        None,
        file_option,
        "Reads text by this tokenizer.json of the tokenizers package; by default one is trained on the text.",
        "data",
        "file",
        resumed="start",
    )
    init_from: str | None = option(
        None,
        file_option,
        "Begins with published weights of bert, gpt2, t5, llama, qwen3 or gemma: a folder with config.json and "
        "model.safetensors or its parts, as transformers writes it, or OWNER/NAME of a hub. The model is as "
        "config.json tells, and so is the tokenizer, if there is a tokenizer.json.",
        "model",
        "folder",
    )
    lora: int | None = option(
        None,
        _COUNT,
        "Trains adapters of this rank alone; all other parameters stay as they are.",
        "model",
        "rank",
    )
    lora_on: str | None = option(
        None,
        name_option,
        "With --lora: patterns of the paths of linear maps that have adapters, with commas between them; by default "
        '"*attention*".',
        "model",
        "patterns",
    )
    export_weights: str | None = option(
        None,
        file_option,
        "Writes the trained model to this new folder, laid out as that of --init-from, for transformers to load; "
        "adapters are added to what they adapt.",
        "run",
        "folder",
        resumed="start",
    )
    seed: int = option(
        0,
        partial(whole_number, least=0, most=2**63 - 1),
        "Seeds parameters, dropout and the order of the data.",
        "data",
        "number",
        resumed="fixed",
    )
    run_dir: str | None = option(
        None,
        file_option,
        "Where the run is kept; by default a new folder in runs/.",
        "run",
        "folder",
    )
    resume: bool = option(
        False,
        checked_flag,
        "Continues the run in --run-dir, under its plan. Options that are not given are as they were in it; with other "
        "stages, another planner, schedule or limit it is planned again.",
        "run",
        "",
        resumed="start",
    )
    trust: bool = option(
        False,
        checked_flag,
        "With --resume of a folder from elsewhere: runs the model's code that its config.json names.",
        "run",
        "",
        resumed="start",
    )
    checkpoint_every: int = option(
        100,
        _COUNT,
        "Steps between checkpoints; there is always one of the last step.",
        "run",
        "steps",
    )
    keep: int = option(
        2,
        _COUNT,
        "How many of the last checkpoints are kept, beside the best one.",
        "run",
        "checkpoints",
    )
    eval_every: int | None = option(
        None,
        _COUNT,
        "Steps between evaluations on batches that training never sees; the best one's checkpoint is kept.",
        "run",
        "steps",
    )
    early_stop: int | None = option(
        None,
        _COUNT,
        "Ends the run after so many evaluations that were no better than the best.",
        "run",
        "evaluations",
    )
    track: tuple[str, ...] = option(
        (),
        _texts,
        "Where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, trackio, or the tracker of an installed "
        "package; may be given again.",
        "run",
        "tracker",
    )
    adapt: bool = option(
        False,
        checked_flag,
        "Lets layers leave a device that has become slow, and come back.",
        "pipeline",
    )
    nas: bool = option(
        False,
        checked_flag,
        "Searches architectures by regularised evolution: one after another is trained, blocks keep their parameters.",
        "model",
    )
    nas_steps: int = option(
        5,
        _COUNT,
        "Steps that each architecture is trained for at a time.",
        "model",
        "steps",
    )
    timeline_steps: int = option(
        1,
        _COUNT,
        "How many steps timeline.json shows: the last ones.",
        "run",
        "steps",
    )
    profile: int | None = option(
        None,
        _COUNT,
        "Profiles so many steps, from the second on, with jax.profiler; timeline.json shows these.",
        "run",
        "steps",
        resumed="start",
    )
    export: str | None = option(
        None,
        file_option,
        "Writes the trained parameters to this .safetensors file.",
        "run",
        "file",
        resumed="start",
    )
    coordinator: str | None = option(
        None,
        address_option,
        "Over several processes, on one host or many: where process 0 waits for the others.",
        "processes",
        "HOST:PORT",
        resumed="processes",
    )
    process_id: int | None = option(
        None,
        partial(whole_number, least=0, most=MOST),
        "Which of the processes this is, from 0; all run the same command except for this.",
        "processes",
        "number",
        resumed="own",
    )
    num_processes: int | None = option(
        None,
        _COUNT,
        "How many processes there are.",
        "processes",
        "processes",
        resumed="processes",
    )
    distributed: bool = option(
        False,
        checked_flag,
        "Finds the other processes as Slurm, Open MPI, Kubernetes or a TPU pod tells, in place of the three above.",
        "processes",
        "",
        resumed="processes",
    )
    host_address: str | None = option(
        None,
        name_option,
        "This host's address for the other processes; by default that over which it reaches the coordinator.",
        "processes",
        "address",
        resumed="own",
    )
    secret_file: str | None = option(
        None,
        file_option,
        "A file of mode 0600 with a secret that all processes have: who has another one is refused. Without it the "
        "file that JVPIPE_SECRET_FILE names; needs the three options above.",
        "processes",
        "file",
        resumed="own",
    )
    host_timeout: float = option(
        300.0,
        partial(positive, largest=threading.TIMEOUT_MAX),
        "Seconds without a sign of another process, or without a step, after which a run over several is given up.",
        "processes",
        "seconds",
        resumed="processes",
    )

    @property
    def shares(self) -> bool:
        """Whether the planner decides how many devices each stage has."""
        return self.replicas == "auto"

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """How many devices each stage has; empty if each has one, or the planner decides."""
        counts = self.replicas
        return () if counts is None or self.shares else read_whole_numbers("--replicas", counts)

    @property
    def stages_asked(self) -> int | None:
        """How many stages there are; None if the planner decides."""
        return (
            self.stages if self.stages or self.shares else len(self.replica_counts) or USUAL_STAGES
        )

    @property
    def devices_asked(self) -> int:
        """How many devices the run needs; CPU devices are made to this number."""
        if self.shares:
            return self.devices or max(self.stages or 1, os.cpu_count() or 1)
        return sum(self.replica_counts) or self.stages_asked or 1

    def check(self) -> None:
        """Raises ValueError for an option with an impossible value, or that contradicts another."""
        check_each(self)
        if self.early_stop and not self.eval_every:
            raise ValueError(
                f"--early-stop {self.early_stop} needs --eval-every, the steps between evaluations"
            )
        if self.devices and not self.shares:
            raise ValueError(
                f"--devices {self.devices} is for --replicas auto; else --stages says how many are used"
            )
        if self.replica_counts and self.stages not in (None, len(self.replica_counts)):
            raise ValueError(
                f"--replicas {self.replicas} says so of {len(self.replica_counts)} stages, --stages of "
                f"{self.stages}: give a number for each, or leave out --stages"
            )
        if self.nas and self.eval_every:
            raise ValueError(
                "--eval-every is for one model: a search is judged by its training losses (--nas)"
            )
        if self.lora_on and not self.lora:
            raise ValueError(f"--lora-on {self.lora_on} needs --lora, the rank of the adapters")
        if self.export_weights and not self.init_from:
            raise ValueError(
                f"--export-weights {self.export_weights} needs --init-from, the folder that it is to be like; "
                "--export FILE writes the parameters of any run"
            )


def check_each(options: PipelineOptions, group: Group | None = None) -> None:
    """Raises ValueError for the first option, of one group or of all, with an impossible value."""
    for name, one in options_of(type(options)).items():
        if group in (None, one.group):
            one.checked(one.flag, getattr(options, name))


# Which options are kept for a resumed run, and which ones all processes must share.

_OWN = resumed(TrainOptions, "own")
OF_PROCESSES = (*resumed(TrainOptions, "processes"), *_OWN)
FIXED = resumed(TrainOptions, "fixed")
"""The options that a resumed run cannot change, because they decide what is computed. Others decide
about placement, or how long to go on."""
DECIDES = resumed(TrainOptions, "plans")
"""The options that decide a plan: a run that is resumed with other values is planned again."""
NOT_KEPT = (*resumed(TrainOptions, "start"), *OF_PROCESSES)


def kept_options(options: TrainOptions) -> dict[str, Any]:
    """Returns the options that a run is resumed with, by name."""
    # A resumed run may have other processes.
    names = (name for name in options_of(TrainOptions) if name not in OF_PROCESSES)
    return {name: getattr(options, name) for name in names}


def agreed_options(options: TrainOptions) -> list[tuple[str, str]]:
    """Returns the options that all processes of a run must share, as text by name."""
    options_of_run = options_of(TrainOptions).values()
    return [
        (one.flag, str(getattr(options, one.name)))
        for one in options_of_run
        if one.name not in _OWN
    ]


def fields_of(options: ModelOptions) -> dict[str, Any]:
    """Returns the fields of the model that options set, by name.

    >>> fields_of(TrainOptions(set=("blocks=12", "dropout=0"), sequence_length=64))
    {'blocks': '12', 'dropout': '0', 'sequence_length': 64}
    """
    names = ("dtype", "sequence_length", "lora", "lora_on")
    by_name = {name: getattr(options, name, None) for name in names}
    set_fields = {name: value for name, value in by_name.items() if value is not None}
    return fields_option("--set", options.set) | set_fields
