# SPDX-License-Identifier: Apache-2.0
"""`bench serve` against stub servers of known speed, on a simulated clock."""

import json
import random
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.stub_server import SimulatedClock, Stub, running
from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.cli.common import serve_lengths
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation import compared_servers, serve_bench, vllm_server
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError, TimedAnswer
from vllm_sparse_backend.evaluation.compared_servers import Settings
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.serve_bench import Length
from vllm_sparse_backend.evaluation.vllm_server import NOT_FASTER_ON_CPU
from vllm_sparse_backend.progress import Progress


def run(*args: object):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)], catch_exceptions=False)


def cases_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"]


@pytest.fixture
def log():
    """(server, prompt) of every request, in order."""
    return []


@pytest.fixture
def clock(monkeypatch):
    return SimulatedClock.of_client(monkeypatch)


@pytest.fixture
def pair(log, clock):
    """Addresses of two stubs. Ours is four times as fast as stock."""
    with ExitStack() as stack:

        def start(**ours):
            stubs = Stub("stock", log, lambda n: 0.08, clock), Stub("ours", log, lambda n: 0.02, clock, **ours)
            return [stack.enter_context(running(stub)) for stub in stubs]

        yield start


def test_running_servers_are_compared(pair, log, tmp_path):
    stock, ours = pair()
    out = tmp_path / "all.json"
    servers = ("--url", stock, "--url", f"{ours}/v1")
    lengths = ("--lengths", "40,900,20+300", "--repeats", 4, "--output-tokens", 3)
    result = run(*servers, *lengths, "--json", out)
    assert result.exit_code == 0, result.output
    cases = {case["case"]: case for case in cases_of(out)}
    assert list(cases) == ["40 tokens", "900 tokens", "20 new after 300 cached"]
    for case in cases.values():
        assert case["failures"] == 0
        assert case["ttft_speed_up"] == pytest.approx(4)
        assert len(case["answers"]["stock"]) == len(case["answers"]["ours"]) == 4
    assert all(case["density"] == 0.25 for case in cases.values())
    # Servers get the same prompts in ABBA order, each prompt once; a cached prefix comes before its question.
    of_900 = [(name, tuple(prompt)) for name, prompt in log if len(prompt) == 900]
    assert [name for name, _ in of_900] == ["stock", "ours", "ours", "stock"] * 2 + ["stock", "ours"]
    assert all(count == 2 for count in Counter(prompt for _, prompt in of_900).values())
    at = next(i for i, (_, prompt) in enumerate(log) if len(prompt) == 320)
    assert log[at - 1][1] == log[at][1][:300]


def test_levels_of_one_server_are_compared_each(pair, log, tmp_path):
    stock, ours = pair()
    servers = ("--url", stock, "--url", ours, "--level", "half", "--level", "tenth")
    lengths = ("--lengths", "40,900,20+300", "--repeats", 2, "--output-tokens", 2)
    result = run(*servers, *lengths, "--json", tmp_path / "all.json")
    assert result.exit_code == 0, result.output
    for label, density in ((f"{ours} half", 0.5), (f"{ours} tenth", 0.1)):
        cases = [case for case in cases_of(tmp_path / "all.json") if case["label"] == label]
        assert [case["density"] for case in cases] == [density] * 3
        assert [case["ttft_speed_up"] for case in cases] == pytest.approx([4] * 3)
    # Each prompt goes to all of them in turn, back and forth; stock gets it once for any number of levels.
    of_900 = [name for name, prompt in log if len(prompt) == 900]
    assert of_900 == ["stock", "half", "tenth", "tenth", "half", "stock", "stock", "half", "tenth"]
    # A level's questions follow its own prefix, because it cannot use another level's.
    at = [i for i, (_, prompt) in enumerate(log) if len(prompt) == 320]
    assert all(log[i - 1] == (log[i][0], log[i][1][:300]) for i in at)


