# SPDX-License-Identifier: Apache-2.0
"""`eval answers` against stub and real servers."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.stub_server import FACT, METRICS, QUESTION, Api, Words, entry, running
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation.agreement import TOP
from vllm_sparse_backend.evaluation.answer_scores import read_cases


class Stub(Api):
    """A server whose model ranks the last token of each answer at ``rank(distance)`` and all other tokens first.

    ``fault`` returns the fault of a request by its number: "away", which leaves the counters unchanged, "refuse",
    "missing" or "cut". ``reason`` is the reason for dense rows.
    """

    def __init__(
        self,
        rank: Callable[[int], int],
        fault: Callable[[int], str | None] = lambda n: None,
        kept_of_100: int | None = None,
    ) -> None:
        self.rank, self.fault, self.kept_of_100 = rank, fault, kept_of_100
        self.reason = Fallback.TOO_SHORT
        self.encode = Words()
        self.perplexities = [2.0]
        """Perplexities of the prompts in order, repeated."""
        self.root: Path | None = None
        self.prompts: list[list[int]] = []
        self.levels: list[object] = []
        self.distances: list[tuple[int, int]] = []
        """A prompt's tokens, and a question's distance from its fact."""

    def at(self, folder: Path) -> "Stub":
        self.root = folder
        return self

    def tokenize(self, text: str) -> list[int]:
        return self.encode(text)

    def prompt_logprobs(self, ids: list[int]) -> list[dict | None]:
        text = self.encode.decode(ids)
        names = {i: token for token, i in self.encode.ids.items()}
        starts = itertools.accumulate((len(names[i]) for i in ids), initial=0)
        at = {character: token for token, character in enumerate(starts)}
        stated = {match[1]: at[match.start(2)] for match in FACT.finditer(text)}
        likely = -math.log(self.perplexities[(len(self.prompts) - 1) % len(self.perplexities)])
        logprobs: list[dict | None] = [None, *(entry(token, likely) for token in ids[1:])]
        for match in QUESTION.finditer(text):
            begin = at[match.start(2)]
            self.distances.append((len(ids), begin - stated[match[1]]))
            logprobs[begin + 6] = entry(ids[begin + 6], -9.0, self.rank(begin - stated[match[1]]))
        return logprobs

    def metrics(self) -> str:
        """Return counters with 100 causal pairs per prompt so far. If ``kept_of_100`` is -1, no row ran sparse."""
        if self.kept_of_100 is None:
            return ""
        dense = f'sparse_prefill_rows_total{{path="dense",reason="{self.reason}"}} {len(self.prompts)}\n'
        kept, causal = self.kept_of_100 * len(self.prompts), 100 * len(self.prompts)
        pairs = METRICS.format(kept=kept, causal=causal) if kept >= 0 else ""
        return f"# TYPE sparse_prefill_rows counter\n{dense}{pairs}"

    def complete(self, body: dict) -> tuple[int, dict]:
        assert (body["max_tokens"], body["prompt_logprobs"], body["temperature"]) == (1, TOP, 0)
        fault = self.fault(len(self.prompts))
        if fault == "away":
            return 503, {"error": "try again"}
        self.prompts.append(body["prompt"])
        self.levels.append(body.get("vllm_xargs", {}).get("sparse_prefill"))
        logprobs = self.prompt_logprobs(body["prompt"])
        if fault == "refuse":
            return 400, {"error": "prompt too long"}
        if fault == "missing":
            logprobs[100] = entry(99999)
        return 200, {"choices": [{"text": "x"} | ({} if fault == "cut" else {"prompt_logprobs": logprobs})]}


def run(*args: object):
    return CliRunner().invoke(app, ["eval", "answers", *map(str, args)], catch_exceptions=False)


LENGTHS = ("--lengths", "2000,6000", "--count", 2, "--facts", 12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model whose tokenizer names a first token but does not add it."""
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    return tmp_path


