"""The command line: `adahop train`, `adahop list`, ... A user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from adahop.cli import commands
from adahop.errors import InputError, no_room

OURS: dict[str, Callable[..., None]] = {
    "train": commands.train,
    "variance": commands.variance,
    "advise": commands.advise,
    "list": commands.listing,
    "convert": commands.convert,
    "partition": commands.partition,
}
# of adahop-lab, which brings them; their sentences are here so that `adahop --help` can do without it
LAB = {
    "compare": "Train with several methods and test whether the best one is significantly better.",
    "bench": "Measure speed and memory compared with other libraries, taking turns.",
    "reproduce": "Run an experiment and print its table; a stopped run continues with the same command.",
    "report": "Write tables and plots as one HTML page; fails if a row differs from the paper without an explanation.",
}
COMMANDS = (*OURS, *LAB)


def _version(asked: bool) -> None:
    if asked:
        from adahop import __version__

        print(f"adahop {__version__}")
        raise typer.Exit()


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train graph neural networks with samplers that learn which neighbours matter."""


def build(wanted: Collection[str] | None = None) -> typer.Typer:
    """Every command; those of other packages that are not `wanted` (None: all are) have a sentence, and cannot run.

    An installed package adds commands by entry points `adahop.commands`, each a function or a Typer.
    """
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(root)
    for name, own in OURS.items():
        app.command(name)(own)
    joined = {entry.name: entry for entry in entry_points(group="adahop.commands")}
    for name in dict.fromkeys([*LAB, *joined]):
        about = LAB.get(name, "")
        if wanted is not None and name not in wanted and about:
            app.command(name, help=about if name in joined else f"{about} Needs adahop-lab.")(_missing)
        elif name not in joined:
            app.command(name, help=f"{about} Needs adahop-lab.", context_settings=ANYTHING)(_missing)
        else:
            command = joined[name].load()
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    return app


ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _missing(context: typer.Context) -> None:
    raise InputError(f"`adahop {context.info_name}` needs adahop-lab: `pip install ./lab` in a checkout adds it")


def plugins() -> None:
    """Import what $ADAHOP_PLUGINS names, modules or .py files with commas between, which `adahop.register` methods."""
    for name in filter(None, map(str.strip, os.environ.get("ADAHOP_PLUGINS", "").split(","))):
        file = Path(name)
        module = file.stem if file.suffix == ".py" else name
        folder = str(file.parent.resolve()) if file.suffix == ".py" else os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            import_module(module)
        except ModuleNotFoundError as e:
            if e.name != module:
                raise
            raise InputError(f"`ADAHOP_PLUGINS` must name modules or .py files that exist, got '{name}'") from None


def main(args: list[str] | None = None) -> NoReturn:
    """Run a command; nothing a user typed ends in a traceback."""
    words = list(sys.argv[1:] if args is None else args)
    try:  # not command.main(): each version of typer has its own way with Ctrl-C and errors
        plugins()
        command = typer.main.get_command(build(words[:1]))
        with command.make_context("adahop", words) as context:
            command.invoke(context)
        sys.stdout.flush()
    except InputError as e:
        _fail(str(e), 1 if isinstance(e, MemoryError) else 2)
    except KeyboardInterrupt as e:
        _fail(str(e) or "interrupted", 130)
    except BrokenPipeError:  # `adahop list | head`: nothing reads on, and Python's own last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (MemoryError, RuntimeError) as e:
        _out_of_memory(e)
    except Exception as e:
        _of_typer(e)
    sys.exit(0)


def _out_of_memory(e: Exception) -> NoReturn:
    """torch raises RuntimeError for it, on any device."""
    if not no_room(e):
        _of_typer(e)  # its Exit is a RuntimeError too
    _fail("out of memory; smaller `sizes`, `batch_size` or `hidden` need less", 1)


def _of_typer(e: Exception) -> NoReturn:
    """What typer raises to exit, and for a bad flag; any other exception is a bug and keeps its traceback."""
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


def levels(text: str) -> float | tuple[float, ...] | str:
    """'0.5' as 0.5, '0,0.5' as (0.0, 0.5), 'auto' as it is."""
    if text == "auto":
        return text
    try:
        each = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"`noise` must be auto, or numbers in [0, 1] with commas between, got '{text}'") from None
    return each[0] if len(each) == 1 else each


def pairs(texts: list[str], what: str) -> dict[str, Any]:
    """['eta=0.2', 'draw=systematic'] as {'eta': 0.2, 'draw': 'systematic'}: numbers, true, false, null, else text."""
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise InputError(f"`{what}` must be name=value, got '{text}'")
        try:
            out[name] = json.loads(re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", value))  # .05 is a number, but no JSON
        except ValueError:
            out[name] = value
        if isinstance(out[name], list | dict):
            raise InputError(f"`{what}` must have one number or word as its value, got '{text}'")
    return out
