"""The registered op `kalmannorm::batch_kalman_norm`, its fake, its backward and its double backward.

    y = relu(normalized + residual); ReLU and residual are optional

The op is functional: it returns the moments and mutates nothing. So autograd, `torch.compile(fullgraph=True)` and
`torch.export` see one node. Its backward is an op too, with the closed form of `docs/equations.md`. The double backward
differentiates the naive reference, so gradients of gradients are right but slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm._groups import cast, group_count, group_size, statistics_dtype
from kalmannorm._ops.dispatch import kernels_for, on_device_of
from kalmannorm._ops.library import ANY_LAYOUT
from kalmannorm._ops.normalize import exportable, naive
from kalmannorm._ops.normalize.arguments import BACKWARD, FORWARD, BackwardInputs, Inputs, Results
from kalmannorm._ops.normalize.recipes import Plan, Tensors, give, keep, plan_of
from kalmannorm.moments import Moments


def forward(*given: Any) -> tuple[Tensor, ...]:
    """The op without the dispatcher."""
    inputs = Inputs(*given)
    x, residual = dense(inputs.x), inputs.residual
    if residual is not None:
        residual = residual.contiguous(memory_format=memory_format_of(x))
    inputs = inputs._replace(x=x, residual=residual)
    with on_device_of(x):
        results: Results = kernels_for(x, inputs.statistics_batch_size).forward(inputs)
    return tuple(results)  # type: ignore[arg-type]


# torch 2.6 has no tags for such ops. There inductor copies around them, as it does by default.
_TAGS: dict[str, Any] = {"tags": ANY_LAYOUT} if "tags" in inspect.signature(torch.library.custom_op).parameters else {}
batch_kalman_norm = torch.library.custom_op(
    "kalmannorm::batch_kalman_norm", forward, mutates_args=(), schema=FORWARD, **_TAGS
)


@batch_kalman_norm.register_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*given)
    x = inputs.x
    groups = group_count(x.shape[0], group_size(x.shape[0], inputs.statistics_batch_size))
    moments = (x.new_empty((groups, x.shape[1]), dtype=statistics_dtype(x)) for _ in range(4))
    return torch.empty_like(dense(x)), *moments


def _backward(*flat: Any) -> list[Tensor]:
    return backward(BackwardInputs.of(*flat))


def backward(given: BackwardInputs) -> list[Tensor]:
    """The backward of the op without the dispatcher."""
    x, grad_y, y = dense(given.inputs.x), given.grads.y, given.results.y
    given = given._replace(inputs=given.inputs._replace(x=x))
    if grad_y is not None:
        grad_y = grad_y.contiguous(memory_format=memory_format_of(x))
        given = given._replace(grads=given.grads._replace(y=grad_y))
    if y is not None:  # hooks on saved tensors may have changed the layout of one of them
        y = y.contiguous(memory_format=memory_format_of(x))
        given = given._replace(results=given.results._replace(y=y))
    with on_device_of(x):
        gradients: list[Tensor] = kernels_for(x, given.inputs.statistics_batch_size).backward(*given)
    return gradients


batch_kalman_norm_backward = torch.library.custom_op(
    "kalmannorm::batch_kalman_norm_backward", _backward, mutates_args=(), schema=BACKWARD, **_TAGS
)


@batch_kalman_norm_backward.register_fake
def _(*flat: Any) -> list[Tensor]:
    given = BackwardInputs.of(*flat)
    x, prior_mean, prior_var, gain, weight = given.inputs[:5]
    x = dense(x)
    gradients = [torch.empty_like(x)] if given.results.y is None else [torch.empty_like(x), torch.empty_like(x)]
    gradients += [t.new_empty(t.shape) for t in (prior_mean, prior_var, gain, weight) if t is not None]
    if given.bias_rows:
        gradients.append(x.new_empty((given.bias_rows, x.shape[1]), dtype=statistics_dtype(x)))
    return gradients


def save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], plan: Plan | None = None, rest: Tensors = ()
) -> None:
    """Save in an autograd context what `differentiate` needs.

    With a plan, y is not kept. `rest` are the tensors of its residual.
    """
    inputs, results = Inputs(*inputs), Results(*output)
    ctx.set_materialize_grads(False)
    ctx.statistics_batch_size, ctx.eps, ctx.relu = inputs.statistics_batch_size, inputs.eps, inputs.relu
    # The backward of a ReLU needs its mask. With a residual, the mask comes from y. Without one, it comes from x and β,
    # because kernels on a GPU read x anyway. On a CPU this would need another pass, so y is used there too.
    adds = inputs.residual is not None
    ctx.mask_first = ctx.relu and not adds and inputs.x.device.type == "cpu"
    ctx.needs_y = needs_output(inputs)
    ctx.plan = plan
    if plan is not None and ctx.needs_y:
        ctx.save_for_backward(*inputs[:6], None, *results[1:], *rest)
    else:
        bias = inputs.bias if ctx.relu and not ctx.needs_y else None
        ctx.save_for_backward(*inputs[:5], bias, results.y if ctx.needs_y else None, *results[1:])
    ctx.bias = (0, None, None) if inputs.bias is None else (_rows(inputs.bias), inputs.bias.shape, inputs.bias.dtype)
    ctx.residual = None if inputs.residual is None else inputs.residual.dtype


def needs_output(inputs: Inputs) -> bool:
    """Whether the backward reads y, for the mask of a ReLU."""
    return inputs.relu and (inputs.residual is not None or inputs.x.device.type == "cpu")


def _rows(parameter: Tensor) -> int:
    """Number of rows of a parameter (C,) or (G, C)."""
    return parameter.shape[0] if parameter.dim() > 1 else 1


def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients with respect to all arguments of the op, from those of its results."""
    return differentiate_saved(ctx, ctx.saved_tensors, *grads)