def test_a_server_that_loses_far_facts(folder: Path) -> None:
    stock, ours = Stub(lambda distance: 1), Stub(lambda distance: 2 if distance >= 1024 else 1)
    ours.encode = stock.encode
    out = folder / "all.json"
    with running(stock.at(folder)) as stock_url, running(ours.at(folder)) as ours_url:
        urls = ("--url", stock_url, "--url", f"{ours_url}/v1")
        result = run(*urls, *LENGTHS, "--json", out)
    assert result.exit_code == 0, result.output
    assert stock.prompts == ours.prompts
    assert [len(prompt) for prompt in stock.prompts] == [2000, 2000, 6000, 6000]
    assert all(prompt[0] == 0 for prompt in stock.prompts)
    assert len({tuple(prompt[:16]) for prompt in stock.prompts}) == 4

    cases = json.loads(out.read_text())["cases"]
    rows = {(row["label"], row["tokens"]): row for row in json.loads(out.read_text())["summary"]}
    for length in (2000, 6000):
        ranks = [ranks for case in cases if case["key"][1] == length for ranks in case["scores"]["ranks"]][24:]
        distances = [distance for n, distance in ours.distances if n == length]
        near = sum(distance < 1024 for distance in distances)
        assert 0 < near < 24
        forgetful = rows[ours_url, length]
        assert (forgetful["right"], forgetful["asked"], rows[stock_url, length]["share"]) == (near, 24, 1)
        assert forgetful["perplexity"] == pytest.approx(2)
        assert (forgetful["text_kl"], forgetful["text_top1"]) == (0, 1)
        lost_share = (24 - near) / sum(map(len, ranks))
        assert forgetful["answers_top1"] == pytest.approx(1 - lost_share)
    assert re.search(rf"{ours_url} +\| facts, 6,000 +\| +{near} of 24 ", result.output)


def test_the_change_of_perplexity_is_told_with_its_standard_error_over_prompts(folder: Path) -> None:
    stock, ours, out = Stub(lambda distance: 1), Stub(lambda distance: 1), folder / "all.json"
    ours.encode, ours.perplexities = stock.encode, [2.1, 2.2]
    with running(stock) as stock_url, running(ours) as ours_url:
        urls = ("--url", stock_url, "--url", ours_url)
        result = run(*urls, *LENGTHS, "--json", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["summary"]
    of_stock, of_ours = ([row for row in rows if row["label"] == label] for label in (stock_url, ours_url))
    for row in of_stock:
        assert "perplexity_change" not in row
    # Differences of nats are log 1.05 and log 1.1: their mean, and half of the distance between them.
    ratio = math.sqrt(1.05 * 1.1)
    for row in of_ours:
        assert row["perplexity_change"] == pytest.approx(100 * (ratio - 1))
        assert row["perplexity_change_error"] == pytest.approx(100 * ratio * math.log(1.1 / 1.05) / 2)
    assert result.output.count("+7.47") == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [("refuse", "answered 400"), ("missing", "no entry for token"), ("cut", "has no prompt_logprobs")],
)
def test_a_failed_request_is_reported_asked_again_and_never_counted(folder: Path, fault: str, said: str) -> None:
    stub = Stub(lambda distance: 1, lambda n: fault if n == 1 else None)
    out = folder / "all.json"
    with running(stub.at(folder)) as url:
        command = ("--url", url, *LENGTHS, "--json", out)
        result = run(*command)
        assert result.exit_code == 1
        assert said in result.output
        assert "12 of 12" in result.output  # only the prompt that was answered
        assert "24 of 24" in result.output
        again = run(*command)
        assert again.exit_code == 0, again.output
        assert len(stub.prompts) == 5
        assert stub.prompts[4] == stub.prompts[1]
        assert again.output.count("24 of 24") == 2
        other = run(*command[:-4], "--facts", 11, "--json", out)
        assert other.exit_code == 1
        assert "measured with facts 12, now 11" in other.stderr


