"""The papers' models over 1 to 16 stages, planned and simulated: python -m experiments.scaling.run [MODEL ...]

On two machines of eight V100 of 16 GB with NVLink, 25 Gbps between them (the preset `v100-a`), 1F1B, AdamW, 32
micro-batches at every number of stages. Nothing runs: layers are estimated from their shapes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import optax

from experiments.planners.questions import question_of
from jvpipe.cost.presets import PRESETS
from jvpipe.models import load
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.session.asking import ask

STAGES, MICRO_BATCHES = (1, 2, 4, 8, 16), 32


@dataclass(frozen=True)
class Subject:
    """A model at a size, the examples of a micro-batch, and their tokens if not as many as usual."""

    model: str
    size: str
    micro_batch: int
    tokens: int | None = None

    def problem(self) -> Problem:
        """On one device; costs are those of a micro-batch, so that only the number of stages changes."""
        workload = load(
            self.model, self.size, **({} if self.tokens is None else {"tokens": self.tokens})
        )
        batch_size = self.micro_batch * MICRO_BATCHES
        return question_of(workload, batch_size, MICRO_BATCHES, 1, optax.adamw(1e-3)).problem(
            PRESETS["v100-a"]
        )

    def row(self) -> str:
        """Examples per second at each number of stages, and the share of the first one's per device that is left."""
        problem, cells, first = self.problem(), [], 0.0
        for stages in STAGES:
            rate = self.rate(replace(problem, stages=stages))
            first = first or rate / stages
            cells.append(
                f"{rate:.3g} ({100 * rate / stages / first:.0f}%)" if rate else "does not fit"
            )
        return f"| {self.model} {self.size} | {self.micro_batch} | {' | '.join(cells)} |"

    def rate(self, problem: Problem) -> float:
        """Examples per second under jvpipe's plan; 0 if nothing fits."""
        try:
            found = ask("jvpipe", problem)
        except Infeasible:
            return 0.0
        stages = evaluate(found.problem, found.decision).stages
        return self.micro_batch * MICRO_BATCHES / simulated_step_s(found.problem, stages)


SUBJECTS = (
    *(
        Subject("bert", "large", 4),
        Subject("gpt2", "770m", 1),
        Subject("t5", "780m", 2),
        Subject("gnmt", "16", 8),
    ),
    *(
        Subject("xlnet", "36", 1),
        Subject("resnet", "152", 16),
        Subject("vgg", "19", 16),
        Subject("unet", "233m", 8),
    ),
    *(Subject("amoebanet", "122m", 16), Subject("llama", "1b", 1, tokens=2048)),
)


def main(names: Sequence[str]) -> int:
    print(f"| model | of a micro-batch | stages: {' | '.join(map(str, STAGES))} |")
    print("|---" * (2 + len(STAGES)) + "|", flush=True)
    for subject in SUBJECTS:
        if not names or subject.model in names:
            print(subject.row(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
