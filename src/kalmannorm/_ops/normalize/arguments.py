"""The arguments and results of the op. Every version of the op uses them, and its schemas are made from them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """γ and β are (C,) or (G, C). `statistics_batch_size` is m, or 0 for the whole batch.

    `residual` has the memory layout of x.
    """

    x: Tensor
    prior_mean: Tensor | None
    prior_var: Tensor | None
    gain: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    statistics_batch_size: int
    eps: float
    residual: Tensor | None = None
    relu: bool = False


class Results(NamedTuple):
    """The output, then the moments of the posterior and of the observation, each (G, C).

    In a backward, y is None unless it is needed. Gradients of the results have the same form.
    """

    y: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    observed_mean: Tensor | None
    observed_var: Tensor | None


_TYPES: dict[str, str] = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
}
_DEFAULTS = {None: "None", False: "False"}


def _parameters(kind: type[Inputs] | type[Results], prefix: str = "", defaults: bool = True) -> list[str]:
    given = kind._field_defaults if defaults else {}
    return [
        f"{_TYPES[annotation.__forward_arg__]} {prefix}{name}" + (f"={_DEFAULTS[given[name]]}" if name in given else "")
        for name, annotation in kind.__annotations__.items()
    ]


FORWARD = f"({', '.join(_parameters(Inputs))}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
"""The schema of the op."""
_BACKWARD = [*_parameters(Results, "grad_"), *_parameters(Inputs, defaults=False), *_parameters(Results)]
BACKWARD = f"({', '.join(_BACKWARD)}, SymInt bias_rows) -> Tensor[]"
"""The schema of the backward. It returns the gradients that exist, in the order of `aten.backward`."""


class BackwardInputs(NamedTuple):
    """The arguments of `BACKWARD` in three parts, and `bias_rows`, which is 0 if β needs no gradient."""

    grads: Results
    inputs: Inputs
    results: Results
    bias_rows: int

    @classmethod
    def of(cls, *given: object) -> BackwardInputs:
        """Build from the flat list of the schema."""
        grads, inputs = len(Results._fields), len(Results._fields) + len(Inputs._fields)
        return cls(
            Results(*given[:grads]),  # type: ignore[arg-type]
            Inputs(*given[grads:inputs]),  # type: ignore[arg-type]
            Results(*given[inputs:-1]),  # type: ignore[arg-type]
            given[-1],  # type: ignore[arg-type]
        )

    def flat(self) -> tuple[object, ...]:
        return *self.grads, *self.inputs, *self.results, self.bias_rows
