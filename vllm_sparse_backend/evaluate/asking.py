"""Answers inside the prompt, asked of servers: started one after the other, or running; the same prompts for all."""

import hashlib
import json
import math
import os
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vllm_sparse_backend.bench.endpoint import Endpoint, RequestError
from vllm_sparse_backend.bench.report import BenchError, Report
from vllm_sparse_backend.bench.serve import Settings, max_positions
from vllm_sparse_backend.demo.scrape import PREFIX, parse
from vllm_sparse_backend.demo.server import Server, ServerError, sparse_args
from vllm_sparse_backend.evaluate.answers import (
    Prompt,
    Share,
    Templates,
    build_prompt,
    by_distance,
    score,
    standard_error,
)
from vllm_sparse_backend.evaluate.texts import prose, read_text

Case = dict[str, Any]
OnCase = Callable[[Case], None]

COLUMNS = {
    "label": "server",
    "tokens": "tokens",
    "answers": "right",
    "share": "share",
    "standard_error": "± s.e.",
    "of_first": "of the first's",
    "perplexity": "perplexity",
    "density": "density, all lengths",
    "failed": "failed requests",
}


@dataclass(frozen=True)
class Asking:
    """All that makes the prompts, but for the tokenizer."""

    lengths: tuple[int, ...]
    prompts: int
    """Of each length."""
    facts: int
    seed: int
    templates: Templates
    text: str | None
    first_token: str | None
    """Text of the token that prompts start with; empty for none; None for what the tokenizer or its files say."""

    @staticmethod
    def about(text: Path | None, lengths: Sequence[int], prompts: int, **others: Any) -> "Asking":
        if not lengths or min(lengths) < 1:
            raise BenchError(f"--lengths: given {list(lengths)}, expected numbers of tokens, with commas between")
        # Eight characters are more than a token has on average, and what is read is tokenised by the server.
        most = 8 * max(lengths) * max(4, prompts)
        return Asking(tuple(dict.fromkeys(lengths)), prompts, text=read_text(text, most) if text else None, **others)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def source(self) -> str:
        return self.text if self.text is not None else prose(2 * self.longest, self.seed)

    def key(self, *context: object) -> str:
        """Equal where the prompts are, and what they are asked in (``context``)."""
        made_of = asdict(self) | {"text": self.source, "context": context}
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]

    def build(self, endpoint: Endpoint) -> dict[tuple[int, int], Prompt]:
        """By length and number: each of a stretch of the text that begins elsewhere."""
        text_ids = _tokenize(endpoint, self.source)
        begin_ids = first_tokens(endpoint, self.first_token)
        # Stretches begin in different places, so that no two prompts of a length begin alike.
        spare = len(text_ids) - self.longest
        if spare < 16 * self.prompts:
            most = self.longest + 16 * self.prompts
            raise BenchError(f"text: given {len(text_ids):,} tokens, expected at least {most:,} for such prompts")

        built = {}
        for length in self.lengths:
            for i in range(self.prompts):
                rng = random.Random(f"{self.seed}/{length}/{i}")
                start = spare * i // self.prompts + rng.randrange(spare // self.prompts)
                stretch = text_ids[start : start + length]
                built[length, i] = build_prompt(
                    lambda text: endpoint.tokenize(text, special=False),
                    begin_ids, stretch, length, self.facts, self.templates, rng,
                )  # fmt: skip
        return built


def _tokenize(endpoint: Endpoint, text: str, chars: int = 200_000) -> list[int]:
    """In pieces that end with a line."""
    ids: list[int] = []
    while text:
        cut = text.rfind("\n", 0, chars) + 1 if len(text) > chars else len(text)
        ids += endpoint.tokenize(text[: cut or chars], special=False)
        text = text[cut or chars :]
    return ids


