"""Predict and update: the closed-form gradient equals autograd's; the moments compose as they must."""

from __future__ import annotations

import pytest
import torch

from kalmannorm import Moments
from kalmannorm._filter import predict, update, update_backward


def moments(G=3, C=4):
    return Moments(torch.randn(G, C).double().requires_grad_(), (torch.rand(G, C).double() + 0.1).requires_grad_())


@pytest.mark.parametrize("gain", [torch.tensor(0.3), torch.tensor([0.1, 0.4, 0.6, 0.95])], ids=["scalar", "channels"])
def test_update_backward_is_the_gradient_of_update(gain):
    prior, observation, gain = moments(), moments(), gain.double().requires_grad_()
    posterior = update(prior, observation, gain)
    grad = Moments(torch.randn(3, 4).double(), torch.randn(3, 4).double())
    leaves = (*prior[:2], *observation[:2], gain)
    expected = torch.autograd.grad(posterior[:2], leaves, grad[:2])
    at_prior, at_observation, at_gain = update_backward(prior, observation, gain, grad)
    actual = (*at_prior[:2], *at_observation[:2], at_gain.sum_to_size((1, *gain.shape) if gain.dim() else ()))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.reshape(e.shape), e, rtol=1e-12, atol=1e-12)


def test_update_is_the_mixture_of_prior_and_observation():
    """Second moments mix linearly: E[x²] = p E_prior[x²] + q E_observed[x²]; that is what the cross term is for."""
    prior, observation, q = moments(), moments(), torch.tensor(0.3).double()
    posterior = update(prior, observation, q)
    second = [m.var + m.mean.square() for m in (prior, observation, posterior)]
    torch.testing.assert_close(second[2], (1 - q) * second[0] + q * second[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gain", [1e-6, 0.3, 0.5, 0.7, 1 - 1e-6])
def test_update_of_a_variance_that_overflows(gain):
    """It is infinite, as by the formulas, and no NaN: an output divided by it is finite."""
    prior = Moments(torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, torch.inf]]))
    observation = Moments(torch.tensor([[3e19, 4.0]]), torch.tensor([[torch.inf, 1.0]]))
    posterior = update(prior, observation, torch.tensor(gain))
    assert (posterior.var == torch.inf).all()
    assert posterior.mean.isfinite().all()


def test_update_does_not_overflow_on_the_way_to_a_small_variance():
    """q = 1e-6 makes small what would overflow as x̄² alone."""
    posterior = update(
        Moments(torch.zeros(1, 1), torch.ones(1, 1)),
        Moments(torch.full((1, 1), 3e19), torch.full((1, 1), 1e37)),
        torch.tensor(1e-6),
    )
    torch.testing.assert_close(posterior.var.double(), torch.full((1, 1), 9.1e32).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("gain", [1e-6, 0.5 - 1e-6, 0.5 + 1e-6, 1 - 1e-6])
def test_update_and_its_gradients_have_their_digits_at_the_edges_of_the_gain(gain):
    """Nothing cancels that is not there in the formulas. `prior` is wide and far, so that p = 1 - q counts."""
    q = torch.tensor(gain)
    prior = Moments(1e6 * torch.randn(3, 4), 1e6 + torch.rand(3, 4))
    observation = Moments(torch.randn(3, 4), torch.rand(3, 4))
    grad = Moments(torch.randn(3, 4), 1e-6 * torch.randn(3, 4))
    posterior, wide = update(prior, observation, q), [m.to(torch.float64) for m in (prior, observation)]
    leaves = [*(t.requires_grad_() for m in wide for t in m[:2]), q.double().expand(3, 4).clone().requires_grad_()]
    exact = update(*wide, leaves[-1])
    expected = (*exact[:2], *torch.autograd.grad(exact[:2], leaves, [g.double() for g in grad[:2]]))
    at_prior, at_observation, at_gain = update_backward(prior, observation, q, grad)
    for a, e in zip((*posterior[:2], *at_prior[:2], *at_observation[:2], at_gain), expected, strict=True):
        assert ((a - e).abs() / e.abs().mean()).max() < 2e-6


def test_predict_full_has_the_diagonal_of_a_diagonal_covariance():
    previous, A, r = moments(C=5), torch.randn(4, 5).double(), torch.tensor(0.7).double()
    diagonal, full = predict(previous, A, r), predict(previous, A, r, full=True)
    torch.testing.assert_close(full.var, diagonal.var, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(full.mean, diagonal.mean, rtol=1e-12, atol=1e-12)
    assert full.cov is not None
    eigenvalues = torch.linalg.eigvalsh(full.cov)
    assert (eigenvalues >= 0.7 - 1e-9).all()


def test_predict_stays_float32_under_autocast():
    previous, A = moments(C=5).to(torch.float32), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        prior = predict(previous, A, torch.ones(()))
    assert prior.mean.dtype == prior.var.dtype == torch.float32
    torch.testing.assert_close(prior.mean, previous.mean @ A.t())


def test_pooled_moments_are_those_of_all_values():
    groups = [torch.randn(4, 3).double() * 2 + shift for shift in (4, 4, 2)]
    each = Moments(
        torch.stack([g.mean(0) for g in groups]),
        torch.stack([g.var(0, correction=0) for g in groups]),
        torch.stack([torch.cov(g.t(), correction=0) for g in groups]),
    )
    pooled = each.pooled()
    everything = torch.cat(groups)
    torch.testing.assert_close(pooled.mean[0], everything.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pooled.var[0], everything.var(0, correction=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pooled.cov[0], torch.cov(everything.t(), correction=0), rtol=1e-12, atol=1e-12)
