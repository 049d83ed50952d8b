"""LARS in float64 NumPy, written from the equation of You, Gitman and Ginsburg (arXiv 1708.03888).

Independent of the package: the tests compare the two.
"""

from __future__ import annotations

import numpy as np


class LarsTwin:
    """Algorithm 1, one variable at a time, for lists of arrays.

    `adapted` and `decayed` say for each variable whether the layer-wise rate and the weight decay
    apply. Where a norm is zero the layer-wise rate is eta.
    """

    def __init__(self, eta=0.001, mu=0.9, beta=0.0, epsilon=0.0, nesterov=False, excluded=1.0):
        self.eta, self.mu, self.beta, self.epsilon = eta, mu, beta, epsilon
        self.nesterov, self.excluded = nesterov, excluded

    def run(self, weights, gradients_by_step, rates, adapted, decayed):
        """Final weights after one update for each entry of `gradients_by_step`."""
        weights = [np.array(w, np.float64) for w in weights]
        velocities = [np.zeros_like(w) for w in weights]
        for gradients, gamma in zip(gradients_by_step, rates):
            for i, g in enumerate(gradients):
                g = np.asarray(g, np.float64)
                beta = self.beta if decayed[i] else 0.0
                local_rate = self.local_rate(weights[i], g, beta) if adapted[i] else self.excluded
                step = gamma * local_rate * (g + beta * weights[i])
                velocities[i] = self.mu * velocities[i] + step
                if self.nesterov:
                    weights[i] = weights[i] - (self.mu * velocities[i] + step)
                else:
                    weights[i] = weights[i] - velocities[i]
        return weights

    def local_rate(self, w, g, beta):
        weight_norm, gradient_norm = np.sqrt(np.sum(w * w)), np.sqrt(np.sum(g * g))
        if weight_norm == 0 or gradient_norm == 0:
            return self.eta
        return self.eta * weight_norm / (gradient_norm + beta * weight_norm + self.epsilon)
