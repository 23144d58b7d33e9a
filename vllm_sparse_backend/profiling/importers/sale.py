# SPDX-License-Identifier: Apache-2.0
"""What SALE's calibration saves: one tensor [layers, heads] of thresholds τ, as ``analyse_sparsity`` collects it.

τ is the relative attention score exp(s − m) / l from which a block is kept, there and here: nothing is converted. Their
kernels keep every block of heads under 1e-5, and calibration writes 0 for those that it leaves dense: these heads are
dense here. Sink and local region are the paper's, which is what their calibration ran with; its bound is in the file's
name, ``dynamic_BOUND.pt``, and so in the profile's source.
"""

from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.profiling.importers.torch_file import rounded, table
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Provenance
from vllm_sparse_kernels.methods.base import Method

FORM = "SALE's thresholds, one tensor [layers, heads]"
LEAST = 1e-5


def fits(content: Any) -> bool:
    return isinstance(content, torch.Tensor)


def level(content: Any, shape: ModelShape, source: str) -> Level:
    thresholds = table(content, (shape.num_layers, shape.num_heads), f"{source}: thresholds [layers, heads]")
    methods = [
        [_method(tau, f"{source}: layer {layer}, head {head}") for head, tau in enumerate(row)]
        for layer, row in enumerate(thresholds)
    ]
    return Level.of_heads(methods, Provenance(source=f"imported from SALE's {Path(source).name}; tau as it is"))


def _method(tau: float, where: str) -> Method:
    if not 0 <= tau < 1:
        raise ConfigurationError(f"{where}: tau: given {tau:g}, expected a number from 0 to 1")
    return make_method("sale", {"tau": rounded(tau)}) if tau >= LEAST else make_method("dense", {})
