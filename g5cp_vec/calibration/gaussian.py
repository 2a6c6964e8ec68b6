"""Gaussian-process regression of what a closed form leaves over, across sizes and across kinds of rows.

The covariance of two rows is that of a constant and of a smooth function of their (logarithmic) sizes, each shared
between rows to a degree: every factor in which the rows differ (chip, library, element type, …) multiplies it by a
correlation between 0 and 1. Rows of one library so inform another, one chip's another's, as far as the data show that
they agree. Smoothness is Matérn-5/2, one length per size. Scales, correlations and lengths maximise the marginal
likelihood under weak priors. Rows that the others contradict by more than ``OUTLIER`` standard deviations get as much
noise of their own as they are off.

References
----------
Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25, 4.17, 5.9 and 5.12.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]

OUTLIER = 3.0
# Priors: logarithms of the scales of constant, function and noise; logits of correlations; logarithm of a length.
_SCALES = (np.log(0.15), np.log(0.2), np.log(0.03))
_CONSTANT_LOGIT, _FUNCTION_LOGIT, _LOG_LENGTH = 0.5, 1.5, np.log(3.0)
_SCALE_SPREAD, _SPREAD = 1.0, 1.5
_MOST_STEPS = 60


class Inputs(NamedTuple):
    """Rows as the process sees them: sizes (n, n_sizes), base-2 logarithms, and factors (n, n_factors), codes."""

    sizes: Real
    factors: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64]) -> Inputs:
        """Return some of the rows."""
        return Inputs(self.sizes[rows], self.factors[rows])


class Process(NamedTuple):
    """A fitted process: parameters (see :func:`_prior`), rows, their weights."""

    parameters: Real
    inputs: Inputs
    weights: Real

    def predict(self, inputs: Inputs) -> Real:
        """Return the mean at other rows."""
        constant, function, *_ = _covariance(self.parameters, inputs, self.inputs)
        result: Real = (constant + function) @ self.weights
        return result


def _prior(n_factors: int, n_sizes: int) -> tuple[Real, Real]:
    """Mean and spread of the parameters: three scales, 2 n_factors correlations, n_sizes lengths."""
    mean = np.concatenate(
        [
            _SCALES,
            np.full(n_factors, _CONSTANT_LOGIT),
            np.full(n_factors, _FUNCTION_LOGIT),
            np.full(n_sizes, _LOG_LENGTH),
        ]
    )
    spread = np.full(len(mean), _SPREAD)
    spread[:3] = _SCALE_SPREAD
    return mean, spread


def _covariance(parameters: Real, a: Inputs, b: Inputs) -> tuple[Real, Real, list[NDArray[np.bool_]], list[Real]]:
    """Covariance of the constant and of the function, with where factors differ and the scaled distances."""
    n_factors, n_sizes = a.factors.shape[1], a.sizes.shape[1]
    differs = [a.factors[:, f][:, None] != b.factors[:, f][None, :] for f in range(n_factors)]
    log_correlation = -np.logaddexp(0, -parameters[3 : 3 + 2 * n_factors])
    lengths = np.exp(parameters[3 + 2 * n_factors :])
    shape = (len(a.sizes), len(b.sizes))
    log_constant, log_function = np.full(shape, 2 * parameters[0]), np.full(shape, 2 * parameters[1])
    for f, apart in enumerate(differs):
        log_constant += apart * log_correlation[f]
        log_function += apart * log_correlation[n_factors + f]
    distances = [
        np.sqrt(5) / lengths[d] * np.abs(a.sizes[:, d][:, None] - b.sizes[:, d][None, :]) for d in range(n_sizes)
    ]
    for q in distances:
        log_function += np.log1p(q + q * q / 3) - q
    return np.exp(log_constant), np.exp(log_function), differs, distances


def _objective(parameters: Real, inputs: Inputs, target: Real, extra: Real) -> tuple[float, Real]:
    """Negative logarithm of likelihood times prior, and its gradient."""
    constant, function, differs, distances = _covariance(parameters, inputs, inputs)
    noise = np.exp(2 * parameters[2])
    total = constant + function + np.diag(noise + extra + 1e-10)
    inverse = np.linalg.inv(total)
    weights = inverse @ target
    slope = 0.5 * (inverse - np.outer(weights, weights))
    of_constant, of_function = slope * constant, slope * function
    n = len(differs)
    decline = 1 - 1 / (1 + np.exp(-parameters[3 : 3 + 2 * n]))
    gradient = np.concatenate(
        [
            [2 * of_constant.sum(), 2 * of_function.sum(), 2 * noise * np.trace(slope)],
            [(of_constant * apart).sum() * decline[f] for f, apart in enumerate(differs)],
            [(of_function * apart).sum() * decline[n + f] for f, apart in enumerate(differs)],
            [(of_function * (q * q * (1 + q) / (3 + 3 * q + q * q))).sum() for q in distances],
        ]
    )
    mean, spread = _prior(n, len(distances))
    z = (parameters - mean) / spread
    value = 0.5 * target @ weights + 0.5 * np.linalg.slogdet(total)[1] + 0.5 * z @ z
    return float(value), gradient + z / spread


def _own_noise(parameters: Real, inputs: Inputs, target: Real) -> Real:
    """Variance added to rows that all others contradict (leave-one-out residual beyond ``OUTLIER`` deviations)."""
    constant, function, *_ = _covariance(parameters, inputs, inputs)
    noise, extra = np.exp(2 * parameters[2]), np.zeros(len(target))
    for _ in range(3):
        inverse = np.linalg.inv(constant + function + np.diag(noise + extra + 1e-10))
        variance = 1 / np.diag(inverse)
        residual = inverse @ target * variance
        deviation = np.sqrt(np.maximum(variance - extra, noise))
        extra = np.where(np.abs(residual) > OUTLIER * deviation, residual**2, 0.0)
    return extra


def learn(inputs: Inputs, target: Real) -> Real:
    """Return the parameters of the process behind targets (natural logarithms of ratios), shape (n,)."""
    from scipy.optimize import minimize

    parameters, _ = _prior(inputs.factors.shape[1], inputs.sizes.shape[1])
    extra = np.zeros(len(target))
    bounds = [(-9.0, 9.0)] * len(parameters)
    for _ in range(2):  # once as if every row could be trusted, then with the outliers known
        parameters = minimize(
            _objective,
            parameters,
            args=(inputs, target, extra),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": _MOST_STEPS},
        ).x
        extra = _own_noise(parameters, inputs, target)
        if not extra.any():
            break
    return parameters


def condition(parameters: Real, inputs: Inputs, target: Real) -> Process:
    """Return the process conditioned on rows."""
    constant, function, *_ = _covariance(parameters, inputs, inputs)
    extra = _own_noise(parameters, inputs, target)
    total = constant + function + np.diag(np.exp(2 * parameters[2]) + extra + 1e-10)
    return Process(parameters, inputs, np.linalg.solve(total, target).astype(np.float64))
