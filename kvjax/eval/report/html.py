"""One self-contained HTML page: tables, pictures, and the words of a text that each policy kept."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

from kvjax.eval.measure.row import Example, Row
from kvjax.eval.report import markdown, table
from kvjax.eval.report.table import Results

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem;
  padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 12px; margin: 1rem 0; display: block; overflow-x: auto }
td, th { border: 1px solid #ccc; padding: 2px 6px; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
img { max-width: 100% }
.text { font: 12px/1.7 ui-monospace, monospace; white-space: pre-wrap; border: 1px solid #ccc;
  padding: .6rem }
.key span { padding: 0 .5rem }
summary { cursor: pointer; padding: .2rem 0 }
"""
TEXTS = 6
"""Cells whose example text is shown."""


def page(results: Results, figures: list[Path]) -> str:
    """The page."""
    body = [_rendered(markdown.text(results))]
    for file in figures:
        data = base64.b64encode(file.read_bytes()).decode()
        body.append(f'<h2>{file.stem}</h2><img alt="{file.stem}" src="data:image/png;base64,{data}">')
    body += ["<h2>What each policy kept of a text</h2>", _key(), *_texts(results)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvjax results</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _rendered(text: str) -> str:
    """HTML of the few forms of Markdown that our tables use."""
    out = []
    for block in text.strip().split("\n\n"):
        if block.startswith("#"):
            level = len(block) - len(block.lstrip("#"))
            out.append(f"<h{level}>{html.escape(block.lstrip('# '))}</h{level}>")
        elif block.startswith("|"):
            lines = [re.split(r"(?<!\\) \| ", line.strip()[2:-2]) for line in block.split("\n")]
            head, *rows = [lines[0], *lines[2:]]
            out.append("<table><tr>" + "".join(f"<th>{_inline(x)}</th>" for x in head) + "</tr>")
            out += ["<tr>" + "".join(f"<td>{_inline(x)}</td>" for x in row) + "</tr>" for row in rows]
            out.append("</table>")
        else:
            out.append(f"<p>{_inline(block)}</p>")
    return "".join(out)


def _inline(text: str) -> str:
    text = html.escape(text.replace("\\|", "|").replace("\\*", "*"))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", text)


def _texts(results: Results) -> list[str]:
    out = []
    for full in [row for row in results.rows if row.example.pieces][:TEXTS]:
        cell = full.cell
        others = [r for r in results.rows if r.cell.drawn == cell.drawn and r is not full]
        if not others:
            continue
        answer = html.escape((full.example.answer or "")[:80])
        out.append(f"<h3>{cell.task}, {cell.length} tokens, first sample; answer: <code>{answer}</code></h3>")
        out += [_highlighted(row, full.example) for row in others]
    return out


def _highlighted(row: Row, example: Example) -> str:
    """The text; each token as strong as the share of (layer, KV head) that still hold it."""
    heads = sum(len(layer) for layer in row.heads)
    words, pieces = [], example.pieces or []
    needed = [*(example.needed or ()), *[0] * len(pieces)]
    for piece, held, answer in zip(pieces, row.example.held, needed):
        share = held / heads
        tone = f"background:rgba(0,158,115,{0.6 * share:.2f})" if held else "color:#999"
        tone += ";border-bottom:2px solid #d55e00" if answer else ""
        words.append(f'<span style="{tone}" title="{held} of {heads}">{html.escape(piece)}</span>')
    title = f"{table.name(row)}: kept {100 * row.kept_fraction:.0f} %"
    return (
        f'<details><summary>{html.escape(title)}</summary><div class="text">{"".join(words)}</div></details>'
    )


def _key() -> str:
    tones = "".join(
        f'<span style="background:rgba(0,158,115,{0.6 * share:.2f})">{share:.0%}</span>'
        for share in (0.25, 0.5, 1)
    )
    none = '<span style="color:#999">none</span>'
    answer = '<span style="border-bottom:2px solid #d55e00">underlined</span>'
    return (
        f'<p class="key">Share of layers and KV heads that hold a token: {none}{tones} '
        f"What holds the answer is {answer}.</p>"
    )
