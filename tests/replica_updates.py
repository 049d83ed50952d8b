"""Program for tests: updates on some replicas of this process, or on the workers of TF_CONFIG.

    python replica_updates.py OUTPUT.npz [REPLICAS]

Each case trains an embedding, whose gradient is sparse with repeated rows, and a dense layer on the
same 16 examples, of which every replica takes an equal part. Ten steps in
float64 and one in float32. OUTPUT holds arrays named `dtype/case/variable`.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import tf_largebatch
from tf_largebatch import LARS
from tf_largebatch._keras import keras, set_precision, tf

output = sys.argv[1]
if "TF_CONFIG" not in os.environ:
    from tf_largebatch.distribution import strategies

    strategies.set_logical_cpus(int(sys.argv[2]))

EXAMPLES = 16
draw = np.random.default_rng(0)
WORDS = draw.integers(0, 10, (EXAMPLES, 3))
WORDS[:, 0] = 4  # a row that every example, so every replica, has
TARGETS = draw.normal(size=(EXAMPLES, 2))
STEPS = {"float64": 10, "float32": 1}
CLIPS = {
    "": {},
    " clipnorm": {"clipnorm": 0.01},
    " clipvalue": {"clipvalue": 0.002},
    " global": {"global_clipnorm": 0.02},
}


def optimizers():
    """{case: function that makes the optimizer}"""
    for suffix, clip in CLIPS.items():
        # An epsilon makes LARS's step depend on the size of the gradient, so that a clip shows.
        yield f"LARS{suffix}", lambda clip=clip: LARS(2.0, weight_decay=1e-3, epsilon=0.01, **clip)
    for suffix in ("", " global"):
        clip = CLIPS[suffix]
        yield f"LAMB{suffix}", lambda clip=clip: tf_largebatch.LAMB(0.01, weight_decay=0.1, **clip)
        # Numbers that are exact in float32 too, through which Keras takes its momentum.
        yield f"keras.SGD{suffix}", lambda clip=clip: keras.optimizers.SGD(0.125, momentum=0.5, **clip)
    yield "SGD", lambda: LARS(0.125, momentum=0.5, exclude_from_layer_adaptation=[""])
    yield "LARS torch nesterov", lambda: LARS(2.0, weight_decay=1e-3, momentum_order="torch", nesterov=True)
    yield "LARS rows", lambda: LARS(0.1, sparse="sgd")
    # Without ema_overwrite_frequency, which Keras 3 cannot do on several replicas: it updates
    # variables inside a condition there.
    yield "LARS ema", lambda: LARS(2.0, use_ema=True, ema_momentum=0.5)


def train(strategy, make_optimizer, dtype):
    """Final weights by name."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int64"),
                keras.layers.Embedding(10, 4, name="embedding"),
                keras.layers.Flatten(),
                keras.layers.Dense(2, name="dense"),
            ]
        )
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(words, targets):
        with tf.GradientTape() as tape:
            # Of the whole batch: the mean over EXAMPLES.
            loss = tf.reduce_sum(tf.square(model(words) - targets)) / EXAMPLES
        gradients = tape.gradient(loss, model.trainable_variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    replicas = strategy.num_replicas_in_sync
    share = EXAMPLES // replicas

    def part(values):
        def of_replica(context):
            first = context.replica_id_in_sync_group * share
            return tf.constant(values[first : first + share])

        return strategy.experimental_distribute_values_from_function(of_replica)

    @tf.function
    def everywhere(words, targets):
        strategy.run(step, args=(words, targets))

    for _ in range(STEPS[dtype]):
        everywhere(part(WORDS), part(TARGETS.astype(dtype)))
    if isinstance(optimizer, (LARS, tf_largebatch.LAMB)):
        # On several replicas too.
        assert f"at step {STEPS[dtype]}" in optimizer.explain()
    if optimizer.use_ema:
        optimizer.finalize_variable_values(model.trainable_variables)
    return dict(zip(("embedding", "kernel", "bias"), model.get_weights()))


strategy = tf_largebatch.strategy()
results = {}
for dtype in STEPS:
    set_precision(dtype)
    for case, make in optimizers():
        results.update({f"{dtype}/{case}/{name}": w for name, w in train(strategy, make, dtype).items()})
np.savez(output, **results)
