# SPDX-License-Identifier: Apache-2.0
"""Every place where this package reaches into vLLM: what is put around which function, and that it still fits there.

Each process gets what it needs, once: all of them the platform's hooks, the front process what checks requests, the
engine's core what hashes cached blocks, workers what tells whose rows a step has. A function that is no longer what a
hook expects, as a later vLLM may have it, ends the start with an error that names it: a request must never be run at
another level than it asked for.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

from vllm_sparse_backend.plugin import BACKEND, is_ours
from vllm_sparse_backend.settings.errors import ConfigurationError

Function = Callable[..., Any]
OURS = "sparse_prefill"
"""Attribute of functions that were put around vLLM's."""


def put_around(owner: Any, name: str, wrapper: Callable[[Function], Function], expects: Sequence[str] = ()) -> None:
    """Replace ``owner.name`` by ``wrapper`` of it, once. ``expects``: parameters that it must have.

    A class method is handed to ``wrapper`` bound. Raises ConfigurationError where vLLM has no such function.
    """
    original = inspect.getattr_static(owner, name, None)
    is_classmethod = isinstance(original, classmethod)
    function = getattr(owner, name) if is_classmethod else original
    if not callable(function):
        raise _misfit(f"{_path(owner)}.{name} is missing")
    if getattr(getattr(function, "__func__", function), OURS, False):
        return
    if missing := [parameter for parameter in expects if parameter not in inspect.signature(function).parameters]:
        raise _misfit(f"{_path(owner)}.{name}{inspect.signature(function)} has no {', '.join(missing)}")
    wrapped = functools.wraps(getattr(function, "__func__", function))(wrapper(function))
    setattr(wrapped, OURS, True)
    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)


def _path(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"


def _misfit(what: str) -> ConfigurationError:
    from vllm import __version__

    return ConfigurationError(
        f"sparse-prefill: vLLM {__version__}'s {what}, expected it as in 0.26 to 0.33; use one of these versions"
    )


def _expect_fields(owner: Any, *names: str) -> None:
    known = {f.name for f in fields(owner)} if is_dataclass(owner) else set()
    if missing := [name for name in names if name not in known]:
        raise _misfit(f"{_path(owner)} has no {', '.join(missing)}")


# --- every process: the platform ---


def install() -> None:
    """What every process needs, whatever backend is chosen."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    put_around(platform, "check_and_update_config", _checked)
    if current_platform.is_cpu():
        put_around(platform, "get_attn_backend_cls", _selectable)
    if "vllm.v1.engine.core" in sys.modules:
        with suppress(ConfigurationError):  # the front process has refused to start if this backend was asked for
            install_in_core()


def _checked(original: Function) -> Function:
    """vLLM builds its configuration in the front process: a mistake in ours is told there, before any model loads.

    While it loads, workers derive further ones for its parts (a multimodal model's text stack, a draft model), whose
    shapes are not the served model's: these are made under a current configuration, and not looked at.
    """

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none

        original(vllm_config)
        is_part = get_current_vllm_config_or_none() is not None
        if is_ours(vllm_config.attention_config.backend) and vllm_config.model_config is not None and not is_part:
            from vllm_sparse_backend.serving.startup import check

            check(vllm_config)
            install_in_front()
            install_in_core()  # which may be this process

    return check_and_update_config


def _selectable(original: Function) -> Function:
    """The CPU platform knows one backend and would go on with it whatever was asked for."""

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *rest: Any, **more: Any
    ) -> str:
        if is_ours(selected_backend) and not attn_selector_config.use_mla:
            return BACKEND
        return original(selected_backend, attn_selector_config, *rest, **more)

    return get_attn_backend_cls


# --- the front process: what a request asks for ---

SERVERS = ("vllm.entrypoints.openai", "vllm.entrypoints.launchers")
"""Of these a process has modules that serves over HTTP; in others these would be loaded for nothing."""

BEAM_SEARCHES = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.speech_to_text.transcription.protocol", "TranscriptionRequest"),
    ("vllm.entrypoints.speech_to_text.translation.protocol", "TranslationRequest"),
)
"""Requests that may be searched by beams, for which vLLM forgets their ``vllm_xargs``."""


def install_in_front() -> None:
    """Check what requests ask for where they come in, and mark them for the processes that they go on to."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    put_around(InputProcessor, "process_inputs", _marked, ("params",))
    put_around(AsyncLLM, "generate", _checked_at_once, ("sampling_params",))
    if any(name.startswith(SERVERS) for name in sys.modules):
        for path, name in BEAM_SEARCHES:
            put_around(_found(path, name), "to_beam_search_params", _without_levels)


def _found(path: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError):
        raise _misfit(f"{path}.{name} is missing") from None


def _marked(original: Function) -> Function:
    """Each request comes through here, however it came in."""
    signature = inspect.signature(original)

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self.vllm_config.attention_config.backend):
            return original(self, *args, **kwargs)
        params = signature.bind(self, *args, **kwargs).arguments["params"]
        mark = _mark_of(self.vllm_config, getattr(params, "extra_args", None))
        request = original(self, *args, **kwargs)
        if request.sampling_params is not None:
            request.sampling_params.extra_args = mark.write(request.sampling_params.extra_args)
        return request

    return process_inputs


def _checked_at_once(original: Function) -> Function:
    """A stream's answer has begun when its request is first processed, too late for the status 400."""
    signature = inspect.signature(original)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(self.vllm_config.attention_config.backend):
            params = signature.bind(self, *args, **kwargs).arguments["sampling_params"]
            _mark_of(self.vllm_config, getattr(params, "extra_args", None))
        return original(self, *args, **kwargs)

    return generate


def _without_levels(original: Function) -> Function:
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_sparse_backend.settings.requests import FIELD

        if FIELD in (self.vllm_xargs or {}):
            raise _bad_request(f"vllm_xargs {FIELD}: given with use_beam_search, for which it is not to be had")
        return original(self, *args, **kwargs)

    return to_beam_search_params


_choices: dict[int, tuple[Any, Any]] = {}  # by id of the configuration, which is kept so that no other gets its id


def _mark_of(vllm_config: Any, extra_args: Mapping[str, Any] | None) -> Any:
    from vllm_sparse_backend.serving.requests import choices

    if id(vllm_config) not in _choices:
        _choices[id(vllm_config)] = vllm_config, choices(vllm_config)
    try:
        return _choices[id(vllm_config)][1].mark(extra_args)
    except ValueError as error:
        raise _bad_request(str(error)) from None


def _bad_request(message: str) -> ValueError:
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message, parameter="vllm_xargs")