def differentiate_saved(ctx: Any, saved: Sequence[Any], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """As `differentiate`. A backward that calls it twice reads `ctx.saved_tensors` once, as checkpoints demand."""
    x, prior_mean, prior_var, gain, weight, bias, y, *moments = saved
    rows, shape, dtype = ctx.bias
    if ctx.plan is not None:
        moments, rest = moments[:4], moments[4:]
        if ctx.needs_y:
            if grads[0] is not None:
                y = ctx.plan.take((x, prior_mean, prior_var, gain, weight, bias, *moments, *rest))
            bias = None
        ctx.plan.release()
    relu = ctx.relu and not ctx.mask_first
    if ctx.mask_first:
        grads = None if grads[0] is None else torch.ops.aten.threshold_backward(grads[0], y, 0), *grads[1:]
        y = None
    given = BackwardInputs(
        Results(*grads),
        Inputs(x, prior_mean, prior_var, gain, weight, bias, ctx.statistics_batch_size, ctx.eps, None, relu),
        Results(y, *moments),
        rows,
    )
    # Without a double backward and without a tracer, skip the dispatcher to save time.
    registered = torch.is_grad_enabled() or watched(x)
    remaining = iter(batch_kalman_norm_backward(*given.flat()) if registered else backward(given))
    dx = next(remaining)
    d_residual = next(remaining) if y is not None else None if ctx.residual is None else grads[0]
    if d_residual is not None:
        d_residual = cast(d_residual, ctx.residual)
    d_parameters = [None if t is None else next(remaining) for t in (prior_mean, prior_var, gain, weight)]
    d_bias = next(remaining) if rows else None
    if d_bias is not None:
        d_bias = cast(d_bias if d_bias.shape == shape else d_bias.reshape(shape), dtype)
    return dx, *d_parameters, d_bias, None, None, d_residual, None


torch.library.register_autograd(batch_kalman_norm, differentiate, setup_context=save)


class _Node(torch.autograd.Function):
    """The autograd node of the op without torch's dispatcher, which costs as much as a small batch."""

    @staticmethod
    def forward(ctx: Any, planned: tuple[Plan | None, Tensors], *inputs: Any) -> tuple[Tensor, ...]:
        output = forward(*inputs)
        save(ctx, inputs, output, *planned)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *differentiate(ctx, *grads)


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Node).apply
"""`_Node.apply` without its checks for `torch.func`. The callers of `run` have made them."""


