# SPDX-License-Identifier: Apache-2.0
"""Parts of the demo that need no server: its parameters, its model, and its refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.demo.model import BUNDLED, CANNOT_FIND
from vllm_sparse_backend.demo.question import ASKED, NUM_FACTS, make_questions
from vllm_sparse_backend.demo.run import demo_settings
from vllm_sparse_kernels.methods import METHODS, sparse_names


def test_every_method_that_leaves_something_out_can_be_shown() -> None:
    for name in sparse_names():
        assert make_method(name, METHODS[name].demo) != make_method(name, {})


@pytest.mark.parametrize("method", sparse_names())
def test_the_bundled_model_finds_facts_densely_where_a_method_cannot(method: str) -> None:
    assert (BUNDLED / "model.safetensors").exists()
    settings = demo_settings(method, bundled=True)
    plan = Plan.build(SparsePrefillConfig(**settings), ModelShape.from_folder(BUNDLED))
    assert plan.dense_layers == ((1,) if method in CANNOT_FIND else ())
    assert "dense_layers" not in demo_settings(method, bundled=False)


@pytest.mark.parametrize(
    ("args", "says"), [(["--method", "dense"], "expected one of"), (["short"], "max_position_embeddings is 2048")]
)
def test_refusals_come_before_a_server_starts(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").mkdir()
    (tmp_path / "short/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 2048}))
    result = CliRunner().invoke(app, ["demo", *args])
    assert result.exit_code != 0
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize("tokens", [2000, 4096])
def test_questions_ask_for_facts_of_the_text(tokens: int) -> None:
    questions = make_questions(lambda text: len(text.split()), tokens)
    text = questions[0].text
    assert tokens <= len(text.split()) < tokens * 1.1
    assert text.count("# The magic number of ") == NUM_FACTS
    assert len(questions) == len(ASKED) == 2
    for i, question in zip(ASKED, questions):
        assert question.text == text
        name = question.name
        assert question.question == f"# Question: what is the magic number of {name}?"
        assert text.count(f"# The magic number of {name} is {question.value}.\n") == 1
        assert text.index(question.value) / len(text) == pytest.approx((i + 1) / NUM_FACTS, abs=0.1)


def test_an_answer_is_right_only_with_the_value() -> None:
    question, other = make_questions(lambda text: len(text.split()), 500)
    assert question.is_answered_by(f" {question.value}.")
    assert not question.is_answered_by(f" {other.value}.")
    assert not question.is_answered_by(f" {question.value[:6]}")
    assert not question.is_answered_by(None)
