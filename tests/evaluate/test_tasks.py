# SPDX-License-Identifier: Apache-2.0
"""Tasks, against a reader that solves them from their text alone; and `eval tasks` against stub and real servers."""

import itertools
import json
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.tasks import FAMILIES, TASKS
from benchmarks.tasks.job import TaskJob, chosen_tasks, error_of_mean, perplexities, summaries
from benchmarks.tasks.task import Haystack, Prompts, Question, spread
from tests.evaluate.stub import Words, entry, running
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.demo.model import make_model
from vllm_sparse_backend.measure.answers import Templates
from vllm_sparse_backend.measure.endpoint import Completion
from vllm_sparse_backend.measure.report import BenchError

QUESTIONS = [name for name, task in TASKS.items() if isinstance(task, Question)]
ONE_NEEDLE = {"needle", "needle_multikey", "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2"}
ONE_NEEDLE |= {"niah_multikey_3", "key_value"}


def solve(prompt: str, seen: Callable[[str], str] = str) -> str:
    """The answer to any of the tasks, by who reads ``seen`` of the text and all of the question."""
    if match := re.search(r"what is the magic number of ([a-z ]+)\? Answer:$", prompt):
        found = re.findall(rf"The magic number of {match[1]} is (\d+)\.", seen(prompt))
    elif match := re.search(r"the special magic \w+ for (.+) mentioned in the provided text\?", prompt):
        names = re.split(r", and |, ", match[1])
        stated = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", seen(prompt))
        found = [value for name, value in stated if name in names]
    elif values := re.findall(r"Find all variables that are assigned the value (\d+)", prompt):
        links = re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", seen(prompt.rpartition("Memorize")[2]))
        found = values[-1:]
        for name, value in links:
            found += [name] if value in found else []
        found = found[1:]
    elif "10 most common words" in prompt:
        listed = seen(prompt.rpartition("Below is")[2])
        found = [word for word, _ in Counter(re.findall(r"\d+\. ([a-z]+)", listed)).most_common(10)]
    elif "most frequently appeared words" in prompt:
        text = seen(prompt.partition("coded words. ")[2].rpartition("\nQuestion")[0])
        found = [word for word, _ in Counter(text.split()).most_common(4) if word != "..."]
    else:
        match = re.search(r'Key: "(\S+)"\nCorresponding value:$', prompt)
        found = re.findall(rf'"{match[1]}": "(\S+)"', seen(prompt))
    return ", ".join(found)


class Model:
    """A server that solves the tasks it is asked, reading ``seen`` of them, and likes late tokens as ``nats`` says."""

    def __init__(
        self,
        seen: Callable[[str], str] = str,
        fault: Callable[[int], str | None] = lambda n: None,
        nats: Callable[[int], float] = lambda place: 1.0,
        tokenizes: bool = True,
    ) -> None:
        self.seen, self.fault, self.nats, self.tokenizes, self.pause_s = seen, fault, nats, tokenizes, 0.0
        self.api_key: str | None = None
        self.encode = Words()
        self.asked: list[str] = []
        self.busy, self.most_busy, self.lock = 0, 0, threading.Lock()

    def metrics(self) -> str:
        return ""

    def complete(self, body: dict) -> tuple[int, dict]:
        assert body["temperature"] == 0
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            found = [None, *(entry(token, -self.nats(place)) for place, token in enumerate(ids[1:], 1))]
            return 200, {"choices": [{"text": "x", "prompt_logprobs": found}]}
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        text = prompt if isinstance(prompt, str) else self.encode.decode(prompt)
        tokens = len(self.encode(text)) + (10 if chat else 0)
        assert ("cache_salt" in body) == self.tokenizes
        answer, end = "x", "length"
        if body["max_tokens"] > 1:
            fault = self.fault(len(self.asked))
            self.asked.append(text)
            if fault == "refuse":
                return 400, {"error": "prompt too long"}
            answer, end = solve(text, self.seen), "abort" if fault == "abort" else "stop"
        choice = {"message": {"content": answer}} if chat else {"text": answer}
        return 200, {"choices": [choice | {"finish_reason": end}], "usage": {"prompt_tokens": tokens}}


