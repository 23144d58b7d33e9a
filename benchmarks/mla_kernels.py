# SPDX-License-Identifier: Apache-2.0
"""Measure the kernels of sparse MLA prefill against FlashAttention, as stock vLLM calls it, on a single card.

    python -m benchmarks.mla_kernels [--shape deepseek-r1] [--case "the server's default"] [--part times]
        [--budget-s 110] [--out docs/results/mla_kernels.json]

Two shapes: one GPU's part of DeepSeek-R1 (16 of 128 heads) and of Kimi-K2 (8 of 64 heads). A step has 8,192 new tokens
after a context of 65,536, which comes as a single chunk. Queries and keys are structured as trained attention is
(``tests/helpers/structured.py``), without a model, so densities are examples only.

For each method, first the results of sampled tiles and heads are compared with float64 attention over the same keys.
Then come the times of the new tokens and of the chunk, each the median of calls between CUDA events. Time of selection
is that of ``top_p`` without attention. The times of single kernels, and of other launches of the attention kernel and
of the kernel that multiplies queries and keys for ``top_p``, are printed, and are not part of the results.

If a check fails, the other parts still run, and the exit code is 1.
"""

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest.mock import patch

import torch
import typer

from benchmarks.figures import Report
from tests.helpers.structured import structured
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.mla import mla_method
from vllm_sparse_backend.evaluation.vllm_server import device_name, has_cuda
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED, HALF_SCORED
from vllm_sparse_kernels.mla import MlaAShape, MlaLimits, MlaMethod, MlaPrefill, MlaRow, MlaTopP, attention, products
from vllm_sparse_kernels.mla.calls import BLOCK_TOKENS, EVERYTHING, Call, Tensors, TileFields
from vllm_sparse_kernels.mla.products import HOPPER_LAUNCHES, ProductLaunch, run_products
from vllm_sparse_kernels.mla.reference import kept_by_a_shape
from vllm_sparse_kernels.rows import TILE_TOKENS

SHAPES = {"deepseek-r1": 16, "kimi-k2": 8}
"""Heads of one GPU's part of each model."""

KEY_DIM, VALUE_DIM = 192, 128
LARGEST_ERROR = 0.01
"""Bar of errors: of a tile's output relative to its norm, and of log-sum-exp in natural units."""

LAUNCHES = tuple(
    attention.LaunchOptions(step, num_warps, num_stages)
    for step, num_warps, num_stages in
    ((64, 8, 3), (64, 8, 2), (64, 8, 4), (64, 4, 3), (64, 4, 2), (32, 8, 4), (32, 4, 3), (32, 4, 2))
)  # fmt: skip
"""Launches of the attention kernel whose times are printed; the first is the default of an H100."""

PRODUCT_LAUNCHES = (
    *(ProductLaunch(256, 128, "float16", 8, num_stages, 128) for num_stages in (3, 2, 4)),
    ProductLaunch(256, 128, "float16", 8, 3, 128, is_bulk=False),
    ProductLaunch(256, 64, "float16", 8, 4, 128),
    ProductLaunch(256, 256, "float16", 8, 2, None),
    *(ProductLaunch(128, 128, "float16", num_warps, 3, 128) for num_warps in (4, 8)),
    *(ProductLaunch(rows, 128, "float32", 8, 3, None) for rows in (128, 256)),
)
"""Launches of the kernel of products whose times are printed, for 128 channels. The first is the default of an H100."""

SERVER_DEFAULT = "the server's default"

METHODS: dict[str, MlaMethod] = {
    "dense": MlaTopP(1.0),
    "A-shape": MlaAShape(AShape().sink_tokens, AShape().local_tokens),
    SERVER_DEFAULT: mla_method(make_method("default", {})),
    "top_p 0.9, 128 channels, half the queries": MlaTopP(0.9, channels=128, queries="half"),
    "top_p 0.9, 64 channels, half the queries": MlaTopP(0.9, channels=64, queries="half"),
    "top_p 0.9, half the queries": MlaTopP(0.9, queries="half"),
    "top_p 0.9, 128 channels": MlaTopP(0.9, channels=128),
    "top_p 0.9, 64 channels": MlaTopP(0.9, channels=64),
    "top_p 0.9": MlaTopP(0.9),
}

PARTS = ("checks", "times", "kernels", "products", "launches")
"""Parts of a shape's measurement, in order."""

PARTS_OF_METHODS = ("checks", "times", "kernels")
"""Parts that run the methods of ``--case``. The others have methods of their own."""


