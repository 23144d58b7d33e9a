# SPDX-License-Identifier: Apache-2.0
"""All functions of vLLM that this package wraps. ``HOOKS``, below the wrappers, lists them.

The package may also be installed on servers that run other backends. There, registration installs only the hooks of
``REGISTRATION``: where a backend is looked up, and where a front process, an engine's core and a worker get their
configuration. These read only the configuration. All other hooks are installed once a process has a configuration that
selects ours. They pass through the calls of other engines in the same process.

If a hook does not fit a function of a later vLLM, the server does not start, and the error names the function:
otherwise a request might run at another level than it chose. For streaming heads this is only a warning, unless the
operator turned streaming heads on.

This module imports nothing that imports vLLM: plugins are loaded before vLLM knows its platform.
"""

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import DOCUMENTS, REQUESTS
from vllm_sparse_backend.config.metrics import WORKER_METHOD
from vllm_sparse_backend.identity import BACKEND, FLAG, LOGGER, MLA_BACKEND, MLA_FLAG, NAMES, RELEASES
from vllm_sparse_backend.serving.registration import (
    is_our_mla_prefill,
    is_ours,
    is_selected,
    mla_prefill_of,
    why_displaced,
    why_mla_prefill_displaced,
)

logger = logging.getLogger(LOGGER)

Function = Callable[..., Any]

EVERY = "every process"
ON_CPU = "every process, on a CPU"
REGISTRATION = (EVERY, ON_CPU)
"""Hooks that registration installs with any backend. Others are installed once a configuration selects ours."""

FRONT = "the front process"
SERVER = "servers' processes"
CORE = "the engine's core"
WORKER = "workers"
MLA_WORKER = "workers, for multi-head latent attention"
CONNECTED = "workers, once they are connected"
STREAMING_OLDER = "workers with the older runner, for streaming heads"
STREAMING_NEWER = "workers with Model Runner V2, for streaming heads"
STREAMING_ON_CPU = "workers on a CPU, for streaming heads"
OLDER = "workers with the older runner"
NEWER = "workers with Model Runner V2"
UNNUMBERED = "workers with Model Runner V2 whose metadata does not number rows: hybrid models, encoder-decoders"

FOR_NO_REQUEST = ("determine_available_memory", "compile_or_warm_up_model", "elastic_ep_execute", "execute_dummy_batch")
"""Methods of a worker that run the model without requests. Counters ignore these runs.

Ranks without requests call the last of these while other ranks are busy. Steps with requests use other methods, which
differ between executors.
"""

MLA_LAYER = "sparse_prefill_layer"
"""Attribute of vLLM's implementation of an MLA layer: its number, if it can run sparse."""

REPLACE_WEIGHTS = ("reload_weights", "update_weights")
"""Methods of a worker that replace the model's weights."""


# --- every process: the lookup of a backend, and the configuration ---


def _looked_up(original: Function) -> Function:
    """Refuse the flag's value if another plugin holds CUSTOM; the lookup happens after all plugins are loaded."""
    return _refused_if_displaced(original, FLAG, why_displaced)


def _mla_looked_up(original: Function) -> Function:
    """Refuse the value of the flag for MLA if another plugin holds CUSTOM there."""
    return _refused_if_displaced(original, MLA_FLAG, why_mla_prefill_displaced)


def _refused_if_displaced(original: Function, flag: str, why_not: Callable[[], str | None]) -> Function:
    def look_up(cls: type, name: str) -> Any:
        member = original(cls, name)
        if name in NAMES and (why := why_not()) is not None:
            error = ConfigurationError(f"{flag}: not available: {why}")
            _end_in_one_line(error)
            raise error
        return member

    return look_up


def _checked(original: Function) -> Function:
    """Validate our settings where the front process builds vLLM's configuration, before any model loads.

    While a model loads, workers derive configurations for its parts (a multimodal model's text stack, a draft model),
    whose shapes differ from the served model's. A current configuration is set at that time, so they are skipped.
    """

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none

        original(vllm_config)
        if vllm_config.model_config is None or get_current_vllm_config_or_none() is not None:
            return
        if not serves(vllm_config):
            from vllm_sparse_backend.serving.unread import log_unread_settings

            log_unread_settings(vllm_config)
            return
        from vllm_sparse_backend.serving import mla_startup, startup

        is_for_mla = is_our_mla_prefill(mla_prefill_of(vllm_config.attention_config))
        check = mla_startup.check if is_for_mla else startup.check
        try:
            check(vllm_config)
        except ConfigurationError as error:
            _end_in_one_line(error)
            raise
        install_in_front()
        install_in_core()  # the core may be this process

    return check_and_update_config