class Tokenizer:
    """An endpoint that tokenises, and nothing else."""

    def __init__(self) -> None:
        self.encode = Words()

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        return self.encode(text)

    def complete(self, prompt: str, max_tokens: int, chat: bool = False) -> Completion:
        return Completion("", len(self.encode(prompt)))


def prompts(text: str | None = None, tokenizes: bool = True, seed: int = 0, chat: bool = False) -> Prompts:
    return Prompts(seed, 5, Haystack(text), Templates(), chat, tokenizes, [0], [])


CODE = "".join(f"def f_{i}(x):\n    return x + {i}\n\n" for i in range(300))


@pytest.mark.parametrize("length", [4000, 6500])
@pytest.mark.parametrize("name", QUESTIONS)
def test_prompts_are_as_long_as_asked_for_and_hold_their_answers(name: str, length: int) -> None:
    task, endpoint = TASKS[name], Tokenizer()
    for text in (None, CODE) if name in ("needle", "niah_multivalue") else (None,):
        made = [task.fitting(endpoint, prompts(text), length, i) for i in range(3)]
        for written in made:
            tokens = 1 + len(endpoint.tokenize(written.prompt(False)))
            assert tokens <= length - task.answer_tokens
            assert tokens > 0.97 * (length - task.answer_tokens) - 60
            assert set(solve(written.prompt(False)).split(", ")) == set(written.expected)
            assert (written.depth is not None) == (name in ONE_NEEDLE)
        assert len({written.question for written in made}) == 3


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_seed_is_a_prompt_and_chats_end_with_the_question(name: str) -> None:
    task, endpoint = TASKS[name], Tokenizer()
    one, again, other = (task.fitting(endpoint, prompts(seed=seed), 4000, 1) for seed in (0, 0, 1))
    assert one == again
    assert one.question != other.question
    assert one.prompt(True) == one.question
    assert one.prompt(False) == one.question + one.begun
    assert solve(one.prompt(True)) == solve(one.prompt(False))


@pytest.mark.parametrize("name", sorted(ONE_NEEDLE))
def test_depths_go_from_the_beginning_to_the_end(name: str) -> None:
    task, endpoint = TASKS[name], Tokenizer()
    for number in range(5):
        written = task.fitting(endpoint, prompts(), 6000, number)
        assert written.depth == number / 4
        at = written.question.index(written.expected[0]) / len(written.question)
        assert at == pytest.approx(written.depth, abs=0.06)


def test_lengths_are_estimated_where_servers_do_not_count_tokens() -> None:
    endpoint = Tokenizer()
    for name in ("niah_single_2", "key_value", "fwe"):
        written = TASKS[name].fitting(endpoint, prompts(tokenizes=False), 6000, 2)
        tokens = len(endpoint.tokenize(written.prompt(False)))
        assert 0.85 * 6000 < tokens < 6000


def test_needles_lie_where_their_depths_say() -> None:
    assert spread(list("abcd"), ["1", "2", "3"], [1.0, 0.0, 0.5]) == ["2", "a", "b", "3", "c", "d", "1"]


def test_prompts_that_cannot_be_made_are_named() -> None:
    with pytest.raises(BenchError, match=r"cwe: its shortest prompt takes [\d,]+ tokens, expected at most 380"):
        TASKS["cwe"].check(Tokenizer(), prompts(), 500)
    with pytest.raises(BenchError, match="perplexity: text: given 0 tokens, expected at least 580"):
        TASKS["perplexity"].check(Tokenizer(), prompts(), 500)


def test_tasks_are_chosen_by_name_and_family() -> None:
    assert chosen_tasks("vt, needles,needle") == ("vt", "needle", "needle_multikey")
    assert len(chosen_tasks(",".join(FAMILIES))) == len(TASKS) == 15
    for wrong in ("vt,vvt", " ,"):
        with pytest.raises(BenchError, match="--tasks") as error:
            chosen_tasks(wrong)
        assert str(error.value).count("key_value") <= 1


