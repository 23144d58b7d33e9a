# SPDX-License-Identifier: Apache-2.0
"""Extra keys in the hashes of cached blocks. They keep requests of different levels from sharing sparse KV blocks.

A block's hash includes the hash of the block before it. A key in the first block past the exact positions therefore
also separates all later blocks.
"""

from typing import Any

from vllm_sparse_backend.config.request_levels import Mark

ExtraKeys = tuple[Any, ...] | None
"""vLLM's extra keys of a block's hash; None without extra keys."""


def add_salt(keys: ExtraKeys, request: Any, start_token_idx: int, end_token_idx: int) -> ExtraKeys:
    """Add the key of a request's level to the extra keys of one of its blocks.

    A request does not name its engine. If the process runs other engines, a marked request of such an engine also gets
    salted blocks. This changes no answer.
    """
    mark = Mark.read(getattr(request.sampling_params, "extra_args", None))
    if mark is None or mark.salt is None:
        return keys
    key = mark.salt.key(start_token_idx, end_token_idx)
    return keys if key is None else (*(keys or ()), key)
