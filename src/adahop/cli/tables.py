"""Tables on a screen."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

ENDLESS = 10_000


def show_table(console: Console, table: Table) -> None:
    """Print a table with all of its words: where a screen is too narrow for them, rich shortens them, even to nothing.
    There the lines are longer than the screen instead."""
    screen, console.width = console.width, ENDLESS
    wanted = Measurement.get(console, console.options, table)
    if wanted.maximum > screen:
        table.width = max(wanted.minimum, screen)
        for column in table.columns:
            cells = [column.header, *column.cells]
            column.min_width = max(Measurement.get(console, console.options, cell).minimum for cell in cells)
    console.print(table)
    console.width = screen
