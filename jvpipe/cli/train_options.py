"""The options of `python -m jvpipe.train`: given ones, else those of a file or a resumed run."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from jvpipe import models
from jvpipe.cli import outputs
from jvpipe.cli.command_line import as_type, is_type, parsed, read_options
from jvpipe.cli.plan_options import Options as PlanOptions
from jvpipe.cli.run_folder import KEPT_CHECKPOINTS, RunDir, check_made_here
from jvpipe.models.recipe import OPTIMIZERS, Recipe
from jvpipe.report.trackers import find_tracker
from jvpipe.session.arguments import USUAL_MICROBATCHES, USUAL_STAGES, whole_numbers
from jvpipe.util.brief import brief
from jvpipe.util.names import did_you_mean

FIXED = ("model", "size", "dtype", "batch_size", "seed", "optimizer")
"""What a resumed run cannot change; all else is placement, or how long to go on."""
OWN = ("process_id", "host_address", "secret_file")
"""Options that differ from process to process."""
OF_PROCESSES = ("coordinator", "num_processes", "distributed", "host_timeout", *OWN)
"""Options that tell of the processes of one start."""
COUNTS = (
    "stages",
    "devices",
    "microbatches",
    "sequence_length",
    "batch_size",
    "steps",
    "checkpoint_every",
    "keep",
    "eval_every",
    "early_stop",
    "nas_steps",
    "timeline_steps",
    "profile",
    "lora",
)
"""Options that are 1 at least."""
MOST = 2**31 - 1
"""What these are at most: steps are counted in 32 bits."""
NOT_KEPT = (
    "config",
    "resume",
    "trust",
    "remeasure",
    "profile",
    "tokenizer",
    "figure",
    "export",
    "export_weights",
    *OF_PROCESSES,
)
"""Options that hold for one start alone."""


@dataclass(frozen=True)
class Options:
    """Trains a model as a pipeline over the devices of this machine."""

    config: str | None = None
    """A file with any of these options, TOML, YAML or JSON such as a run's config.json; those given here win."""
    model: str = "bert"
    """Which model: one of jvpipe's or of an installed package, or your own, as file.py:NAME or package.module:NAME."""
    size: str | None = None
    """Which of its sizes; the smallest one if left out, or your object as it is."""
    dtype: str | None = None
    """The type to compute in (float32 or bfloat16); parameters are float32. The model's own if left out."""
    sequence_length: int | None = None
    """Tokens of a record, for models that have this field or one called tokens."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE replaces a field of the model, such as blocks=12; may be given again and again."""
    stages: int | None = None
    """Over how many devices, or how many --replicas share; 2 if left out, decided with --replicas auto."""
    replicas: str | None = None
    """How many devices each stage has, such as 2,1; auto to have that decided, and the number of stages."""
    devices: int | None = None
    """How many devices --replicas auto shares out; all that there are if left out, one per core if they are CPUs."""
    microbatches: int = USUAL_MICROBATCHES
    """Into how many parts a batch is split."""
    schedule: str = "1f1b"
    """In which order the micro-batches run."""
    planner: str = "jvpipe"
    """How layers are spread over stages."""
    plan: str | None = None
    """A plan to follow, such as the plan.json of a run: nothing is planned then."""
    memory_limit: str | None = None
    """What each device may hold, such as 2GiB, or 24GiB,11GiB for two."""
    host_memory_limit: str | None = None
    """What values swapped to the host may take there, of all devices together."""
    checkpoint: str | None = None
    """Which micro-batches are computed again from their stage's input: always, except_last, never."""
    stacked: str | None = None
    """What the optimizer sees of layers that the model scans over: with per_layer each alone, else
    their arrays."""
    frozen: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A pattern of the paths of parameters that stay as they are, such as "base/*"; may be given again."""
    batch_size: int | None = None
    """Examples per step; the model's own if left out."""
    steps: int | None = None
    """The total number of steps, those before a resume included; the model's own if left out."""
    optimizer: str | None = None
    """What updates parameters: adamw, adam, nadamw, adafactor, lamb, lion, rmsprop, sgd or momentum, with a clipped
    gradient; the model's own if left out."""
    learning_rate: float | None = None
    """Its highest learning rate; the model's own if left out."""
    warmup: int | None = None
    """In how many steps the learning rate rises to that; the model's own share of all steps if left out."""
    data: str | None = None
    """A text file or a folder of them, .jsonl and .parquet files with a field "text" or "messages" among them, or
    OWNER/NAME of a hub; by default the English prose that comes with Python. For models of images a folder with a
    folder for each class; by default the digits of scikit-learn. For models that translate a folder with files such as
    train.en and train.de; by default the message catalogues of Django."""
    tokenizer: str | None = None
    """Reads text by this tokenizer.json of the tokenizers package; by default one is trained on the text."""
    init_from: str | None = None
    """Begins with published weights of bert, gpt2, t5, llama, qwen3 or gemma: a folder with config.json and
    model.safetensors or its parts, as transformers writes it, or OWNER/NAME of a hub. The model is as config.json
    tells, and so is the tokenizer, if there is a tokenizer.json."""
    lora: int | None = None
    """Trains adapters of this rank alone; all other parameters stay as they are."""
    lora_on: str | None = None
    """With --lora: patterns of the paths of linear maps that have adapters, with commas between them; by default
    "*attention*"."""
    export_weights: str | None = None
    """Writes the trained model to this new folder, laid out as that of --init-from, for transformers to load; adapters
    are added to what they adapt."""
    seed: int = 0
    """Of parameters, dropout and the order of the data."""
    remeasure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measures layers anew; else what an earlier run of the same model has measured on this machine is used."""
    run_dir: str | None = None
    """Where the run is kept; by default a new folder in runs/."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continues the run in --run-dir, under its plan. Options that are not given are as they were in it; with other
    stages, another planner, schedule or limit it is planned anew."""
    trust: tyro.conf.FlagCreatePairsOff[bool] = False
    """With --resume of a folder from elsewhere: runs the model's code that its config.json names."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is always one of the last step."""
    keep: int = KEPT_CHECKPOINTS
    """How many of the last checkpoints are kept, beside the best one."""
    eval_every: int | None = None
    """Steps between evaluations on batches that training never sees; the best one's checkpoint is kept."""
    early_stop: int | None = None
    """Ends the run after so many evaluations that were no better than the best."""
    track: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, trackio, or the tracker of an installed
    package; may be given again."""
    adapt: tyro.conf.FlagCreatePairsOff[bool] = False
    """Lets layers leave a device that has become slow, and come back."""
    nas: tyro.conf.FlagCreatePairsOff[bool] = False
    """Searches architectures by regularised evolution: one after another is trained, blocks keep their parameters."""
    nas_steps: int = 5
    """Steps that each architecture is trained for at a time."""
    timeline_steps: int = 1
    """How many steps timeline.json shows: the last ones."""
    profile: int | None = None
    """Profiles so many steps, from the second on, with jax.profiler; timeline.json shows these."""
    figure: str | None = None
    """Draws the steps of timeline.json to this .png, .svg or .pdf."""
    export: str | None = None
    """Writes the trained parameters to this .safetensors file."""
    coordinator: str | None = None
    """Over several processes, on one host or many: HOST:PORT, where process 0 waits for the others."""
    process_id: int | None = None
    """Which of the processes this is, from 0; all run the same command but for this."""
    num_processes: int | None = None
    """How many processes there are."""
    distributed: tyro.conf.FlagCreatePairsOff[bool] = False
    """Finds the other processes as Slurm, Open MPI, Kubernetes or a TPU pod tells, in place of the three above."""
    host_address: str | None = None
    """This host's address for the other processes; by default that over which it reaches the coordinator."""
    secret_file: str | None = None
    """A file of mode 0600 with a secret that all processes have: who has another one is refused. Without it the file
    that JVPIPE_SECRET_FILE names; needs the three options above."""
    host_timeout: float = 300.0
    """Seconds without a sign of another process, or without a step, after which a run over several is given up."""

    @property
    def shares(self) -> bool:
        """Whether it is to be decided how many devices each stage has."""
        return self.replicas == "auto"

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """How many devices each stage has; nothing where each has one, or that is to be decided."""
        return (
            ()
            if self.replicas is None or self.shares
            else whole_numbers("--replicas", self.replicas)
        )

    @property
    def stages_asked(self) -> int | None:
        """How many stages there are; None where that is to be decided."""
        return (
            self.stages if self.stages or self.shares else len(self.replica_counts) or USUAL_STAGES
        )

    @property
    def devices_asked(self) -> int:
        """How many devices there should be, if they can be made."""
        if self.shares:
            return self.devices or max(self.stages or 1, os.cpu_count() or 1)
        return sum(self.replica_counts) or self.stages_asked or 1


