"""Draws a simulated step: a row for each rank, time to the right, a cell for each action with its
micro-batch.

Invariant: the same simulation gives the same picture. Messages, and actions that take no time, are not drawn.
Beside each row stand the rank's bubble, and the most micro-batches whose activations it keeps at once."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from rich.style import Style
from rich.text import Text

from polyreme.pipeline.schedule import Op
from polyreme.pipeline.simulate import Cell, Simulation

MEANING: dict[Op, str] = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "R": "reduce",
    "U": "update",
}
COLOURS: dict[Op, tuple[str, str]] = {
    "F": ("#bcd4f6", "#6fa0e6"),
    "B": ("#bfe3bf", "#6fb873"),
    "W": ("#fbe3a2", "#eab93f"),
    "R": ("#e0d3ee", "#b79ad6"),
    "U": ("#d9d9d9", "#a8a8a8"),
}
"""Colours of each action: on a rank's first stage, and on its others."""
INK = "#202020"


def text(simulation: Simulation, title: str, width: int = 80) -> Text:
    """Draw the picture for a terminal of `width` columns. The table must have an action that takes time.

    Cells show operation and micro-batch if all have room for both, else the micro-batch, else the operation
    (in small letters for other stages than a rank's first)."""
    rows = _drawn(simulation)
    head = [f"rank {rank} " for rank in range(len(rows))]
    tail = [
        f" {bubble:>6.1%} {peak:>4}" for bubble, peak in zip(simulation.bubble, simulation.peak, strict=True)
    ]
    margin = max(map(len, head))
    scale, kind = _scale(rows, simulation.total, max(width - margin - max(map(len, tail)), 1))
    columns = round(simulation.total * scale)
    picture = Text(f"{title}\n", no_wrap=True)
    picture.append(f"{'':{margin + columns}} bubble keep\n", style="dim")
    for name, row, facts in zip(head, rows, tail, strict=True):
        picture.append(f"{name:>{margin}}")
        at = 0
        for cell, shade in row:
            start, end = round(cell.start * scale), round(cell.end * scale)
            picture.append(" " * (start - at))
            letter = cell.action.op.lower() if shade else cell.action.op
            label = letter * (end - start) if kind == LETTERS else _label(cell, kind).ljust(end - start)
            picture.append(label, style=Style(color=INK, bgcolor=COLOURS[cell.action.op][shade]))
            at = end
        picture.append(" " * (columns - at) + facts + "\n")
    for op in _operations(rows):
        picture.append(f" {op} ", style=Style(color=INK, bgcolor=COLOURS[op][0]))
        picture.append(f" {MEANING[op]}  ")
    return picture.append(f"bubble {simulation.bubble_fraction:.1%}")


def svg(simulation: Simulation, title: str) -> str:
    """Draw the picture as the text of an SVG file. The table must have an action that takes time."""
    rows = _drawn(simulation)
    left, top, height, gap, right = 64, 52, 26, 4, 132
    usual = median(cell.end - cell.start for row in rows for cell, _ in row)
    scale = min(max(1200 / simulation.total, 16 / usual), 24 / usual)  # pixels in a unit of time
    end, bottom = left + simulation.total * scale, top + len(rows) * (height + gap)
    elements = [
        f'<text x="12" y="22" font-size="14">{escape(title)}; bubble {simulation.bubble_fraction:.1%}</text>',
        f'<text x="{end + 12:g}" y="{top - 8}" fill="#666">bubble, keep</text>',
    ]
    for rank, row in enumerate(rows):
        y = top + rank * (height + gap)
        elements.append(f'<text x="12" y="{y + 17}">rank {rank}</text>')
        elements.append(f'<rect x="{left}" y="{y}" width="{end - left:g}" height="{height}" fill="#f3f3f3"/>')
        elements.append(
            f'<text x="{end + 12:g}" y="{y + 17}">{simulation.bubble[rank]:.1%}, '
            f"{simulation.peak[rank]}</text>"
        )
        for cell, shade in row:
            x, width = left + cell.start * scale, (cell.end - cell.start) * scale
            box = (
                f'x="{x:g}" y="{y}" width="{width:g}" height="{height}" '
                f'fill="{COLOURS[cell.action.op][shade]}" stroke="#fff"'
            )
            elements.append(f"<rect {box}><title>{cell.action}</title></rect>")
            label = _label(cell, NUMBERS)
            if width > 7 * len(label):
                elements.append(
                    f'<text x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle">{label}</text>'
                )
    for i, op in enumerate(_operations(rows)):
        x = left + 140 * i
        elements.append(f'<rect x="{x}" y="{bottom + 10}" width="14" height="14" fill="{COLOURS[op][1]}"/>')
        elements.append(f'<text x="{x + 20}" y="{bottom + 21}">{MEANING[op]}</text>')
    view = (
        f'viewBox="0 0 {max(end + right, 640):g} {bottom + 36}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}"'
    )
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', background, *elements, "</svg>\n"])


Row = list[tuple[Cell, int]]
BOTH, NUMBERS, LETTERS = range(3)
"""Kinds of labels of cells: operation and micro-batch, the micro-batch, the operation."""


def _drawn(simulation: Simulation) -> list[Row]:
    """The cells to draw, by rank, each with the shade of its stage: 0 for the rank's first, 1 for others."""
    rows = []
    for cells in simulation.cells:
        first = min((cell.action.stage for cell in cells if cell.action.op == "F"), default=0)
        drawn = [cell for cell in cells if cell.action.op in MEANING and cell.end > cell.start]
        rows.append([(cell, int(cell.action.op != "U" and cell.action.stage != first)) for cell in drawn])
    return rows


def _operations(rows: Sequence[Row]) -> list[Op]:
    present = {cell.action.op for row in rows for cell, _ in row}
    return [op for op in MEANING if op in present]


def _label(cell: Cell, kind: int) -> str:
    number = "" if cell.action.microbatch is None else str(cell.action.microbatch)
    return number if number and kind == NUMBERS else f"{cell.action.op}{number}"


def _scale(rows: Sequence[Row], total: float, room: int) -> tuple[float, int]:
    """The columns for a unit of time, and the kind of label that fits, with a space, into all cells."""
    cells = [cell for row in rows for cell, _ in row]
    for kind in (BOTH, NUMBERS):
        scale = max((len(_label(cell, kind)) + 1) / (cell.end - cell.start) for cell in cells)
        if total * scale <= room:
            return scale, kind
    return min(room / total, 1 / min(cell.end - cell.start for cell in cells)), LETTERS
