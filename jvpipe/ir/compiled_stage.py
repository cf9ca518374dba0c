"""The memory of a stage, as the plan estimates it and as an accelerator's compiler reports it."""

from dataclasses import dataclass
from typing import Any

from jvpipe.util.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """The bytes of a stage as planned and as compiled; stages on one device are counted together.

    Attributes:
        target: the accelerator for which the stage was compiled.
        planned_bytes: the peak, as the plan estimates it.
        compiled_bytes: the peak, as the compiler reports it.
        row: the row of the step at which the device holds the most bytes.
        temporary_bytes: the temporary memory of that row's program, as the compiler reports it.
        working_bytes: the working memory of that row's layer, as the plan estimates it.
        padding_bytes: the bytes that the target's memory layout adds to buffers.
        host_bytes: the peak of the bytes on the host, summed over all devices.
    """

    target: str
    planned_bytes: int
    compiled_bytes: int
    row: str
    temporary_bytes: int
    working_bytes: int
    padding_bytes: int
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The larger of the two peaks: the least memory limit that suffices."""
        return max(self.planned_bytes, self.compiled_bytes)

    def to_json(self) -> dict[str, Any]:
        """Returns the entries about compiled bytes in the JSON of a stage."""
        return {
            "peak_bytes": self.peak_bytes,
            "planned_bytes": self.planned_bytes,
            "compiled_bytes": self.compiled_bytes,
            "compiled": {
                "target": self.target,
                "row": self.row,
                "temporary_bytes": self.temporary_bytes,
                "working_bytes": self.working_bytes,
                "padding_bytes": self.padding_bytes,
                "host_bytes": self.host_bytes,
            },
        }

    def __str__(self) -> str:
        """Writes both peaks, and why they differ.

        >>> print(CompiledStage("h100", 2**20, 3 * 2**20, "0B3", 2**21, 2**18, 0, 0))
        3.00 MiB by the compiler for h100, 1.00 MiB planned: at 0B3, 2.00 MiB of temporaries (256.00 KiB planned)
        """
        sizes = self.temporary_bytes, self.working_bytes
        temporary, working = map(format_bytes, sizes)
        reasons = [f"{temporary} of temporaries ({working} planned)"]
        reasons += [f"{format_bytes(self.padding_bytes)} of padding"] if self.padding_bytes else []
        reasons += [f"{format_bytes(self.host_bytes)} on the host"] if self.host_bytes else []
        compiled, planned = map(format_bytes, (self.compiled_bytes, self.planned_bytes))
        return (
            f"{compiled} by the compiler for {self.target}, {planned} planned: "
            f"at {self.row}, {', '.join(reasons)}"
        )
