# SPDX-License-Identifier: Apache-2.0
"""MInference (Jiang et al., 2024): each head has one of three patterns."""

from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.reference import select_a_shape, select_block_sparse, select_vertical_slash
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.spec import MethodSpec

EVERYTHING = 1 << 20
"""More tokens or blocks than any row has."""

LOCAL_TOKENS = (
    *(256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
    *(5120, 6144, 8192, 12288, 16384),
)
"""Local windows of A-shape's ladder: whole blocks of 128 keys, in steps of at most a half."""

TOP_BLOCKS = (8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 100, 128, 160, 200, 256)
"""Numbers of blocks in the ladder of block-sparse heads."""


def a_shape_ladder() -> tuple[dict[str, int], ...]:
    """List the settings of A-shape that searches choose from, and the paper's, which has more first keys."""
    settings = [{"sink_tokens": 128 * min(max(local // 1024, 1), 8), "local_tokens": local} for local in LOCAL_TOKENS]
    paper = {"sink_tokens": 1024, "local_tokens": 4096}
    return tuple(sorted([*settings, paper], key=lambda setting: sum(setting.values())))


SPECS = (
    MethodSpec(
        "a_shape",
        AShape,
        select_a_shape,
        full=AShape(local_tokens=EVERYTHING),
        demo={"sink_tokens": 128, "local_tokens": 1024},
        ladder=a_shape_ladder(),
    ),
    MethodSpec(
        "vertical_slash",
        VerticalSlash,
        select_vertical_slash,
        full=VerticalSlash(slash_tokens=EVERYTHING),
        demo={"vertical_tokens": 256, "slash_tokens": 104},  # 100 of the slashes are always the nearest
        ladder=tuple(
            {"vertical_tokens": int(1000 * share), "slash_tokens": int(6096 * share)}
            for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
        ),
    ),
    MethodSpec(
        "block_sparse",
        BlockSparse,
        select_block_sparse,
        full=BlockSparse(top_blocks=EVERYTHING),
        demo={"top_blocks": 16},
        ladder=tuple({"top_blocks": count} for count in TOP_BLOCKS),
    ),
)
