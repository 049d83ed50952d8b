"""LAMB in float64 NumPy, written from algorithm 2 of You et al. (arXiv 1904.00962).

Independent of the package: the tests compare the two.
"""

from __future__ import annotations

import numpy as np


class LambTwin:
    """Algorithm 2, one variable at a time, for lists of arrays.

    `adapted` and `decayed` say for each variable whether the layer-wise rate and the weight decay
    apply. Where a norm is zero the layer-wise rate is 1.
    """

    def __init__(
        self, beta_1=0.9, beta_2=0.999, epsilon=1e-6, decay=0.0, excluded=1.0, bounds=(0.0, np.inf), bias=True
    ):
        self.beta_1, self.beta_2, self.epsilon, self.decay = beta_1, beta_2, epsilon, decay
        self.excluded, self.bounds, self.bias = excluded, bounds, bias

    def run(self, weights, gradients_by_step, rates, adapted, decayed):
        """Final weights after one update for each entry of `gradients_by_step`; the last ratios too."""
        weights = [np.array(w, np.float64) for w in weights]
        first = [np.zeros_like(w) for w in weights]
        second = [np.zeros_like(w) for w in weights]
        ratios = [0.0] * len(weights)
        for t, (gradients, gamma) in enumerate(zip(gradients_by_step, rates), start=1):
            for i, g in enumerate(gradients):
                g = np.asarray(g, np.float64)
                first[i] = self.beta_1 * first[i] + (1 - self.beta_1) * g
                second[i] = self.beta_2 * second[i] + (1 - self.beta_2) * g**2
                m, v = first[i], second[i]
                if self.bias:
                    m, v = m / (1 - self.beta_1**t), v / (1 - self.beta_2**t)
                r = m / (np.sqrt(v) + self.epsilon)
                u = r + self.decay * weights[i] if decayed[i] else r
                ratios[i] = self.ratio(weights[i], u) if adapted[i] else self.excluded
                weights[i] = weights[i] - gamma * ratios[i] * u
        return weights, ratios

    def ratio(self, w, u):
        weight_norm, update_norm = np.sqrt(np.sum(w * w)), np.sqrt(np.sum(u * u))
        if weight_norm == 0 or update_norm == 0:
            return 1.0
        return min(max(weight_norm / update_norm, self.bounds[0]), self.bounds[1])
