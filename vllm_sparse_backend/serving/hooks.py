# SPDX-License-Identifier: Apache-2.0
"""All functions of vLLM that this package wraps. ``HOOKS``, below the wrappers, lists those of classes and modules.

The package may also be installed on servers that run other backends. There, registration installs only the hooks of
``EVERY`` and ``ON_CPU``, which run where a front process, an engine's core or a worker gets its configuration, and only
read it. If the configuration selects our backend, the process installs all other hooks, on the objects of that engine
where possible.

This module imports nothing that imports vLLM: plugins are loaded before vLLM knows its platform.
"""

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import CARRIED, KEY
from vllm_sparse_backend.config.metrics import WORKER_METHOD
from vllm_sparse_backend.identity import BACKEND
from vllm_sparse_backend.serving.registration import is_ours, is_selected, log_unread_settings, why_other_selected

if TYPE_CHECKING:
    from vllm_sparse_backend.serving.worker.owner import Worker

Function = Callable[..., Any]

signature_of = functools.cache(inspect.signature)
"""Return a function's signature. It is cached, because every request needs one."""

# Registration installs the hooks of these two with any backend. Others are installed once a configuration selects ours.
EVERY = "every process"
ON_CPU = "every process, on a CPU"

SERVER = "servers' processes"
MLA_WORKER = "workers, for multi-head latent attention"

POLICY = "_sparse_prefill_policy"
"""Attribute with the policy of an engine's requests."""


# --- every process: the configuration ---


def check_configuration(original: Function, cls: type, vllm_config: Any) -> None:
    """Validate our settings where the front process builds vLLM's configuration, before any model loads.

    While a model loads, workers derive configurations for its parts (a multimodal model's text stack, a draft model),
    whose shapes differ from the served model's. A current configuration is set at that time, so they are skipped.
    """
    from vllm.config import get_current_vllm_config_or_none

    original(vllm_config)
    if vllm_config.model_config is None or get_current_vllm_config_or_none() is not None:
        return
    from vllm_sparse_backend.serving import mla_startup, startup

    try:
        if not serves(vllm_config):
            log_unread_settings(vllm_config)
            return
        is_for_mla = is_ours(vllm_config.attention_config.mla_prefill_backend)
        check = mla_startup.check if is_for_mla else startup.check
        check(vllm_config)
    except ConfigurationError as error:
        _end_in_one_line(error)
        raise
    _install(SERVER)


def serves(vllm_config: Any) -> bool:
    """Return whether an engine with this configuration runs this backend.

    Raises ConfigurationError if it has our settings, but another plugin has taken our place after our registration, in
    every process or only in this one.
    """
    if is_selected(vllm_config.attention_config):
        return True
    carried = vllm_config.additional_config
    if isinstance(carried, Mapping) and (KEY in carried or CARRIED in carried):
        why = why_other_selected(vllm_config.attention_config)
        if why is not None:
            raise ConfigurationError(why)
    return False


