"""What passes into and out of a converted norm in each of its calls."""

from collections.abc import Callable

from torch import Tensor, nn

from kalmannorm.moments import Moments

__all__ = ["delivered", "given"]


def given(model: nn.Module, name: str) -> list[Moments | None]:
    """The prior that reaches a norm in each of its calls."""
    found = []
    _listen(model.get_submodule(name), lambda previous, posterior: found.append(previous))
    return found


def delivered(model: nn.Module, name: str) -> list[Moments]:
    """The posterior that leaves a norm in each of its calls."""
    found = []
    _listen(model.get_submodule(name), lambda previous, posterior: found.append(posterior))
    return found


def _listen(norm: nn.Module, hear: Callable[[Moments | None, Moments], None]) -> None:
    original = norm._forward

    def forward(x: Tensor, previous: Moments | None, *rest):
        y, posterior = original(x, previous, *rest)
        hear(previous, posterior)
        return y, posterior

    norm._forward = forward