def given(arguments: Sequence[str] | None) -> Options:
    """The options of a command line, others as --config has them, or as they are by default."""
    options = parsed(Options, arguments, "jvpipe.train")
    return options if options.config is None else _parsed(arguments, _of_file(options))


def parse(arguments: Sequence[str] | None, *, writes: bool = True) -> Options:
    """The options: given ones, else those of --config, else with --resume those of the run, else the defaults.

    Args:
        arguments: of the command line.
        writes: this process is the one that writes files.
    """
    options = given(arguments)
    if options.resume:
        if options.run_dir is None:
            raise ValueError("--resume needs --run-dir, the folder of the run to continue")
        before = RunDir(Path(options.run_dir))
        config = before.read_config()
        if options.nas or config.get("nas"):
            raise ValueError(
                "--nas cannot be resumed: a search saves its last architecture alone. Begin a new run"
            )
        saved = _options_in(config, before.config)
        if saved.get("data") and not options.data:
            print(
                f"data: {saved['data']}, as the run in {options.run_dir} had it; --data says where it is now"
            )
        of_file, trusted = _of_file(options), options.trust
        asked_for = _parsed(arguments, {"model": ""} | of_file).model
        options = _parsed(arguments, saved | of_file)
        if writes and not asked_for and not trusted:
            check_made_here(before.path, config, options.model)
        if options.init_from and not saved.get("init_from"):
            raise ValueError(
                f"--init-from {options.init_from}: a run that is resumed has its parameters, leave it out"
            )
        if not options.shares and options.devices == saved.get("devices"):
            options = replace(options, devices=None)
    _check(options)
    if options.figure is not None and writes:
        outputs.check_figure(options.figure)
    if options.export and writes:
        outputs.check_writable(Path(options.export))
    if options.export_weights and writes:
        outputs.check_new_folder(Path(options.export_weights))
    for tracker in options.track if writes else ():
        find_tracker(tracker)
    return options


