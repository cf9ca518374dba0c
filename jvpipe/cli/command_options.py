"""Defines options beyond those of a `Pipeline`: all of `jvpipe.train`, some of `jvpipe.plan`.

To add an option, add a field. The options of a `Pipeline` are in session/options.py. The
function `option` (util/option.py), which makes a field, takes the default, the check, the
help, the group, the unit, and what a resumed run does with the option. `TrainOptions.check`
compares options with each other. The help and the page docs/options.md are generated from
the fields.
"""

import os
import threading
from dataclasses import dataclass
from functools import partial
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
from jvpipe.session.options import PipelineOptions
from jvpipe.util.given import (
    checked_address,
    checked_fields,
    checked_flag,
    checked_path,
    several,
)
from jvpipe.util.option import TRAIN, Group, Taker, option, options_of, resumed

MOST = 2**31 - 1
"""The largest count of anything, because steps are counted in 32 bits."""
_COUNT = partial(whole_number, most=MOST)


def _texts(flag: str, value: Any) -> list[str]:
    texts = [] if value is None else several(value)
    return [
        checked_name(flag, text, "tensorboard") for text in ([value] if texts is None else texts)
    ]


# Common kinds of options; each use adds help, group and unit. A flag is False by default,
# the other kinds None. The checks accept unknown names, and files that do not exist.

_NAME = partial(checked_name, usual="tiny")
name_option = partial(option, None, _NAME)
path_option = partial(option, None, checked_path)
count_option = partial(option, None, _COUNT)
flag_option = partial(option, False, checked_flag)


@dataclass(frozen=True)
class ModelOptions(PipelineOptions):
    """The options about a model that both command lines have."""

    size: str | None = name_option(
        "The model's size, by name; if left out the smallest one, or your own model as it is.",
        "model",
        resumed="fixed",
    )
    dtype: str | None = name_option(
        "The type to compute in, float32 or bfloat16; the model's own if left out. Parameters are "
        "float32.",
        "model",
        resumed="fixed",
    )
    sequence_length: int | None = count_option(
        "Tokens of a record, for models that have this field or one called tokens.",
        "model",
        "tokens",
    )
    set: tuple[str, ...] = option(
        (),
        checked_fields,
        "NAME=VALUE replaces a field of the model, such as blocks=12; may be given several times.",
        "model",
        "NAME=VALUE",
    )
    batch_size: int | None = count_option(
        "Examples per step; the model's own if left out.",
        "data",
        "examples",
        resumed="fixed",
    )
    figure: str | None = path_option(
        "Draws the timeline to this file (png, svg or pdf); the figure of a plan also shows its "
        "memory.",
        "run",
        "file",
        resumed="start",
    )


