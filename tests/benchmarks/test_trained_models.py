# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.trained_models`: its prompts, scores from log-probabilities, and refused settings."""

import io
import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from benchmarks import trained_models
from benchmarks.trained_models import Setting
from tests.helpers.stub_server import entry
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation.prompt_texts import prose


def test_prompts_hold_each_fact_before_it_is_asked_for(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text(prose(8000, 5))
    command = ["prompts", str(BUNDLED), str(tmp_path / "out.json"), str(text), "--lengths", "3000,4000", "--each", "2"]
    result = CliRunner().invoke(trained_models.app, [*command, "--forms", "0,1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    expected = [(length, form, length) for length in (3000, 4000) for form in (0, 1)]
    assert [(prompt["length"], prompt["form"], len(prompt["ids"])) for prompt in written] == expected
    decode = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).decode
    for prompt in written:
        assert len(prompt["spans"]) == len(prompt["facts"]) == trained_models.FACTS
        for (begin, end), fact in zip(prompt["spans"], prompt["facts"], strict=True):
            value = decode(prompt["ids"][begin:end])
            assert value in decode(prompt["ids"][fact : fact + 12])
            assert fact < begin


def test_an_answer_is_right_if_each_of_its_tokens_is_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nats cover the last two thirds, without facts, questions and answers."""
    ids = list(range(600))
    returned: list[Any] = [None, *(entry(token, -2.0) for token in ids[1:])]
    returned[300:303] = (entry(300, -9.0), entry(301, -9.0), entry(302, -9.0, rank=2))
    answer = io.BytesIO(json.dumps({"choices": [{"prompt_logprobs": returned}]}).encode())
    monkeypatch.setattr(Setting, "ask", lambda *_: (HTTPConnection("unused"), answer))
    prompt = {"ids": ids, "spans": [[300, 303], [500, 503]], "facts": [100, 250]}
    assert trained_models._score(Setting("ours", "http://unused", None), prompt) == (1, 2, 2.0)


def test_runs_one_after_the_other_are_compared_by_prompt(tmp_path: Path) -> None:
    for name, right, nats in (("stock", [4, 4], [2.0, 3.0]), ("ours", [4, 3], [2.0, 3.2])):
        prompts = {"right": right, "questions": [4, 4], "nats": nats, "density": 0.25, "sparse_rows": 0.5}
        (tmp_path / name).write_text(json.dumps({name: {"900": {"prompts": prompts}}}))
    result = CliRunner().invoke(trained_models.app, ["against", str(tmp_path / "stock"), str(tmp_path / "ours")])
    assert (
        "answers 0.8750 ± 0.1250 (7 of 8), perplexity +10.517 % ± 10.000, density 0.25, sparse rows 0.5"
        in result.output
    )


@pytest.mark.parametrize(("text", "level"), [("", None), ("@fast", "fast"), ("@0.9", 0.9), ("@0", 0)])
def test_a_setting_has_a_level_by_name_or_p(text: str, level: object) -> None:
    setting = Setting.parse(f"a=http://x:1{text}")
    assert setting == Setting("a", "http://x:1", level)
    assert setting.more == ({} if level is None else {"vllm_xargs": {"sparse_prefill": level}})


@pytest.mark.parametrize("text", ["http://localhost:8000", "ours=localhost:8000", "ours"])
def test_a_misspelt_setting_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"given '.*', expected NAME=http://HOST:PORT"):
        Setting.parse(text)
    assert Setting.parse("ours=http://x:1@fast") == Setting("ours", "http://x:1", "fast")