def serves(vllm_config: Any) -> bool:
    """Return whether an engine with this configuration runs this backend."""
    if is_selected(vllm_config.attention_config):
        return True
    carried = vllm_config.additional_config
    if isinstance(carried, Mapping) and DOCUMENTS in carried:
        for flag, why in ((FLAG, why_displaced()), (MLA_FLAG, why_mla_prefill_displaced())):
            if why is not None:
                raise ConfigurationError(f"{flag}: not available in this process: {why}")
    return False


def _begun(install: Callable[[Any, Any], None]) -> Callable[[Function], Function]:
    """Install a process's hooks in a constructor that takes ``vllm_config``, if the configuration is ours.

    Spawned processes load plugins before they have a configuration. They receive it complete, so vLLM's check of a new
    configuration does not run there.
    """

    def around(original: Function) -> Function:
        signature = inspect.signature(original)

        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config = signature.bind(self, *args, **kwargs).arguments["vllm_config"]
            if serves(vllm_config):
                install(self, vllm_config)
            original(self, *args, **kwargs)

        return construct

    return around


def _end_in_one_line(error: ConfigurationError) -> None:
    """Make an uncaught error end the process with a one-line message instead of a traceback."""
    sys.excepthook = functools.partial(_in_one_line, error, sys.excepthook)


def _in_one_line(
    refusal: ConfigurationError, others: Callable[..., object], kind: type, error: BaseException, trace: Any
) -> None:
    """``sys.excepthook``: print only the message of our error, without a traceback; pass other errors on."""
    if error is refusal:
        print(f"sparse-prefill: {error}", file=sys.stderr)
    else:
        others(kind, error, trace)


def _selectable(original: Function) -> Function:
    """Select this backend on the CPU platform, which otherwise ignores the configured backend."""

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if is_ours(selected_backend) and not attn_selector_config.use_mla:
            return BACKEND
        return original(selected_backend, attn_selector_config, *args, **kwargs)

    return get_attn_backend_cls


def _mla_selectable(original: Function) -> Function:
    """Select our prefill backend for MLA on the CPU platform, which otherwise ignores the configured backend."""

    def get_mla_prefill_backend(vllm_config: Any) -> Any:
        if vllm_config is not None and is_our_mla_prefill(mla_prefill_of(vllm_config.attention_config)):
            return _imported(MLA_BACKEND)
        return original(vllm_config)

    return get_mla_prefill_backend