def _parsed(arguments: Sequence[str] | None, before: Mapping[str, Any]) -> Options:
    """The options of a command line, others as they were before."""
    return parsed(Options, arguments, "jvpipe.train", Options(**before))


def _check(options: Options) -> None:
    """Raises ValueError for a number that cannot be."""
    for name in COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{_flag(name)} must be at least 1, not {value}")
        if value is not None and value > MOST:
            raise ValueError(f"{_flag(name)} must be at most {MOST}, not {value}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to {2**63 - 1}, not {options.seed}")
    if options.early_stop and not options.eval_every:
        raise ValueError(
            f"--early-stop {options.early_stop} needs --eval-every, the steps between evaluations"
        )
    if options.devices and not options.shares:
        raise ValueError(
            f"--devices {options.devices} is for --replicas auto; else --stages says how many are used"
        )
    if options.replica_counts and options.stages not in (None, len(options.replica_counts)):
        raise ValueError(
            f"--replicas {options.replicas} says so of {len(options.replica_counts)} stages, --stages of "
            f"{options.stages}: give a number for each, or leave out --stages"
        )
    if options.nas and options.eval_every:
        raise ValueError(
            "--eval-every is for one model: a search is judged by its training losses (--nas)"
        )
    if options.lora_on and not options.lora:
        raise ValueError(f"--lora-on {options.lora_on} needs --lora, the rank of the adapters")
    if options.export_weights and not options.init_from:
        raise ValueError(
            f"--export-weights {options.export_weights} needs --init-from, the folder that it is to be like; "
            "--export FILE writes the parameters of any run"
        )
    if options.warmup is not None and options.warmup < 0:
        raise ValueError(f"--warmup must be 0 steps or more, not {options.warmup}")
    if options.learning_rate is not None and not 0 < options.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be above 0, not {options.learning_rate:g}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def kept_options(options: Options) -> dict[str, Any]:
    """The options that a run is resumed with, by name."""
    return {name: value for name, value in asdict(options).items() if name not in OF_PROCESSES}


