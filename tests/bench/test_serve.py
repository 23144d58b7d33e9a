# SPDX-License-Identifier: Apache-2.0
"""`bench serve` against stub servers of known speed, and once against real ones."""

import itertools
import json
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.bench.stub import Stub, running
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.demo.model import CONFIG, bundled_model, make_model
from vllm_sparse_backend.measure import latency, load, serve
from vllm_sparse_backend.measure.endpoint import Endpoint, Prompts, RequestError
from vllm_sparse_backend.measure.latency import Length
from vllm_sparse_backend.measure.report import BenchError, Report


def run(*args: object):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)], catch_exceptions=False)


@pytest.fixture
def log():
    """(server, prompt) of every request, in order."""
    return []


@pytest.fixture
def pair(log):
    """Addresses of two stubs; ours is four times as fast."""
    with ExitStack() as stack:

        def start(**ours):
            stubs = Stub("stock", log, lambda n: 0.08), Stub("ours", log, lambda n: 0.02, **ours)
            return [stack.enter_context(running(stub)) for stub in stubs]

        yield start


def test_running_servers_are_compared(pair, log, tmp_path):
    stock, ours = pair()
    files = ("--json", tmp_path / "all.json", "--results", tmp_path / "results.json", "--png", tmp_path / "a.png")
    lengths = ("--lengths", "40,900", "--cached", 300, "--new", 20, "--repeats", 4, "--output-tokens", 3)
    mixed = ("--requests", 6, "--rate", 100, "--short", 30, "--long", 500)
    result = run("--stock-url", stock, "--url", f"{ours}/v1", "--label", "a_shape", *lengths, *mixed, *files)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "all.json").read_text())
    cases = {case["case"]: case for case in written["cases"] if case["part"] == "latency"}
    assert list(cases) == ["40 tokens", "900 tokens", "20 new after 300 cached"]
    for case in cases.values():
        assert case["failures"] == 0
        assert 2 < case["times_sooner"] < 6
        assert len(case["answers"]["stock"]) == len(case["answers"]["ours"]) == 4
    mixed = [case for case in written["cases"] if case["part"] == "load"]
    assert [case["answered"] for case in mixed] == [6, 6]
    names = {row["name"] for row in json.loads((tmp_path / "results.json").read_text())}
    assert {
        "vllm serve, a_shape, 900 tokens: first token, times sooner",
        "vllm serve, a_shape, 20 new after 300 cached: first token, times sooner",
        "vllm serve, a_shape, 40 tokens: per output token, times faster",
        "vllm serve, a_shape, mixed load: p99 of short requests' first token, times sooner",
        "vllm serve, a_shape, mixed load: throughput, times stock's",
        "vllm serve, a_shape, mixed load: density of its sparse rows",
        "vllm serve, a_shape, 40 tokens: density of its sparse rows",
        "vllm serve, a_shape: density of its sparse rows",
    } <= names
    assert all(case["density"] == 0.25 for case in [*cases.values(), mixed[1], written["cases"][-1]])
    assert mixed[0]["density"] is None  # stock's
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # Asked in turn, ABBA, each the same prompts; no prompt twice; a cached prefix goes before its question.
    of_900 = [(name, tuple(prompt)) for name, prompt in log if len(prompt) == 900]
    assert [name for name, _ in of_900] == ["stock", "ours", "ours", "stock"] * 2 + ["stock", "ours"]
    assert all(count == 2 for count in Counter(prompt for _, prompt in of_900).values())
    at = next(i for i, (_, prompt) in enumerate(log) if len(prompt) == 320)
    assert log[at - 1][1] == log[at][1][:300]


