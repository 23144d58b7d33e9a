# SPDX-License-Identifier: Apache-2.0
"""The settings of the server that all tests ask: a profile of one level for each thing that there is to see."""

from pathlib import Path
from typing import Any

from benchmarks.tiny import CONFIG
from vllm_sparse_backend.settings.profile import Profile
from vllm_sparse_kernels.methods import METHODS, sparse_names

MIN_TOKENS = 256
"""Fewer than a chunk's, so that every chunk is sparse, the first but for its first part."""


def spec(name: str, **params: Any) -> dict[str, Any]:
    return {"method": name, **METHODS[name].demo, **params}


def share(cluster: int) -> dict[str, Any]:
    # Rows of a pivot's map have a mass of 1 each: half of the whole is, to the last bit, where a few tiles are enough.
    return spec("share_prefill", cluster=cluster, gamma=0.47)


NUM_HEADS = CONFIG["num_attention_heads"]
EACH = [share(0) if name == "share_prefill" else spec(name) for name in sparse_names()]
BESIDE = {0: EACH[:NUM_HEADS], 3: EACH[NUM_HEADS:]}
"""Every method, a head each: those that a layer has no head left for in another layer."""

# Each head of a layer another method. Clusters reach over layers, and over groups of heads that are no neighbours.
MIXED: dict[str, Any] = {
    "default": share(0),
    "layers": {
        0: {"heads": dict(enumerate(BESIDE[0]))},
        1: {"heads": {"0,5": spec("dense"), 2: share(1), 3: spec("sale", int8_scores=True), "1,4": share(0),
                      6: spec("sparge_attn", skip_margin=-1.0)}, "default": spec("anchor_attention")},
        2: {"heads": {"2-3": share(1), 4: share(-1), 6: spec("anchor_attention", theta=4.0), 7: spec("dense")}},
        3: {"heads": dict(enumerate(BESIDE[3])), "default": spec("vertical_slash")},
    },
}  # fmt: skip
ALL: dict[str, dict[str, Any]] = {
    "high": {"default": {"method": "vertical_slash", "vertical_tokens": 64, "slash_tokens": 104}},
    "fast": {"default": {"method": "a_shape", "sink_tokens": 64, "local_tokens": 128}, "dense_layers": [1]},
    "everything": {"default": {"method": "dense"}},
    "mixed": MIXED,
}
"""``high`` is the server's own."""


def write(folder: Path, *names: str) -> dict[str, Any]:
    """Settings of a server with these levels, the first its own; with the switch, and a guard that never trips."""
    own, *others = names
    starts = {"format": 1, "model": "any", "min_tokens": MIN_TOKENS, "min_query_tokens": 1}
    profile = starts | {"level": own, **ALL[own], "levels": {name: ALL[name] for name in others}}
    path = folder / f"{own}.yaml"
    path.write_text(Profile.model_validate(profile).to_yaml())
    return {"profile": str(path), "guard": {"rate": 1.0, "bound": 1e6}, "switch": True}
