"""The loss on one example, with the same equations as on a whole micro-batch.

JAX traces some functions, such as `jnp.take_along_axis`, differently if an axis has size one,
because such an axis may be broadcast. So the equations of the micro-batch are kept, and their sizes
on one example are extrapolated from the sizes on the micro-batch and on a batch twice as large:

    on 4 examples                    on 8 examples                    on one example
    reshape[new_sizes=(4, 16, 1)]    reshape[new_sizes=(8, 16, 1)]    reshape[new_sizes=(1, 16, 1)]
    div x 64.0                       div x 128.0                      div x 16.0

The equations of a derivative rule cannot be changed, because the rule is a function. So rules are
taken from a trace on one example.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace.factors import factor_power
from jvpipe.trace.flatten import RULES
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.structure import comparable


class UnlikeError(ValueError):
    """The equations at two sizes do not determine the equations at a third size."""


def on_one(whole: LossJaxpr, examples: int) -> LossJaxpr:
    """Returns the loss on one example.

    Args:
        whole: the loss on several examples.
        examples: the number of these examples.

    Raises:
        UnlikeError: the loss has other equations on twice as many examples, or other derivative
            rules on one example.
    """
    double = _of_size(whole, 2 * examples)
    single = _of_size(whole, 1)
    if double is None:
        raise UnlikeError("it does not take twice as many examples")
    if comparable(whole.constants) != comparable(double.constants):
        raise UnlikeError("it closes over other arrays")
    smaller = _Smaller(examples, _rules(single.eqns if single else ()))
    inputs = smaller.variables(whole.inputs, double.inputs)
    eqns = smaller.equations(whole.eqns, double.eqns)
    results = [atom for atom, _ in whole.outputs]
    double_results = [atom for atom, _ in double.outputs]
    atoms = smaller.atoms(results, double_results)
    refs = [ref for _, ref in whole.outputs]
    return replace(
        whole,
        eqns=tuple(eqns),
        inputs=dict(zip(inputs, whole.inputs.values(), strict=True)),
        outputs=tuple(zip(atoms, refs, strict=True)),
    )


def _of_size(loss: LossJaxpr, examples: int) -> LossJaxpr | None:
    """Returns the loss as JAX traces it on another number of examples; None if that fails."""
    assert loss.of_size is not None, "a loss that was not traced from a function"
    try:
        return loss.of_size(examples)
    except Exception:  # whatever the user's function raises
        return None


def _rules(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields the equations with derivative rules, also those in loops, but not those in a rule."""
    for eqn in eqns:
        if eqn.primitive.name in RULES:
            yield eqn
            continue
        for inner in _jax.inner_jaxprs(eqn):
            yield from _rules(inner.eqns)