def test_levels_of_one_server_are_compared_each(pair, log, tmp_path):
    stock, ours = pair()
    files = ("--json", tmp_path / "all.json", "--results", tmp_path / "results.json")
    lengths = ("--lengths", "40,900", "--cached", 300, "--new", 20, "--repeats", 2, "--output-tokens", 2)
    mixed = ("--requests", 4, "--clients", 3, "--short", 30, "--long", 500)
    servers = ("--stock-url", stock, "--url", ours, "--level", "half", "--level", "tenth")
    result = run(*servers, *lengths, *mixed, *files)
    assert result.exit_code == 0, result.output
    cases = json.loads((tmp_path / "all.json").read_text())["cases"]
    for label, density in (("half", 0.5), ("tenth", 0.1)):
        own = [case for case in cases if case["label"] == label]
        assert [case["part"] for case in own] == ["latency"] * 3 + ["load", "load", "density"]
        assert [case["density"] for case in own] == [density] * 3 + [None, density, density]
        assert all(case["times_sooner"] > 1.3 for case in own[:3])
    figures = {row["name"]: row["value"] for row in json.loads((tmp_path / "results.json").read_text())}
    assert figures["vllm serve, tenth, 900 tokens: density of its sparse rows"] == 0.1
    assert figures["vllm serve, half, mixed load of 3 clients: throughput, times stock's"] > 1
    # One prompt to all of them in turn, there and back; stock once, however many levels.
    of_900 = [name for name, prompt in log if len(prompt) == 900]
    assert of_900 == ["stock", "half", "tenth", "tenth", "half", "stock", "stock", "half", "tenth"]
    assert len({tuple(prompt) for _, prompt in log if len(prompt) == 900}) == 3
    # A level's questions come after its own prefix: another level's is none of its own.
    at = [i for i, (_, prompt) in enumerate(log) if len(prompt) == 320]
    assert all(log[i - 1] == (log[i][0], log[i][1][:300]) for i in at)
    assert "3 clients, each of which sends the next" in result.output
    run(*servers, "--lengths", "", *mixed, "--json", tmp_path / "load.json")
    cases = json.loads((tmp_path / "load.json").read_text())["cases"]
    assert [case["part"] for case in cases] == ["load"] * 4 + ["density"] * 2


def test_servers_that_do_not_fit_side_by_side_are_asked_the_same(log, tmp_path, monkeypatch):
    """Stand-ins for servers that count how many of them run at a time."""
    up = []

    class OneServer:
        def __init__(self, model, args):
            self.is_ours = "sparse-prefill" in args

        def __enter__(self):
            name, first_s = ("ours", 0.02) if self.is_ours else ("stock", 0.08)
            self.running = running(Stub(name, log, lambda n: first_s))
            self.url = self.running.__enter__()
            up.append(self)
            assert len(up) == 1
            return self

        def __exit__(self, *error):
            up.remove(self)
            self.running.__exit__(*error)

    monkeypatch.setattr(serve, "Server", OneServer)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lengths = ("--lengths", "40,900", "--repeats", 2, "--output-tokens", 2, "--requests", 0)
    settings = ("--settings", '{"method": "a_shape"}', "--settings", "streaming")
    result = run(tmp_path, "--apart", *settings, *lengths, "--json", tmp_path / "all.json")
    assert result.exit_code == 0, result.output
    cases = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert [(case["label"], case.get("case")) for case in cases] == [
        (label, case) for label in ("a_shape", "profile streaming") for case in ("40 tokens", "900 tokens", None)
    ]
    assert all(case["times_sooner"] > 1.3 for case in cases if case["part"] == "latency")
    assert {case["density"] for case in cases} == {0.25}
    asked = [tuple(prompt) for _, prompt in log]
    assert asked == asked[:6] * 3
    result = run(tmp_path, "--apart", *lengths, "--label", "mine", "--json", tmp_path / "named.json")
    assert {case["label"] for case in json.loads((tmp_path / "named.json").read_text())["cases"]} == {"mine"}
    for wrong, says in (
        (["--apart"], "expected a MODEL and --requests 0"),
        ([*settings, "--label", "x"], "expected one"),
    ):
        result = run(tmp_path, *wrong)
        assert result.exit_code == 1
        assert says in result.stderr


def test_a_level_that_the_server_lacks_is_refused_before_anything_is_measured(pair, log):
    stock, ours = pair()
    result = run("--stock-url", stock, "--url", ours, "--level", "half", "--level", "third", "--lengths", "40")
    assert result.exit_code == 1
    assert "level 'third': answered 400: " in result.stderr
    assert "expected one of half, tenth" in result.stderr
    assert len(log) == 1  # which asked for the other level