def _imported(path: str) -> Any:
    """Import a class or function by its qualified name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# --- servers' processes ---


def _with_our_endpoints(original: Function) -> Function:
    """Add our endpoint plugins, which get a server's app and its engine client.

    vLLM loads endpoint plugins of an entry point only if VLLM_PLUGINS names them, because they may open routes. Our
    plugins belong to the backend, and need no variable.
    """

    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
        from vllm_sparse_backend.serving.frontend.metrics_endpoint import MetricsEndpoint
        from vllm_sparse_backend.serving.frontend.middleware import LevelsEndpoint

        return [*original(*args, **kwargs), MetricsEndpoint(), LevelsEndpoint()]

    return load_endpoint_plugins


# --- workers: methods that vLLM calls by name ---


def add_worker_methods(worker: Any) -> None:
    """Give a worker our method for ``collective_rpc``, do not count its runs without requests, and warn of new weights.

    They are attributes of the instance, where vLLM's wrapper around the worker finds methods by name.
    """
    setattr(worker, WORKER_METHOD, _samples_of(worker))
    for name in FOR_NO_REQUEST:
        setattr(worker, name, _uncounted(worker, name))
    for name in REPLACE_WEIGHTS:
        if hasattr(worker, name):
            setattr(worker, name, _warned_of(worker, name))


def _samples_of(worker: Any) -> Function:
    sent: dict[Any, float] = {}

    def samples(start: bool = True) -> dict[str, Any]:
        from vllm_sparse_backend.serving.worker.worker_samples import new_samples

        return new_samples(worker, sent, start)

    return samples


def _uncounted(worker: Any, name: str) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        from vllm_sparse_backend.serving.worker.counters import not_counting

        with not_counting():
            return getattr(type(worker), name)(worker, *args, **kwargs)  # looked up late: it may be wrapped by now

    return call


def _warned_of(worker: Any, name: str) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        from vllm_sparse_backend.serving.streaming_startup import warn_of_weights

        warn_of_weights(worker.vllm_config, name)
        return getattr(type(worker), name)(worker, *args, **kwargs)

    return call


# --- the front process and the engine's core: the level of a request ---


def _with_level(original: Function) -> Function:
    """Check the level of each request, and set its cache salt. Requests from all entry points pass through here."""
    signature = inspect.signature(original)

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_selected(self.vllm_config.attention_config):
            return original(self, *args, **kwargs)
        from vllm_sparse_backend.serving.level_policy import level_of, policy_of, set_level

        arguments, policy = signature.bind(self, *args, **kwargs).arguments, policy_of(self)
        level = level_of(policy, arguments["params"], arguments.get("resumable", False))
        request = original(self, *args, **kwargs)
        set_level(policy, request, level)
        return request

    return process_inputs


def _checked_in_core(original: Function) -> Function:
    """Refuse requests whose level no front process of this package has checked."""

    def preprocess_add_request(self: Any, request: Any) -> Any:
        if not is_selected(self.vllm_config.attention_config):
            return original(self, request)
        from vllm_sparse_backend.serving.level_policy import refuse_unchecked
        from vllm_sparse_backend.serving.streaming_startup import add_heads_to_salt

        add_heads_to_salt(self, request)
        # First, because it puts the request's images into the core's cache, where the front process expects them for
        # the next request.
        prepared = original(self, request)
        refuse_unchecked(request)
        return prepared

    return preprocess_add_request


def _learning_heads(original: Function) -> Function:
    """Ask the workers which streaming heads they found, once they have measured the memory for their cache."""

    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if is_selected(self.vllm_config.attention_config):
            from vllm_sparse_backend.serving.streaming_startup import learn_heads

            learn_heads(self)
        return result

    return determine_available_memory


# --- workers: the requests of a step's rows ---


def _known(original: Function) -> Function:
    """Record the levels of a step's requests, and how its rows map to requests.

    The older runner has a persistent batch, which is in order when metadata is built. In Model Runner V2, metadata
    numbers a step's rows (``req_idx``), or ``prepare_attn`` gets the batch. A dummy run has neither.
    """

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        requests = vars(self).get(REQUESTS)
        if requests is None:  # the runner's first step, or a runner without a layer of ours
            if not is_selected(self.vllm_config.attention_config):
                return original(self, scheduler_output, *args, **kwargs)
            from vllm_sparse_backend.serving.worker.step_context import requests_of

            requests = requests_of(self)
            if requests is None:
                return original(self, scheduler_output, *args, **kwargs)
        with requests.at_step(scheduler_output, self):
            if hasattr(self, "input_batch"):
                requests.name_rows(lambda: self.input_batch.req_ids)
            return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _batch_told(original: Function) -> Function:
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_sparse_backend.serving.worker.step_context import requests_of

        requests = requests_of(self)
        if requests is not None:
            requests.name_rows(lambda: input_batch.req_ids)
        return original(self, input_batch, *args, **kwargs)

    return prepare_attn


# --- workers: their settings, and streaming heads ---


def _agreeing(original: Function) -> Function:
    """Compare the settings of all workers as soon as vLLM has connected them, before any model loads."""

    def init_worker_distributed_environment(vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(vllm_config, *args, **kwargs)
        if is_selected(vllm_config.attention_config):
            from vllm_sparse_backend.serving.worker.agreement import agree

            agree(vllm_config)

    return init_worker_distributed_environment


def _profiled(original: Function) -> Function:
    """Find the streaming heads after vLLM's profile run: it has compiled the model, and the cache does not exist."""

    def profile_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _find_streaming_heads(self.vllm_config, self)
        return result

    return profile_run


def _measured_on_cpu(original: Function) -> Function:
    """Find the streaming heads on a CPU, where vLLM may skip the profile run."""

    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _find_streaming_heads(self.vllm_config, self.model_runner)
        return result

    return determine_available_memory