def test_levels_are_asked_of_one_server_each_by_itself(folder: Path) -> None:
    """Levels run one after the other with the same prompts, because a server's counters would otherwise mix their
    densities."""
    stock, ours, out = Stub(lambda distance: 1), Stub(lambda distance: 1, kept_of_100=25), folder / "all.json"
    ours.encode = stock.encode  # equal token ids
    with running(stock) as first, running(ours) as second:
        options = ("--url", first, "--url", second, *LENGTHS, "--json", out)
        levels = ("--level", "high", "--level", "0")
        result = run(*options, *levels)
        assert result.exit_code == 0, result.output
        number = len(stock.prompts)
        assert stock.levels == [None] * number  # a stock server has no levels
        assert ours.levels == ["high"] * number + [0] * number
        assert ours.prompts == 2 * stock.prompts
        cases = json.loads(out.read_text())["cases"]
        assert {case["label"] for case in cases} == {first, f"{second} high", f"{second} 0"}
        assert {prompt.pairs.density for prompt in read_cases(cases) if prompt.pairs} == {0.25}
        assert run(*options, *levels, "--level", "fast").exit_code == 0  # only this level is missing
        assert ours.levels == ["high"] * number + [0] * number + ["fast"] * number


@pytest.mark.parametrize("reason", [Fallback.TOO_SHORT, Fallback.REQUESTED])
def test_density_is_of_these_requests_and_a_server_that_ran_nothing_sparse_says_why(
    folder: Path, reason: Fallback
) -> None:
    sparse, idle = Stub(lambda distance: 1, kept_of_100=30), Stub(lambda distance: 1, kept_of_100=-1)
    idle.encode, idle.reason = sparse.encode, reason
    out = folder / "all.json"
    with running(sparse) as first, running(idle) as second:
        urls = ("--url", first, "--url", second)
        result = run(*urls, "--lengths", 2000, "--facts", 4, "--count", 2, "--json", out)
    assert result.exit_code == 0, result.output
    cases = json.loads(out.read_text())["cases"]
    densities = {prompt.label: prompt.pairs and prompt.pairs.density for prompt in read_cases(cases)}
    assert densities == {first: 0.3, second: None}
    assert f"{second}: no request ran sparse: {reason.explain} (dense rows: 2)" in result.output
    assert f"{first}: no request ran sparse" not in result.output


@pytest.mark.parametrize("level", ["exact", "0"])
def test_exact_requests_that_ran_exact_are_no_surprise(folder: Path, level: str) -> None:
    """They are a baseline on the same server."""
    stub = Stub(lambda distance: 1, kept_of_100=-1)
    stub.reason = Fallback.REQUESTED
    with running(stub) as url:
        options = ("--url", url, "--lengths", 2000, "--facts", 4, "--count", 2)
        assert "no request ran sparse" not in run(*options, "--level", level).output
        assert "no request ran sparse" in run(*options, "--level", "high").output


def test_tokenizers_that_differ_are_refused() -> None:
    stub, other = Stub(lambda distance: 1), Stub(lambda distance: 1)
    other.encode.ids["before all others"] = 1
    with running(stub) as first, running(other) as second:
        result = run("--url", first, "--url", second, *LENGTHS)
    assert result.exit_code == 1
    assert f"{second}: its tokenizer differs from the first server's" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "expected a model to serve, or the --url"),
        ((BUNDLED, "--url", "http://x"), "expected a model to serve, or the --url"),
        ((BUNDLED, "--lengths", "1024,8192"), "--facts: given 24, expected at most 8 in a prompt of 1,024 tokens"),
        ((BUNDLED, "--server-args", "--x 'unclosed"), '--server-args: given "--x \'unclosed"'),
        (
            ("--url", "http://x", "--settings", "{}", "--server-args", "--seed 7"),
            "--settings, --server-args: given with running servers, expected only with a MODEL",
        ),
    ],
)
def test_wrong_commands_are_told_why_before_a_server_starts(args: tuple[object, ...], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr
