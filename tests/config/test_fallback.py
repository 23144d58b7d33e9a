# SPDX-License-Identifier: Apache-2.0
"""Each reason follows from a single property, and its message explains it to people."""

import pytest

from tests.helpers.row_fallbacks import ROW_FALLBACKS
from vllm_sparse_backend.config.fallback import Fallback, LayerTraits, layer_fallback

FITTING = {"head_dim": 128, "dtype": "bfloat16"}
# Properties that cause each reason.
PROPERTIES = {
    Fallback.NOT_DECODER: {"attn_type": "encoder_only"},
    Fallback.MLA: {"is_mla": True},
    Fallback.SLIDING_WINDOW: {"sliding_window": 4096},
    Fallback.ALIBI: {"alibi": True},
    Fallback.SOFTCAP: {"softcap": 50.0},
    Fallback.HEAD_SIZE: {"head_dim": 100},
    Fallback.DTYPE: {"dtype": "float32"},
    Fallback.QUANTISED_CACHE: {"kv_cache_dtype": "fp8_e5m2", "reads_fp8": True},
    Fallback.HEAD_SCALES: {"kv_cache_dtype": "fp8", "reads_fp8": True, "head_scales": True},
    Fallback.PREFILL_CONTEXT_PARALLEL: {"prefill_context_parallel_size": 2},
    Fallback.DECODE_CONTEXT_PARALLEL: {"decode_context_parallel_size": 2},
}


def test_every_other_reason_comes_from_a_property() -> None:
    of_the_plan_or_device = {Fallback.DENSE_LAYER, Fallback.OTHER_HEADS, Fallback.SHARED_MEMORY}
    assert set(PROPERTIES) == set(Fallback) - of_the_plan_or_device - ROW_FALLBACKS


FP8 = {"kv_cache_dtype": "fp8", "reads_fp8": True}
UNREAD = ("nvfp4", "fp8_per_token_head", "fp8_inc", "turboquant_3bit")


@pytest.mark.parametrize(
    ("reason", "properties"),
    [
        (None, {}),
        *PROPERTIES.items(),
        (None, {"sliding_window": -1, "softcap": 0.0, "head_scales": True}),
        (None, {"dtype": "torch.float16"}),
        (None, {"dtype": "torch.bfloat16", "kv_cache_dtype": "bfloat16"}),
        (None, {"dtype": "float32", "device_type": "cpu"}),
        (None, {"kv_cache_dtype": "fp8_e4m3", "reads_fp8": True}),
        (None, FP8 | {"head_dim": 80}),
        *(
            (Fallback.QUANTISED_CACHE, FP8 | traits)
            for traits in ({"reads_fp8": False}, {"head_dim": 16}, {"head_dim": 72})
        ),
        *((Fallback.QUANTISED_CACHE, FP8 | {"kv_cache_dtype": name}) for name in UNREAD),
    ],
)
def test_property_gives_its_reason(reason: Fallback | None, properties: dict[str, object]) -> None:
    assert layer_fallback(LayerTraits(**(FITTING | properties))) is reason


def test_head_dims() -> None:
    taken = [d for d in range(1, 600) if layer_fallback(LayerTraits(head_dim=d, dtype="float16")) is None]
    assert taken == list(range(16, 257, 8))


def test_reasons_speak() -> None:
    explanations = {reason.explain for reason in Fallback}
    assert len(explanations) == len(Fallback)
    for reason in Fallback:
        assert "; " in reason.explain, f"{reason}: what it is, then what to do"