def agreed_options(options: Options) -> list[tuple[str, str]]:
    """The options that all processes of a run must share, as text by name."""
    shared = ((name, value) for name, value in asdict(options).items() if name not in OWN)
    return [(_flag(name), str(value)) for name, value in shared]


def _of_file(options: Options) -> dict[str, Any]:
    """The options that --config has."""
    if options.config is None:
        return {}
    return read_options(Path(options.config), get_type_hints(Options), (*NOT_KEPT, "run_dir"))


def _options_in(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options of a run, but for what it was to write elsewhere.

    Raises:
        ValueError: one is of another type than the command line's.
    """
    types = get_type_hints(Options)
    kept = [name for name in types if name in config and name not in NOT_KEPT]
    saved = {name: as_type(config[name], types[name]) for name in kept}
    for name, value in saved.items():
        if not is_type(value, types[name]):
            raise ValueError(f"{path} is not what a run wrote: {name} is {brief(value)}")
    return saved


# What options change of a model: the fields of its configuration, and how it is trained.

_RATE = 1e-3
"""Of a model with an optimizer of its own, if another is named."""


def fields_of(options: Options | PlanOptions) -> dict[str, Any]:
    """The fields of the model that options tell, by name.

    Raises:
        ValueError: one is not told as NAME=VALUE.

    >>> fields_of(Options(set=("blocks=12", "dropout=0"), sequence_length=64))
    {'blocks': '12', 'dropout': '0', 'sequence_length': 64}
    """
    given = {
        name: getattr(options, name, None)
        for name in ("dtype", "sequence_length", "lora", "lora_on")
    }
    return _assigned(options.set) | {
        name: value for name, value in given.items() if value is not None
    }


def _assigned(told: Sequence[str]) -> dict[str, str]:
    for each in told:
        if not each.partition("=")[1]:
            raise ValueError(f"--set {each}: give a field of the model and its value, NAME=VALUE")
    return {each.partition("=")[0].strip(): each.partition("=")[2].strip() for each in told}


def retrained(workload: models.Workload, options: Options, updates: int) -> models.Workload:
    """The model under the optimizer, the rate and the warm-up that were asked for.

    Args:
        workload: as it would be trained.
        options: of the command line.
        updates: of the whole run.

    Raises:
        ValueError: there is no such optimizer, or the model has one of its own.
    """
    assert options.steps is not None
    rates = {"--learning-rate": options.learning_rate, "--warmup": options.warmup}
    given = [f"{flag} {value:g}" for flag, value in rates.items() if value is not None]
    if options.optimizer is None and not given:
        return workload
    if options.optimizer is not None and options.optimizer not in OPTIMIZERS:
        raise ValueError(did_you_mean("optimizer", options.optimizer, list(OPTIMIZERS)))
    if workload.recipe is None and options.optimizer is None:
        raise ValueError(
            f"{given[0]}: {workload.name} has an optimizer of its own, change it there; or name another by --optimizer"
        )
    recipe = workload.recipe or Recipe(_RATE)
    recipe = replace(
        recipe,
        optimizer_name=options.optimizer or recipe.optimizer_name,
        learning_rate=recipe.learning_rate
        if options.learning_rate is None
        else options.learning_rate,
        warmup_steps=None if options.warmup is None else options.warmup * updates // options.steps,
    )
    return replace(
        workload, recipe=recipe, optimizer=recipe.optimizer, learning_rates=recipe.learning_rates
    )
