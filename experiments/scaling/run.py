"""The papers' models over 1 to 16 stages, planned and simulated.

    python -m experiments.scaling.run [MODEL ...]

On two machines of eight V100 of 16 GB with NVLink, 25 Gbps between them (the preset `v100-a`),
1F1B, AdamW, 32 micro-batches at every number of stages. Nothing runs: layers are estimated from
their shapes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import optax

from experiments.planners.questions import question_of
from jvpipe.cost.presets import PRESETS
from jvpipe.models import load
from jvpipe.session.forecast import asked, with_splits
from jvpipe.session.question import Question

STAGES, MICRO_BATCHES = (1, 2, 4, 8, 16), 32


@dataclass(frozen=True)
class Subject:
    """A model at a size, the examples of a micro-batch, and their tokens if not as many as
    usual.
    """

    model: str
    size: str
    micro_batch: int
    tokens: int | None = None

    def question(self, stages: int) -> Question:
        """On so many devices; micro-batches are the same whatever their number."""
        size = {} if self.tokens is None else {"tokens": self.tokens}
        workload = load(self.model, self.size, **size)
        batch_size = self.micro_batch * MICRO_BATCHES
        return question_of(workload, batch_size, MICRO_BATCHES, stages, optax.adamw(1e-3))

    def row(self) -> str:
        """Examples per second at each number of stages, and the share of the first one's per device
        that is left.
        """
        cells, first = [], 0.0
        for stages in STAGES:
            rate = self.rate(self.question(stages))
            first = first or rate / stages
            cells.append(
                f"{rate:.3g} ({100 * rate / stages / first:.0f}%)" if rate else "does not fit"
            )
        return f"| {self.model} {self.size} | {self.micro_batch} | {' | '.join(cells)} |"

    def rate(self, question: Question) -> float:
        """Examples per second under jvpipe's plan; 0 if nothing fits."""
        whole = asked(question.problem(PRESETS["v100-a"]), ["jvpipe"], "", question)
        found = with_splits(question, whole)
        return self.micro_batch * MICRO_BATCHES / found.step_s if found.fits else 0.0


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
