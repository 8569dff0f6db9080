"""The command line: `adahop train`, `adahop list`, ... A user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import sys

import typer

from adahop.checks import InputError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train graph neural networks with samplers that learn which neighbours matter.",
)


def main(args: list[str] | None = None) -> None:
    """Run a command; nothing a user typed ends in a traceback."""
    from adahop.cli import listing, train  # noqa: F401  (they add their commands)

    try:
        code = app(args=args, standalone_mode=False)
    except InputError as e:
        _fail(str(e))
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except MemoryError as e:
        _fail(f"out of memory: {e or 'this graph and model need more than this machine has'}", 1)
    except Exception as e:
        if type(e).__name__ in ("Abort", "Exit"):
            sys.exit(getattr(e, "exit_code", 1))
        if not hasattr(e, "format_message"):  # what typer raises for a bad flag has one
            raise
        _fail(e.format_message())
    sys.exit(code or 0)


def _fail(sentence: str, code: int = 2) -> None:
    print(f"adahop: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


def numbers(text: str, what: str) -> list[int]:
    """'10,10' as [10, 10]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"`{what}` must be whole numbers with commas between, like 10,10, got '{text}'") from None