class _Formula:
    """y of the op from all its tensors and its moments."""

    def __init__(self, statistics_batch_size: int, eps: float, relu: bool) -> None:
        self.size, self.eps, self.relu = statistics_batch_size, eps, relu

    def again(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        x, _, _, _, weight, bias, mean, var, observed_mean, _ = tensors
        inputs = Inputs(x, None, None, None, weight, bias, self.size, self.eps, residual, self.relu)
        return again(inputs, mean, var, observed_mean)

    def attached(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        y: Tensor = batch_kalman_norm(*tensors[:6], self.size, self.eps, residual, self.relu)[0]
        return y


def again(inputs: Inputs, mean: Tensor, var: Tensor, observed_mean: Tensor) -> Tensor:
    """The output of a norm once more."""
    with on_device_of(inputs.x):
        y: Tensor = kernels_for(inputs.x, inputs.statistics_batch_size).again(inputs, mean, var, observed_mean)
    return y


def run(*inputs: Any, region: Any = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`batch_kalman_norm` on all its arguments, through the dispatcher only if necessary.

    `region`: y gets a recipe for readers in this region. None: y is kept by everyone who needs it.
    """
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    if watched(inputs[0]):
        results = batch_kalman_norm(*inputs)
        return results
    if region is None or not torch.is_grad_enabled():
        results = _apply((None, ()), *inputs)  # type: ignore[assignment]
        return results
    given = Inputs(*inputs)
    formula = _Formula(given.statistics_batch_size, given.eps, given.relu)
    planned = plan_of(formula, 10, given.residual, region)
    results = _apply(planned or (None, ()), *inputs)  # type: ignore[assignment]
    y, needed = results[0], needs_output(given)
    if planned is not None and y.requires_grad:
        plan, rest = planned
        plan.readers += needed
        give(y, plan, (*inputs[:6], *results[1:], *rest), region)
    elif needed:
        keep(y, region)
    return results


def _observe(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, Tensor]:
    x = dense(x)
    with on_device_of(x):
        moments: tuple[Tensor, Tensor] = kernels_for(x, statistics_batch_size).observe(x, statistics_batch_size)
    return moments


observe = torch.library.custom_op(
    "kalmannorm::observe",
    _observe,
    mutates_args=(),
    schema="(Tensor x, SymInt statistics_batch_size) -> (Tensor, Tensor)",
    **_TAGS,
)


@observe.register_fake
def _(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, ...]:
    groups = group_count(x.shape[0], group_size(x.shape[0], statistics_batch_size))
    return tuple(x.new_empty((groups, x.shape[1]), dtype=statistics_dtype(x)) for _ in range(2))


def _save_observed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.statistics_batch_size = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *output)


def _differentiate_observed(ctx: Any, grad_mean: Tensor | None, grad_var: Tensor | None) -> tuple[Tensor, None]:
    x, mean, var = ctx.saved_tensors
    inputs = Inputs(x, None, None, None, None, None, ctx.statistics_batch_size, 1.0)
    given = BackwardInputs(
        Results(None, grad_mean, grad_var, None, None), inputs, Results(None, mean, var, mean, var), 0
    )
    (dx,) = batch_kalman_norm_backward(*given.flat())
    return dx, None


torch.library.register_autograd(observe, _differentiate_observed, setup_context=_save_observed)


def watched(x: Tensor) -> bool:
    """Whether a compiler, an exporter, a tracer or a dispatch mode must see the registered op."""
    if torch.compiler.is_compiling():
        return True
    return (
        type(x) is not Tensor or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
    )


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = BackwardInputs.of(*inputs)
    inputs = given.inputs
    ctx.set_materialize_grads(False)
    ctx.statistics_batch_size, ctx.eps, ctx.relu = inputs.statistics_batch_size, inputs.eps, inputs.relu
    ctx.bias_rows = given.bias_rows
    ctx.save_for_backward(*given.grads, *inputs[:6], *given.results[1:3], given.results.y)


def _differentiate_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Second derivatives: differentiate the gradient of the naive version. It computes the moments from x again."""
    *saved, bias, mean, var, y = ctx.saved_tensors
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves: list[Any] = [None if t is None else _leaf(t) for t in saved]
        outer, (x, prior_mean, prior_var, gain, weight) = leaves[:5], leaves[5:]
        if ctx.relu and outer[0] is not None:
            outer[0] = outer[0].masked_fill(_blocked(ctx, x, Moments(mean, var), weight, bias, y), 0)
        shift = mean.new_zeros((ctx.bias_rows, x.shape[1]), requires_grad=True) if ctx.bias_rows else None
        inputs = (x, prior_mean, prior_var, gain, weight, shift)
        outputs = naive.batch_kalman_norm(*inputs, ctx.statistics_batch_size, ctx.eps)
        arrived = [(o, g) for o, g in zip(outputs, outer, strict=True) if g is not None]
        given = [t for t in inputs if t is not None]
        first = list(
            torch.autograd.grad(
                [o for o, _ in arrived],
                given,
                [g for _, g in arrived],
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        if y is not None:
            first.insert(1, torch.zeros_like(y) if outer[0] is None else outer[0])
        pairs = [(a, g) for a, g in zip(first, grads, strict=True) if g is not None and a.requires_grad]
        present = [t for t in leaves if t is not None]
        second = iter(
            torch.autograd.grad(
                [a for a, _ in pairs], present, [g for _, g in pairs], create_graph=higher, allow_unused=True
            )
        )
    none = [None] * (len(Results._fields) + len(Inputs._fields) + len(Results._fields) + 1 - len(leaves))
    return *(None if t is None else next(second) for t in leaves), *none


def _leaf(t: Tensor) -> Tensor:
    """A leaf for `t`. A view, so that a tensor in two places counts twice. It stays attached for third derivatives."""
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()


def _blocked(
    ctx: Any, x: Tensor, posterior: Moments, weight: Tensor | None, bias: Tensor | None, y: Tensor | None
) -> Tensor:
    """The mask of values that the ReLU set to zero."""
    with torch.no_grad():
        if y is None:
            y = exportable.apply(x, posterior, weight, bias, group_size(x.shape[0], ctx.statistics_batch_size), ctx.eps)
        return y <= 0


torch.library.register_autograd(batch_kalman_norm_backward, _differentiate_backward, setup_context=_save_backward)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The memory format in which x has no gaps, or `contiguous_format` if there is none."""
    if x.is_contiguous():
        return torch.contiguous_format
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and x.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format


def dense(x: Tensor) -> Tensor:
    """x without gaps. It is x itself if it has none."""
    return x.contiguous(memory_format=memory_format_of(x))
