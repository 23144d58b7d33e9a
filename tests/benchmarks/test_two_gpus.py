# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.two_gpus` without a GPU: skipped steps, kept results, comparisons and reports, against stubs."""

import json
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import two_gpus
from benchmarks.two_gpus import CHECKED, DEFAULT, ONE, STOCK, TENSOR, Lab, Running, Spec, TwoGpus
from tests.helpers.folders import model_folder
from tests.helpers.stub_server import SimulatedClock, Stub, running
from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.evaluation.vllm_server import Server, ServerError


def options(folder: Path, **changes: Any) -> TwoGpus:
    values: dict[str, Any] = {
        "model": model_folder(folder / "large", CONFIG), "out": folder / "out", "second": None, "profile": None,
        "budget_s": 100.0, "steps": "one,tensor,pipeline,others", "layouts": "pair,data",
        "lengths": "40,900", "answer_lengths": "480", "prompts": 1,
        "repeats": 1, "output_tokens": 3, "requests": 8, "clients": 2, "checked_min_tokens": 256,
        "server_args": "", "text": None,
    }  # fmt: skip
    return TwoGpus(**values | changes)


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "out/figures.json").read_text())}


def problems(folder: Path) -> dict[str, str]:
    cases = json.loads((folder / "out/cases.json").read_text())["cases"]
    return {case["what"]: case["reason"] for case in cases if case["part"] == "problem"}


class StubServer:
    """Stands in for a running ``Server``: an address."""

    def __init__(self, url: str, model: str = "stub-model") -> None:
        self.url, self.model = url, model


def replace_step(monkeypatch: pytest.MonkeyPatch, name: str, step: Any) -> None:
    monkeypatch.setattr(TwoGpus, name, step)


class TestSteps:
    def test_a_step_without_enough_time_is_skipped_with_its_reason(self, tmp_path, monkeypatch) -> None:
        for name in ("one", "tensor", "pipeline", "others"):
            replace_step(monkeypatch, name, lambda self, lab: None)
        with pytest.raises(typer.Exit):
            options(tmp_path, budget_s=0.0).run()
        assert problems(tmp_path).keys() == {"step one", "step tensor", "step pipeline", "step others"}
        assert "expected at least 120 s" in problems(tmp_path)["step one"]

    def test_a_step_that_takes_too_long_ends_with_its_servers_and_the_next_runs(self, tmp_path, monkeypatch) -> None:
        calls, after = [], []

        class Stuck:
            def kill(self) -> None:
                calls.append("kill")

            def stop(self) -> None:
                calls.append("stop")

        def stuck(self: TwoGpus, lab: Lab) -> None:
            lab._started = [Stuck()]  # type: ignore[list-item]
            time.sleep(600)

        monkeypatch.setattr(two_gpus.Server, "stop", Stuck.stop)
        monkeypatch.setattr(two_gpus, "LIMITS", {"one": (1.0, 0.0), "tensor": (600.0, 0.0), "others": (600.0, 0.0)})
        replace_step(monkeypatch, "one", stuck)
        replace_step(monkeypatch, "tensor", lambda self, lab: after.append("tensor"))
        with pytest.raises(typer.Exit):
            options(tmp_path, steps="one,tensor").run()
        assert problems(tmp_path) == {"step one": "took longer than 1 s"}
        assert (calls, after) == (["kill", "stop"], ["tensor"])

    def test_a_failing_step_does_not_stop_the_next_and_nothing_is_an_error_if_all_went_well(
        self, tmp_path, monkeypatch
    ) -> None:
        def fail(self: TwoGpus, lab: Lab) -> None:
            raise ServerError("out of memory")

        monkeypatch.setattr(two_gpus, "LIMITS", dict.fromkeys(("one", "tensor", "others"), (600.0, 0.0)))
        replace_step(monkeypatch, "one", fail)
        replace_step(monkeypatch, "tensor", lambda self, lab: None)
        with pytest.raises(typer.Exit):
            options(tmp_path, steps="one,tensor").run()
        assert problems(tmp_path) == {"step one": "out of memory"}
        options(tmp_path, steps="tensor").run()
        assert problems(tmp_path) == {}

    def test_an_unknown_step_is_an_error(self, tmp_path, capsys) -> None:
        with pytest.raises(typer.Exit):
            options(tmp_path, steps="one,two").run()
        assert "given 'two', expected names from one, tensor, pipeline, others" in capsys.readouterr().err

    def test_a_server_that_does_not_start_is_recorded_with_the_engines_error(self, tmp_path, monkeypatch) -> None:
        def enter(server: Server) -> Server:
            if "--tensor-parallel-size" in server.command:
                server.log_path.write_text("(EngineCore pid=7) ValueError: 9 heads\n")
                raise ServerError("exited with code 1")
            return server

        monkeypatch.setattr(two_gpus.Server, "__enter__", enter)
        test, lab = options(tmp_path), Lab(tmp_path / "out", 100)
        specs = [test.timed_spec(test.model, DEFAULT, layout, (0, 1)) for layout in (ONE, TENSOR)]
        assert list(lab.start(specs).servers) == specs[:1]
        assert problems(tmp_path) == {"large, default, TP 2: the server did not start": "ValueError: 9 heads"}
        lab.stop_servers()

    def test_heads_that_two_cards_cannot_share_are_skipped(self, tmp_path, monkeypatch) -> None:
        small = model_folder(tmp_path / "small", CONFIG | {"num_attention_heads": 9, "num_key_value_heads": 3})
        monkeypatch.setattr(Lab, "start", lambda self, specs: Running({}))
        options(tmp_path, second=small).tensor(Lab(tmp_path / "out", 100))
        assert problems(tmp_path) == {"small, TP 2": "skipped: its 9 heads cannot be divided by 2"}

    def test_pipeline_parallelism_has_stock_as_its_baseline(self, tmp_path, monkeypatch) -> None:
        started: list[Any] = []
        monkeypatch.setattr(Lab, "start", lambda self, specs: started.extend(specs) or Running({}))
        options(tmp_path).pipeline(Lab(tmp_path / "out", 100))
        assert [(spec.setting, spec.cards) for spec in started] == [(STOCK, (0, 1)), (DEFAULT, (0, 1))]
        assert all(spec.args[:2] == ("--pipeline-parallel-size", "2") for spec in started)