@dataclass(frozen=True)
class Part:
    """A call of a step: the new tokens, or the chunk of the context."""

    name: str
    is_causal: bool
    row: MlaRow
    k: torch.Tensor
    v: torch.Tensor

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key up to it, for one head."""
        queries = self.row.num_queries
        return queries * (queries + 1) // 2 if self.is_causal else queries * self.row.num_keys


class Step:
    """A step of one shape on one device."""

    def __init__(self, num_heads: int, new: int, context: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        data = structured(new, context, num_heads, num_heads, KEY_DIM, dtype, device)
        up = torch.zeros(context + new, num_heads, 2 * VALUE_DIM, dtype=dtype, device=device)
        up[..., VALUE_DIM:] = data.v[..., :VALUE_DIM]
        self.q, self.scale, self.num_heads, self.device = data.q, data.scale, num_heads, device
        k, v = data.k, up[..., VALUE_DIM:]
        new_row = MlaRow(0, new, context, 0, 0, new, context)
        chunk_row = MlaRow(0, new, context, 0, 0, context, 0)
        self.parts = (
            Part("new tokens", True, new_row, k[context:].contiguous(), v[context:]),
            Part("chunk", False, chunk_row, k[:context].contiguous(), v[:context]),
        )
        self._engines = {
            num_scored: MlaPrefill(
                num_heads=num_heads, scale=data.scale, qk_head_dim=KEY_DIM, v_head_dim=VALUE_DIM,
                limits=MlaLimits(new, context, num_scored), dtype=dtype, device=device,
            )
            for num_scored in (ALL_SCORED, HALF_SCORED, 0)
        }  # fmt: skip
        self.out = torch.zeros(new, num_heads, VALUE_DIM, dtype=dtype, device=device)
        self.lse = torch.zeros(num_heads, new, device=device)

    def engine(self, method: MlaMethod) -> MlaPrefill:
        """Return the kernels as a server with this method builds them."""
        return self._engines[method.num_scored]

    def attend(self, method: MlaMethod, part: Part, kept_pairs: torch.Tensor | None = None) -> None:
        """Run a call."""
        self.engine(method).attend(
            method, self.q, part.k, part.v, [part.row], is_causal=part.is_causal, out=self.out, lse=self.lse,
            kept_pairs=kept_pairs,
        )  # fmt: skip

    def tiles(self) -> list[slice]:
        """Return the queries of sampled tiles: the first, one in the middle, and the last."""
        starts = range(0, len(self.q), TILE_TOKENS)
        return [slice(start, start + TILE_TOKENS) for start in sorted({0, starts[len(starts) // 2], starts[-1]})]

    def heads(self) -> Sequence[int]:
        """Return sampled heads, of different kinds."""
        return range(0, self.num_heads, max(self.num_heads // 4, 1))

    def kept_keys(self, method: MlaMethod, part: Part, tile: slice, head: int) -> torch.Tensor:
        """Return the keys that a tile's queries keep in the last call, which was of this part: [queries, keys]."""
        row, length = part.row, len(self.q[tile])
        if isinstance(method, MlaTopP) and method.kept_mass < 1:
            kept = kept_by_a_shape(MlaAShape(0, EVERYTHING), row, tile.start, length, self.device)
            return kept & self._listed(method, part, tile, head)
        window = method if isinstance(method, MlaAShape) else MlaAShape(0, EVERYTHING)
        return kept_by_a_shape(window, row, tile.start, length, self.device)

    def _listed(self, method: MlaTopP, part: Part, tile: slice, head: int) -> torch.Tensor:
        """Return whether a key is in a listed block: [keys]. Without kernels there are no lists."""
        selection = self.engine(method)._selection
        if selection is None:
            raise RuntimeError("no lists of blocks: top_p runs by the reference here; set TRITON_INTERPRET=1")
        runs = Call.of([part.row], self.device).runs(selection.most_tiles, selection.most_blocks)
        if len(runs) != 1:
            raise RuntimeError(f"given {len(runs)} runs of tiles, expected 1: lists of earlier runs are lost")
        run = runs[0]
        tiles = [TileFields(*fields) for fields in run.tiles.tolist()]
        i_list = head * run.num_tiles + next(i for i, fields in enumerate(tiles) if fields.query == tile.start)
        ids = selection.ids[i_list * run.width : (i_list + 1) * run.width].long()
        blocks = torch.zeros(-(-part.row.num_keys // BLOCK_TOKENS), dtype=torch.bool, device=self.device)
        blocks[ids[: int(selection.counts[i_list])]] = True
        return blocks.repeat_interleave(BLOCK_TOKENS)[: part.row.num_keys]


def check(step: Step, method: MlaMethod, name: str, about: str, report: Report) -> None:
    """Compare a method's results with float64, and add errors, densities and the dropped attention to the report."""
    errors: dict[str, float] = defaultdict(float)
    kept_mass: dict[tuple[int, int], torch.Tensor] = {}
    whole_mass: dict[tuple[int, int], torch.Tensor] = {}
    for part in step.parts:
        step.out.fill_(torch.nan)
        step.lse.fill_(torch.nan)
        counter = torch.zeros(1, dtype=torch.int64, device=step.device)
        step.attend(method, part, counter)
        density = int(counter) / (part.pairs * step.num_heads)
        report.add_figure(f"{about}, {name}, {part.name}: density", density, "share", "lower")
        for tile in step.tiles():
            for head in step.heads():
                kept = step.kept_keys(method, part, tile, head)
                scores = step.q[tile, head].double() @ part.k[:, head].double().T * step.scale
                causal = kept_by_a_shape(MlaAShape(0, EVERYTHING), part.row, tile.start, len(kept), step.device)
                whole = scores.masked_fill(~causal, -torch.inf).logsumexp(-1)
                scores = scores.masked_fill(~kept, -torch.inf)
                lse = scores.logsumexp(-1)
                out = scores.softmax(-1).nan_to_num(0.0) @ part.v[:, head].double()
                error = (step.out[tile, head].double() - out).norm() / out.norm().clamp(min=1e-9)
                difference = (step.lse[head, tile].double() - lse).nan_to_num(0.0)  # -inf on both sides is equal
                for key, value in (("output", error), ("log-sum-exp", difference.abs().max())):
                    errors[key] = max(errors[key], float("inf") if value.isnan() else float(value))
                place = tile.start, head
                kept_mass[place] = torch.logaddexp(kept_mass.get(place, torch.full_like(lse, -torch.inf)), lse)
                whole_mass[place] = torch.logaddexp(whole_mass.get(place, torch.full_like(lse, -torch.inf)), whole)
    for key, value in errors.items():
        report.add_figure(
            f"{about}, {name}: largest error of {key} of sampled tiles, against float64", value, "ratio", "lower",
            LARGEST_ERROR,
        )  # fmt: skip
    dropped = [float(1 - (kept_mass[place] - whole_mass[place]).exp().mean()) for place in kept_mass]
    report.add_figure(f"{about}, {name}: attention that a sampled tile drops, mean", sum(dropped) / len(dropped),
                      "share", "lower")  # fmt: skip
    report.add_figure(f"{about}, {name}: attention that a sampled tile drops, largest", max(dropped), "share", "lower")
    if max(errors.values()) > LARGEST_ERROR or step.out.isnan().any() or step.lse.isnan().any():
        raise RuntimeError(f"{about}, {name}: errors {dict(errors)}, expected at most {LARGEST_ERROR} and no NaN")


def seconds_of(call: Callable[[], None], prepare: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Return the median time of a call, after two warm-ups. ``prepare`` runs before each call and is not timed."""
    times = []
    for _ in range(repeats + 2):
        prepare()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return median(times[2:])


def stock_call(step: Step, part: Part) -> Callable[[], None]:
    """Return stock vLLM's call of FlashAttention for a part; on a CPU, torch's dense attention."""
    if step.device.type != "cuda":
        mask = kept_by_a_shape(MlaAShape(0, EVERYTHING), part.row, 0, part.row.num_queries)
        q, k, v = (x.transpose(0, 1) for x in (step.q, part.k, part.v))

        def by_torch() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=step.scale)

        return by_torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    if not is_fa_version_supported(3):
        raise RuntimeError("this card has no FlashAttention-3: run on an H100 or H200")
    ends = [
        torch.tensor([0, number], dtype=torch.int32, device=step.device)
        for number in (part.row.num_queries, part.row.num_keys)
    ]

    def by_flash_attention() -> None:
        flash_attn_varlen_func(
            q=step.q, k=part.k, v=part.v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1],
            max_seqlen_q=part.row.num_queries, max_seqlen_k=part.row.num_keys, softmax_scale=step.scale,
            causal=part.is_causal, return_softmax_lse=True, fa_version=3,
        )  # fmt: skip

    return by_flash_attention


def measure_times(step: Step, methods: Mapping[str, MlaMethod], about: str, report: Report, repeats: int) -> None:
    """Add the times of stock's attention, and of each method's."""
    stock: dict[str, float] = {}
    for part in step.parts:
        seconds = seconds_of(stock_call(step, part), lambda: None, step.device, repeats)
        stock[part.name] = seconds
        rate = 2.0 * (KEY_DIM + VALUE_DIM) * step.num_heads * part.pairs / seconds
        report.add_figure(f"{about}, stock, {part.name}: time", seconds, "s", "lower")
        report.add_figure(f"{about}, stock, {part.name}: rate", rate, "FLOP/s", "higher")
    for name, method in methods.items():
        new, _ = step.parts
        step.attend(method, new)
        engine = step.engine(method)
        before = [x.clone() for x in engine.sums]

        def restore(engine: MlaPrefill = engine, before: list[torch.Tensor] = before) -> None:
            for now, then in zip(engine.sums, before, strict=True):
                now.copy_(then)

        totals: dict[str, float] = defaultdict(float)
        for part in step.parts:
            calls: dict[str, Callable[[], None]] = {"attend": partial(step.attend, method, part)}
            if isinstance(method, MlaTopP) and method.kept_mass < 1 and engine._selection is not None:
                calls["selection"] = selection_call(step, method, part)
            for what, call in calls.items():
                seconds = seconds_of(call, restore, step.device, repeats)
                totals[what] += seconds
                report.add_figure(f"{about}, {name}, {part.name}: time of {what}", seconds, "s", "lower")
                share = seconds / stock[part.name]
                report.add_figure(f"{about}, {name}, {part.name}: {what}'s time to stock's", share, "ratio", "lower")
        for what, seconds in totals.items():
            share = seconds / sum(stock.values())
            report.add_figure(f"{about}, {name}, step: {what}'s time to stock's", share, "ratio", "lower")


def selection_call(step: Step, method: MlaTopP, part: Part) -> Callable[[], None]:
    """Return a call of ``top_p``'s selection without attention."""
    engine = step.engine(method)
    selection = engine._selection
    assert selection is not None
    tensors, call = Tensors.of(step.q, part.k, part.v, step.out, step.lse), Call.of([part.row], step.device)

    def select() -> None:
        for run in call.runs(selection.most_tiles, selection.most_blocks):
            selection.select(method, tensors, call, run, engine.sums, step.scale, part.is_causal, None)

    return select


def print_kernels(step: Step, methods: Mapping[str, MlaMethod], about: str) -> None:
    """Print the time of each kernel of a step, for each method."""
    if step.device.type != "cuda":
        return
    from torch.profiler import ProfilerActivity, profile

    for part in step.parts:
        for method in methods.values():
            step.attend(method, part)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step.attend(method, part)
                torch.cuda.synchronize()
            times: dict[str, float] = defaultdict(float)
            for event in profiler.key_averages():
                times[event.key] += event.self_device_time_total
            heaviest = sorted(times.items(), key=lambda item: -item[1])[:10]
            print(f"{about}, {method}, {part.name}:", ", ".join(f"{name} {us / 1e3:.3f} ms" for name, us in heaviest))


def print_products(step: Step, about: str, repeats: int) -> None:
    """Print the time of the chunk's products of half of the queries, with each of ``PRODUCT_LAUNCHES``."""
    if step.device.type != "cuda":
        return
    chunk = step.parts[1]
    call = Call.of([chunk.row], step.device)
    by_method = {
        MlaTopP(0.9, channels=128, queries="half"): PRODUCT_LAUNCHES,
        MlaTopP(0.9, queries="half"): HOPPER_LAUNCHES,
    }
    for method, launches in by_method.items():
        step.attend(method, chunk)  # rounds queries and keys
        selection = step.engine(method)._selection
        assert selection is not None
        (run,) = call.runs(selection.most_tiles, selection.most_blocks)
        num_heads = selection.heads_at_once
        work = (method, run, False, chunk.row.num_keys, num_heads, selection.rounded, selection.scratch.products)
        for launch in launches:
            with patch.object(products, "product_launch", return_value=launch):
                try:
                    seconds = seconds_of(partial(run_products, *work), lambda: None, step.device, repeats)
                except Exception as error:  # a launch may need more memory than the card has
                    print(f"{about}, {method}, {launch}: {type(error).__name__}: {str(error)[:200]}")
                    continue
            rate = 2.0 * method.channels * num_heads * chunk.pairs * method.num_scored / TILE_TOKENS / seconds
            print(
                f"{about}, products of {num_heads} heads, {method.channels} channels, {launch}: {seconds * 1e3:.3f} ms,"
                f" {rate / 1e12:.0f} TFLOP/s", flush=True,
            )  # fmt: skip


def print_launches(step: Step, about: str, repeats: int) -> None:
    """Print the time of dense attention to the chunk with each of ``LAUNCHES``."""
    chunk = step.parts[1]
    for options in LAUNCHES if step.device.type == "cuda" else LAUNCHES[:1]:
        with patch.object(attention, "launch_options", return_value=options):
            try:
                seconds = seconds_of(
                    lambda: step.attend(MlaTopP(1.0), chunk), lambda: None, step.device, min(repeats, 3)
                )
            except Exception as error:  # a launch may need more memory than the card has
                print(f"{about}, {options}: {type(error).__name__}: {error}")
                continue
        rate = 2.0 * (KEY_DIM + VALUE_DIM) * step.num_heads * chunk.pairs / seconds
        print(f"{about}, dense, {chunk.name}, {options}: {seconds * 1e3:.3f} ms, {rate / 1e12:.0f} TFLOP/s", flush=True)


def parts_of(
    about: str, names: Sequence[str], methods: Mapping[str, MlaMethod], report: Report, repeats: int
) -> dict[str, Callable[[Step], None]]:
    """Return the parts of a shape's measurement. The checks are a part for each method."""
    checks = {
        f"check of {name}": partial(check, method=method, name=name, about=about, report=report)
        for name, method in methods.items()
    }
    others: dict[str, Callable[[Step], None]] = {
        "times": partial(measure_times, methods=methods, about=about, report=report, repeats=repeats),
        "kernels": partial(print_kernels, methods=methods, about=about),
        "products": partial(print_products, about=about, repeats=repeats),
        "launches": partial(print_launches, about=about, repeats=repeats),
    }
    chosen: dict[str, Callable[[Step], None]] = {}
    if "checks" in names:
        chosen.update(checks)
    return chosen | {name: run for name, run in others.items() if name in names}


def measure_shape(
    about: str, build: Callable[[], Step], parts: Mapping[str, Callable[[Step], None]], end: float
) -> list[str]:
    """Run the parts of a shape. Return a line for each part that failed or did not start in time."""
    step: Step | None = None
    problems = []
    for label, run in parts.items():
        if time.monotonic() > end:
            problems.append(f"{about}, {label}: not started, because the budget (--budget-s) is used up")
            continue
        try:
            step = step or build()
            run(step)
        except Exception as error:  # other parts may still run
            traceback.print_exc()
            problems.append(f"{about}, {label}: {type(error).__name__}: {error}")
    return problems


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(SHAPES)}. Default: both.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"Method of {', '.join(PARTS_OF_METHODS)}: {', '.join(METHODS)}. Default: all."),
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}. Default: all.")] = None,
    budget_s: Annotated[float, typer.Option(help="No part starts after this many seconds.")] = 110.0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Results file to write.")] = None,
    small: Annotated[bool, typer.Option(help="Short rows and two heads, to try this program on a CPU.")] = False,
) -> None:
    """Measure both shapes."""
    for option, values, known in (("shape", shape, SHAPES), ("case", case, METHODS), ("part", part, PARTS)):
        if unknown := sorted(set(values or ()) - set(known)):
            raise typer.BadParameter(f"--{option}: given {', '.join(unknown)}, expected {' or '.join(known)}")
    if case and part and not set(part) & set(PARTS_OF_METHODS):
        raise typer.BadParameter(
            f"--case: given {', '.join(case)} with only --part {', '.join(part)}, which has methods of its own; "
            f"leave --case out, or add a --part of {', '.join(PARTS_OF_METHODS)}"
        )
    methods = {name: method for name, method in METHODS.items() if not case or name in case}
    device = torch.device("cuda" if has_cuda() else "cpu")
    end, problems = time.monotonic() + budget_s, []
    report = Report("mla_kernels", device_name(), None, out)
    new, context = (130, 400) if small else (8192, 65536)
    for name in shape or SHAPES:
        num_heads = 2 if small else SHAPES[name]
        about = f"MLA kernels, {name}'s shape, {num_heads} heads, {new:,} tokens after {context:,}"
        parts = parts_of(about, part or PARTS, methods, report, repeats)
        problems += measure_shape(about, partial(Step, num_heads, new, context, device), parts, end)
    for figure in report.figures.values():
        print(f"{figure['name']}: {figure['value']} {figure['unit']}", flush=True)
    for problem in problems:
        print(problem, flush=True)
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