def _end_in_one_line(refusal: ConfigurationError) -> None:
    """Make an uncaught error end the process with a one-line message instead of a traceback."""
    others = sys.excepthook

    def print_in_one_line(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if error is refusal:
            print(f"sparse-prefill: {error}", file=sys.stderr)
        else:
            others(kind, error, trace)

    sys.excepthook = print_in_one_line


def select_on_cpu(
    original: Function, cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
) -> str:
    """Select this backend on the CPU platform, which otherwise ignores the configured backend."""
    if is_ours(selected_backend) and not attn_selector_config.use_mla:
        return BACKEND
    return original(selected_backend, attn_selector_config, *args, **kwargs)


def select_mla_on_cpu(original: Function, vllm_config: Any) -> Any:
    """Select our prefill backend for MLA on the CPU platform, which otherwise ignores the configured backend."""
    if vllm_config is not None and is_ours(vllm_config.attention_config.mla_prefill_backend):
        from vllm_sparse_backend.serving.worker.mla_prefill import SparseMlaPrefillBackend

        return SparseMlaPrefillBackend
    return original(vllm_config)


# --- servers: request levels, /metrics and answers ---


def add_endpoints(original: Function, *args: Any, **kwargs: Any) -> list[Any]:
    """Add our endpoint plugin, which gets a server's app and its engine client.

    vLLM loads endpoint plugins of an entry point only if VLLM_PLUGINS names them, because they may open routes. Our
    plugin belongs to the backend, and needs no variable.
    """
    from vllm_sparse_backend.serving.frontend.endpoint import SparsePrefillEndpoint

    return [*original(*args, **kwargs), SparsePrefillEndpoint()]


def set_levels(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the level of each request to our engine, and set its cache salt. All entry points pass through here."""
    if not is_selected(self.vllm_config.attention_config):
        return original(self, *args, **kwargs)
    from vllm_sparse_backend.serving.level_policy import level_of, level_policy, set_level

    if POLICY not in vars(self):
        setattr(self, POLICY, level_policy(self.vllm_config))
    policy = vars(self)[POLICY]
    arguments = signature_of(original).bind(self, *args, **kwargs).arguments
    level = level_of(policy, arguments["params"], arguments.get("resumable", False))
    request = original(self, *args, **kwargs)
    set_level(policy, request, level)
    return request


def shorten_prompts(original: Function, self: Any, tokenizer: Any, request: Any) -> None:
    """Give the detokenizer of an answer only the end of its prompt."""
    from vllm_sparse_backend.serving.frontend.detokenizer import with_end_of_prompt

    original(self, tokenizer, with_end_of_prompt(request, tokenizer))


# --- the engine's core ---


def begin_core(original: Function, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Learn from the workers which streaming heads they found, before the core takes requests."""
    result = original(self, vllm_config, *args, **kwargs)
    if serves(vllm_config):
        from vllm_sparse_backend.serving.resolution import resolve
        from vllm_sparse_backend.serving.streaming_startup import shares_blocks
        from vllm_sparse_backend.serving.worker.streaming import heads_of_worker

        heads = self.model_executor.collective_rpc(heads_of_worker)[0] if shares_blocks(vllm_config) else ""
        wrap_method(self, "preprocess_add_request", refuse_unchecked_requests, heads, resolve(vllm_config).plans)
    return result


def refuse_unchecked_requests(original: Function, heads: str, levels: Collection[str], request: Any) -> Any:
    """Refuse requests whose level is not checked, or not this engine's; complete the salts of the others.

    ``heads`` is the fingerprint of this engine's streaming heads. The front process, which writes the salts, does not
    know it: an offline engine does not ask its workers at start-up, and a server's engines may find different heads.
    """
    from vllm_sparse_backend.serving.level_policy import add_heads_to_salt, refuse_unchecked

    add_heads_to_salt(request, heads)
    # First, because it puts the request's images into the core's cache, where the front process expects them for
    # the next request.
    prepared = original(request)
    refuse_unchecked(request, levels)
    return prepared


# --- workers ---


def begin_worker(original: Function, self: Any) -> None:
    """Make our ``Worker`` once vLLM's worker is connected with the others and has a runner, before any model loads."""
    original(self)
    if serves(self.vllm_config):
        from vllm_sparse_backend.serving.worker.agreement import agree

        agree(self.vllm_config)
        own(self.worker)


def own(vllm_worker: Any) -> None:
    """Make the owner of our state in one of vLLM's workers, which keeps it alive, and install the hooks that fill it.

    vLLM's wrapper around the worker finds the method for ``collective_rpc`` among the worker's attributes.
    """
    from vllm.platforms import current_platform

    from vllm_sparse_backend.serving.worker.owner import Worker

    vllm_config, runner = vllm_worker.vllm_config, vllm_worker.model_runner
    worker = Worker(vllm_config)
    setattr(vllm_worker, WORKER_METHOD, worker.new_samples)
    if vllm_config.is_mm_encoder_only:  # its runner has no attention of ours
        return
    wrap_method(runner, "execute_model", track_requests, runner, worker)
    if vllm_config.use_v2_model_runner:
        wrap_method(runner, "prepare_attn", name_rows, worker)
    target, name = runner, "profile_run"
    if current_platform.is_cpu():  # vLLM may skip the profile run here
        target, name = vllm_worker, "determine_available_memory"
    wrap_method(target, name, measure_model, runner, worker)
    if is_ours(vllm_config.attention_config.mla_prefill_backend):
        _install(MLA_WORKER)


def track_requests(
    original: Function, runner: Any, worker: "Worker", scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Record the levels of a step's requests.

    The older runner has a persistent batch, which is in order when metadata is built. Model Runner V2 passes the batch
    to ``prepare_attn``. Dummy runs, which V2 passes through here too, have no requests.
    """
    if kwargs.get("dummy_run"):
        return original(scheduler_output, *args, **kwargs)
    with worker.requests.run_step(scheduler_output) as step:
        if hasattr(runner, "input_batch"):
            step.req_ids = lambda: runner.input_batch.req_ids
        return original(scheduler_output, *args, **kwargs)


def name_rows(original: Function, worker: "Worker", input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Record how the rows of a step map to its requests."""
    if worker.requests.step is not None:
        worker.requests.step.req_ids = lambda: input_batch.req_ids
    return original(input_batch, *args, **kwargs)


def measure_model(original: Function, runner: Any, worker: "Worker", *args: Any, **kwargs: Any) -> Any:
    """Allocate our memory before vLLM measures the model's, and find the streaming heads once the model is compiled."""
    from vllm_sparse_backend.serving.worker.layers import reserve_memory
    from vllm_sparse_backend.serving.worker.streaming import find_streaming_heads

    reserve_memory(worker)
    result = original(*args, **kwargs)
    find_streaming_heads(worker, runner.get_model)
    return result


# --- workers: multi-head latent attention ---


def classify_mla_rows(
    original: Function,
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
    **kwargs: Any,
) -> Any:
    """Give our prefill backend the metadata of the whole batch before vLLM gives it that of the rows that prefill.

    The older runner builds a draft model's metadata with ``fast_build``, which is not passed on. Model Runner V2 does
    not, but its draft models have builders of their own, whose prefill backends ignore the metadata.
    """
    begin_step = getattr(self._prefill_backend, "begin_step", None)
    if begin_step is not None and not fast_build:
        begin_step(common_attn_metadata, common_prefix_len, self.reorder_batch_threshold or 1)
    return original(self, common_prefix_len, common_attn_metadata, fast_build, **kwargs)


def name_mla_layer(
    original: Function, self: Any, q: Any, kv_c_normed: Any, k_pe: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Tell our prefill backend which layer calls it: the layers of a cache group share a backend in a step."""
    begin_layer = getattr(attn_metadata.prefill.prefill_backend, "begin_layer", None)
    if begin_layer is not None:
        begin_layer(self)
    return original(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, *args, **kwargs)


# --- the table ---


class Hook(NamedTuple):
    """A wrapped function of a module or class of vLLM. It sees all engines."""

    where: str
    owner: str
    """``module:class``, or ``module:``."""
    function: str
    wrapper: Function
    """Called instead of the function, which it gets as its first argument."""


_MLA_SELECTOR = "vllm.v1.attention.backends.mla.prefill.selector:"
_MLA_ATTENTION = "vllm.model_executor.layers.attention.mla_attention"

# fmt: off
HOOKS = (
    Hook(EVERY, "vllm.platforms:current_platform", "check_and_update_config", check_configuration),
    Hook(EVERY, "vllm.v1.engine.core:EngineCore", "_initialize_kv_caches", begin_core),
    Hook(EVERY, "vllm.v1.worker.worker_base:WorkerWrapperBase", "init_device", begin_worker),
    Hook(ON_CPU, "vllm.platforms:current_platform", "get_attn_backend_cls", select_on_cpu),
    Hook(ON_CPU, _MLA_SELECTOR, "get_mla_prefill_backend", select_mla_on_cpu),
    Hook(SERVER, "vllm.plugins:", "load_endpoint_plugins", add_endpoints),
    Hook(SERVER, "vllm.v1.engine.input_processor:InputProcessor", "process_inputs", set_levels),
    Hook(SERVER, "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer", "__init__", shorten_prompts),
    Hook(MLA_WORKER, f"{_MLA_ATTENTION}:MLACommonMetadataBuilder", "build", classify_mla_rows),
    Hook(MLA_WORKER, f"{_MLA_ATTENTION}:MLACommonBaseImpl", "forward_mha", name_mla_layer),
)
# fmt: on


# --- installation, process by process ---


def install() -> None:
    """Install the hooks that every process has, with any backend."""
    from vllm.platforms import current_platform

    _install(EVERY)
    if current_platform.is_cpu():
        _install(ON_CPU)
        _replace_by_name("get_mla_prefill_backend", pkgutil.resolve_name(f"{_MLA_SELECTOR}get_mla_prefill_backend"))


def _replace_by_name(name: str, function: Function) -> None:
    """Replace a wrapped function in all modules of vLLM that imported it by name before."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and name in vars(module):
            setattr(module, name, function)


def _install(where: str) -> None:
    """Install the hooks of a kind of process."""
    for hook in HOOKS:
        if hook.where == where:
            owner = pkgutil.resolve_name(hook.owner)
            is_object = not (inspect.isclass(owner) or inspect.ismodule(owner))
            put_around(type(owner) if is_object else owner, hook.function, hook.wrapper)


def wrap_method(target: Any, name: str, wrapper: Function, *values: Any) -> None:
    """Wrap a method of one object. The wrapper gets the method, these values, and the arguments of each call."""
    original = getattr(target, name)
    setattr(target, name, functools.wraps(original)(functools.partial(wrapper, original, *values)))


_wrapped: set[tuple[Any, str]] = set()
"""Owner and name of each function that this process has wrapped."""


def put_around(owner: Any, name: str, wrapper: Function) -> None:
    """Wrap a function of vLLM. A function that is wrapped already stays as it is."""
    if (owner, name) in _wrapped:
        return
    original = inspect.getattr_static(owner, name)
    is_classmethod = isinstance(original, classmethod)
    function = getattr(owner, name) if is_classmethod else original

    @functools.wraps(getattr(function, "__func__", function))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
    _wrapped.add((owner, name))
