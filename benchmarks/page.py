# SPDX-License-Identifier: Apache-2.0
"""One page of HTML with all in it: tables and drawings that people can send around. It loads nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vllm_sparse_backend.measure.report import Report, cell, versions

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
h3 { font-size: 1rem; margin-bottom: .2rem; font-weight: 600 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.n, th.n { text-align: right } tr:hover td { background: #f4f6f8 }
p.note { color: #555; font-size: .9rem; max-width: 50rem } .failed { color: #b00020 }
.wide { overflow-x: auto } .side { display: flex; flex-wrap: wrap; gap: 1rem 2rem }
code { font-size: .85rem; overflow-wrap: anywhere }
""".strip()


class Page:
    """Parts in the order in which they are added."""

    def __init__(self, title: str, report: Report) -> None:
        self.title = title
        about = {"Measured": f"{report.date[:10]}, {report.device}", "Command": report.command}
        about["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
        lines = "<br>".join(f"{name}: <code>{escape(text)}</code>" for name, text in about.items())
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="note">{lines}</p>']

    def heading(self, text: str, note: str | None = None) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")
        if note:
            self._parts.append(f'<p class="note">{escape(note)}</p>')

    def table(self, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
        """As ``bench.report.table_of``; what a row lacks stays empty."""
        numeric = {key: any(isinstance(row.get(key), int | float) for row in rows) for key in columns}

        def line(tag: str, texts: Mapping[str, str]) -> str:
            cells = (f"<{tag}{' class=n' if numeric[key] else ''}>{escape(texts[key])}</{tag}>" for key in columns)
            return f"<tr>{''.join(cells)}</tr>"

        body = "".join(line("td", {key: cell(row.get(key)) for key in columns}) for row in rows)
        head = line("th", columns)
        self._parts.append(f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>')

    def figures(self, drawings: Mapping[str, str]) -> None:
        """SVGs by their titles, side by side where there is room; empty ones are left out."""
        shown = (f"<div><h3>{escape(name)}</h3>{svg}</div>" for name, svg in drawings.items() if svg)
        self._parts.append(f'<div class="side">{"".join(shown)}</div>')

    def failures(self, texts: Sequence[str]) -> None:
        """What is not in the figures."""
        if texts:
            self.heading("Failed, and not counted")
            self._parts.append("".join(f'<p class="failed">{escape(text)}</p>' for text in texts))

    def html(self) -> str:
        head = f'<meta charset="utf-8"><title>{escape(self.title)}</title><style>{_STYLE}</style>'
        body = "\n".join(self._parts)
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html(), encoding="utf-8")
