"""LARS in float64 NumPy, written from the publications and independent of the package.

The rule of You, Gitman and Ginsburg (arXiv 1708.03888) is `LarsTwin()`; `published(name)` gives the
twins of what others have released, each written out as its source has it.
"""

from __future__ import annotations

import numpy as np


def length(x):
    return np.sqrt(np.sum(x * x))


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
        last_rate = 0.0
        for gradients, gamma in zip(gradients_by_step, rates):
            for i, g in enumerate(gradients):
                beta = self.beta if decayed[i] else 0.0
                g = np.asarray(g, np.float64)
                weights[i], velocities[i] = self.step(weights[i], velocities[i], g, gamma, last_rate, beta, adapted[i])
            last_rate = gamma
        return weights

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        step = gamma * (self.local_rate(w, g, beta) if adapted else self.excluded) * (g + beta * w)
        v = self.mu * v + step
        return w - ((self.mu * v + step) if self.nesterov else v), v

    def local_rate(self, w, g, beta):
        if length(w) == 0 or length(g) == 0:
            return self.eta
        return self.eta * length(w) / (length(g) + beta * length(w) + self.epsilon)


class IntelCaffe(LarsTwin):
    """Factor 1 at zero norms; while the rate grows the momentum is multiplied by its growth."""

    def local_rate(self, w, g, beta):
        return super().local_rate(w, g, beta) if length(w) and length(g) else 1.0

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        correction = gamma / last_rate if gamma > last_rate > 0 else 1.0
        return super().step(w, correction * v, g, gamma, last_rate, beta, adapted)


class NvCaffe(LarsTwin):
    """The denominator is the gradient's norm."""

    def local_rate(self, w, g, beta):
        return self.eta * length(w) / length(g) if length(w) and length(g) else 1.0


class Contrib(LarsTwin):
    """v = mu v + g; w = w - gamma lambda v; the decay in lambda alone."""

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        trust = 1.0
        if adapted and length(w) > 0 and length(g) > 0:
            trust = self.eta * length(w) / (length(g) + beta * length(w) + self.epsilon)
        v = self.mu * v + g
        return w - gamma * trust * (self.mu * v + g if self.nesterov else v), v


class MlPerf(LarsTwin):
    """Factor 1 at zero norms."""

    def local_rate(self, w, g, beta):
        return super().local_rate(w, g, beta) if length(w) and length(g) else 1.0


class ModelGarden(LarsTwin):
    """The decay goes into the gradient before its norm is taken."""

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        g = g + beta * w
        trust = self.eta * length(w) / length(g) if adapted and length(w) > 0 and length(g) > 0 else 1.0
        v = self.mu * v + gamma * trust * g
        return w - (self.mu * v + gamma * trust * g if self.nesterov else v), v


class ModelGardenPopular(ModelGarden):
    """The same with `classic_momentum=False`: the norm is that of the velocity."""

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        g = g + beta * w
        v = self.mu * v + g
        u = self.mu * v + g if self.nesterov else v
        trust = self.eta * length(w) / length(u) if adapted and length(w) > 0 and length(u) > 0 else 1.0
        return w - gamma * trust * u, v


class Timm(LarsTwin):
    """PyTorch's order: the rate multiplies the velocity. What is not decayed is not adapted."""

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        trust = 1.0
        if beta and length(w) > 0 and length(g) > 0:
            trust = self.eta * length(w) / (length(g) + length(w) * beta + self.epsilon)
        g = (g + beta * w) * trust
        v = self.mu * v + g
        return w - gamma * (g + self.mu * v if self.nesterov else v), v


class ApexLarc(LarsTwin):
    """min(lambda / gamma, 1); at zero norms the gradient stays as it is, without decay."""

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        if length(w) > 0 and length(g) > 0:
            trust = self.eta * length(w) / (length(g) + length(w) * beta + self.epsilon)
            # At gamma = 0 torch's division gives infinity.
            trust = min(trust / gamma, 1.0) if gamma else 1.0
            g = (g + beta * w) * trust
        v = self.mu * v + g
        return w - gamma * v, v


class Nus(LarsTwin):
    """lambda of this step's raw gradient times the velocity; lambda to 50, elements to 10."""

    def step(self, w, v, g, gamma, last_rate, beta, adapted):
        trust = 1.0
        if adapted and length(w) > 0 and length(g) > 0:
            trust = min(self.eta * length(w) / (length(g) + beta * length(w) + self.epsilon), 50.0)
        v = self.mu * v + np.clip(g + beta * w, -10, 10)
        return w - gamma * trust * v, v


def published(name, **options):
    """The twin of a preset, with that publication's own epsilon and trust coefficient."""
    twins = {
        "intel_caffe": (IntelCaffe, {}),
        "nvcaffe": (NvCaffe, {}),
        "contrib": (Contrib, {}),
        "tpu": (MlPerf, {}),
        "mlperf": (MlPerf, {"epsilon": 1e-7}),
        "model_garden": (ModelGarden, {}),
        "timm": (Timm, {"epsilon": 1e-8}),
        "larc": (ApexLarc, {"eta": 0.02, "epsilon": 1e-8}),
        "nus": (Nus, {"epsilon": 1e-5}),
    }
    twin, own = twins[name]
    return twin(**{**own, **options})
