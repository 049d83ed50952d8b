"""LARS as others have published it: for each name, the arguments of `LARS` that differ from ours.

Learning rate, momentum and weight decay are not part of a preset: they belong to the recipe. Published
recipes by preset: AlexNet, AlexNet-BN and ResNet-50 of the Caffe releases, "intel_caffe"; You's LEGW runs
on TPU and Google's TPU recipes for ResNet-50 (16K, 32K), "contrib"; MLPerf's, "mlperf"; LEGW as the NUS
laboratory measured it, "nus".
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Intel Caffe 1.0.7, the release of the LARS authors for "ImageNet Training in Minutes": every
    # variable is adapted and decayed, biases too, and the momentum follows a growing rate.
    "intel_caffe": {
        "zero_norm": "one",
        "momentum_correction": True,
        "exclude_from_weight_decay": (),
        "exclude_from_layer_adaptation": (),
    },
    # NVCaffe of December 2017: the denominator is the gradient's norm alone. Its optional clip is
    # clip="larc".
    "nvcaffe": {
        "norm_rule": "gradient",
        "zero_norm": "one",
        "exclude_from_weight_decay": (),
        "exclude_from_layer_adaptation": (),
    },
    # tf.contrib.opt.LARSOptimizer: the decay is in the ratio only, the loss has an L2 term of its
    # own, and the rate multiplies the velocity.
    "contrib": {"momentum_order": "unscaled", "decay_in_update": False, "zero_norm": "one"},
    # tensorflow/tpu, the LARS beside EfficientNet.
    "tpu": {"zero_norm": "one"},
    # mlcommons/training, ResNet-50 in TensorFlow 2: an epsilon of 0.0 is replaced by Keras's 1e-7.
    "mlperf": {"zero_norm": "one", "epsilon": 1e-7},
    # tensorflow/models and SimCLR with classic momentum: the norm of the decayed gradient.
    "model_garden": {"norm_rule": "vector", "zero_norm": "one"},
    # timm: what is not decayed is not adapted.
    "timm": {
        "momentum_order": "torch",
        "epsilon": 1e-8,
        "zero_norm": "one",
        "adapt_without_decay": False,
        "exclude_from_layer_adaptation": (),
    },
    # NVIDIA apex LARC around momentum SGD: the layer's rate is at most the global one.
    "larc": {
        "momentum_order": "torch",
        "trust_coefficient": 0.02,
        "epsilon": 1e-8,
        "zero_norm": "plain",
        "clip": "larc",
        "exclude_from_weight_decay": (),
        "exclude_from_layer_adaptation": (),
    },
    # NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch, the LARS author's later laboratory.
    "nus": {
        "momentum_order": "unscaled",
        "epsilon": 1e-5,
        "zero_norm": "one",
        "trust_max": 50.0,
        "gradient_clip": 10.0,
    },
}
