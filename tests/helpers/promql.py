# SPDX-License-Identifier: Apache-2.0
"""The PromQL of docs/metrics.md and of the dashboard, as sent to Prometheus."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/monitoring/grafana/sparse-prefill.json"
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}
METRIC = re.compile(r"\b(?:sparse_prefill_|vllm:)\w+")


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def dashboard_queries() -> dict[str, str]:
    """Return queries by panel and letter, with Grafana's variables replaced."""
    queries = {f"{p['title']} {t['refId']}": t["expr"] for p in panels() for t in p["targets"]}
    for variable, value in VARIABLES.items():
        queries = {name: query.replace(variable, value) for name, query in queries.items()}
    return queries


def documented_queries() -> dict[str, str]:
    """Return the queries of the table of questions in docs/metrics.md. A bar within a table's cell is escaped."""
    rows = (ROOT / "docs/metrics.md").read_text().partition("## Queries")[2].partition("\n## ")[0].splitlines()
    cells = [re.split(r"(?<!\\)\|", row) for row in rows if row.startswith("| ") and "`" in row]
    return {question.strip(): query.strip().strip("`").replace("\\|", "|") for _, question, query, _ in cells}
