# SPDX-License-Identifier: Apache-2.0
"""Trains the bundled needle model in a few minutes on one H100 or H200.

    python -m benchmarks.needle.train OUT [--minutes 5] [--seed 0]

Needs torch, tokenizers, safetensors and rich. OUT becomes a model folder for vLLM and transformers, with measurements
in training.json and the recipe in README.md. Texts grow from 128 to 16,384 tokens, whenever the answers at the current
length are right. The evaluation uses the saved weights, in bfloat16.
"""

import argparse
import json
import platform
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.needle.data import ANSWER, ANSWER_OF_TWO, TEXT, Batch, Composer
from benchmarks.needle.folder import write_folder
from benchmarks.needle.judge import Judge
from benchmarks.needle.net import CONFIG, Needle
from benchmarks.needle.tokens import make_tokenizer

LOG_EVERY = 25  # steps


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    minutes: float = 5.0
    peak_rate: float = 2e-3
    warmup_steps: int = 100
    decay_from: float = 0.6
    """Share of the time after which the learning rate falls linearly to 0."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    text_weight: float = 0.2
    """Weight of the text's loss relative to the answers'."""
    tokens_per_step: int = 65536
    lengths: tuple[int, ...] = (128, 256, 512, 2048, 8192, 16384)
    until: tuple[float, ...] = (0.15, 0.3, 0.4, 0.55, 0.85, 1.0)
    """Share of the training time at which each length ends."""
    enough: float = 0.98
    """Share of right digits at which training moves to the next length. The last length begins at a fixed time."""


class Curriculum:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.stage = recipe, 0

    @property
    def tokens(self) -> int:
        return self.recipe.lengths[self.stage]

    def move(self, progress: float, right: float) -> None:
        last = self.stage == len(self.recipe.lengths) - 1
        learnt = right >= self.recipe.enough and self.stage < len(self.recipe.lengths) - 2
        if not last and (learnt or progress >= self.recipe.until[self.stage]):
            self.stage += 1


def rate_at(recipe: Recipe, step: int, progress: float) -> float:
    falling = (1 - progress) / (1 - recipe.decay_from)
    return recipe.peak_rate * min(1.0, (step + 1) / recipe.warmup_steps, max(0.0, falling))


def losses(net: Needle, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean negative log-probabilities [3] of text, answers and aliases' answers, and their accuracies."""
    logits, targets, kinds = net(batch.ids)[:, :-1], batch.ids[:, 1:], batch.kinds[:, 1:]
    nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)
    right = logits.argmax(-1) == targets
    means = []
    for values in (nats, right.float()):
        masks = [kinds == kind for kind in (TEXT, ANSWER, ANSWER_OF_TWO)]
        means.append(torch.stack([(values * mask).sum() / mask.sum().clamp(min=1) for mask in masks]))
    return means[0], means[1]


def train(
    net: Needle, composer: Composer, recipe: Recipe, autocast: AbstractContextManager[Any]
) -> list[dict[str, Any]]:
    decayed = [p for p in net.parameters() if p.dim() == 2]
    plain = [p for p in net.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    curriculum, log = Curriculum(recipe), []
    recent: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=LOG_EVERY)
    began, step, seen = time.monotonic(), 0, 0
    while (progress := (time.monotonic() - began) / (60 * recipe.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(recipe, step, progress)
        batch = composer.compose(max(1, recipe.tokens_per_step // curriculum.tokens), curriculum.tokens, True)
        with autocast:
            nats, right = losses(net, batch)
        of_answers = nats[1:].sum()
        (of_answers + recipe.text_weight * nats[0]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append((nats.detach(), right))
        step, seen = step + 1, seen + batch.ids.numel()
        if step % LOG_EVERY == 0:
            mean_nats, mean_right = (torch.stack(column).mean(0).tolist() for column in zip(*recent))
            row = {
                "step": step, "seconds": round(time.monotonic() - began, 1), "million_tokens": round(seen / 1e6, 2),
                "length": curriculum.tokens, "nats": [round(x, 4) for x in mean_nats],
                "right": [round(x, 4) for x in mean_right],
            }  # fmt: skip
            log.append(row)
            print(json.dumps(row), flush=True)
            curriculum.move(progress, mean_right[1])
    return log


@torch.no_grad()
def judge(net: Needle, tokenizer: Any, device: str, lengths: list[int], prompts: int) -> dict[str, Any]:
    """Evaluate the saved weights: bfloat16, computed in float32 on a CPU."""

    def first_choice(ids: list[int]) -> torch.Tensor:
        return net(torch.tensor([ids], device=device))[0].argmax(-1)

    judging = Judge(tokenizer, first_choice, seed=1234)
    results: dict[str, Any] = {"inside": [], "at_end": [], "two_hops": []}
    for tokens in lengths:
        facts = min(24, tokens // 120)
        results["inside"].append(judging.inside(tokens, prompts, facts))
        results["at_end"].append(judging.at_end(tokens, prompts))
        results["two_hops"].append(judging.two_hops(tokens, 4 * prompts))
        shares = {name: rows[-1]["share"] for name, rows in results.items()}
        print(f"{tokens:>6} tokens: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()), flush=True)
        print(f"        at end by depth: {results['at_end'][-1]['by_depth']}", flush=True)
        print(f"        inside by distance: {results['inside'][-1]['by_distance']}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--rate", type=float, default=Recipe.peak_rate)
    parser.add_argument("--tokens-per-step", type=int, default=Recipe.tokens_per_step)
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=Recipe.lengths)
    parser.add_argument(
        "--judge", type=lambda text: list(map(int, text.split(","))), default=[1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--prompts", type=int, default=20, help="for each length and depth")
    parser.add_argument("--config", type=json.loads, default={}, help="changes to the model's config, as JSON")
    options = parser.parse_args()
    recipe = Recipe(
        seed=options.seed, minutes=options.minutes, peak_rate=options.rate, tokens_per_step=options.tokens_per_step,
        lengths=options.lengths, until=Recipe.until[-len(options.lengths) :],
    )  # fmt: skip
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer()
    net = Needle(CONFIG | options.config).to(device)
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters on {device}, torch {torch.__version__}", flush=True)
    composer = Composer(tokenizer, device, recipe.seed)
    autocast = torch.autocast(device, torch.bfloat16) if on_gpu else nullcontext()
    log = train(net, composer, recipe, autocast)
    net.to(torch.bfloat16)
    measured = judge(net if on_gpu else net.float(), tokenizer, device, options.judge, options.prompts)
    where = torch.cuda.get_device_name() if on_gpu else platform.machine()
    facts = {"recipe": asdict(recipe), "device": where, "torch": torch.__version__, "measured": measured, "log": log}
    write_folder(options.out, net, tokenizer, facts)


if __name__ == "__main__":
    main()