SERVERS = ("--stock-url", "http://127.0.0.1:9", "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--lengths", "-5"), "--lengths: given '-5', expected whole numbers above 0"),
        (("--lengths", "0"), "--lengths: given '0'"),
        (("--lengths", "a"), "--lengths: given 'a'"),
        (("--short", ""), "--short: given ''"),
        (("--long", ","), "--long: given ','"),
        (("--cached", 300, "--new", ""), "--new: given ''"),
        (("--rate", -1), "--rate: given -1, expected a number above 0"),
        (("--rate", 0), "--rate: given 0"),
        (("--rate", 2, "--clients", 3), "--rate, --clients: given both, expected one"),
        (("--clients", 3, "--requests", 0), "--rate, --clients: given with --requests 0"),
        (("--lengths", "", "--requests", 0), "nothing to ask: expected --lengths"),
        (("--lengths", ""), "--rate: not given, expected it, --clients, or --lengths"),
        (("--text", "none"), "--text: given 'none', expected a text file: No such file"),
        (("--text", "."), "--text: given '.', expected a text file: Is a directory"),
        (
            ("--settings", "{}", "--kv-tokens", 9, "--server-args", "--seed 7"),
            "--settings, --kv-tokens, --server-args: given with running servers, expected only with a MODEL",
        ),
    ],
)
def test_what_cannot_be_asked_is_said_before_servers_are_looked_for(given, said):
    result = run(*SERVERS, *given)
    assert result.exit_code == 1
    assert said in result.stderr


