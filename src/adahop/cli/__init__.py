"""The command line: `adahop train`, `adahop list`, ... A user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from adahop.checks import InputError, no_room

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train graph neural networks with samplers that learn which neighbours matter.",
)


def _version(asked: bool) -> None:
    if asked:
        from adahop import __version__

        print(f"adahop {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Train graph neural networks with samplers that learn which neighbours matter."""


def main(args: list[str] | None = None) -> NoReturn:
    """Run a command; nothing a user typed ends in a traceback."""
    from adahop.cli import (  # noqa: F401  (they add their commands)
        bench,
        compare,
        convert,
        listing,
        partition,
        report,
        reproduce,
        train,
        variance,
    )  # fmt: skip

    command = typer.main.get_command(app)
    try:  # not command.main(): each version of typer has its own way with Ctrl-C and errors
        with command.make_context("adahop", list(sys.argv[1:] if args is None else args)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except InputError as e:
        _fail(str(e), 1 if isinstance(e, MemoryError) else 2)
    except KeyboardInterrupt as e:
        _fail(str(e) or "interrupted", 130)
    except BrokenPipeError:  # `adahop list | head`: nobody reads on, and Python's own last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (MemoryError, RuntimeError) as e:
        _out_of_memory(e)
    except Exception as e:
        _of_typer(e)
    sys.exit(0)


def _out_of_memory(e: Exception) -> NoReturn:
    """torch says RuntimeError for it, on any device."""
    if not no_room(e):
        _of_typer(e)  # its Exit is a RuntimeError too
    _fail("out of memory; smaller `sizes`, `batch_size` or `hidden` need less", 1)


def _of_typer(e: Exception) -> NoReturn:
    """What typer raises to leave, and for a bad flag; all else is ours, and its traceback is wanted."""
    if type(e).__name__ in ("Abort", "Exit"):
        sys.exit(getattr(e, "exit_code", 1))
    if not hasattr(e, "format_message"):
        raise e
    if type(e).__name__ == "NoArgsIsHelpError":  # the help was its message
        sys.exit(2)
    _fail(e.format_message())


def _fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"adahop: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


def numbers(text: str, what: str) -> list[int]:
    """'10,10' as [10, 10]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"`{what}` must be whole numbers with commas between, like 10,10, got '{text}'") from None


def pairs(texts: list[str], what: str) -> dict[str, Any]:
    """['eta=0.2', 'draw=systematic'] as {'eta': 0.2, 'draw': 'systematic'}: numbers, true, false, null, else text."""
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise InputError(f"`{what}` must be name=value, got '{text}'")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
        if isinstance(out[name], list | dict):
            raise InputError(f"`{what}` must have one number or word as its value, got '{text}'")
    return out
