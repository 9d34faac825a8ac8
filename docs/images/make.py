"""Makes the two pictures of the README from one real run of the demo: its terminal (demo.png) and its loss
plot (loss.png).

    python docs/images/make.py [--set section.key=value ...]

from the root of the repository; what follows goes to `polyreme train`. Needs a Unix system and the extra
`demo`."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import shutil
import struct
import sys
import termios
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from polyreme.config import Config

COLUMNS = 100
FONT, SIZE = "DejaVu Sans Mono", 10.0
# points; the first is what the font gives each character
ADVANCE, LEADING, MARGIN = 0.602 * SIZE, 1.45 * SIZE, 12.0
PAPER, INK = "#16191d", "#d6dae0"
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")


def capture(command: list[str]) -> str:
    """All that `command` writes to a terminal of COLUMNS columns, control sequences included. Raises
    SystemExit if it fails."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    written = bytearray()
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # how Linux tells that the other end is closed
            break
        if not chunk:
            break
        written += chunk
    if status := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        sys.exit(f"{' '.join(command)} ended with status {status}:\n{written.decode(errors='replace')}")
    return written.decode()


def screen(output: str) -> list[str]:
    """The lines that a terminal shows after `output`, with their colours. Knows what a live display uses: to
    go up a line, to erase one, and to return to its beginning and write it anew."""
    lines, row, returned = [""], 0, False
    for token in CONTROL.findall(output):
        if token == "\n":
            row, returned = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            returned = True
        elif token.endswith("A") and token[0] == "\x1b":
            row = max(row - int(token[2:-1] or 1), 0)
        elif token.endswith("K") and token[0] == "\x1b":
            lines[row] = ""
        elif token.endswith("m") or token[0] != "\x1b":
            lines[row] = token if returned else lines[row] + token
            returned = False
    return lines


def draw(lines: list[str], png: Path) -> None:
    """Draw `lines` as a terminal shows them."""
    console = Console(width=COLUMNS, color_system="256", force_terminal=True)
    rows = [
        part
        for line in lines
        for part in Text.from_ansi(line).wrap(console, COLUMNS, overflow="fold") or [Text()]
    ]
    width, height = COLUMNS * ADVANCE + 2 * MARGIN, len(rows) * LEADING + 2 * MARGIN
    figure = Figure(figsize=(width / 72, height / 72), dpi=144, facecolor=PAPER)
    FigureCanvasAgg(figure)
    for number, row in enumerate(rows):
        column = 0
        for text, style, _ in Segment.simplify(row.render(console)):
            x, y = (MARGIN + column * ADVANCE) / width, 1 - (MARGIN + (number + 0.8) * LEADING) / height
            bold = "bold" if style and style.bold else "normal"
            figure.text(
                x,
                y,
                text.rstrip("\n"),
                color=_colour(style),
                family=FONT,
                size=SIZE,
                weight=bold,
                parse_math=False,
            )
            column += len(text)
    figure.savefig(png)


def _colour(style: Style | None) -> str:
    if style is None or style.color is None:
        return "#8a919c" if style is not None and style.dim else INK
    return style.color.get_truecolor().hex


def main(arguments: list[str]) -> None:
    root, here = Path(__file__).parents[2], Path(__file__).parent
    os.chdir(root)
    command = ["polyreme", "train", "examples/demo.toml", *arguments]
    output = capture([sys.executable, "-m", *command])
    draw(["$ " + " ".join(command), *screen(output)], here / "demo.png")
    changes = [value for option, value in itertools.pairwise(arguments) if option == "--set"]
    folder = Config.load("examples/demo.toml", changes).checkpoint.folder
    shutil.copy(Path(folder) / "loss.png", here / "loss.png")


if __name__ == "__main__":
    main(sys.argv[1:])
