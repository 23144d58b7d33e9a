"""What is checked before a model loads: the configuration, its profile, and that some layer can go sparse at all."""

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_sparse_backend import compat
from vllm_sparse_backend.config import load_config
from vllm_sparse_backend.errors import ConfigurationError
from vllm_sparse_backend.modelcheck import layer_reasons
from vllm_sparse_backend.plan import Plan
from vllm_sparse_backend.reasons import Fallback

logger = init_logger(__name__)


def check(vllm_config: VllmConfig) -> None:
    """Raise ConfigurationError, one line, where the server could not do what was asked for."""
    config = load_config(vllm_config.additional_config)
    shape = compat.model_shape(vllm_config)
    plan = Plan.build(config, shape, 0, vllm_config.parallel_config.tensor_parallel_size)
    hf_config = vllm_config.model_config.hf_config.to_dict()
    text = hf_config.get("text_config") or hf_config
    reasons = layer_reasons({"architectures": hf_config.get("architectures"), **text})
    sparse = [i for i, reason in enumerate(reasons) if reason is None and plan.layer(i) is not None]
    if not sparse:
        raise ConfigurationError(no_layer_message({reason for reason in reasons if reason is not None}))


def no_layer_message(reasons: set[Fallback]) -> str:
    """Why a server that was asked to go sparse will not start."""
    why = "; ".join(f"{reason.value}: {reason.explain}" for reason in sorted(reasons)) or "all are in dense_layers"
    return f"--attention-backend sparse-prefill: no layer of this model can prefill sparsely ({why})"