class TestServers:
    def test_their_cards_caches_and_settings(self, tmp_path) -> None:
        test = options(tmp_path)
        (tmp_path / "out/logs").mkdir(parents=True)
        single, double = (
            test.timed_spec(test.model, DEFAULT, layout, cards).server(tmp_path / "out/logs", 5)
            for layout, cards in ((ONE, (0,)), (TENSOR, (0, 1)))
        )
        assert (single._env["CUDA_VISIBLE_DEVICES"], double._env["CUDA_VISIBLE_DEVICES"]) == ("0", "0,1")
        caches = [int(s.command[s.command.index("--kv-cache-memory-bytes") + 1]) for s in (single, double)]
        assert caches[0] == 2 * caches[1]
        assert single.log_path.name == "large-default-TP1.log"
        stock = test.timed_spec(test.model, STOCK, ONE, (0,)).server(tmp_path / "out/logs", 5)
        assert stock._env["VLLM_PLUGINS"] == "none"
        assert "--attention-backend" in single.command
        assert "--attention-backend" not in stock.command

    def test_cards_are_those_that_this_process_may_use(self, monkeypatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert [two_gpus.visible_card(card) for card in (0, 1)] == ["0", "1"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
        assert [two_gpus.visible_card(card) for card in (0, 1)] == ["5", "7"]

    def test_a_large_model_for_data_parallelism_waits_for_the_cards(self, tmp_path) -> None:
        assert options(tmp_path).together() == [["pair"], ["data"]]
        assert options(tmp_path, layouts="data").together() == [["data"]]
        assert options(tmp_path, second=tmp_path).together() == [["pair", "data"]]

    def test_lengths_fit_the_model(self, tmp_path) -> None:
        test = options(tmp_path, lengths="8192,16384")
        assert test.timed_lengths(test.model) == [8192]


class TestMeasurements:
    @pytest.fixture
    def measured(self, tmp_path, monkeypatch):
        """Speeds of four stubs: ours is four times as fast as stock on a single card, and twice as fast on two
        cards."""
        test, lab, log = options(tmp_path), Lab(tmp_path / "out", 100), []
        clock = SimulatedClock.of_client(monkeypatch)
        seconds = {(STOCK, ONE): 0.04, (DEFAULT, ONE): 0.01, (STOCK, TENSOR): 0.02, (DEFAULT, TENSOR): 0.01}
        for layout, cards in ((ONE, (0,)), (TENSOR, (0, 1))):
            with ExitStack() as stack:
                servers = []
                for setting in (STOCK, DEFAULT):
                    name = "stock" if setting == STOCK else "ours"
                    stub = Stub(name, log, lambda length, s=seconds[setting, layout]: s, clock)
                    url = stack.enter_context(running(stub))
                    servers.append((test.timed_spec(test.model, setting, layout, cards), StubServer(url)))
                test.measure_speed(lab, servers, len(cards))
                test.measure_speed(lab, servers, len(cards))  # measures nothing again
        return test, lab, log

    def test_speed_is_compared_with_stock_and_with_one_card(self, measured, tmp_path) -> None:
        _, lab, log = measured
        rows = figures(tmp_path)
        for length in (40, 900):
            times = {
                (setting, layout): case["ttft_s"]
                for setting in (STOCK, DEFAULT)
                for layout in (ONE, TENSOR)
                for case in lab.report.cases_of("speed", label=f"large, {setting}, {layout}", tokens=length)
            }
            gains = [times[STOCK, layout] / times[DEFAULT, layout] for layout in (ONE, TENSOR)]
            assert gains == pytest.approx([4, 2])
            about = f"large, default, TP 1, {length} tokens"
            assert rows[f"{about}: TTFT, speed-up over stock"]["value"] == pytest.approx(gains[0], rel=1e-3)
            assert "×" not in rows[f"{about}: TTFT"]["device"]
            about = f"large, default, TP 2, {length} tokens"
            ratio = rows[f"{about}: TTFT, speed-up over stock ÷ TP 1's"]
            assert ratio["value"] == pytest.approx(gains[1] / gains[0], rel=1e-3)
            assert ratio["bar"] == 0.95
            assert ratio["device"].startswith("2 × ")
            assert rows[f"{about}: TPOT"]["unit"] == "ms"
        assert len(log) == 2 * 2 * 2 * 2  # layouts, servers, lengths; a warm-up and a timed request

    def test_an_earlier_run_is_continued(self, measured, tmp_path) -> None:
        test, _, log = measured
        again, count = Lab(tmp_path / "out", 100), len(log)
        specs = [test.timed_spec(test.model, setting, ONE, (0,)) for setting in (STOCK, DEFAULT)]
        test.measure_speed(again, [(spec, StubServer("http://127.0.0.1:9")) for spec in specs], 1)
        assert len(log) == count
        assert not test.is_measured(again, specs[0])  # its answers are missing

    def test_answers_are_compared_with_one_cards(self, tmp_path) -> None:
        test, lab = options(tmp_path), Lab(tmp_path / "out", 100)
        row = {
            "label": "large, default, TP 2", "tokens": 480, "failed": 0, "share": 0.5, "asked": 96, "right": 48,
            "perplexity": 2.0, "density": 0.3, "of_first": 0.98, "standard_error": 0.02, "perplexity_change": 0.5,
        }  # fmt: skip
        test.add_answers(lab, row, "large, default, TP 1", 2)
        rows = figures(tmp_path)
        answers = rows["large, default, TP 2, 480 tokens: right answers ÷ TP 1's"]
        assert (answers["value"], answers["bar"]) == (0.98, 0.96)
        assert rows["large, default, TP 2, 480 tokens: perplexity ÷ TP 1's"]["value"] == 1.005
        test.add_answers(lab, {**row, "failed": 1}, "large, default, TP 2", 2)
        assert problems(tmp_path) == {"large, default, TP 2, 480 tokens": "1 requests with questions failed"}


class RankedServer:
    """A server of two workers that return their counts; ``page`` is the content of /metrics."""

    def __init__(self, page: str, ranks: list[list[Any]], behind: int = 0) -> None:
        self.page, self.ranks, self.behind = page, ranks, behind

    def get(self, path: str) -> str:
        return self.page

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert (path, body) == ("/collective_rpc", {"method": "sparse_prefill_samples", "args": [True]})
        self.behind -= 1
        results = [{"rank": i, "behind": self.behind >= 0, "samples": s} for i, s in enumerate(self.ranks)]
        return {"results": results}


def rank(kept: int, levels: tuple[str, ...] = ("default", "fast", "p"), checks: int = 2) -> list[Any]:
    samples: list[Any] = [["guard_checks", ["0", "default"], checks]]
    for level in levels:
        samples += [["kept_pairs", ["0", level], kept], ["causal_pairs", ["0", level], 100]]
    return samples


def page_of(kept: int, checks: int = 4) -> str:
    lines = [f'sparse_prefill_guard_checks_total{{engine="0",layer="0",level="default"}} {checks}']
    for level in ("default", "fast", "p"):
        for name, value in (("kept_pairs", kept), ("causal_pairs", 200)):
            lines.append(f'sparse_prefill_{name}_total{{engine="0",layer="0",level="{level}"}} {value}')
    return "\n".join(lines) + "\n"


class TestRanks:
    SPEC = Spec(Path("large"), CHECKED, TENSOR, (0, 1), {}, (), 0, 0)

    def checked(self, folder: Path, server: RankedServer) -> dict[str, float]:
        options(folder).check_ranks(Lab(folder / "out", 100), self.SPEC, server)  # type: ignore[arg-type]
        start = f"large, {CHECKED}, {TENSOR}: "
        return {name.removeprefix(start): row["value"] for name, row in figures(folder).items()}

    def test_that_agree(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(two_gpus.time, "sleep", lambda seconds: None)
        assert self.checked(tmp_path, RankedServer(page_of(80), [rank(30), rank(50)], behind=3)) == {
            "density of rank 0": 0.3,
            "density of rank 1": 0.5,
            "largest difference of the ranks' densities": 0.2,
            "ranks whose pairs differ": 0,
            "levels that a rank did not run": 0,
            "ranks without the guard's checks": 0,
            "metrics that differ from the workers' sum": 0,
        }

    def test_that_do_not(self, tmp_path) -> None:
        server = RankedServer(page_of(81, checks=2), [rank(30), rank(50, levels=("default",), checks=0)])
        wrong = self.checked(tmp_path, server)
        assert wrong["levels that a rank did not run"] == 2
        assert wrong["ranks without the guard's checks"] == 1
        assert wrong["ranks whose pairs differ"] == 1
        assert wrong["metrics that differ from the workers' sum"] == 2  # kept and causal pairs


class TestPair:
    """Servers whose answers depend only on the prompt's level, unless a test says otherwise."""

    SHORT, LONG = [1] * 129, [2] * 513

    def checked(self, folder: Path, monkeypatch: pytest.MonkeyPatch, uses_nixl: bool, wrong: object = None) -> Any:
        test = options(folder)
        lab = Lab(folder / "out", 100)
        sent: list[tuple[str, int, object]] = []

        def tokens_of(url: str, model: str, prompt: list[int], level: object = None) -> list[int]:
            sent.append((url, len(prompt), level))
            level = (level or "on") if len(prompt) > 256 and url != "stock" else "exact"
            mistakes = url in ("pair", "decode") and level == wrong
            return [len(prompt), hash(str(level)) + mistakes]

        class PrefillServer(StubServer):
            def post(self, path: str, body: dict[str, Any]) -> None:
                sent.append(("prefill", len(body["prompt"]), None))

        monkeypatch.setattr(two_gpus.importlib.util, "find_spec", lambda name: object() if uses_nixl else None)
        monkeypatch.setattr(two_gpus, "tokens_of", tokens_of)
        monkeypatch.setattr(two_gpus, "proxy", lambda *urls: nullcontext("pair"))
        monkeypatch.setattr(TwoGpus, "check_prompts", lambda options, url: [self.SHORT, self.LONG])
        with ExitStack() as stack:
            pair = two_gpus.Pair.plan(test, folder / "out/logs", stack)
            names = ("prefill", "decode", "single", "stock")
            servers = {spec: PrefillServer(name) for spec, name in zip(pair.specs, names, strict=True)}
            pair.check(lab, Running(servers), stack)  # type: ignore[arg-type]
        return pair, sent, {name: row["value"] for name, row in figures(folder).items()}

    def test_with_nixl_all_levels_are_compared(self, tmp_path, monkeypatch) -> None:
        pair, sent, rows = self.checked(tmp_path, monkeypatch, uses_nixl=True)
        assert rows == {
            # The short prompt at four levels, the long prompt once, then both again after the sparse requests.
            "large, pair: share of 7 exact answers equal to a stock server's": 1,
            "large, pair: share of 3 sparse answers equal to a single server's": 1,
            "large, pair: sparse answers that differ from exact answers": 3,
        }
        levels = [level for url, length, level in sent if url == "pair" and length == len(self.LONG)]
        assert levels == ["exact", "on", "fast", 0.9, "exact"]
        assert [sent.count(("single", len(self.LONG), level)) for level in ("on", "fast", 0.9)] == [2, 2, 2]
        assert problems(tmp_path) == {}
        for spec, role in ((pair.prefill, "kv_producer"), (pair.decode, "kv_consumer")):
            transfer = json.loads(spec.args[spec.args.index("--kv-transfer-config") + 1])
            assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", role)
        channels = {spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for spec in (pair.prefill, pair.decode)}
        assert len(channels) == 2
        assert (pair.prefill.settings is None, pair.decode.settings is None) == (False, True)

    @pytest.mark.parametrize(("wrong", "exact", "sparse"), [("exact", 2 / 7, 1), ("fast", 1, 2 / 3)])
    def test_a_wrong_answer_shows(self, tmp_path, monkeypatch, wrong: str, exact: float, sparse: float) -> None:
        _, _, rows = self.checked(tmp_path, monkeypatch, uses_nixl=True, wrong=wrong)
        values = list(rows.values())[:2]
        assert values == pytest.approx([exact, sparse], rel=1e-3)

    def test_without_nixl_the_servers_own_level_is_compared_by_a_shared_folder(self, tmp_path, monkeypatch) -> None:
        pair, sent, rows = self.checked(tmp_path, monkeypatch, uses_nixl=False)
        assert list(rows.values())[:2] == [1, 1]
        # A further token, because this connector looks up prompts without their last token.
        assert [call for call in sent if call[0] in ("prefill", "decode")] == [
            ("prefill", 130, None), ("decode", 130, None), ("prefill", 514, None), ("decode", 514, None)
        ]  # fmt: skip
        assert "ExampleConnector" in pair.decode.args[-1]
        assert "only the default level" in problems(tmp_path)["pair"]


def test_equal_answers() -> None:
    assert two_gpus.equal_share([([1, 2], [1, 2]), ([1], [2])]) == 0.5
