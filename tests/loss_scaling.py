"""Program for tests: loss scaling where one replica's gradient is infinite in one step.

    python loss_scaling.py OUTPUT.npz [REPLICAS]

The last replica's gradient is infinite in step 1 of 4. OUTPUT: `weights` after each step, and `scale`.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import tf_largebatch
from tf_largebatch import LARS
from tf_largebatch._keras import KERAS_3, keras, tf

if "TF_CONFIG" not in os.environ:
    from tf_largebatch.distribution import strategies

    strategies.set_logical_cpus(int(sys.argv[2]))

strategy = tf_largebatch.strategy()
with strategy.scope():
    if KERAS_3:
        variable = keras.Variable(np.ones((2, 2), np.float32), name="kernel")
        optimizer = keras.optimizers.LossScaleOptimizer(
            LARS(1.0, trust_coefficient=0.5, momentum=0.0), initial_scale=8.0
        )
    else:
        variable = tf.Variable(np.ones((2, 2), np.float32), name="kernel")
        inner = LARS(1.0, trust_coefficient=0.5, momentum=0.0)
        optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build([variable])


def replica_step(number):
    last = tf.distribute.get_replica_context().replica_id_in_sync_group == strategy.num_replicas_in_sync - 1
    with tf.GradientTape() as tape:
        factor = tf.where(tf.logical_and(last, tf.equal(number, 1)), np.inf, 1.0)
        loss = factor * tf.reduce_sum(tf.convert_to_tensor(variable)) / strategy.num_replicas_in_sync
        scaled = optimizer.scale_loss(loss) if KERAS_3 else optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, [variable.value if KERAS_3 else variable])
    if not KERAS_3:
        gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, [variable]))


@tf.function
def step(number):
    strategy.run(replica_step, args=(number,))


weights, scales = [], []
for number in range(4):
    step(tf.constant(number))
    weights.append(np.asarray(variable))
    scales.append(float(np.asarray(optimizer.dynamic_scale if KERAS_3 else optimizer.loss_scale)))
np.savez(sys.argv[1], weights=weights, scales=scales)
