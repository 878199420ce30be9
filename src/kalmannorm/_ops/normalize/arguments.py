"""The arguments and results of the ops. Every version of an op uses them, and the schemas are made from them.

The op is `batch_kalman_norm`. The classes with "Settled" belong to norms that use running statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class SettledInputs(NamedTuple):
    """γ and β are (C,) or (G, C). The running statistics are (C,). `statistics_batch_size` is m, or 0 for all of x.

    All but x and the residual have the dtype of the statistics. The residual has the memory layout of x.
    """

    x: Tensor
    prior_mean: Tensor | None
    prior_var: Tensor | None
    gain: Tensor | None
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    statistics_batch_size: int
    eps: float
    residual: Tensor | None = None
    relu: bool = False


class SettledResults(NamedTuple):
    y: Tensor
    mean: Tensor
    """Of the posterior, (G, C)."""
    var: Tensor
    observed_mean: Tensor
    observed_var: Tensor
    centre: Tensor
    """m, (C,). The forward copies it, because the buffer is updated before the backward."""
    rho: Tensor
    """ρ, (C,)"""


class SettledGrads(NamedTuple):
    """The arguments of the backward.

    `y`: None unless its sign is the mask of the ReLU. `averages` is (C, 3), and its first columns are e₀ and e₁. Then
    there are the gradients with respect to posterior and observation.
    """

    grad_y: Tensor
    x: Tensor
    y: Tensor | None
    prior_mean: Tensor | None
    prior_var: Tensor | None
    gain: Tensor | None
    weight: Tensor
    bias: Tensor
    centre: Tensor
    rho: Tensor
    observed_mean: Tensor
    observed_var: Tensor
    averages: Tensor
    grad_mean: Tensor | None
    grad_var: Tensor | None
    grad_observed_mean: Tensor | None
    grad_observed_var: Tensor | None
    statistics_batch_size: int
    relu: bool
    residual: bool
    """Whether the gradient of a residual is wanted. It is g with the mask of the ReLU."""


_TYPES: dict[str, str] = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
}
_DEFAULTS = {None: "None", False: "False"}


def _parameters(kind: Any, prefix: str = "", defaults: bool = True) -> list[str]:
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


SETTLED_FORWARD = f"({', '.join(_parameters(SettledInputs, defaults=False))}) -> Tensor[]"
SETTLED_BACKWARD = f"({', '.join(_parameters(SettledGrads))}) -> Tensor[]"


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