def _find_streaming_heads(vllm_config: Any, runner: Any) -> None:
    """Find the streaming heads, if this engine does. The hook also sees other engines of the same process."""
    from vllm_sparse_backend.config.resolved import carried_streaming

    if is_selected(vllm_config.attention_config) and carried_streaming(vllm_config.additional_config):
        from vllm_sparse_backend.serving.worker.streaming_heads import find_streaming_heads

        find_streaming_heads(vllm_config, lambda: runner.get_model())


# --- workers: multi-head latent attention ---


def _rows_of_mla_known(original: Function) -> Function:
    """Give our prefill backend the metadata of the whole batch before vLLM gives it that of the rows that prefill.

    The older runner builds a draft model's metadata with ``fast_build``, which is not passed on. Model Runner V2 does
    not, but its draft models have builders of their own, whose prefill backends ignore the metadata.
    """

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
    ) -> Any:
        begin_step = getattr(self._prefill_backend, "begin_step", None)
        if begin_step is not None and not fast_build:
            begin_step(common_attn_metadata, common_prefix_len, self.reorder_batch_threshold or 1)
        return original(self, common_prefix_len, common_attn_metadata, fast_build, **kwargs)

    return build


def _layer_of_mla_known(original: Function) -> Function:
    """Tell our prefill backend which layer calls it: the layers of a cache group share a backend in a step."""

    def forward_mha(
        self: Any, q: Any, kv_c_normed: Any, k_pe: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        begin_layer = getattr(attn_metadata.prefill.prefill_backend, "begin_layer", None)
        if begin_layer is not None:
            begin_layer(vars(self).get(MLA_LAYER))
        return original(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, *args, **kwargs)

    return forward_mha


# --- processes that are spawned ---


def _core_begins(executor: Any, vllm_config: Any) -> None:
    install_in_core()


def _worker_begins(worker: Any, vllm_config: Any) -> None:
    add_worker_methods(worker)
    _install(CONNECTED)
    name = "init_worker_distributed_environment"
    _replace_by_name(name, _imported(f"vllm.v1.worker.gpu_worker.{name}"))


# --- the table ---


class Hook(NamedTuple):
    """A wrapped function of vLLM. It belongs to a class or, if ``owner`` is empty, to the module."""

    where: str
    module: str
    owner: str
    function: str
    expects: tuple[str, ...]
    """Parameters that it must have."""
    wrapper: Callable[[Function], Function]
    why: str


class ReadClass(NamedTuple):
    """A class of vLLM that wrappers read, and the fields or methods that it must have."""

    where: str
    module: str
    owner: str
    names: tuple[str, ...]


_MLA_PREFILL = "vllm.v1.attention.backends.mla.prefill"
_MLA_ATTENTION = "vllm.model_executor.layers.attention.mla_attention"

# fmt: off
HOOKS = (
    Hook(EVERY, "vllm.platforms", "current_platform", "check_and_update_config", ("vllm_config",), _checked,
         "the configuration is checked before a model loads; if it is ours, the front process gets its hooks"),
    Hook(EVERY, "vllm.v1.attention.backends.registry", "_AttentionBackendEnumMeta", "__getitem__", ("name",),
         _looked_up, "the flag is refused where another plugin has taken its backend's place"),
    Hook(EVERY, f"{_MLA_PREFILL}.registry", "_MLAPrefillBackendEnumMeta", "__getitem__", ("name",), _mla_looked_up,
         "the flag for MLA is refused where another plugin has taken its backend's place"),
    Hook(EVERY, "vllm.v1.executor.abstract", "Executor", "__init__", ("vllm_config",), _begun(_core_begins),
         "an engine's core whose configuration is ours gets its hooks"),
    Hook(EVERY, "vllm.v1.worker.worker_base", "WorkerBase", "__init__", ("vllm_config",), _begun(_worker_begins),
         "a worker whose configuration is ours gets its hooks and methods, and does not count runs without requests"),
    Hook(ON_CPU, "vllm.platforms", "current_platform", "get_attn_backend_cls",
         ("selected_backend", "attn_selector_config"), _selectable, "a CPU runs the configured backend"),
    Hook(ON_CPU, f"{_MLA_PREFILL}.selector", "", "get_mla_prefill_backend", ("vllm_config",), _mla_selectable,
         "a CPU runs the configured prefill backend for MLA"),
    Hook(SERVER, "vllm.plugins", "", "load_endpoint_plugins", (), _with_our_endpoints,
         "levels are refused where vLLM would drop them; /metrics shows our counters"),
    Hook(FRONT, "vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", ("params",), _with_level,
         "each request's level is checked, written in canonical form, and put into its cache salt"),
    Hook(CORE, "vllm.v1.engine.core", "EngineCore", "preprocess_add_request", ("request",), _checked_in_core,
         "requests whose level our front process has not checked are refused"),
    Hook(CORE, "vllm.v1.executor.abstract", "Executor", "determine_available_memory", (), _learning_heads,
         "servers that share a store of blocks read only blocks of servers with the same streaming heads"),
    Hook(CONNECTED, "vllm.v1.worker.gpu_worker", "", "init_worker_distributed_environment", ("vllm_config",), _agreeing,
         "workers that have other settings are refused before any of them waits for another"),
    Hook(OLDER, "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model", ("scheduler_output",),
         _known, "the rows of a step are mapped to requests, and requests to levels"),
    Hook(NEWER, "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "execute_model", ("scheduler_output",),
         _known, "the requests of a step are mapped to levels"),
    Hook(UNNUMBERED, "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_attn", ("input_batch",),
         _batch_told, "the rows of a step are mapped to requests"),
    Hook(STREAMING_OLDER, "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "profile_run", (), _profiled,
         "streaming heads are found before the KV cache exists"),
    Hook(STREAMING_NEWER, "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "profile_run", (), _profiled,
         "streaming heads are found before the KV cache exists"),
    Hook(STREAMING_ON_CPU, "vllm.v1.worker.cpu_worker", "CPUWorker", "determine_available_memory", (),
         _measured_on_cpu, "streaming heads are found before the KV cache exists"),
    Hook(MLA_WORKER, _MLA_ATTENTION, "MLACommonMetadataBuilder", "build",
         ("common_prefix_len", "common_attn_metadata", "fast_build"), _rows_of_mla_known,
         "the rows that prefill are mapped to requests"),
    Hook(MLA_WORKER, _MLA_ATTENTION, "MLACommonBaseImpl", "forward_mha",
         ("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata"), _layer_of_mla_known,
         "the prefill backend, which layers share, knows the layer"),
)
READ_CLASSES = (
    ReadClass(FRONT, "vllm.v1.engine", "EngineCoreRequest", ("sampling_params", "cache_salt")),
    ReadClass(CORE, "vllm.v1.engine", "EngineCoreRequest", ("sampling_params", "abort_immediately")),
    ReadClass(WORKER, "vllm.v1.core.sched.output", "NewRequestData", ("req_id", "sampling_params", "prompt_token_ids")),
    ReadClass(WORKER, "vllm.v1.core.sched.output", "SchedulerOutput",
         ("scheduled_new_reqs", "finished_req_ids", "num_scheduled_tokens")),
    ReadClass(WORKER, "vllm.v1.worker.gpu_worker", "Worker", FOR_NO_REQUEST),
    ReadClass(MLA_WORKER, _MLA_ATTENTION, "MLACommonMetadataBuilder", ("_prefill_backend", "reorder_batch_threshold")),
    ReadClass(MLA_WORKER, _MLA_ATTENTION, "MLACommonPrefillMetadata",
         ("query_start_loc", "max_query_len", "chunked_context", "prefill_backend")),
    ReadClass(STREAMING_OLDER, "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("get_model",)),
    ReadClass(STREAMING_NEWER, "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("get_model",)),
    ReadClass(OLDER, "vllm.v1.worker.gpu_input_batch", "InputBatch", ("req_ids",)),
    ReadClass(NEWER, "vllm.v1.attention.backend", "CommonAttentionMetadata", ("req_idx",)),
    ReadClass(NEWER, "vllm.v1.worker.gpu.states", "RequestState", ("index_to_req_id",)),
    ReadClass(UNNUMBERED, "vllm.v1.worker.gpu.input_batch", "InputBatch", ("req_ids",)),
)
# fmt: on


# --- installation, process by process ---


def install() -> None:
    """Install the hooks of ``REGISTRATION``. Every process has them, with any backend."""
    from vllm.platforms import current_platform

    _install(EVERY)
    if current_platform.is_cpu():
        _install(ON_CPU)
        _replace_by_name("get_mla_prefill_backend", _imported(f"{_MLA_PREFILL}.selector.get_mla_prefill_backend"))


def install_in_front() -> None:
    """Install the front process's hooks, which check the levels of requests."""
    _install(FRONT)
    _install(SERVER)


def install_in_core() -> None:
    """Install the core's hook, which refuses requests that no front process of this package has checked."""
    _install(CORE)


def _replace_by_name(name: str, function: Function) -> None:
    """Replace a wrapped function in all modules of vLLM that imported it by name before."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and name in vars(module):
            setattr(module, name, function)


def install_in_worker(vllm_config: Any) -> None:
    """Install a worker's hooks, which provide the levels of requests and their rows, on every rank and stage."""
    newer = (NEWER,) if numbers_rows(vllm_config) else (NEWER, UNNUMBERED)
    for where in (WORKER, *(newer if vllm_config.use_v2_model_runner else (OLDER,))):
        _install(where)


def streaming_problem(vllm_config: Any) -> str | None:
    """Install a worker's hooks that find streaming heads at its start. Returns why they cannot be installed."""
    from vllm.platforms import current_platform

    newer = vllm_config.use_v2_model_runner
    try:
        _install(STREAMING_ON_CPU if current_platform.is_cpu() else STREAMING_NEWER if newer else STREAMING_OLDER)
    except ConfigurationError as error:
        return str(error)
    return None


def install_for_mla() -> None:
    """Install a worker's hooks for multi-head latent attention, which provide the rows and the layer of each call."""
    _install(MLA_WORKER)


def numbers_rows(vllm_config: Any) -> bool:
    """Return whether Model Runner V2 maps rows to requests in each batch's metadata."""
    model = vllm_config.model_config
    return not (model.is_hybrid or model.is_encoder_decoder)  # their model states leave req_idx empty


def _install(where: str) -> None:
    """Install the hooks of a kind of process. Raises ConfigurationError if vLLM lacks anything they expect."""
    for read in READ_CLASSES:
        if read.where == where:
            owner = owner_of(read.module, read.owner)
            if missing := [name for name in read.names if name not in names_of(owner)]:
                raise _misfit(f"{_path(owner)} has no {', '.join(missing)}")
    for hook in HOOKS:
        if hook.where == where:
            put_around(owner_of(hook.module, hook.owner), hook.function, hook.wrapper, hook.expects)


def names_of(owner: Any) -> set[str]:
    """Return the names that instances of a class have."""
    if is_dataclass(owner):
        return {f.name for f in fields(owner)}
    constructor_code = getattr(getattr(owner, "__init__", None), "__code__", None)
    return {*dir(owner), *(constructor_code.co_names if constructor_code else ())}


def owner_of(module: str, name: str) -> Any:
    """Import a class or a module of vLLM."""
    try:
        owner = importlib.import_module(module)
        owner = getattr(owner, name) if name else owner
    except (ImportError, AttributeError):
        raise _misfit(f"{module}.{name} is missing") from None
    return owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)


OURS = "sparse_prefill"
"""Attribute of our wrappers around vLLM's functions."""

_wrapped: set[tuple[Any, str]] = set()
"""Owner and name of each function that this process has wrapped. Another plugin's wrapper may hide ``OURS``."""


def put_around(owner: Any, name: str, wrapper: Callable[[Function], Function], expects: Sequence[str] = ()) -> None:
    """Wrap a function of vLLM. A function that is wrapped already stays as it is."""
    original = inspect.getattr_static(owner, name, None)
    is_classmethod = isinstance(original, classmethod)
    function = getattr(owner, name) if is_classmethod else original
    if not callable(function):
        raise _misfit(f"{_path(owner)}.{name} is missing")
    if (owner, name) in _wrapped:
        return
    if missing := [parameter for parameter in expects if parameter not in inspect.signature(function).parameters]:
        raise _misfit(f"{_path(owner)}.{name}{inspect.signature(function)} has no {', '.join(missing)}")
    wrapped = functools.wraps(getattr(function, "__func__", function))(wrapper(function))
    setattr(wrapped, OURS, True)
    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
    _wrapped.add((owner, name))


def _path(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"


def _misfit(what: str) -> ConfigurationError:
    from vllm import __version__

    return ConfigurationError(
        f"sparse-prefill: vLLM {__version__}'s {what}, expected it as in {RELEASES}; use one of these versions"
    )
