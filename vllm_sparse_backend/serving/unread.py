# SPDX-License-Identifier: Apache-2.0
"""A log line for operators who set up this backend on a server that runs another backend."""

import multiprocessing
from collections.abc import Mapping
from typing import Any

from vllm_sparse_backend.config.keys import KEY, OPTION
from vllm_sparse_backend.identity import FLAG, LOGGER, MLA_FLAG
from vllm_sparse_backend.serving.registration import why_other_selected


def log_unread_settings(vllm_config: Any) -> None:
    """Log once that the server ignores this backend's settings."""
    from vllm.logger import init_logger

    # Engine cores and workers get the same configuration.
    if multiprocessing.parent_process() is not None:
        return
    if isinstance(vllm_config.additional_config, Mapping) and KEY in vllm_config.additional_config:
        init_logger(LOGGER).info_once(
            "sparse-prefill: %s in %s is ignored: this server runs another attention backend; add %s to use these "
            "settings, or remove them", KEY, OPTION, MLA_FLAG if vllm_config.model_config.use_mla else FLAG,
        )  # fmt: skip
    elif (why := why_other_selected(vllm_config.attention_config)) is not None:
        init_logger(LOGGER).warning_once(why)
