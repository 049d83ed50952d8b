"""Learning-rate schedules of large-batch training: global step in, rate out.

Steps count optimizer updates from 0. All are `keras.optimizers.schedules.LearningRateSchedule`s that
compute in float32, so they go wherever Keras takes one and are saved with a model. Cosine decay is
Keras's own `CosineDecay`, which `Warmup` takes as it takes any other.
"""

from tf_largebatch.schedules.decays import Halvings, PolynomialDecay, StepDecay
from tf_largebatch.schedules.warmup import Warmup

__all__ = ["Halvings", "PolynomialDecay", "StepDecay", "Warmup"]
