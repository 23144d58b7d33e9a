# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.mla_kernels`: its methods, and what it refuses."""

import typer
from typer.testing import CliRunner

from benchmarks import mla_kernels
from vllm_sparse_backend.config.mla import describe


def output_of(*options: str) -> str:
    """Return the error message of a command that is refused."""
    app = typer.Typer()
    app.command()(mla_kernels.main)
    result = CliRunner().invoke(app, options, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    return result.output


def test_methods_without_a_part_that_runs_them_are_refused() -> None:
    output = output_of("--case", "dense", "--part", "products", "--part", "launches")
    assert "--case: given dense with only --part products, launches" in output
    assert "add a --part of checks, times, kernels" in output


def test_unknown_methods_are_refused() -> None:
    assert "--case: given top_p, expected dense or A-shape" in output_of("--case", "top_p")


def test_parts_get_the_methods_of_the_command() -> None:
    methods = {"dense": mla_kernels.METHODS["dense"]}
    parts = mla_kernels.parts_of("a shape", ["checks", "times", "kernels"], methods, report=None, repeats=1)  # type: ignore[arg-type]
    assert list(parts) == ["check of dense", "times", "kernels"]
    assert all(parts[name].keywords["methods"] == methods for name in ("times", "kernels"))  # type: ignore[attr-defined]


def test_the_servers_default_is_that_of_a_server() -> None:
    assert describe(mla_kernels.METHODS[mla_kernels.SERVER_DEFAULT]) == (
        "top_p(kept_mass=0.9, most_share=0.2, channels=128, queries='half')"
    )