def test_servers_that_are_started_run_one_at_a_time_and_are_asked_the_same(log, clock, tmp_path, monkeypatch):
    """The servers are stand-ins that count how many of them run at a time."""
    up = []

    @contextmanager
    def server(model, args):
        name, first_s = ("ours", 0.02) if "sparse-prefill" in args else ("stock", 0.08)
        up.append(name)
        assert len(up) == 1
        with running(Stub(name, log, lambda n: first_s, clock)) as url:
            yield SimpleNamespace(url=url)
        up.remove(name)

    monkeypatch.setattr(compared_servers, "Server", server)
    monkeypatch.setattr(vllm_server, "has_cuda", lambda: False)
    settings = ("--settings", '{"method": "a_shape"}', "--settings", "streaming")
    out = tmp_path / "all.json"
    result = run(BUNDLED, *settings, "--lengths", "40,900", "--repeats", 2, "--output-tokens", 2, "--json", out)
    assert result.exit_code == 0, result.output
    assert [case["label"] for case in cases_of(out)] == ["a_shape"] * 2 + ["profile streaming"] * 2
    assert [case["ttft_speed_up"] for case in cases_of(out)] == pytest.approx([4] * 4)
    prompts = [tuple(prompt) for _, prompt in log]
    assert prompts == prompts[:6] * 3
    assert result.stdout.endswith(f"{NOT_FASTER_ON_CPU}\n")