@dataclass(frozen=True)
class TrainOptions(ModelOptions):
    """Trains a model as a pipeline over the devices of this machine."""

    taker: ClassVar[Taker] = TRAIN

    config: str | None = path_option(
        "A file with any of these options: TOML, YAML, or JSON such as a run's config.json. The "
        "command line wins.",
        "run",
        "file",
        resumed="start",
    )
    model: str = option(
        "bert",
        _NAME,
        "Which model: one of jvpipe's or of an installed package, or your own, as file.py:NAME or "
        "package.module:NAME.",
        "model",
        resumed="fixed",
    )
    plan: str | None = path_option(
        "A plan to use, such as the plan.json of a run; no planner is asked then.",
        "pipeline",
        "file",
        resumed="plans",
    )
    steps: int | None = count_option(
        "The total number of steps, those before a resume included; the model's own if left out.",
        "run",
        "steps",
    )
    optimizer: str | None = option(
        None,
        one_of("optimizer", OPTIMIZERS),
        f"The optimizer, which gets clipped gradients: {', '.join(OPTIMIZERS)}; the model's own "
        "if left out.",
        "model",
        resumed="fixed",
    )
    learning_rate: float | None = option(
        None,
        positive,
        "The highest learning rate; the model's own if left out.",
        "model",
        "rate",
    )
    warmup: int | None = option(
        None,
        partial(whole_number, least=0, most=MOST),
        "Steps in which the learning rate rises to its highest; the model's own share of all "
        "steps if left out.",
        "model",
        "steps",
    )
    data: str | None = path_option(
        "For models of text: a file or a folder of files, which are text, or .jsonl or .parquet with a field "
        '"text" or "messages"; or OWNER/NAME of a hub; by default the English prose that comes with Python. '
        "For models of images: a folder with a folder for each class; by default the digits of scikit-learn. "
        "For models that translate: a folder with files such as train.en and train.de; by default the message "
        "catalogs of Django.",
        "data",
        "path",
    )
    tokenizer: str | None = path_option(
        "Reads text with this tokenizer.json of the tokenizers package; by default one is trained "
        "on the text.",
        "data",
        "file",
        resumed="start",
    )
    init_from: str | None = path_option(
        "Begins with published weights of bert, gpt2, t5, llama, qwen3 or gemma: a folder with "
        "config.json and model.safetensors or its parts, as transformers writes it, or OWNER/NAME "
        "of a hub. The model's fields are those in config.json, and its tokenizer is the "
        "tokenizer.json if there is one.",
        "model",
        "folder",
    )
    lora: int | None = count_option(
        "Trains only adapters of this rank; all other parameters stay as they are.",
        "model",
        "rank",
    )
    lora_on: str | None = name_option(
        "With --lora: patterns for the paths of the linear maps that get adapters, with commas between them; by "
        'default "*attention*".',
        "model",
        "patterns",
    )
    export_weights: str | None = path_option(
        "Writes the trained model to this new folder, laid out as that of --init-from, for "
        "transformers to load; adapters are added to the parameters that they adapt.",
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
    run_dir: str | None = path_option(
        "The folder of the run; by default a new one in runs/.",
        "run",
        "folder",
    )
    resume: bool = flag_option(
        "Continues the run in --run-dir with its plan. Options that are not given keep the values "
        "of the run; other stages, or another planner, schedule or limit, make a new plan.",
        "run",
        resumed="start",
    )
    trust: bool = flag_option(
        "With --resume of a folder from elsewhere: runs the model's code that its config.json "
        "names.",
        "run",
        resumed="start",
    )
    checkpoint_every: int = option(
        100,
        _COUNT,
        "Steps between checkpoints; the last step always has one.",
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
    eval_every: int | None = count_option(
        "Steps between evaluations on batches that training never sees; the best checkpoint is "
        "kept.",
        "run",
        "steps",
    )
    early_stop: int | None = count_option(
        "Ends the run once this many evaluations have come after the best one.",
        "run",
        "evaluations",
    )
    track: tuple[str, ...] = option(
        (),
        _texts,
        "Where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, trackio, or the "
        "tracker of an installed package; may be given several times.",
        "run",
        "tracker",
    )
    adapt: bool = flag_option(
        "Lets layers leave a device that has become slow, and come back.",
        "pipeline",
    )
    nas: bool = flag_option(
        "Searches architectures by regularized evolution: trains one after another; equal blocks "
        "share parameters.",
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
    profile: int | None = count_option(
        "Profiles this many steps, from the second on, with jax.profiler; timeline.json shows the "
        "same steps.",
        "run",
        "steps",
        resumed="start",
    )
    export: str | None = path_option(
        "Writes the trained parameters to this .safetensors file.",
        "run",
        "file",
        resumed="start",
    )
    coordinator: str | None = option(
        None,
        checked_address,
        "For several processes, on one host or many: the address where process 0 waits for the "
        "others.",
        "processes",
        "HOST:PORT",
        resumed="processes",
    )
    process_id: int | None = option(
        None,
        partial(whole_number, least=0, most=MOST),
        "The number of this process, from 0; all run the same command except for this number.",
        "processes",
        "number",
        resumed="own",
    )
    num_processes: int | None = count_option(
        "How many processes there are.",
        "processes",
        "processes",
        resumed="processes",
    )
    distributed: bool = flag_option(
        "Finds the other processes through Slurm, Open MPI, Kubernetes or a TPU pod, in place of "
        "--coordinator, --process-id and --num-processes.",
        "processes",
        resumed="processes",
    )
    host_address: str | None = name_option(
        "This host's address for the other processes; by default the one from which it reaches "
        "the coordinator.",
        "processes",
        "address",
        resumed="own",
    )
    secret_file: str | None = path_option(
        "A file of mode 0600 with a secret that all processes share; a process with another "
        "secret is refused. By default the file that JVPIPE_SECRET_FILE names. Needs "
        "--coordinator.",
        "processes",
        "file",
        resumed="own",
    )
    host_timeout: float = option(
        300.0,
        partial(positive, largest=threading.TIMEOUT_MAX),
        "Seconds without a sign of another process, or without a step, after which a run of "
        "several processes is given up.",
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
        """The number of devices of each stage; empty if each has one, or the planner decides."""
        counts = self.replicas
        return () if counts is None or self.shares else read_whole_numbers("--replicas", counts)

    @property
    def stages_asked(self) -> int | None:
        """The number of stages that the options ask for; None if the planner decides."""
        return (
            self.stages if self.stages or self.shares else len(self.replica_counts) or USUAL_STAGES
        )

    @property
    def devices_asked(self) -> int:
        """The number of devices that the run needs; on CPUs, JAX makes that many."""
        if self.shares:
            return self.devices or max(self.stages or 1, os.cpu_count() or 1)
        return sum(self.replica_counts) or self.stages_asked or 1

    def check(self) -> None:
        """Raises ValueError if an option has an impossible value or contradicts another option."""
        check_each(self)
        if self.early_stop and not self.eval_every:
            raise ValueError(
                f"--early-stop {self.early_stop} needs --eval-every, the steps between evaluations"
            )
        if self.devices and not self.shares:
            raise ValueError(
                f"--devices {self.devices} is for --replicas auto; else --stages says how many are "
                "used"
            )
        if self.replica_counts and self.stages not in (None, len(self.replica_counts)):
            raise ValueError(
                f"--replicas {self.replicas} is for {len(self.replica_counts)} stages, but "
                f"--stages is {self.stages}: give a number for each stage, or leave out --stages"
            )
        if self.nas and self.eval_every:
            raise ValueError(
                "--eval-every is for one model: a search is judged by its training losses (--nas)"
            )
        if self.lora_on and not self.lora:
            raise ValueError(f"--lora-on {self.lora_on} needs --lora, the rank of the adapters")
        if self.export_weights and not self.init_from:
            raise ValueError(
                f"--export-weights {self.export_weights} needs --init-from, the folder whose "
                "layout it copies; --export FILE writes the parameters of any run"
            )


def check_each(options: PipelineOptions, group: Group | None = None) -> None:
    """Raises ValueError if an option of a group, or of any group, has an impossible value."""
    for name, one in options_of(type(options)).items():
        if group in (None, one.group):
            one.checked(one.flag, getattr(options, name))


# The tables below say which options a resumed run keeps, and which ones all processes must share.

OF_PROCESSES = resumed(TrainOptions, "processes", "own")
FIXED = resumed(TrainOptions, "fixed")
"""The options that a resumed run cannot change, because they decide what is computed. The
fields of the model cannot change either (`_config` in job.py)."""
DECIDES = resumed(TrainOptions, "plans")
"""The options that decide a plan. If a run is resumed with other values, a new plan is made."""
NOT_KEPT = resumed(TrainOptions, "start", "processes", "own")
"""The options that hold for only one start of a run."""


def kept_options(options: TrainOptions) -> dict[str, Any]:
    """Returns the options that config.json keeps, by name."""
    # Options about processes are not kept, because a resumed run may have other processes.
    return {
        name: getattr(options, name)
        for name in options_of(TrainOptions)
        if name not in OF_PROCESSES
    }


def agreed_options(options: TrainOptions) -> list[tuple[str, str]]:
    """Returns the flags and values of the options that all processes of a run must share."""
    return [
        (one.flag, str(getattr(options, name)))
        for name, one in options_of(TrainOptions).items()
        if one.resumed != "own"
    ]


def fields_of(options: ModelOptions) -> dict[str, Any]:
    """Returns the fields of the model that the options set, by name.

    >>> fields_of(TrainOptions(set=("blocks=12", "dropout=0"), sequence_length=64))
    {'blocks': '12', 'dropout': '0', 'sequence_length': 64}
    """
    names = ("dtype", "sequence_length", "lora", "lora_on")
    by_name = {name: getattr(options, name, None) for name in names}
    set_fields = {name: value for name, value in by_name.items() if value is not None}
    return checked_fields("--set", options.set) | set_fields