def first_tokens(endpoint: Endpoint, given: str | None) -> list[int]:
    """What prompts start with: the given token, or what the tokenizer adds, or the bos token of the model's folder.

    The tokenizer of a model that was trained with a bos token does not always add it, and attention without its sink is
    another one.
    """
    if given is None:
        plain, full = endpoint.tokenize("a", special=False), endpoint.tokenize("a")
        if plain and plain[0] in full and (added := full[: full.index(plain[0])]):
            return added
        if not endpoint.root:
            return []
        try:
            config = json.loads((Path(endpoint.root) / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []  # a name that the server resolved, or a folder of another machine
        bos = config.get("bos_token")
        given = bos.get("content") if isinstance(bos, dict) else bos
    if not given:
        return []
    ids = endpoint.tokenize(given, special=False)
    if len(ids) != 1:
        raise BenchError(f"--first-token: {given!r} is {len(ids)} tokens of {endpoint.model}, expected one")
    return ids


@dataclass(frozen=True)
class Contestant:
    """One server to ask; ``open`` starts it, or finds it running."""

    label: str
    model: str
    """Its name, without a folder's path."""
    what: str
    """Its address or its settings, whole: what a label leaves out."""
    open: Callable[[], AbstractContextManager[Endpoint]] = field(compare=False)

    @staticmethod
    def running(label: str | None, url: str) -> "Contestant":
        endpoint = Endpoint.connect(label or url, url)
        return Contestant(
            label or endpoint.model, Path(endpoint.model).name, endpoint.url, lambda: nullcontext(endpoint)
        )

    @staticmethod
    def served(label: str, model: Path, args: Sequence[str], what: str) -> "Contestant":
        @contextmanager
        def start() -> Iterator[Endpoint]:
            # A long prompt needs more than the cache that a server on a CPU gets otherwise.
            env = {name: os.environ[name] for name in ("VLLM_CPU_KVCACHE_SPACE",) if name in os.environ}
            try:
                with Server(model, args, env=env) as server:
                    yield Endpoint.connect(label, server.url)
            except ServerError as error:
                raise BenchError(f"{label}: {error}") from error

        return Contestant(label, model.name, what, start)


def started(model: Path, settings: Sequence[Settings], stock: bool, longest: int, extra: str) -> list[Contestant]:
    """Stock and each of the settings, served on this machine, one at a time."""
    if (most := max_positions(model)) is not None and longest >= most:
        raise BenchError(
            f"{model} has {most:,} positions, expected prompts to be shorter, and {longest:,} were asked for"
        )
    args = ("--max-model-len", str(longest + 1), *shlex.split(extra))
    labels, whole = [str(one) for one in settings], [json.dumps(dict(one.values)) for one in settings]
    # Those that differ in more than their parameters have their whole text for a name.
    labels = [text if labels.count(name) > 1 else name for name, text in zip(labels, whole)]
    found = [Contestant.served("stock", model, args, "stock")] if stock else []
    for name, text, one in zip(labels, whole, settings):
        found.append(Contestant.served(name, model, (*args, *sparse_args(one.values)), text))
    return found


def resume(report: Report, path: Path | None, key: str, contestants: Sequence[Contestant]) -> None:
    """Take over what a file from an earlier run holds, less failed requests. Raises BenchError if it is of others."""
    if path is None or not path.exists():
        return
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        held = {case["label"]: case["what"] for case in cases}
        keys = {case["key"] for case in cases}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of `eval answers`: {error!r}") from None
    if keys - {key}:
        raise BenchError(f"{path}: holds answers to other prompts, or of other servers: name another file for these")
    for one in contestants:
        if (what := held.get(one.label, one.what)) != one.what:
            raise BenchError(f"{path}: holds {one.label} as {what}, now it is {one.what}: name another file")
    report.cases.extend(case for case in cases if not case.get("error"))


def ask_all(
    contestants: Sequence[Contestant], asking: Asking, key: str, report: Report, concurrency: int, on_case: OnCase
) -> None:
    """A case for each contestant and prompt that the report does not hold yet. Raises BenchError."""
    if len({one.label for one in contestants}) < len(contestants):
        raise BenchError(f"labels {', '.join(one.label for one in contestants)}: expected each of them once")
    prompts: dict[tuple[int, int], Prompt] = {}
    sample: list[int] = []
    wanted = [(length, i) for length in asking.lengths for i in range(asking.prompts)]
    for one in contestants:
        held = {(case["tokens"], case["prompt"]) for case in report.cases if case["label"] == one.label}
        todo = [at for at in wanted if at not in held]
        if not todo:
            continue
        with one.open() as endpoint:
            if not prompts:
                prompts, sample = asking.build(endpoint), endpoint.tokenize(asking.source[:2000])
            elif endpoint.tokenize(asking.source[:2000]) != sample:
                raise BenchError(f"{one.label}: its tokenizer is another than the first server's: prompts would differ")
            base = {"key": key, "label": one.label, "what": one.what}
            ask_server(endpoint, {at: prompts[at] for at in todo}, base, report, concurrency, on_case)


def ask_server(
    endpoint: Endpoint,
    prompts: Mapping[tuple[int, int], Prompt],
    base: Case,
    report: Report,
    concurrency: int,
    on_case: OnCase,
) -> None:
    """A case for each of the prompts, by length and number, and one for the density of all; each with ``base``."""
    before = _pairs(endpoint)
    pool = ThreadPoolExecutor(concurrency)
    try:
        for at, case in zip(prompts, pool.map(partial(ask_one, endpoint), prompts.values())):
            case = {"part": "prompt", **base, "tokens": at[0], "prompt": at[1], **case}
            report.add_case(case)
            on_case(case)
    finally:
        # Who breaks off does not wait for prompts of minutes: they end with the server.
        pool.shutdown(wait=False, cancel_futures=True)
    after = _pairs(endpoint)
    if before is not None and after is not None:
        kept, causal = after[0] - before[0], after[1] - before[1]
        # None where nothing ran sparse: all prompts may lie within min_tokens.
        density = kept / causal if causal else None
        report.add_case({"part": "density", **base, "tokens": None, "prompt": None, "density": density})


def ask_one(endpoint: Endpoint, prompt: Prompt) -> Case:
    """A request that fails, or is not answered whole, has its ``error`` and no answers."""
    case: Case = {"sha256": prompt.sha256, "error": None}
    began = time.perf_counter()
    try:
        scores = score(prompt, endpoint.prompt_logprobs(prompt.token_ids))
    except RequestError as error:
        return case | {"error": str(error)}
    answers = [
        {"place": answer.begin, "distance": answer.distance, "ranks": ranks}
        for answer, ranks in zip(prompt.answers, scores.ranks)
    ]
    seconds = round(time.perf_counter() - began, 3)
    return case | {"seconds": seconds, "nats": scores.nats, "others": scores.others, "answers": answers}


def _pairs(endpoint: Endpoint) -> tuple[int, int] | None:
    """Kept and causal pairs of a server's sparse rows since its start; None where it does not count them."""
    if PREFIX not in endpoint.metrics():
        return None
    # Counters are told once a second, in steps: causal pairs in one, kept ones in the next. These are dense.
    time.sleep(1.1)
    try:
        endpoint.ask([1] * 8, 4)
    except RequestError:
        return None
    layers = parse(endpoint.metrics()).layers.values()
    return sum(counts.kept_pairs for counts in layers), sum(counts.causal_pairs for counts in layers)


def right_answers(case: Case) -> list[bool]:
    """Right is an answer whose tokens are all of rank 1."""
    return [all(rank == 1 for rank in answer["ranks"]) for answer in case["answers"]]


def summaries(cases: Sequence[Case], labels: Sequence[str], lengths: Sequence[int]) -> list[Case]:
    """For each label and length: right of asked, beside the first label's on the prompts that both answered."""
    asked = {(c["label"], c["tokens"], c["prompt"]): c for c in cases if c["part"] == "prompt"}
    density = {c["label"]: c["density"] for c in cases if c["part"] == "density"}
    rows = []
    for length in lengths:
        base = {i: c for (label, n, i), c in asked.items() if label == labels[0] and n == length and c["error"] is None}
        for label in labels:
            of = [c for (name, n, _), c in asked.items() if name == label and n == length]
            good = {c["prompt"]: c for c in of if c["error"] is None}
            judged = [
                (answer["distance"], right)
                for c in good.values()
                for answer, right in zip(c["answers"], right_answers(c))
            ]
            whole = Share(sum(right for _, right in judged), len(judged))
            shares = [Share(sum(right_answers(c)), len(c["answers"])) for c in good.values()]
            both = base.keys() & good.keys()
            first = sum(sum(right_answers(base[i])) for i in both)
            others = sum(c["others"] for c in good.values())
            rows.append({
                "label": label, "tokens": length, "answers": str(whole) or None, "right": whole.right,
                "asked": whole.asked, "share": whole.share if judged else None,
                "standard_error": standard_error(shares) if judged else None,
                "of_first": sum(sum(right_answers(good[i])) for i in both) / first if first else None,
                "perplexity": math.exp(sum(c["nats"] for c in good.values()) / others) if others else None,
                "density": density.get(label), "failed": len(of) - len(good), "by_distance": by_distance(judged),
            })  # fmt: skip
    return rows


def distance_columns(rows: Sequence[Case]) -> tuple[dict[str, str], list[Case]]:
    """Columns and rows of a table of right answers by distance."""
    buckets = sorted({bounds for row in rows for bounds in row["by_distance"]})
    columns = {"label": "server", "tokens": "tokens"}
    columns |= {str(bounds): f"{bounds[0]:,} to {bounds[1] - 1:,}" for bounds in buckets}
    shown = []
    for row in rows:
        shares = {str(bounds): str(share) for bounds, share in row["by_distance"].items()}
        shown.append({"label": row["label"], "tokens": row["tokens"], **shares})
    return columns, shown


def add_figures(report: Report, rows: Sequence[Case], model: str) -> None:
    """Of those whose requests were all answered: prompts would differ otherwise."""
    for row in rows:
        if not row["failed"] and row["share"] is not None:
            name = f"{row['label']}, answers inside the prompt, {row['tokens']:,} tokens, {model}"
            report.add_figure(f"{name}: right", row["share"], "share", "higher")
            report.add_figure(f"{name}: perplexity", row["perplexity"], "ratio", "lower")