def case(label: str, prompt: int, found: list[bool] | None, task: str = "vt") -> dict:
    base = {"part": "prompt", "label": label, "task": task, "tokens": 1000, "prompt": prompt}
    return base | ({"error": "down"} if found is None else {"error": None, "found": found})


def test_differences_are_of_prompts_that_both_answered() -> None:
    cases = [case("a", i, [True, True]) for i in range(4)] + [case("b", 0, None)]
    cases += [case("b", i, [True, i != 2]) for i in range(1, 4)]
    first, other = summaries(cases, ["a", "b"])
    assert (first["answers"], first["failed"], first["difference"]) == ("8 of 8", 0, None)
    assert (other["answers"], other["failed"]) == ("5 of 6", 1)
    assert other["difference"] == pytest.approx(-0.5 / 3)
    assert other["difference_error"] == pytest.approx(math.sqrt((2 / 36 + 1 / 9) / 2 / 3))
    assert error_of_mean([1.0]) is None


def test_perplexity_is_of_all_tokens_and_of_places() -> None:
    positions = {"a": [[0, 1024, 1023.0, 1023], [1024, 2048, 2048.0, 1024]], "b": [[0, 1024, 0.0, 1023]]}
    cases = []
    for label, number in itertools.product("ab", (0, 1)):
        cases.append(case(label, number, None, "perplexity") | {"error": None, "positions": positions[label]})
    first, other = perplexities(cases, ["a", "b"])
    assert first["by_place"] == pytest.approx({(0, 1024): math.e, (1024, 2048): math.e**2})
    assert first["perplexity"] == pytest.approx(math.exp(3071 / 2047))
    assert first["standard_error"] == 0
    assert (other["perplexity"], other["of_first"]) == pytest.approx((1, math.exp(-3071 / 2047)))


def run(*args: object):
    return CliRunner().invoke(app, ["eval", "tasks", *map(str, args)], catch_exceptions=False)


@pytest.mark.parametrize("given", [True, False], ids=["a text", "the project's own"])
def test_tasks_lengths_and_perplexity_may_be_added_to_a_file(tmp_path: Path, given: bool) -> None:
    (tmp_path / "code.py").write_text(CODE)

    def key(tasks: str, lengths: list[int], seed: int = 0) -> str:
        text = tmp_path / "code.py" if given else None
        others = {"seed": seed, "templates": Templates(), "chat": False, "first_token": None}
        return TaskJob.about(tasks, lengths, 2, text, **others).key("model")

    assert key("needle", [1500]) == key("needle,perplexity", [1000, 1500]) == key("perplexity", [1000])
    assert key("needle", [1500]) != key("needle", [1500], seed=1)