SERVERS = ("--url", "http://127.0.0.1:9", "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lengths", "-5"), "--lengths: given '-5', expected whole numbers above 0"),
        (("--lengths", "20+"), "--lengths: given '20+'"),
        (
            ("--text", "none"),
            "--text: given 'none', expected a text file or a folder: none: cannot be read: No such file",
        ),
        (("--settings", "{}"), "--settings: given with running servers, expected only with a MODEL"),
    ],
)
def test_what_cannot_be_asked_is_said(options, said):
    result = run(*SERVERS, *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_server_that_is_named_twice_is_asked_once(pair):
    """Whatever the texts: a URL with a path, a number with more digits, JSON with more spaces."""
    _, ours = pair()
    assert "--url: given one server" in run("--url", ours, "--url", f"{ours}/v1", "--lengths", "40").stderr
    assert (
        "--url: given one server" in run("--url", ours, "--level", "0.5", "--level", "0.50", "--lengths", "40").stderr
    )
    settings = [Settings.parse(text) for text in ('{"method": "sale"}', '{"method":"sale"}')]
    assert len(compared_servers.servers_to_start(BUNDLED, settings, 100)) == 2


def test_one_server_is_too_few_and_two_of_its_levels_are_enough(pair, tmp_path):
    """The first level is the baseline, and tables use its name."""
    _, ours = pair()
    for levels in ((), ("--level", "half")):
        result = run("--url", ours, *levels, "--lengths", "40")
        assert result.exit_code == 2
        assert "--url: given one server, expected at least two, of which the first is the baseline" in result.stderr
    levels = ("--level", "half", "--level", "tenth")
    result = run("--url", ours, *levels, "--lengths", "40", "--repeats", 1, "--json", tmp_path / "all.json")
    assert result.exit_code == 0, result.output
    (case,) = cases_of(tmp_path / "all.json")
    assert (case["first"], case["label"]) == (f"{ours} half", f"{ours} tenth")
    assert f"{ours} tenth, one request at a time; baseline: {ours} half\n\n| prompt " in result.stdout
    assert "stock" not in result.stdout


@pytest.mark.parametrize("fault", ["short", "nan", "error", "refuse"])
def test_what_failed_is_reported_and_not_counted(pair, tmp_path, fault):
    stock, ours = pair(fault=lambda length: fault if length > 400 else None)
    lengths = ("--lengths", "40,900", "--repeats", 3, "--output-tokens", 2, "--json", tmp_path / "all.json")
    result = run("--url", stock, "--url", ours, *lengths)
    assert result.exit_code == 1, result.output
    written = json.loads((tmp_path / "all.json").read_text())
    good, bad = written["cases"]
    assert (good["failures"], bad["failures"]) == (0, 4)  # including the warm-up request
    assert good["ttft_speed_up"] == pytest.approx(4)
    assert bad["ours_first_s"] is None
    assert "ttft_speed_up" not in bad
    says = {
        "short": "the answer has 1 tokens, expected 2", "nan": "log-probability nan", "error": "out of cache",
        "refuse": "answered 400",
    }  # fmt: skip
    assert any(says[fault] in said for said in bad["said"]), bad["said"]


def test_a_level_that_the_server_lacks_is_refused_before_anything_is_measured(pair, log):
    stock, ours = pair()
    result = run("--url", stock, "--url", ours, "--level", "half", "--level", "third", "--lengths", "40")
    assert result.exit_code == 1
    assert "level 'third': answered 400: " in result.stderr
    assert len(log) == 1  # this request chose the other level


def test_first_and_later_tokens_are_the_servers(pair):
    """This also holds if several tokens arrive at a time: TPOT is the time from the first to the last token, divided by
    their number."""
    for burst in (1, 4):
        _, ours = pair(token_s=0.03, burst=burst)
        answer = Endpoint.connect("ours", ours).ask([5] * 50, 9)
        assert answer.tokens == 9
        assert (answer.first_token_s, answer.token_s) == pytest.approx((0.02, 0.03))


def test_medians_are_not_moved_by_one_request_and_failures_are_counted():
    stock = serve_bench.ServerResults([TimedAnswer(0.1 * i, 0.1 * i + 0.04, 5) for i in (1, 3, 2)])
    ours = serve_bench.ServerResults([TimedAnswer(0.1, 0.14, 5)] * 2 + [TimedAnswer(0.1, 1.63, 4)], ["no"])
    case = serve_bench.case_of(Length(40), "stock", stock, "x", ours)
    assert (case["stock_first_s"], case["ours_first_s"]) == (0.2, 0.1)
    assert case["ttft_speed_up"] == pytest.approx(2)
    assert case["stock_token_ms"] == pytest.approx(10) == case["ours_token_ms"]
    assert (case["failures"], case["said"]) == (1, ["ours: no"])
    # vLLM 0.33 sends tokens in a burst after a long prompt. The time between them is the client's, not the server's.
    for answer in (TimedAnswer(0.1, 0.1, 1), TimedAnswer(0.5, 0.5 + 8e-6, 64)):
        assert serve_bench.ServerResults([answer]).token_ms is None


def test_a_server_that_is_gone_is_named():
    for url in ("http://127.0.0.1:9", "http://127.0.0.1:80a", "http://[::1"):
        with pytest.raises(BenchError, match="stock: no model server at http"):
            Endpoint.connect("stock", url)
    with pytest.raises(RequestError, match=r"refused|ConnectionError|ConnectError"):
        Endpoint("stock", "http://127.0.0.1:9", "m").ask([1], 1)
    with pytest.raises(BenchError, match="expected a server's address such as"):
        Endpoint.connect("stock", "localhost:80")


def test_prompts_have_their_length_and_begin_apart():
    chosen = random.Random(0)
    prompts = Prompts([chosen.randrange(50) for _ in range(1500)])
    made = [prompts.take(length) for length in [40, 16, 5000] * 40]
    assert [len(prompt) for prompt in made] == [40, 16, 5000] * 40
    assert len({tuple(prompt[:16]) for prompt in made}) == len(made)
    with pytest.raises(BenchError, match="expected at least 1,024"):
        Prompts([1] * 100)


def test_long_prompts_are_asked_fewer_times_and_warmed_up_with_shorter_ones(log, clock):
    assert [serve_bench.repeats_of(Length(n), 21) for n in (1000, 20_000, 131_072)] == [21, 10, 3]
    assert serve_bench.repeats_of(Length(131_072), 2) == 2
    with running(Stub("stock", log, lambda n: 0, clock)) as url:
        servers = [Endpoint.connect("stock", url)] * 2
        workload = serve_bench.ServeWorkload((Length(40_000),), output_tokens=1, most_repeats=1, text=None)
        list(serve_bench.alternate_requests(servers, workload, Prompts(list(range(2000))), Progress()))
    assert [len(prompt) for _, prompt in log] == [32_768, 32_768, 40_000, 40_000]


def test_settings_that_a_server_would_refuse_are_refused_before_it_starts():
    for text in ('{"method": "sales"}', '{"min_token": 1}', "{", "[1]", "none.yaml", '{"profile": "none"}'):
        with pytest.raises(BenchError, match="--settings"):
            Settings.parse(text)
    assert Settings.parse("streaming", model=BUNDLED).values == {"profile": "streaming"}
    for text, problem in (
        ("minference-llama-3.1-8b-instruct", "the profile is for .* 32 layers"),
        ('{"crossover": "nosuch.json"}', "crossover: given 'nosuch.json'"),
    ):
        with pytest.raises(BenchError, match=problem):
            Settings.parse(text, model=BUNDLED)


def test_servers_get_room_for_what_is_asked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert serve_lengths(None, serve_bench.LENGTHS, 64, tmp_path) == (Length(1024), Length(8192))
    assert serve_lengths(None, serve_bench.LENGTHS, 64, None) == tuple(map(Length, serve_bench.LENGTHS))
    with pytest.raises(BenchError, match="--lengths: given none, expected lengths within the 16,384 positions"):
        serve_lengths(None, serve_bench.LENGTHS, 16_000, tmp_path)