@dataclass
class _Smaller:
    """Makes equations on one example from those on `examples` and on twice as many examples.

    In its methods, `whole` is on `examples` examples, and `double` on twice as many.

    Args:
        examples: the number of examples of the micro-batch.
        rules: the equations with derivative rules on one example, in their order.
    """

    examples: int
    rules: Iterator[JaxprEqn]
    _variables: dict[Var, Var] = field(default_factory=dict)

    def equations(self, whole: Sequence[JaxprEqn], double: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """Returns the equations of a loss, or of a loop in it, on one example."""
        if [eqn.primitive for eqn in whole] != [eqn.primitive for eqn in double]:
            raise UnlikeError("it is another program")
        return [self._equation(*both) for both in zip(whole, double, strict=True)]

    def atoms(self, whole: Sequence[Atom], double: Sequence[Atom]) -> list[Atom]:
        """Returns atoms on one example; a literal may have the factor n or 1/n for n examples."""
        atoms: list[Atom] = []
        for a, b in zip(whole, double, strict=True):
            if isinstance(a, Literal) and isinstance(b, Literal):
                atoms.append(Literal(self._literal(a, b), _jax.aval(a)))
            elif isinstance(a, Var) and isinstance(b, Var):
                atoms.append(self._variables[a])
            else:
                raise UnlikeError("it reads other values")
        return atoms

    def variables(self, whole: Iterable[Var], double: Iterable[Var]) -> list[Var]:
        """Returns new variables for inputs or results, with their shapes on one example."""
        for a, b in zip(whole, double, strict=True):
            shape = self._value(_jax.aval(a).shape, _jax.aval(b).shape)
            self._variables[a] = _jax.reshaped_variable(a, shape)
        return [self._variables[a] for a in whole]

    def _equation(self, whole: JaxprEqn, double: JaxprEqn) -> JaxprEqn:
        ins = self.atoms(whole.invars, double.invars)
        outs = self.variables(whole.outvars, double.outvars)
        if whole.primitive.name in RULES:
            rule = next(self.rules, None)
            expected = _shapes([*ins, *outs])
            if rule is None or _shapes([*rule.invars, *rule.outvars]) != expected:
                raise UnlikeError("it has other derivative rules on one example")
            return rule.replace(invars=ins, outvars=outs)
        params = {}
        for name, value in whole.params.items():
            params[name] = self._value(value, double.params[name])
        return whole.replace(invars=ins, outvars=outs, params=params)

    def _value(self, whole: Any, double: Any) -> Any:
        """Returns an equation's parameter on one example; only bodies and sizes change."""
        match whole, double:
            case ClosedJaxpr(), ClosedJaxpr():
                if comparable(whole.consts) != comparable(double.consts):
                    raise UnlikeError("a loop closes over other arrays")
                return ClosedJaxpr(self._value(whole.jaxpr, double.jaxpr), whole.consts)
            case Jaxpr(), Jaxpr():
                constvars = self.variables(whole.constvars, double.constvars)
                invars = self.variables(whole.invars, double.invars)
                eqns = self.equations(whole.eqns, double.eqns)
                outs = self.atoms(whole.outvars, double.outvars)
                return whole.replace(
                    constvars=constvars,
                    invars=invars,
                    eqns=eqns,
                    outvars=outs,
                )
            case int(), int() if whole != double:
                # A size is a + b n for n examples. On 2 n examples it is larger by b n, and on
                # one example it is smaller by b (n - 1).
                less, rest = divmod((double - whole) * (self.examples - 1), self.examples)
                if rest:
                    raise UnlikeError("a size is not linear in the number of examples")
                return whole - less
            case (tuple(), tuple()) | (list(), list()) if type(whole) in (tuple, list):
                if len(whole) != len(double):
                    raise UnlikeError("shapes have other ranks")
                return type(whole)(map(self._value, whole, double))
            case _:
                if whole is not double and comparable(whole) != comparable(double):
                    raise UnlikeError("equations have other parameters")
                return whole

    def _literal(self, whole: Literal, double: Literal) -> Any:
        """Returns the value of a literal on one example."""
        a = np.asarray(whole.val)
        b = np.asarray(double.val)
        # An integer may be a size, such as 3 + 2 n, which `_value` extrapolates. If a real number
        # differs, it must have the factor n or 1/n, and so be twice or half as large on 2 n
        # examples.
        if a.dtype != b.dtype or a.shape or a.tobytes() == b.tobytes():
            return self._value(whole.val, double.val)
        if np.issubdtype(a.dtype, np.integer):
            return a.dtype.type(self._value(int(a), int(b)))
        power = factor_power(b, a, 2.0)
        if power is None:
            raise UnlikeError("a number has neither the factor n nor 1/n for n examples")
        # On one example, both n and 1/n are 1, so the factor is removed.
        on_one = float(a) / float(self.examples) ** power
        return a.dtype.type(on_one)


def _shapes(atoms: Iterable[Atom]) -> list[object]:
    return [(_jax.aval(a).shape, _jax.aval(a).dtype) for a in atoms]
