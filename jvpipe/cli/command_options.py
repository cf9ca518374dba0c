"""The options that the commands have in addition to those of a `Pipeline`.

This file has all such options of `jvpipe.train`, and those that `jvpipe.plan` shares. To add an
option, add a field that `option` makes (util/option.py). The help and the page docs/options.md are
generated from the fields. session/options.py defines the options of a `Pipeline`.
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
from jvpipe.session.options import PipelineOptions, flag_option
from jvpipe.util.given import (
    checked_address,
    checked_fields,
    checked_path,
)
from jvpipe.util.option import TRAIN, Group, Taker, option, options_of, resumed

MOST = 2**31 - 1
"""The largest count that an option may have, because steps are counted with 32-bit integers."""
_COUNT = partial(whole_number, most=MOST)


def _trackers(flag: str, names: tuple[str, ...]) -> list[str]:
    return [checked_name(flag, name, "tensorboard") for name in names]


# Common kinds of options; each use adds help, group and unit. The default is None. The checks
# accept unknown names, and files that do not exist.

_NAME = partial(checked_name, usual="tiny")
name_option = partial(option, None, _NAME)
path_option = partial(option, None, checked_path)
count_option = partial(option, None, _COUNT)


@dataclass(frozen=True)
class ModelOptions(PipelineOptions):
    """The options that both commands have in addition to those of a `Pipeline`."""

    size: str | None = name_option(
        "The name of the model's size; by default the smallest size, or your own model unchanged.",
        "model",
        resumed="fixed",
    )
    dtype: str | None = name_option(
        "The type of computations, float32 or bfloat16; by default the model's own. Parameters are "
        "float32.",
        "model",
        resumed="fixed",
    )
    sequence_length: int | None = count_option(
        "The number of tokens in a record, for models with a field sequence_length or tokens.",
        "model",
        "tokens",
    )
    set: tuple[str, ...] = option(
        (),
        checked_fields,
        "Replaces the field NAME of the model, such as blocks=12; may be given several times.",
        "model",
        "NAME=VALUE",
    )
    batch_size: int | None = count_option(
        "The number of examples in a step; by default the model's own.",
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
        "A file with any of these options, in TOML, YAML or JSON, such as a run's config.json. "
        "Options on the command line take precedence.",
        "run",
        "file",
        resumed="start",
    )
    model: str = option(
        "bert",
        _NAME,
        "The model: a name from jvpipe or from an installed package, or your own model as "
        "file.py:NAME or package.module:NAME.",
        "model",
        resumed="fixed",
    )
    plan: str | None = path_option(
        "A plan to use in place of a planner, such as the plan.json of a run.",
        "pipeline",
        "file",
        resumed="plans",
    )
    steps: int | None = count_option(
        "The total number of steps, including those before a resume; by default the model's own.",
        "run",
        "steps",
    )
    optimizer: str | None = option(
        None,
        one_of("optimizer", OPTIMIZERS),
        f"The optimizer: {', '.join(OPTIMIZERS)}; by default the model's own. It gets clipped "
        "gradients.",
        "model",
        resumed="fixed",
    )
    learning_rate: float | None = option(
        None,
        positive,
        "The highest learning rate; by default the model's own.",
        "model",
        "rate",
    )
    warmup: int | None = option(
        None,
        partial(whole_number, least=0, most=MOST),
        "The number of steps in which the learning rate rises to its highest; by default the "
        "model's own share of all steps.",
        "model",
        "steps",
    )
    data: str | None = path_option(
        "For text models: a file or a folder of files, either of text, or .jsonl or .parquet files "
        'with a field "text" or "messages"; or OWNER/NAME on the Hugging Face hub; by default the '
        "English prose that comes with Python. For image models: a folder with a subfolder for "
        "each class; by default the digits of scikit-learn. For translation models: a folder with "
        "files such as train.en and train.de; by default the message catalogs of Django.",
        "data",
        "path",
    )
    tokenizer: str | None = path_option(
        "Reads text with this tokenizer.json of the tokenizers package; by default a tokenizer is "
        "trained on the text.",
        "data",
        "file",
        resumed="start",
    )
    init_from: str | None = path_option(
        "Begins with published weights of bert, gpt2, t5, llama, qwen3 or gemma: a folder that "
        "transformers wrote, with config.json and model.safetensors or its parts, or OWNER/NAME on "
        "the Hugging Face hub. The model's fields come from config.json, and its tokenizer comes "
        "from tokenizer.json if there is one.",
        "model",
        "folder",
    )
    lora: int | None = count_option(
        "Trains only LoRA adapters of this rank; all other parameters stay unchanged.",
        "model",
        "rank",
    )
    lora_on: str | None = name_option(
        "With --lora: patterns for the paths of the linear maps that get adapters, separated by "
        'commas; by default "*attention*".',
        "model",
        "patterns",
    )
    export_weights: str | None = path_option(
        "Writes the trained model to this new folder, in the layout of the folder of --init-from, "
        "so that transformers can load it. LoRA adapters are merged into the parameters that they "
        "adapt.",
        "run",
        "folder",
        resumed="start",
    )
    seed: int = option(
        0,
        partial(whole_number, least=0, most=2**63 - 1),
        "The seed of the parameters, of dropout and of the order of the data.",
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
        "of the run. A change of the stages, planner, schedule or memory limit makes a new plan.",
        "run",
        resumed="start",
    )
    trust: bool = flag_option(
        "With --resume: runs the model's code that config.json names, even if the folder comes "
        "from elsewhere.",
        "run",
        resumed="start",
    )
    checkpoint_every: int = option(
        100,
        _COUNT,
        "The number of steps between checkpoints; the last step always has one.",
        "run",
        "steps",
    )
    keep: int = option(
        2,
        _COUNT,
        "The number of last checkpoints to keep, in addition to the best one.",
        "run",
        "checkpoints",
    )
    eval_every: int | None = count_option(
        "The number of steps between evaluations on held-out batches; the best checkpoint is kept.",
        "run",
        "steps",
    )
    early_stop: int | None = count_option(
        "Ends the run when this many evaluations in a row were not the best so far.",
        "run",
        "evaluations",
    )
    track: tuple[str, ...] = option(
        (),
        _trackers,
        "Also sends the metrics to this tracker: tensorboard, wandb, mlflow, trackio, or the "
        "tracker of an installed package; may be given several times.",
        "run",
        "tracker",
    )
    adapt: bool = flag_option(
        "Moves layers away from a device that becomes slow, and back when it recovers.",
        "pipeline",
    )
    nas: bool = flag_option(
        "Searches architectures by regularized evolution. Architectures are trained one after "
        "another, and equal blocks share parameters.",
        "model",
    )
    nas_steps: int = option(
        5,
        _COUNT,
        "The number of steps for which each architecture is trained at a time.",
        "model",
        "steps",
    )
    timeline_steps: int = option(
        1,
        _COUNT,
        "The number of last steps that timeline.json shows.",
        "run",
        "steps",
    )
    profile: int | None = count_option(
        "Profiles this many steps with jax.profiler, from the second step on; timeline.json shows "
        "the same steps.",
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
        "For several processes, on one or several hosts: the address where process 0 waits for "
        "the others.",
        "processes",
        "HOST:PORT",
        resumed="processes",
    )
    process_id: int | None = option(
        None,
        partial(whole_number, least=0, most=MOST),
        "The number of this process, from 0. All processes run the same command otherwise.",
        "processes",
        "number",
        resumed="own",
    )
    num_processes: int | None = count_option(
        "The number of processes.",
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
        "The address of this host for the other processes; by default the address from which it "
        "reaches the coordinator.",
        "processes",
        "address",
        resumed="own",
    )
    secret_file: str | None = path_option(
        "A file of mode 0600 with a secret that all processes share; a process with another "
        "secret is refused. By default the file that the environment variable JVPIPE_SECRET_FILE "
        "names. Needs --coordinator.",
        "processes",
        "file",
        resumed="own",
    )
    host_timeout: float = option(
        300.0,
        partial(positive, largest=threading.TIMEOUT_MAX),
        "With several processes: the run ends after this many seconds without a message from "
        "another process, or without progress.",
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
        """The requested number of stages; None if the planner decides."""
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
                f"--early-stop {self.early_stop} needs --eval-every, the number of steps between "
                "evaluations"
            )
        if self.devices and not self.shares:
            raise ValueError(
                f"--devices {self.devices} needs --replicas auto; without it, give the number of "
                "devices by --stages"
            )
        if self.replica_counts and self.stages not in (None, len(self.replica_counts)):
            raise ValueError(
                f"--replicas {self.replicas} is for {len(self.replica_counts)} stages, but "
                f"--stages is {self.stages}: give a number for each stage, or leave out --stages"
            )
        if self.nas and self.eval_every:
            raise ValueError(
                "--eval-every is for one model, but --nas trains several and compares their "
                "training losses: leave out one of the two"
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


# The constants below say what a resumed run does with options (`Resumed` in util/option.py).

OF_PROCESSES = resumed(TrainOptions, "processes", "own")
FIXED = resumed(TrainOptions, "fixed")
"""The options that a resumed run cannot change, because they decide what is computed. The
fields of the model cannot change either (`_config` in job.py)."""
DECIDES = resumed(TrainOptions, "plans")
"""The options that decide a plan. If a run is resumed with other values, a new plan is made."""
NOT_KEPT = resumed(TrainOptions, "start", "processes", "own")
"""The options that apply to only one start of a run."""


def kept_options(options: TrainOptions) -> dict[str, Any]:
    """Returns the options to write to config.json, by name."""
    # Options about processes are left out, because a resumed run may have other processes.
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
    fields = checked_fields("--set", options.set)
    for name in ("dtype", "sequence_length", "lora", "lora_on"):
        if (value := getattr(options, name, None)) is not None:
            fields[name] = value
    return fields