# --- the engine's core: which cached blocks a request may read ---


def install_in_core() -> None:
    """Let the hash of the first block past the exact positions tell levels apart: hashes go on from block to block."""
    from vllm.v1.core import block_pool, kv_cache_utils

    name = "generate_block_hash_extra_keys"
    expects = ("request", "start_token_idx", "end_token_idx")
    hasher = kv_cache_utils.get_request_block_hasher(16, repr)
    if name not in hasher.__code__.co_names:
        raise _misfit(f"{kv_cache_utils.__name__}.get_request_block_hasher does not call {name}")
    put_around(kv_cache_utils, name, _salted, expects)
    for module in (block_pool, *_that_have(name)):
        setattr(module, name, getattr(kv_cache_utils, name))


def _that_have(name: str) -> Iterator[Any]:
    """Modules of vLLM's that imported the function by name before it was replaced."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.v1.") and name in vars(module):
            yield module


def _salted(original: Function) -> Function:
    from vllm_sparse_backend.settings.requests import FIELD, Mark

    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, *rest: Any
    ) -> tuple[tuple[Any, ...] | None, Any]:
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, *rest)
        mark = Mark.of(getattr(request.sampling_params, "extra_args", None))
        if mark is not None and mark.salt is not None and start_token_idx <= mark.exact_tokens < end_token_idx:
            keys = (*(keys or ()), (FIELD, f"{FIELD}={mark.salt}"))
        return keys, next_mm_idx

    return generate_block_hash_extra_keys


# --- workers: whose rows a step has ---


class Step:
    """The step that a worker's runner is at: the levels of its requests, and the order of the rows, once known."""

    def __init__(self, levels: Mapping[str, str]) -> None:
        self.levels = levels
        self.req_ids: Callable[[], Sequence[str]] = tuple

    def of_rows(self, num_rows: int) -> list[str] | None:
        """The level of each row, by padding rows ``default``; None where all have that."""
        from vllm_sparse_backend.settings.plan import DEFAULT

        if not self.levels:
            return None
        rows = [self.levels.get(req_id, DEFAULT) for req_id in self.req_ids()]
        if len(rows) > num_rows:
            raise RuntimeError(
                f"sparse-prefill: a batch of {num_rows} rows is built in a step of {len(rows)} requests: nothing tells "
                "whose rows they are; please report it with the server's options"
            )
        return rows + [DEFAULT] * (num_rows - len(rows))


_step: Step | None = None


def levels_of_rows(num_rows: int) -> list[str] | None:
    """The level that each row of the batch at hand was asked to have; None where all have the server's own."""
    return None if _step is None else _step.of_rows(num_rows)


def install_in_worker(vllm_config: Any) -> None:
    """Learn from the runner what requests ask for and which rows are theirs, on every rank and pipeline stage."""
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    _expect_fields(NewRequestData, "req_id", "sampling_params")
    _expect_fields(SchedulerOutput, "scheduled_new_reqs", "finished_req_ids")
    if vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu.input_batch import InputBatch
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as NewerRunner

        _expect_fields(InputBatch, "req_ids")
        put_around(NewerRunner, "execute_model", _known_by_batch, ("scheduler_output",))
        put_around(NewerRunner, "prepare_attn", _batch_told, ("input_batch",))
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        put_around(GPUModelRunner, "execute_model", _known_by_runner, ("scheduler_output",))


@contextmanager
def _at_step(runner: Any, scheduler_output: Any) -> Iterator[Step]:
    """Keep the runner's record of levels, and make it known while the step runs."""
    global _step
    from vllm_sparse_backend.settings.requests import Mark

    levels: dict[str, str] = runner.__dict__.setdefault("sparse_prefill_levels", {})
    for req_id in scheduler_output.finished_req_ids:
        levels.pop(req_id, None)
    for new in scheduler_output.scheduled_new_reqs:
        mark = Mark.of(getattr(new.sampling_params, "extra_args", None))
        if mark is None:
            levels.pop(new.req_id, None)
        else:
            levels[new.req_id] = mark.level
    before, _step = _step, Step(levels)
    try:
        yield _step
    finally:
        _step = before


def _known_by_runner(original: Function) -> Function:
    """The older runner: it keeps one batch, whose order is final when metadata is built."""

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with _at_step(self, scheduler_output) as step:
            step.req_ids = lambda: self.input_batch.req_ids
            return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _known_by_batch(original: Function) -> Function:
    """Model Runner V2: each step has a batch of its own. A dummy run's never comes to ``prepare_attn``."""

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with _at_step(self, scheduler_output):
            return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _batch_told(original: Function) -> Function:
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if _step is not None:
            _step.req_ids = lambda: input_batch.req_ids
        return original(self, input_batch, *args, **kwargs)

    return prepare_attn
