"""What a recipe names, as objects: its schedule, its optimizer, and its compiled model."""

from __future__ import annotations

from typing import Any

from tf_largebatch import named_functions, scaling
from tf_largebatch._keras import keras
from tf_largebatch.config import Recipe
from tf_largebatch.distribution.batch_split import BatchSplit
from tf_largebatch.distribution.micro_batches import train_in_micro_batches
from tf_largebatch.optimizer_config import Addons, Lamb, Sgd, given
from tf_largebatch.optimizers import addons
from tf_largebatch.optimizers.lamb import LAMB
from tf_largebatch.optimizers.lars import LARS
from tf_largebatch.schedules import Halvings, PolynomialDecay, StepDecay, Warmup
from tf_largebatch.validation import InputError


def learning_rate_schedule(recipe: Recipe, steps_per_epoch: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """The recipe's schedule in global steps; a decay to an end rate reaches it after the last step.

    Raises:
      InputError: the warm-up takes the whole run.
    """
    schedule, total = recipe.schedule, recipe.epochs * steps_per_epoch
    warmup_steps = (
        schedule.warmup_steps
        or scaling.epochs_to_steps(schedule.warmup_epochs, steps_per_epoch)
        or scaling.examples_to_steps(schedule.warmup_examples, recipe.global_batch_size)
    )
    if warmup_steps >= total:
        raise InputError(f"the warm-up of the schedule takes {warmup_steps} steps, but the whole run has {total}.")
    # Steps and halvings are placed in the run, whatever the warm-up.
    decay_from = getattr(schedule, "decay_from", "start")
    decay_steps = total - warmup_steps if decay_from == "warmup_end" else total
    peak = schedule.peak_learning_rate
    if schedule.decay == "polynomial":
        decay = PolynomialDecay(
            peak, decay_steps, schedule.end_learning_rate, schedule.decay_power, schedule.decay_plus_one
        )
    elif schedule.decay == "step":
        decay = StepDecay.from_epochs(peak, schedule.decay_epochs, steps_per_epoch, schedule.decay_factor)
    elif schedule.decay == "halvings" and schedule.first_halving_step is None:
        decay = Halvings.luong234(peak, total, schedule.halvings)
    elif schedule.decay == "halvings":
        decay = Halvings(peak, schedule.first_halving_step, schedule.halving_interval_steps, schedule.halvings)
    elif schedule.decay == "cosine":
        # Keras gives the end rate as a fraction of the first.
        end = schedule.end_learning_rate / peak
        decay = keras.optimizers.schedules.CosineDecay(peak, decay_steps, alpha=end)
    else:
        decay = peak
    return Warmup(decay, warmup_steps, schedule.warmup_start_rate, decay_from, schedule.warmup_shape)


def optimizer(recipe: Recipe, schedule: Any) -> keras.optimizers.Optimizer:
    """The recipe's optimizer; create it in the strategy's scope."""
    chosen, options = recipe.optimizer, given(recipe.optimizer)
    if isinstance(chosen, Addons):
        return addons.build(chosen.name, chosen.options, schedule)
    if isinstance(chosen, Lamb):
        return LAMB(schedule, **options)
    if isinstance(chosen, Sgd):
        # LARS without its layer-wise rate is momentum SGD with the decay in the gradient.
        return LARS(schedule, **options, exclude_from_layer_adaptation=[""], name="SGD")
    preset = options.pop("preset", None)
    return LARS.preset(preset, schedule, **options) if preset else LARS(schedule, **options)


def model(
    recipe: Recipe, split: BatchSplit, schedule: Any, input_shape: tuple[int, ...], num_classes: int
) -> keras.Model:
    """The recipe's network, compiled and ready for `fit`; create it in the strategy's scope.

    Args:
      recipe: names the network, the optimizer, and how gradients are summed.
      split: how the global batch is cut up.
      schedule: as `learning_rate_schedule` gives it.
      input_shape: of one example.
      num_classes: labels are from 0 to one less.

    Raises:
      InputError: the recipe's function gives no Keras model, or one with other outputs.
    """
    network = named_functions.find("network", recipe.network, recipe.network_options, positional=2)
    made = network.resolve()(input_shape, num_classes, **network.options)
    _check_network(made, recipe.network, num_classes)
    made.compile(
        optimizer=optimizer(recipe, schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Weighted, because evaluation fills its last batch with examples of weight 0.
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        # XLA would compile the collectives into the step, which CPU and multi-worker runs cannot.
        jit_compile=False,
    )
    return train_in_micro_batches(made, split.micro_batches, wire_dtype=recipe.collectives.wire_dtype)


def _check_network(model: Any, name: str, num_classes: int) -> None:
    shape = tuple(getattr(model, "output_shape", None) or ()) if isinstance(model, keras.Model) else None
    if shape is None:
        raise InputError(f"network {name!r} returned {type(model).__name__}, but must return a Keras model.")
    # A subclassed model has no shape before it is called.
    if shape and (len(shape) != 2 or not isinstance(shape[-1], int) or shape[-1] < num_classes):
        raise InputError(f"network {name!r} has outputs of shape {shape}, but must give (None, {num_classes}) logits.")
