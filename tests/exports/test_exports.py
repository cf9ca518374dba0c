"""What formats say of a plan, what they refuse, and what of theirs is read."""

import os
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from jvpipe import Forecast, models, plan_for
from jvpipe.cli.plan_command import main
from jvpipe.exports.beside import judged
from jvpipe.exports.formats import FORMATS, find_format
from jvpipe.exports.stack import stack_of
from jvpipe.ir.outline import LayerOutline, Outline, block_of
from jvpipe.ir.plan import Fate, Plan
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import lists_of
from tests.exports.plans import again, outline, plan

HERE = Path(__file__).parent
# The stage boundaries 5 and 9 are before blocks 2 and 4 of six.
EVEN, UNEVEN, INSIDE = [5, 4, 5], [3, 6, 5], [4, 5, 5]


def with_fates(given: Plan, *fates: dict[str, Fate]) -> Plan:
    stages = zip(given.stages, fates, strict=True)
    return replace(given, stages=tuple(replace(stage, fates=each) for stage, each in stages))


GOLDEN = {
    "megatron": """\
# jvpipe megatron 1
--num-layers 6
--pipeline-model-parallel-size 3
--pipeline-model-parallel-layout 'Et|t*3|t*2L'
""",
    "torchtitan": """\
# jvpipe torchtitan 1
[parallelism]
pipeline_parallel_degree = 3
pipeline_parallel_schedule = "1F1B"
module_fqns_per_model_part = [
  ["tok_embeddings", "layers.0"],
  ["layers.1", "layers.2", "layers.3"],
  ["layers.4", "layers.5", "norm", "lm_head"],
]

[activation_checkpoint]
mode = "none"
""",
    "torch-csv": """\
0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0F3,0SEND_F3,0RECV_B1,0B1,0RECV_B2,0B2,0RECV_B3,0B3,0REDUCE_GRAD
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,1RECV_B0,1RECV_F2,1B0,1SEND_B0,1F2,1SEND_F2,1RECV_B1,1RECV_F3,1B1,1SEND_B1,1F3,1SEND_F3,1RECV_B2,1B2,1SEND_B2,1RECV_B3,1B3,1SEND_B3,1REDUCE_GRAD
2RECV_F0,2F0,2RECV_F1,2B0,2SEND_B0,2F1,2RECV_F2,2B1,2SEND_B1,2F2,2RECV_F3,2B2,2SEND_B2,2F3,2B3,2SEND_B3,2REDUCE_GRAD
""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_plan_is_written_as_it_was(name: str) -> None:
    assert plan(UNEVEN).export(name) == GOLDEN[name]


def test_maxtext_is_told_equal_stages_under_gpipe() -> None:
    even = replace(plan(EVEN, "gpipe"), outline=outline(6, microbatches=6))
    assert even.export("maxtext") == (
        "# jvpipe maxtext 1\nbase_config: base.yml\nbase_num_decoder_layers: "
        "6\nici_pipeline_parallelism: 3\nnum_layers_per_pipeline_stage: 2\nnum_pipeline_repeats: "
        "1\nnum_pipeline_microbatches: 6\nremat_policy: "
        "'none'\nset_remat_policy_on_pipeline_iterations: false\n"
    )


def test_jaxpp_is_told_marks_and_an_order() -> None:
    text = plan(INSIDE, "zb-h1").export("jaxpp")
    assert "\nMARKS = ['blocks/1@1', 'blocks/3@2', 'head']\n" in text
    assert "'2F0 2I0 " in text
    assert "ORDER = ['0F0 0F1 0F2 0I0 0W0 " in text  # the first stage's backward is whole
    compile(text, "plan.py", "exec")


@pytest.mark.parametrize("path", ["model/{}/{}/w", "model/{}_{}/w"])
def test_an_encoder_and_a_decoder_in_one_module_are_two_stacks(path: str) -> None:
    paths = [path.format(part, k) for part in ("encoder", "decoder") for k in range(2)]
    layers = tuple(LayerOutline(each, block_of(each), (), (), 100) for each in paths)
    with pytest.raises(ValueError, match=r"a head: it has model/encoder, model/decoder$"):
        stack_of(Outline(layers, 4))
    assert stack_of(Outline(layers, 4), strict=False).starts == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"])
@pytest.mark.parametrize("cuts", [EVEN, UNEVEN, INSIDE, [3, 2, 2, 2, 2, 3]])
def test_what_is_not_refused_reads_back_equal(name: str, schedule: str, cuts: list[int]) -> None:
    if len(cuts) % find_schedule(schedule).chunks:
        return
    one = replace(plan(cuts, schedule), outline=outline(6, microbatches=6))
    text = ""
    refused = ""
    try:
        text = one.export(name)
    except ValueError as told:
        refused = str(told)
    if not text:
        assert "lost would be" in refused or "nothing near" in refused
        return
    back = find_format(name).load(text, outline(6, microbatches=6))
    assert back.cuts == one.cuts or name == "torch-csv"
    assert [x.devices for x in back.stages] == [x.devices for x in one.stages]
    orders = [lists_of(x, find_schedule(x.schedule or ""), 6) for x in (one, back)]
    assert orders[0] == orders[1]


LOST = [
    ("megatron", plan(INSIDE), "cuts: 4:5:5 layers per stage, the nearest is 3:6:5"),
    ("megatron", plan(EVEN, "gpipe"), "the order of tasks of schedule gpipe, the nearest is 1f1b"),
    ("torchtitan", plan(EVEN, "zb-h1"), "the order of tasks of schedule zb-h1"),
    ("maxtext", plan(UNEVEN, "gpipe"), "cuts: 3:6:5 layers per stage, the nearest is 5:4:5"),
    ("torch-csv", plan(EVEN, "pipedream"), "updates before the step ends: schedule pipedream"),
    ("jaxpp", replace(plan(EVEN), keep_last=True), "that the last micro-batch keeps everything"),
    ("jaxpp", with_fates(plan(EVEN), again(0), {}, {}), r"fates of 3 values \(recompute\)"),
    ("megatron", with_fates(plan(EVEN), {"blocks/1/up": Fate.SWAP}, {}, {}), r"1 values \(swap\)"),
    (
        "jaxpp",
        Plan.from_cuts([5, 9], [(0, 1), 2], schedule="1f1b", outline=outline()),
        r"devices of replicated stages: \[2, 1\]",
    ),
]


@pytest.mark.parametrize(("name", "given", "lost"), LOST)
def test_what_would_be_lost_is_named_and_a_lossy_export_says_it(
    name: str, given: Plan, lost: str
) -> None:
    if name == "maxtext":
        given = replace(given, outline=outline(6, microbatches=6))
    with pytest.raises(ValueError, match=f"{name} cannot say all of this plan.*{lost}"):
        given.export(name)
    text = given.export(name, lossy=True)
    if name != "torch-csv":  # torch takes every line of a CSV for a rank's
        assert "# nearest; lost: " in text


@pytest.mark.parametrize("devices", [(2, 3), ((0, 1), 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_lossy_export_keeps_the_order_whatever_the_devices(schedule: str, devices: Any) -> None:
    """Places count, not devices: replicas are one place, and numbers of devices may begin anywhere."""
    given = Plan.from_cuts([7, 7], devices, schedule=schedule, outline=outline())
    back = find_format("torchtitan").load(given.export("torchtitan", lossy=True), outline())
    assert (back.schedule, len(back.stages)) == (schedule, 2)


def test_recomputation_of_the_first_blocks_of_every_stage_is_megatrons_by_block() -> None:
    given = with_fates(plan(EVEN), again(0), again(2), again(4))
    text = given.export("megatron")
    assert text.endswith(
        "--recompute-granularity full\n--recompute-method block\n--recompute-num-layers 1\n"
    )
    assert find_format("megatron").load(text, outline()) == given
    later = with_fates(plan(EVEN), again(1), again(2), again(4))
    with pytest.raises(ValueError, match="fates of 9 values"):
        later.export("megatron")


def test_layouts_of_others_are_read() -> None:
    """As their own documents write them."""
    read = find_format("megatron").load("Ett|(t|)*2t*2L", outline())
    assert read.cuts == (5, 2, 2, 5)
    bounds = [0, *accumulate(read.cuts)]
    assert [b - a for a, b in pairwise(bounds)] == [5, 2, 2, 5]
    options = "num_layers_per_pipeline_stage=2\nici_pipeline_parallelism=3\n"
    theirs = find_format("maxtext").load(options, outline())
    assert theirs.cuts == (5, 4, 5)
    assert theirs.stages[1].fates == again(2) | again(3)  # their usual policy is full
    only = "0F0,0F1,,0B0,0B1\n1F0, ,1B0,1F1,1B1\n"
    assert find_format("torch-csv").load(only, outline()).schedule == "1f1b"


WRONG = [
    ("megatron", "Ett|ttL", "the layout covers 4 blocks, the model has 6"),
    ("megatron", "Ett|tqttL", "is not a layout: E, t, L and | can be read"),
    ("megatron", "# jvpipe megatron 9\nEttttttL", "'jvpipe megatron 9', and 'jvpipe megatron 1'"),
    ("megatron", "# jvpipe torchtitan 1\n", "this is 'jvpipe torchtitan 1'"),
    ("megatron", "--num-layers 6", "there is no --pipeline-model-parallel-layout"),
    ("torchtitan", "parallelism]", "this is not TOML"),
    (
        "torchtitan",
        '[parallelism]\nmodule_fqns_per_model_part = [["tok_embeddings", "layers.0", "layers.1", '
        '"layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"]]',
        "activation checkpoints 'selective' cannot be read: only none and full can, such as",
    ),
    ("torchtitan", "[parallelism]\n", "lacks module_fqns_per_model_part"),
    ("maxtext", "ici_pipeline_parallelism: 4", "4 stages of 1 layers, 1 times, do not cover the 6"),
    ("torch-csv", "0F0,0B0\n1B0,1F0\n", "the schedule cannot progress: .* waits for"),
    (
        "torch-csv",
        "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "the CSV deadlocks: 0RECV_B0, 1RECV_F0 wait for ever",
    ),
    (
        "torch-csv",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
        "the CSV deadlocks: 0RECV_B0, 1F0 wait for ever",
    ),
    ("torch-csv", "0F0,0SEND_F0,0B0\n1F0,1B0\n", "must send and receive other values"),
    ("torch-csv", "0F0,0Q0\n", "'0Q0' is not an action of torch's"),
    (
        "jaxpp",
        "MARKS = ['a']\nDEVICES = [0]\nORDER = ['0F0 0B0']",
        "the mark 'a' names no layer",
    ),
    ("jaxpp", "MARKS = [__import__('os').getcwd()]", "the file lacks MARKS, a literal list of str"),
    (
        "jaxpp",
        "MARKS = 5\nDEVICES = [0]\nORDER = []",
        "the file lacks MARKS, a literal list of str",
    ),
    ("jaxpp", "MARKS = ['head']\nDEVICES = [0]\nORDER = [5]", "the file lacks ORDER"),
    ("jaxpp", "MARKS = ['head']\nDEVICES = [1]\nORDER = ['0F0 0B0']", r"DEVICES are \[1\]"),
    ("jaxpp", "MARKS = ['head']\nDEVICES = [0]\nORDER = ['0F0']", "have F, B, I and W .* times"),
    ("jaxpp", "MARKS = " + "-" * 10**5 + "1", "this is not Python: it nests too deeply"),
    ("torch-csv", "0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and on rank 1"),
    ("torch-csv", "0F0,0B0,0F99999999,0B99999999\n", "of micro-batch 99999999, and none of 1"),
    (
        "torch-csv",
        "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "rank 0 must send and receive other values: 0SEND_F0 2 times, not 1",
    ),
    ("megatron", "E(t*999999)*999999L", "has more than the 1000000 layers that a model may have"),
    ("megatron", "Ettt|tttL --num-layers 12", "--num-layers is 12, the layout has 6 blocks t"),
    ("megatron", "Ett|tt|ttL --pipeline-model-parallel-size 2", "3 stages cannot be shared by 2"),
    (
        "megatron",
        f"EttttttL --num-layers {'6' * 5000}",
        "--num-layers must be a whole number of at",
    ),
    ("megatron", "EttttttL --num-layers=--6", "at least 0, such as 6, not '--6'"),
    (
        "maxtext",
        f"ici_pipeline_parallelism: {'6' * 5000}",
        "must be a whole number, such as 1, not",
    ),
    ("torchtitan", "parallelism = 3", r"\[parallelism\] must be a table, not 3"),
    (
        "torchtitan",
        '[parallelism]\nmodule_fqns_per_model_part = [["tok_embeddings", "layers.0", "layers.1"]]',
        r"part 0 must have \['tok_embeddings', 'norm', 'lm_head'\] beside layers.N",
    ),
    (
        "torchtitan",
        '[parallelism]\npipeline_parallel_schedule = ["1F1B"]\n'
        'module_fqns_per_model_part = [["tok_embeddings", "norm", "output"]]',
        r"schedule \['1F1B'\] cannot be read",
    ),
    (
        "maxtext",
        "ici_pipeline_parallelism: 6\nset_remat_policy_on_pipeline_iterations: maybe",
        "set_remat_policy_on_pipeline_iterations must be true or false, not 'maybe'",
    ),
]


@pytest.mark.parametrize(("name", "text", "told"), WRONG)
def test_what_cannot_be_read_is_named_in_one_line(name: str, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        find_format(name).load(text, outline())
    assert "\n" not in str(refused.value)


def test_maxtext_keeps_what_it_is_told_to_keep_in_iterations_alone() -> None:
    """Their usual iterations keep the inputs of blocks, whatever the policy of blocks is."""
    base = "num_layers_per_pipeline_stage=2\nici_pipeline_parallelism=3\nremat_policy=none\n"
    there = outline(6, microbatches=6)
    assert find_format("maxtext").load(base, there).stages[1].fates == again(2) | again(3)
    kept = base + "set_remat_policy_on_pipeline_iterations=false\n"
    assert find_format("maxtext").load(kept, there).stages[1].fates == {}


def test_options_of_a_whole_command_are_read_past_flags() -> None:
    text = "--use-flash-attn --pipeline-model-parallel-layout='Ettt|tttL' --swiglu --lr 1e-3 2e-4"
    assert find_format("megatron").load(text, outline()).cuts == (7, 7)


def test_one_stage_has_the_embedding_and_the_head() -> None:
    one = plan([14])
    assert "--pipeline-model-parallel-layout 'Et*6L'\n" in one.export("megatron")
    assert '["tok_embeddings", "layers.0", ' in one.export("torchtitan")


@pytest.mark.parametrize("name", ["megatron", "torchtitan"])
def test_chunks_are_refused_where_rounds_of_micro_batches_are_others(name: str) -> None:
    chunks = plan([3, 4, 2, 5], "interleaved")
    assert chunks.export(name)
    with pytest.raises(ValueError, match=r"5 micro-batches pass 2 chunks .* use --microbatches 6"):
        replace(chunks, outline=outline(6, microbatches=5)).export(name)


def test_formats_and_models_that_are_not_known_are_named() -> None:
    with pytest.raises(ValueError, match="unknown format 'megatorn'"):
        plan(EVEN).export("megatorn")
    with pytest.raises(ValueError, match="does not know its model's layers"):
        Plan.from_cuts([1, 1]).export("megatron")


def of_tiny_llama(*options: str) -> int:
    base = ["--model", "llama", "--size", "tiny", "--stages", "2", "--hardware", "h100"]
    return main([*base, *options])


def test_the_command_exports_alone_to_stdout_and_simulates_what_it_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nowhere in ("", ":"):
        assert of_tiny_llama("--export", f"megatron{nowhere}") == 0
        text = capsys.readouterr().out
        assert text.splitlines()[0] == "# jvpipe megatron 1"
    (tmp_path / "layout.txt").write_text("Et|t*3L")
    assert of_tiny_llama("--import", f"megatron:{tmp_path / 'layout.txt'}") == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"megatron: .* ms, .* KiB; jvpipe: .*; gain .* ms \(.*%\), .* KiB", told)
    assert (
        of_tiny_llama("--memory-limit", "1KiB", "--import", f"megatron:{tmp_path / 'layout.txt'}")
        == 1
    )
    assert "no plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--export", "megatorn"], "error: unknown format 'megatorn'"),
        (["--export", "maxtext"], "error: maxtext cannot say all of this plan; lost would be"),
        (["--lossy"], "error: --lossy is for --export"),
        (["--import", "megatron"], "error: --import megatron: give FORMAT:FILE"),
        (
            ["--import", "megatron:nowhere.txt"],
            "error: --import megatron:nowhere.txt: the file cannot be read (No such file or directory)",
        ),
        (["--import", f"megatron:{HERE}"], "exports: the file cannot be read (Is a directory)"),
        (
            ["--import", f"torch-csv:{HERE.parents[1] / 'docs' / 'plan.png'}"],
            "plan.png: the file is not a text file",
        ),
        (
            ["--import", f"jaxpp:{HERE / 'golden' / 'vee.jaxpp'}"],
            "vee.jaxpp: the mark 'blocks/0@2' names no layer of the model",
        ),
    ],
)
def test_the_command_names_mistakes_in_one_line(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert of_tiny_llama(*options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert told in error


def test_a_pipe_which_would_be_empty_when_read_again_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody writes to: it is not even opened, which would wait."""
    os.mkfifo(tmp_path / "pipe")
    assert of_tiny_llama("--import", f"megatron:{tmp_path / 'pipe'}") == 2
    error = capsys.readouterr().err
    assert error.endswith("pipe: the file cannot be read (this is not a regular file)\n")


def test_what_is_imported_is_simulated_as_planners_do() -> None:
    """Our own plan, through a file, takes what it took; everything computed again takes longer and
    holds less.
    """
    found = small_forecast()
    own = judged(found.problem, found.plan)
    text = found.plan.export("megatron")
    outline_there = found.plan.outline
    assert outline_there is not None
    assert judged(found.problem, find_format("megatron").load(text, outline_there)) == own
    full = "\n--recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n"
    again_all = judged(found.problem, find_format("megatron").load(text + full, outline_there))
    assert again_all.step_s > own.step_s
    assert again_all.peak_bytes < own.peak_bytes


def test_a_comparison_counts_the_copies_of_state_under_both_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layout.txt").write_text("Et|t*3L")
    options = ["--planner", "even", "--import", f"megatron:{tmp_path / 'layout.txt'}"]
    times = []
    for more in ([], ["--state-fates", "*=swap"]):
        assert of_tiny_llama(*options, *more) == 0
        told = capsys.readouterr().out
        times.append([float(ms) for ms in re.findall(r"(?:: |step )([0-9.]+) ms", told)])
        step_ms, _, ours_ms = times[-1]
        assert step_ms == ours_ms
    kept, away = times
    assert all(more > less for more, less in zip(away, kept, strict=True))


def small_forecast() -> Forecast:
    work = models.load("bert", "mini")
    batch = work.abstract_batch(64)
    more = {"has_aux": work.has_aux, "has_state": work.has_state, "planner": "even"}
    found = plan_for(work.loss_fn, work.init, batch, 2, hardware="h100", microbatches=4, **more)
    assert isinstance(found, Forecast)
    cuts = [5, 6]  # between blocks, of which the embedding's stage has two
    return replace(found, answers=(replace(found.answers[0], plan=given_cuts(found, cuts)),))


def given_cuts(found: Forecast, cuts: list[int]) -> Plan:
    return Plan.from_cuts(cuts, schedule="1f1b", outline=found.problem.costs.outline)
