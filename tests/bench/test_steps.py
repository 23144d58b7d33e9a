# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.steps` against a stub server whose counters are chosen."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import steps
from tests.bench.stub import Stub, running
from vllm_sparse_backend.measure.endpoint import Endpoint

PAGE = """
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_count{{engine="0"}} {requests}.0
# TYPE sparse_prefill_rows counter
sparse_prefill_rows_total{{engine="0",path="sparse",reason=""}} 7.0
# TYPE sparse_prefill_compilations counter
sparse_prefill_compilations_total{{engine="0",when="warmup"}} 90.0
sparse_prefill_compilations_total{{engine="0",when="serving"}} 0.0
# TYPE sparse_prefill_arena_overflows counter
sparse_prefill_arena_overflows_total{{engine="0"}} 0.0
# TYPE sparse_prefill_arena_bytes gauge
sparse_prefill_arena_bytes{{engine="0",rank="0"}} 2e+08
# TYPE sparse_prefill_arena_peak_bytes gauge
sparse_prefill_arena_peak_bytes{{engine="0",rank="0"}} 1.5e+08
"""


def run(page: str, tmp_path, log, first_s=lambda n: 0.005, **of_stub):
    app = typer.Typer()
    app.command()(steps.main)
    args = ("--rows", "12x32", "--document", "600", "--steps", "20", "--clients", "4", "--longest", "300")
    with running(stub := Stub("ours", log, first_s, metrics=page, **of_stub)) as url:
        given = [url, *args, "--json", str(tmp_path / "all.json")]
        return stub, CliRunner().invoke(app, given, catch_exceptions=False)


def test_what_a_server_holds(tmp_path):
    # Rows over the document take so long that a busy machine, too, has sent all before the first are answered.
    stub, result = run(PAGE, tmp_path, log := [], lambda n: 0.1 if n == 632 else 0.005)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "all.json").read_text())
    about = "a server of 1,024 different heads, 12 rows of 32 tokens after 600 cached"
    figures = {figure["name"]: figure["value"] for figure in written["figures"]}
    assert figures[f"{about}: peak of the arena, share of it"] == 0.75
    assert figures[f"{about}: errors"] == figures[f"{about}: kernels compiled while serving"] == 0
    assert written["cases"][0]["steps"] >= 20
    assert written["cases"][0]["rows"] == {"sparse": 7}
    # The document alone comes first, then all rows at a time beside a prompt that is as long and begins otherwise.
    lengths = [len(prompt) for _, prompt in log]
    assert sorted(lengths[-13:]) == [600] + [632] * 12
    document = log[-14][1]
    assert len(document) == 600
    assert sum(prompt[:600] == document for _, prompt in log[-13:]) == 12
    assert stub.most_at_once > 8


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('serving"}} 0', 'serving"}} 2', "2 kernels compiled"),
        ("1.5e+08", "2.5e+08", "250000000 of the arena's 200000000 bytes"),
        ('overflows_total{{engine="0"}} 0', 'overflows_total{{engine="0"}} 3', "3 overflows"),
        ('reason=""}} 7', 'reason=""}} 0', "0 sparse rows"),
    ],
)
def test_what_it_does_not_hold_is_said(tmp_path, old, new, says):
    _, result = run(PAGE.replace(old, new), tmp_path, [])
    assert result.exit_code == 1
    assert says in result.stderr


def test_requests_that_fail_are_said(tmp_path):
    _, result = run(PAGE, tmp_path, [], fault=lambda length: "refuse" if length == 632 else None)
    assert result.exit_code == 1
    assert "12 rows of 32 tokens: answered 400" in result.stderr
    assert json.loads((tmp_path / "all.json").read_text())["figures"][3]["value"] == 12


def test_random_requests_end_where_nothing_counts_steps(monkeypatch):
    monkeypatch.setattr(steps, "MOST_S", 0.6)
    with running(Stub("ours", [], lambda n: 0.01)) as url:
        errors = steps.random_steps(Endpoint.connect("ours", url), steps.Prompts(list(range(2000))), 10, 2, 50)
    assert errors == ["0 steps in 1 s, expected 10"]


def test_random_requests_end_where_all_clients_fail():
    with running(Stub("ours", [], lambda n: 0, fault=lambda length: "refuse")) as url:
        server = Endpoint.connect("ours", url)
        errors = steps.random_steps(server, steps.Prompts(list(range(2000))), 10**6, 3, 50)
    assert len(errors) >= 3
