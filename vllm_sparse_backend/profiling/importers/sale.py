# SPDX-License-Identifier: Apache-2.0
"""What SALE's calibration saves: one tensor [layers, heads] of thresholds τ, as ``analyse_sparsity`` collects it.

τ is the relative attention score exp(s − m) / l from which a block is kept, there and here: nothing is converted. Their
kernels keep every block of heads under 1e-5, and calibration writes 0 for those that it leaves dense: these heads are
dense here. Sink and local region are the paper's, which is what their calibration ran with; its bound is in the file's
name, ``dynamic_BOUND.pt``, and so in the profile's source.
"""

from typing import Any

import torch

from vllm_sparse_backend.profiling.importers.places import each
from vllm_sparse_backend.profiling.importers.torch_file import rounded, table
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_kernels.methods.base import Method

TOOL = "SALE's"
FORM = "SALE's thresholds, one tensor [layers, heads]"
LEAST = 1e-5


def fits(content: Any) -> bool:
    return isinstance(content, torch.Tensor)


def read(content: Any, shape: ModelShape) -> tuple[list[list[Method]], str]:
    thresholds = table(content, (shape.num_layers, shape.num_heads), "thresholds [layers, heads]")
    return each("layer", thresholds, lambda row: each("head", row, _method)), "; tau as it is"


def _method(tau: float) -> Method:
    return make_method("sale", {"tau": rounded(tau)}) if not 0 <= tau < LEAST else make_method("dense", {})