def test_a_server_that_reads_the_end_alone_is_told_by_depth(tmp_path: Path) -> None:
    stock = Model()
    ours = Model(lambda text: text[len(text) // 2 :], nats=lambda place: 2.0 if place >= 2048 else 1.0)
    ours.encode = stock.encode
    out, figures, html = tmp_path / "all.json", tmp_path / "figures.json", tmp_path / "page.html"
    (tmp_path / "code.py").write_text(CODE)
    options = (
        "--text",
        tmp_path / "code.py",
        "--lengths",
        "4000,6000",
        "--prompts",
        5,
        "--json",
        out,
        "--results",
        figures,
        "--html",
        html,
    )
    with running(stock) as one, running(ours) as other:
        urls = ("--url", one, "--label", "stock", "--url", f"{other}/v1", "--label", "forgetful")
        result = run(*urls, *options)
        assert result.exit_code == 0, result.output
        asked = len(stock.asked)
        assert run(*urls, *options).exit_code == 0
        assert len(stock.asked) == asked  # all of it was held
    assert stock.asked == ours.asked
    found = {row["name"]: row["value"] for row in json.loads(figures.read_text())}
    for name in QUESTIONS:
        for length in (4000, 6000):
            assert found[f"stock, {name}, {length:,} tokens, stub-model"] == 1, name
    for name in ONE_NEEDLE:
        assert found[f"forgetful, {name}, 6,000 tokens, stub-model"] in (0.4, 0.6), name
    for name in ("niah_multivalue", "niah_multiquery", "vt"):
        assert found[f"forgetful, {name}, 6,000 tokens, stub-model"] < 0.8, name
    assert found["stock, perplexity, 6,000 tokens, stub-model"] == pytest.approx(math.e, rel=1e-3)
    assert found["forgetful, perplexity, 4,000 tokens, stub-model"] < 4.5
    assert found["forgetful, perplexity, 6,000 tokens, stub-model"] > 5.1
    page = html.read_text()
    assert all(f">{name}</" in page for name in QUESTIONS)
    assert "forgetful" in page


@pytest.mark.parametrize(("fault", "said"), [("refuse", "answered 400"), ("abort", "was not finished: 'abort'")])
def test_a_failed_request_is_reported_asked_again_and_never_counted(tmp_path: Path, fault: str, said: str) -> None:
    model, out, figures = Model(fault=lambda n: fault if n == 1 else None), tmp_path / "all.json", tmp_path / "f.json"
    with running(model) as url:
        options = ("--tasks", "needle,vt", "--lengths", 1500, "--prompts", 3, "--json", out, "--results", figures)
        result = run("--url", url, *options)
        assert result.exit_code == 1
        assert said in result.output
        assert "2 of 2" in result.output
        assert [row["name"] for row in json.loads(figures.read_text())] == ["stub-model, vt, 1,500 tokens, stub-model"]
        again = run("--url", url, *options)
        assert again.exit_code == 0, again.output
        assert len(model.asked) == 7
        assert model.asked[6] == model.asked[1]
        more = run("--url", url, *options, "--tasks", "needle,vt,niah_single_2")
        assert more.exit_code == 0
        assert len(model.asked) == 10
        other = run("--url", url, *options, "--seed", 1)
        assert "holds answers to other prompts" in other.stderr


def test_servers_without_a_tokenizer_and_chats(tmp_path: Path) -> None:
    model = Model(tokenizes=False)
    with running(model) as url:
        wanted = ("--url", url, "--lengths", 2500, "--prompts", 2, "--concurrency", 2)
        result = run(*wanted, "--tasks", "needle,niah_multiquery", "--chat", "--json", tmp_path / "all.json")
        assert result.exit_code == 0, result.output
        refused = run(*wanted, "--tasks", "perplexity")
    assert "perplexity needs a vLLM server" in refused.stderr
    cases = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert all(all(one["found"]) for one in cases)
    assert all(1900 < one["prompt_tokens"] < 2500 for one in cases)


def test_servers_that_want_a_key_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.api_key = "secret"
    with running(model) as url:
        command = ("--url", url, "--tasks", "needle", "--lengths", 1500, "--prompts", 1)
        assert "401" in run(*command).stderr
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert run(*command).exit_code == 0


def test_randomness_is_seeded() -> None:
    assert prompts().rng("a", 1).random() == random.Random("0/a/1").random()


@pytest.mark.server
def test_a_real_server(tmp_path: Path) -> None:
    """Stock and ours on a model that knows nothing: greedy answers and perplexities come back."""
    model = make_model(tmp_path / "model")
    out = tmp_path / "all.json"
    options = ("--tasks", "needle,niah_multikey_2,perplexity", "--lengths", 1200, "--prompts", 2, "--json", out)
    result = run(model, *options, "--settings", '{"method": "sale", "min_tokens": 256, "min_query_tokens": 1}')
    assert result.exit_code == 0, result.output
    cases = [case for case in json.loads(out.read_text())["cases"] if case["part"] == "prompt"]
    assert len(cases) == 12  # three tasks, two prompts, two servers
    by_label = [{c["sha256"] for c in cases if c["label"] == label} for label in {c["label"] for c in cases}]
    assert by_label[0] == by_label[1]
    assert all(1000 < c["prompt_tokens"] <= 1200 for c in cases if c["task"] != "perplexity")