class TestModelWithoutPositions:
    """For long prompts: it has 16,384."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        """Runs the command, and has what it would ask of servers in place of them."""
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        monkeypatch.setattr(serve, "serve_and_compare", lambda *args: self.asked.append(args[4]))
        self.asked = []
        return lambda *args: run(tmp_path, *args)

    @pytest.mark.parametrize("given", [("--requests", 4), ("--clients", 2), ("--rate", 3)])
    def test_a_load_that_was_asked_for_is_not_left_out(self, run, given):
        result = run(*given)
        assert result.exit_code == 1
        assert f"{given[0]} {given[1]}" in result.stderr
        assert "no positions for a prompt of 32,768 tokens and its answer, expected --long" in result.stderr
        assert run(*given, "--long", 9000, "--lengths", 40).exit_code == 0
        assert self.asked[0].mix.long_lengths == (9000,)

    def test_one_by_default_is_left_out_with_a_word(self, run):
        result = run()
        assert (result.exit_code, self.asked[0].mix) == (0, None)
        assert "No mixed load: the model has no positions for a prompt of 32,768 tokens" in result.output
        assert "No mixed load" not in run("--requests", 0).output

    def test_nothing_to_ask(self, run):
        result = run("--lengths", "")
        assert result.exit_code == 1
        assert "nothing to ask" in result.stderr

    def test_arguments_with_an_open_quote(self, run):
        result = run("--server-args", "--x 'unclosed")
        assert result.exit_code == 1
        assert '--server-args: given "--x \'unclosed", expected arguments as a shell takes them' in result.stderr


@pytest.mark.parametrize("fault", ["short", "nan", "error", "refuse"])
def test_what_failed_is_reported_and_not_counted(pair, tmp_path, fault):
    stock, ours = pair(fault=lambda length: fault if length > 400 else None)
    lengths = ("--lengths", "40,900", "--repeats", 3, "--output-tokens", 2, "--json", tmp_path / "all.json")
    mixed = ("--requests", 4, "--rate", 200, "--short", 30, "--long", 500)
    result = run("--stock-url", stock, "--url", ours, *lengths, *mixed)
    assert result.exit_code == 1, result.output
    written = json.loads((tmp_path / "all.json").read_text())
    good, bad = (case for case in written["cases"] if case["part"] == "latency")
    assert good["failures"] == 0
    assert good["times_sooner"] > 1
    assert bad["failures"] == 4  # the one that warms up too
    assert bad["ours_first_s"] is None
    assert "times_sooner" not in bad
    stock_load, ours_load = (case for case in written["cases"] if case["part"] == "load")
    assert (stock_load["answered"], stock_load["failures"]) == (4, 0)
    assert (ours_load["answered"], ours_load["failures"]) == (3, 1)
    assert ours_load["long_p99_s"] is None
    assert not any("mixed load" in figure["name"] or "900" in figure["name"] for figure in written["figures"])
    assert "failed" in result.output
    says = {
        "short": "1 tokens answered, asked for 2",
        "nan": "log-probability nan",
        "error": "out of cache",
        "refuse": "answered 400",
    }
    assert any(says[fault] in said for said in bad["said"]), bad["said"]


def test_some_failures_leave_the_medians_of_the_others():
    answers = [latency.Answer(x, 4, (0.01,) * 3) for x in (0.1, 0.3, 0.2)]
    stock, ours = latency.Taken(answers), latency.Taken(answers[:1], ["refused", "refused"])
    case = latency.case_of("x", Length(40), stock, ours)
    assert (case["stock_first_s"], case["ours_first_s"], case["failures"]) == (0.2, 0.1, 2)
    assert case["times_sooner"] == pytest.approx(2)
    assert case["said"] == ["ours: refused", "ours: refused"]


def test_first_token_is_the_servers(pair):
    _, ours = pair(token_s=0.03)
    answer = Endpoint.connect("ours", ours).ask([5] * 50, 4)
    assert 0.02 <= answer.first_token_s < 0.2
    assert answer.tokens == 4
    assert len(answer.waits_s) == 3
    assert all(0 < wait < 0.2 for wait in answer.waits_s)
    # A token that the client takes late is followed by an early one, the first too: what must hold is the whole.
    assert answer.first_token_s + sum(answer.waits_s) >= 0.02 + 3 * 0.03


def test_a_later_token_takes_the_median_and_pauses_are_told_apart():
    """A request in which the server pauses for a second says nothing of its other tokens."""
    stock = latency.Taken([latency.Answer(0.1, 5, (0.01, 0.011, 0.012, 0.01)) for _ in range(3)])
    ours = latency.Taken([latency.Answer(0.1, 5, (0.01, 1.5, 0.011, 0.012)), latency.Answer(0.1, 1)])
    case = latency.case_of("x", Length(40), stock, ours)
    assert case["stock_token_ms"] == pytest.approx(10.5)
    assert case["ours_token_ms"] == pytest.approx(11.5)
    assert case["token_ratio"] == pytest.approx(10.5 / 11.5)
    assert (case["stock_paused_s"], case["ours_paused_s"]) == (0, 0.75)
    assert latency.Taken([latency.Answer(0.1, 1)]).token_s is None


def test_one_file_cannot_hold_both_what_was_measured_and_figures(tmp_path):
    with pytest.raises(BenchError, match=r"--results, --json: given .*both\.json for both, expected two files"):
        Report("serve", "a device", tmp_path / "both.json", tmp_path / "both.json")


def test_a_server_that_is_gone_is_named(tmp_path):
    with pytest.raises(BenchError, match=r"stock: no model server answers at http://127\.0\.0\.1:9"):
        Endpoint.connect("stock", "http://127.0.0.1:9")
    for url in ("http://127.0.0.1:80a", "http://[::1"):
        with pytest.raises(BenchError, match="stock: no model server answers at http"):
            Endpoint.connect("stock", url)
    assert serve.device_name("http://[::1") == "http://[::1"
    with pytest.raises(RequestError, match=r"Connection refused|URLError"):
        Endpoint("stock", "http://127.0.0.1:9", "m").ask([1], 1)
    result = run("--stock-url", "localhost:80", "--url", "localhost:81")
    assert result.exit_code == 1
    assert "expected a server's address such as" in result.stderr


@pytest.mark.parametrize("args", [(), ("--url", "http://x"), ("MODEL", "--url", "http://x")])
def test_one_way_to_find_servers(args):
    result = run(*args)
    assert result.exit_code == 1
    assert "expected a MODEL to serve, or both --stock-url and --url" in result.stderr


def test_prompts_have_their_length_and_begin_apart():
    chosen = random.Random(0)
    prompts = Prompts([chosen.randrange(50) for _ in range(1500)])
    made = [prompts.take(length) for length in [40, 16, 5000] * 40]
    assert [len(prompt) for prompt in made] == [40, 16, 5000] * 40
    assert len({tuple(prompt[:16]) for prompt in made}) == len(made)
    with pytest.raises(BenchError, match="expected at least 1,024"):
        Prompts([1] * 100)


def test_arrivals_are_a_poisson_process_of_the_asked_mix():
    mix = load.Mix(4000, 5.0, (10, 20), (100,), long_share=0.25, output_tokens=7, seed=3)
    arrivals = mix.arrivals()
    assert arrivals == mix.arrivals()
    assert Counter(a.is_long for a in arrivals) == {True: 1000, False: 3000}
    assert {a.prompt_tokens for a in arrivals if not a.is_long} == {10, 20}
    gaps = torch.tensor([b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)])
    assert float(gaps.mean()) == pytest.approx(1 / 5, rel=0.06)
    assert float(gaps.std()) == pytest.approx(1 / 5, rel=0.1)  # exponential: as its mean
    assert Counter(a.is_long for a in load.Mix(2, 1.0, (10,), (100,), long_share=0.9).arrivals()) == {True: 1, False: 1}


def test_an_open_loop_counts_from_when_a_request_was_due(log):
    """Ten requests at once, 30 ms each, one after the other: the last waits 300 ms, and that shows."""
    with running(Stub("stock", log, lambda n: 0.03)) as url:
        arrivals = [load.Arrival(0.001 * i, 20, 1, False) for i in range(10)]
        served = load.play(Endpoint.connect("stock", url), arrivals, [[i] * 20 for i in range(10)])
    assert [one.error for one in served] == [None] * 10
    waits = sorted(one.first_token_s for one in served)
    assert waits[0] < 0.15
    assert waits[-1] > 0.25


def test_a_closed_loop_has_so_many_requests_under_way(log):
    """Seven requests of three clients, 60 ms each, one after the other: a client waits for two others at most."""
    stub = Stub("stock", log, lambda n: 0.06)
    with running(stub) as url:
        arrivals = [load.Arrival(60.0 * i, 20, 1, False) for i in range(7)]
        server = Endpoint.connect("stock", url)
        served = load.play_closed(server, arrivals, [[i] * 20 for i in range(7)], clients=3)
    assert stub.most_at_once == 3
    assert [one.error for one in served] == [None] * 7
    assert sorted(prompt[0] for _, prompt in log) == list(range(7))
    assert max(one.first_token_s for one in served) < 0.35
    assert served[6].arrival.at_s > 0.2
    assert load.summary("stock", "x", served)["span_s"] > 0.4


def test_long_prompts_are_asked_fewer_times_and_warmed_up_with_shorter_ones(log):
    assert [latency.repeats_of(Length(n), 21) for n in (1000, 20_000, 131_072)] == [21, 10, 3]
    assert latency.repeats_of(Length(131_072), 2) == 2
    with ExitStack() as stack:
        urls = [stack.enter_context(running(Stub(name, log, lambda n: 0))) for name in ("stock", "ours")]
        stock, ours = (Endpoint.connect(name, url) for name, url in zip(("stock", "ours"), urls, strict=True))
        report, prompts = Report("serve", "x"), Prompts(list(range(2000)))
        latency.compare(stock, {"ours": ours}, [Length(40_000)], prompts, 1, 1, report, lambda case: None)
    assert [len(prompt) for _, prompt in log] == [32_768, 32_768, 40_000, 40_000]


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quantiles(q, count):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    assert load.quantile(values.tolist(), q) == pytest.approx(float(values.quantile(q)), rel=1e-9)
    assert load.quantile([], q) is None


def test_a_load_that_is_more_than_stock_takes():
    first_s = {1000: 0.1, 100_000: 8.0}
    # Half of the requests take 0.1 s (no shorter one was measured), half 16 s, twice the longest that was.
    assert load.saturating_rate([(0.5, 500), (0.5, 200_000)], first_s, 1.3) == pytest.approx(1.3 / (0.05 + 8.0))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{}", "no configuration"),
        ('{"method": "a_shape", "min_tokens": 8192}', "a_shape"),
        ('{"method": "sale", "params": {"tau": 0.1}}', "sale tau=0.1"),
        ("streaming", "profile streaming"),
        ('{"guard": {}}', "default with guard"),
        ('{"profile": "minference-llama-3.1-8b-instruct"}', "profile minference-llama-3.1-8b-instruct"),
    ],
)
def test_settings_have_a_short_name(given, shown):
    assert str(serve.Settings.parse(given)) == shown


@pytest.mark.parametrize(
    "given", ['{"method": "sales"}', '{"min_token": 1}', "{", "[1]", "none.yaml", '{"profile": "none"}']
)
def test_settings_that_a_server_would_refuse_are_refused_before_it_starts(given):
    with pytest.raises(BenchError, match="--settings"):
        serve.Settings.parse(given)


def test_a_profile_that_the_server_chooses_is_left_to_it():
    assert serve.Settings.parse('{"profile": "auto"}').values == {"profile": "auto"}
    needle = bundled_model()
    assert serve.Settings.parse("streaming", model=needle).values == {"profile": "streaming"}
    assert serve.Settings.parse("best-code-lm-29m-128k", model=Path("owner/name"))
    for text, problem in (
        ("best-code-lm-29m-128k", "the profile is for .* 8 layers"),
        ('{"crossover": "nosuch.json"}', "crossover: given 'nosuch.json'"),
    ):
        with pytest.raises(BenchError, match=problem):
            serve.Settings.parse(text, model=needle)


def test_servers_get_room_for_what_is_asked(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert serve.fitting([1024, 16320, 16321], tmp_path, 64) == [1024, 16320]
    assert serve.fitting([1 << 20], Path("owner/name"), 64) == [1 << 20]
    for typo in (tmp_path / "typo", Path("../typo"), Path("a/b/c")):
        with pytest.raises(BenchError, match="no such folder: expected a model's folder"):
            serve.max_positions(typo)
    assert serve.server_args(tmp_path, 9000, None, ("--seed", "7")) == ("--max-model-len", "9000", "--seed", "7") or (
        torch.cuda.is_available()
    )
    monkeypatch.setattr(serve, "has_cuda", lambda: True)
    args = serve.server_args(tmp_path, 9000, 10_000, ())
    kv_bytes = 10_000 * 2 * 2 * 4 * 2 * 64  # keys and values of two bytes, 4 layers, 2 kv heads of 64
    assert args[args.index("--kv-cache-memory-bytes") + 1] == str(kv_bytes)
    with pytest.raises(BenchError, match=r"has 16,384 positions, and 20,000 were asked for"):
        serve.server_args(tmp_path, 20_000, None, ())


@pytest.mark.server
def test_real_servers(tmp_path: Path):
    """Two small servers: both answer everything, and the counters show what each level kept."""
    model, profile = make_model(tmp_path / "model"), tmp_path / "levels.yaml"
    profile.write_text(
        "format: 1\nmodel: any\nmin_tokens: 1024\nlevel: narrow\n"
        "default: {method: a_shape, sink_tokens: 128, local_tokens: 256}\n"
        "levels: {wide: {default: {method: a_shape, sink_tokens: 512, local_tokens: 512}}}\n"
    )
    lengths = ("--lengths", "100,2500", "--repeats", 3, "--output-tokens", 2, "--json", tmp_path / "all.json")
    mixed = ("--requests", 3, "--rate", 5, "--short", 100, "--long", 1500)
    result = run(model, "--settings", profile, "--level", "narrow", "--level", "wide", *lengths, *mixed)
    assert result.exit_code == 0, result.output
    cases = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert sum(case.get("failures", 0) for case in cases) == 0
    kept = []
    for label in ("narrow", "wide"):
        own = [case for case in cases if case["label"] == label]
        assert [case["part"] for case in own] == ["latency", "latency", "load", "load", "density"]
        assert all(case["times_sooner"] > 0 for case in own[:2])
        assert own[0]["density"] is None  # too short to be sparse
        kept.append(own[1]["density"])
        assert 0 < own[-1]["density"] < 1
    assert 0 < kept[0] < 0.6 < kept[1] < 0.8


def test_levels_find_nothing_that_another_level_left_in_the_cache(monkeypatch):
    """Their first blocks are one another's, and each is asked the same prompts."""
    asked: list[dict] = []
    monkeypatch.setattr(Endpoint, "ask", lambda self, *_: asked.append(dict(self.extra)))
    server = Endpoint("ours", "http://127.0.0.1:9", "m")
    found = serve.of_levels(server, None, ["high", 0])
    assert [one["cache_salt"] for one in asked] == ["level high", "level 0"]
    assert [one.extra["vllm_xargs"] for one in found.values()] == [{"sparse_prefill": "high"}, {"sparse_prefill": 0}]
