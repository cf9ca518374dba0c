"""The kernels of a compiled program, read from its scheduled HLO.

    %fusion.2 = f32[8,4]{1,0} fusion(%x, %gemm.1), kind=kLoop, calls=%fused_computation.3, backend_config={...}

Each result of a kernel has a text of its own: the equations that make it, in one order and without
names, the layouts that they read and write, and how the compiler has configured them. Two results
with one text are computed alike. What does not decide bits is left out: names, sources, queues,
estimates, and in which memory of the device operands lie.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

ITEM_BYTES = {"pred": 1, "c64": 8, "c128": 16, "bf16": 2}
"""Of types whose bits are not in their names."""
SUMS = {
    "dot",
    "scaled-dot",
    "convolution",
    "reduce",
    "reduce-window",
    "select-and-scatter",
    "scatter",
    "custom-call",
    "fft",
    "cholesky",
    "triangular-solve",
}
"""What adds up in an order that is the compiler's: products, convolutions and reductions, and what
libraries do.
"""
_MOVES_NOTHING = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "opt-barrier",
    "copy-start",
    "copy-done",
    "async-done",
    "partition-id",
    "replica-id",
}
"""What is no kernel; a TPU's asynchronous copies only bring operands nearer."""
_CALLERS = {"while", "call", "conditional", "async-start"}
_CONFIGURED = {
    "fusion_backend_config",
    "gemm_backend_config",
    "cudnn_conv_backend_config",
    "reduction_backend_config",
    "convolution_algorithm_config",
    "custom_call_config",
    "custom_fusion_config",
    "window_config",
}
_ESTIMATES = re.compile(r"estimated|cost_model|ml_|buffering|is_mask|pad_")


@dataclass(frozen=True)
class Kernel:
    """One launch: what makes each of its results, and how many bytes it reads and writes."""

    results: tuple[str, ...]
    sums: tuple[bool, ...]  # of each result: whether its text adds up
    bytes: int


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @cached_property
    def computations(self) -> tuple[str, ...]:
        """The computations that it calls, in the order of its text."""
        listed = re.sub(r"\{([^{}]*)\}", r" \1 ", _without_config(self.attributes))
        return tuple(
            name
            for key, names in re.findall(
                r"(calls|to_apply|body|condition|branch_computations|select|scatter|"
                r"true_computation|false_computation|called_computations)=((?:,?\s*%[\w.\-]+)+)",
                listed,
            )
            for name in re.findall(r"%([\w.\-]+)", names)
        )

    @property
    def rounds(self) -> bool:
        """Whether it is a product or convolution at the precision that a TPU has unless another is
        asked for.
        """
        return (
            self.opcode in ("dot", "convolution")
            and "operand_precision={high" not in self.attributes
        )

    @property
    def is_idle(self) -> bool:
        """Whether it rounds to the precision that its operand has: what `jax.checkpoint` saves is
        marked so.
        """
        own = {"f32": (8, 23), "bf16": (8, 7), "f16": (5, 10)}.get(self.type.partition("[")[0])
        said = re.search(r"exponent_bits=(\d+), mantissa_bits=(\d+)", self.attributes)
        return (
            self.opcode == "reduce-precision"
            and bool(said)
            and own == tuple(map(int, said.groups()))
        )

    @cached_property
    def said(self) -> str:
        """What its attributes say of what it computes."""
        kept = _dropped(
            self.attributes, ("metadata", "sharding", "frontend_attributes", "backend_config")
        )
        kept = re.sub(r"%[\w.\-]+", "%", kept)
        kept = re.sub(
            r",? ?(channel_id|cross_program_prefetch_index|control-predecessors)=\S+", "", kept
        )
        return " ".join(kept.replace(",", " ").split()) + _configuration(self.attributes)


