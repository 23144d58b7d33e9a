"""Figures as rows of docs/results/*.json: name, value, unit, bar, better, device, command."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

FIELDS = ("name", "value", "unit", "bar", "better", "device", "command")


class Results:
    """Rows of one run. A row of the same name in the file is replaced, others are kept."""

    def __init__(self, path: Path | None, command: str | None = None) -> None:
        self.path = path
        self.command = command or shlex.join(["python", "-m", *_module(), *sys.argv[1:]])
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: float, unit: str, better: str, bar: float | None = None) -> None:
        values = (name, float(f"{value:.4g}"), unit, bar, better, self.device, self.command)
        self.rows.append(dict(zip(FIELDS, values, strict=True)))
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        old = json.loads(self.path.read_text()) if self.path.exists() else []
        names = {row["name"] for row in self.rows}
        rows = [row for row in old if row["name"] not in names] + self.rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(rows, indent=1) + "\n")

    def show(self) -> None:
        table = Table(title=self.device)
        for column in ("name", "value", "unit", "bar", "met"):
            table.add_column(column)
        for row in self.rows:
            table.add_row(row["name"], str(row["value"]), row["unit"], str(row["bar"] or ""), _met(row))
        Console(width=150).print(table)


def _met(row: dict[str, Any]) -> str:
    if row["bar"] is None:
        return ""
    met = row["value"] >= row["bar"] if row["better"] == "higher" else row["value"] <= row["bar"]
    return "yes" if met else "NO"


def _module() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name] if spec else [sys.argv[0]]
