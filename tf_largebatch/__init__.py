"""Large-batch training for Keras: LARS, warm-up, and recipes that do not know the machine.

Names are imported on first use (PEP 562), so that what needs no TensorFlow, such as reading a
recipe or starting workers, does not load it.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    # Classes that Keras saves by name.
    "GhostBatchNormalization": "layers.ghost_batch_normalization",
    "GlobalBatchDropout": "layers.global_batch_dropout",
    "LAMB": "optimizers.lamb",
    "LARS": "optimizers.lars",
    "Halvings": "schedules",
    "PolynomialDecay": "schedules",
    "StepDecay": "schedules",
    "Warmup": "schedules",
    # Everything else.
    "BatchSplit": "distribution.batch_split",
    "Cluster": "distribution.cluster",
    "InputError": "validation",
    "Recipe": "config",
    "SaveAndResume": "distribution.save_and_resume",
    "load_recipe": "config",
    "run": "training",
    "scale_up": "scaling",
    "split_batch": "distribution.batch_split",
    "strategy": "distribution.strategies",
    "train_in_micro_batches": "distribution.micro_batches",
}
_RENAMED = {"load_recipe": "load", "split_batch": "split"}
_SAVED_BY_KERAS = (
    "GhostBatchNormalization",
    "GlobalBatchDropout",
    "LAMB",
    "LARS",
    "Halvings",
    "PolynomialDecay",
    "StepDecay",
    "Warmup",
)

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _SAVED_BY_KERAS:
        # A saved model names all its classes: whoever imports one can load a model with the others.
        for other in _SAVED_BY_KERAS:
            importlib.import_module(f"{__name__}.{_MODULE_OF[other]}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return getattr(module, _RENAMED.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