@dataclass
class _Module:
    computations: dict[str, dict[str, _Instruction]]
    entry: str
    is_tpu: bool
    _texts: dict[tuple[str, str], str] = field(default_factory=dict)

    def root(self, computation: str) -> _Instruction:
        """What a computation yields."""
        return next(x for x in self.computations[computation].values() if x.is_root)

    def kernels(self, computation: str) -> Iterator[Kernel]:
        """Yields the kernels of a computation, and of those that it runs."""
        for it in self.computations[computation].values():
            if it.opcode in _CALLERS:
                for called in it.computations:
                    yield from self.kernels(called)
            elif it.opcode not in _MOVES_NOTHING:
                yield self._kernel(computation, it)

    def _kernel(self, computation: str, it: _Instruction) -> Kernel:
        inside = self.computations[computation]
        taken = [inside[name].type for name in it.operands]
        moved = type_bytes(it.type) + sum(map(type_bytes, taken))
        if it.opcode != "fusion":
            text = f"{it.opcode} {it.said} {_plain(it.type)} of {' '.join(map(_plain, taken))}"
            text += "".join(self._text(called, "") for called in it.computations)
            return Kernel((_digest(text),), (it.opcode in SUMS,), moved)
        (called,) = it.computations
        root = self.root(called)
        roots = root.operands if root.opcode == "tuple" else (root.name,)
        roots = tuple(self._unrounded(called, name) for name in roots)
        texts = [f"{it.said} {self._text(called, name)}" for name in roots]
        sums = tuple(bool(SUMS & set(re.findall(r"\[([\w\-]+)", text))) for text in texts)
        return Kernel(tuple(map(_digest, texts)), sums, moved)

    def _text(self, computation: str, result: str) -> str:
        """The equations of one result, from the operands on, in the order of a walk from it."""
        known = self._texts.get((computation, result))
        if known is not None:
            return known
        inside, rounded = self.computations[computation], self._rounded(computation)
        numbers: dict[str, int] = {}
        lines: list[str] = []
        last = result or self.root(computation).name

        def visit(name: str) -> int:
            if name not in numbers:
                it = inside[name]
                read = [visit(operand) for operand in it.operands]
                if it.is_idle:
                    numbers[name] = read[0]
                    return read[0]
                numbers[name] = len(lines)
                own = "" if it.opcode == "parameter" else it.said
                own = it.attributes if it.opcode == "constant" else own
                called = "".join(self._text(c, "") for c in it.computations)
                line = f"[{it.opcode} {_plain(it.type)} {own} {read}{called}]"
                if name in rounded or (self.is_tpu and result and name == last):
                    line = re.sub(r"\b(f32|bf16)\[", "low[", line)
                lines.append(line)
            return numbers[name]

        visit(last)
        text = "".join(lines)
        self._texts[computation, result] = text
        return text

    def _unrounded(self, computation: str, name: str) -> str:
        """What is rounded last, where that may as well be done by its reader."""
        it = self.computations[computation][name]
        stored = it.opcode == "convert" and it.type.startswith("bf16")
        return it.operands[0] if self.is_tpu and stored else name

    def _rounded(self, computation: str) -> set[str]:
        """What products of a TPU alone read, which round it to bfloat16 if it is not."""
        if not self.is_tpu:
            return set()
        inside = self.computations[computation]
        readers: dict[str, list[str]] = {}
        for it in inside.values():
            for name in it.operands:
                readers.setdefault(name, []).append(it.name)
        found: set[str] = set()
        for it in reversed(inside.values()):
            own = readers.get(it.name, ())
            products = all(x in found or inside[x].rounds for x in own)
            if own and products and self._moves(it):
                found.add(it.name)
        return found

    def _moves(self, it: _Instruction) -> bool:
        """Whether it changes no number."""
        if it.opcode == "fusion":
            return all(
                self._moves(x) for c in it.computations for x in self.computations[c].values()
            )
        return it.opcode in ("parameter", "bitcast", "copy", "transpose", "reshape")


def kernels(hlo: str) -> list[Kernel]:
    """Reads the kernels of a program in the order of its schedule."""
    module = _parsed(hlo)
    return list(module.kernels(module.entry))


def type_bytes(text: str) -> int:
    """The bytes of an array, or of all arrays of a tuple.

    >>> type_bytes("(f32[4,2]{1,0:T(8,128)}, bf16[3]{0}, pred[])")
    39
    """
    total = 0
    for name, shape in re.findall(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]", text):
        bits = re.search(r"\d+", name)
        item = ITEM_BYTES.get(name) or (int(bits[0]) / 8 if bits else 0)
        total += math.ceil(item * math.prod(int(x) for x in shape.split(",") if x))
    return total


def _parsed(hlo: str) -> _Module:
    found: dict[str, dict[str, _Instruction]] = {}
    entry = ""
    heads = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
    inside: dict[str, _Instruction] = {}
    for line in hlo.splitlines():
        if head := heads.match(line):
            inside = found.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("  ") and " = " in line:
            it = _instruction(line.strip())
            inside[it.name] = it
    return _Module(found, entry, is_tpu=":T(" in hlo)


def _instruction(line: str) -> _Instruction:
    is_root, line = line.startswith("ROOT "), line.removeprefix("ROOT ")
    name, _, rest = line.partition(" = ")
    size = _closed(rest) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:size], rest[size:].strip()
    opcode = rest[: rest.index("(")]
    end = len(opcode) + _closed(rest[len(opcode) :])
    inner = rest[len(opcode) + 1 : end - 1]
    operands = () if opcode in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", inner)
    after = inner if opcode == "constant" else rest[end:].lstrip(", ")
    return _Instruction(name.lstrip("%"), kind, opcode, tuple(operands), after, is_root)


def _closed(text: str) -> int:
    """Where the bracket that a text begins with ends."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0:
            return place + 1
    raise ValueError(f"a bracket stays open in {text[:80]}")


def _plain(type_text: str) -> str:
    """A type and its layout, without tiles, which follow from these, and memory: S(1) is a TPU's
    faster one.
    """
    return re.sub(r"\{:?\}", "", re.sub(r":[TS(][^}]*", "", type_text))


def _dropped(attributes: str, names: tuple[str, ...]) -> str:
    for name in names:
        while (at := attributes.find(f"{name}={{")) >= 0:
            first = at + len(name) + 1
            attributes = attributes[:at] + attributes[first + _closed(attributes[first:]) :]
    return attributes


def _without_config(attributes: str) -> str:
    return _dropped(attributes, ("metadata", "frontend_attributes", "backend_config"))


def _configuration(attributes: str) -> str:
    at = attributes.find("backend_config={")
    if at < 0:
        return ""
    first = at + len("backend_config=")
    config = json.loads(attributes[first : first + _closed(attributes[first:])])
    return json.dumps(
        _decisive({k: v for k, v in config.items() if k in _CONFIGURED}), sort_keys=True
    )


def _decisive(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {k: _decisive(v) for k, v in config.items() if not _ESTIMATES.search(k)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
