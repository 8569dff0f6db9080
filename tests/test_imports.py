"""What an import loads, in a process of its own: help and errors without torch, the library without plots or tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

import adahop
from adahop import cli

HEAVY = ("torch", "torch_geometric", "numba", "numpy")
LAB = ("matplotlib", "sklearn", "adahop_lab")


def loaded(code: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that are imported once `code` has run."""
    words = f"{code}\nimport sys; print('loaded', *[m for m in {names!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def command(*words: str) -> str:
    return f"from adahop.cli import main\ntry: main({list(words)!r})\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    "code",
    ["import adahop", command("--help"), command("--version"), command("no-such-command"), command("--no-such-flag")],
)
def test_help_does_not_wait_for_torch(code):
    assert loaded(code, HEAVY) == []


def test_the_rule_sees_an_import():
    assert loaded("import adahop; adahop.Loader", HEAVY) == list(HEAVY)


def test_training_loads_no_plots():
    code = "import adahop\nadahop.fit(adahop.load('synthetic:60,600,4,2'), epochs=1, hidden=4, sizes=(2, 2))"
    assert loaded(code, LAB) == []


def test_every_public_name_is_there_and_is_itself():
    """`adahop.watch` is the function, whatever was imported before it."""
    code = (
        "import adahop.train, adahop.pyg, adahop\nfor name in adahop.__all__: getattr(adahop, name)\n"
        "assert set(adahop.__all__) <= set(dir(adahop)) and callable(adahop.watch) and callable(adahop.inference)\n"
        "assert adahop.Graph is adahop.graph.Graph and adahop.InputError is adahop.checks.InputError"
    )
    assert loaded(code, ()) == []
    import adahop

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        adahop.nothing  # noqa: B018


@pytest.mark.parametrize("words", [*([name] for name in cli.COMMANDS), ["bench", "sampling"]], ids=" ".join)
def test_a_commands_help_does_not_wait_for_torch(words):
    assert loaded(command(*words, "--help"), HEAVY) == []


def test_the_help_names_every_estimator(capsys):
    from adahop.sum import ESTIMATORS

    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ESTIMATORS)


@pytest.mark.parametrize("name", cli.LAB)
def test_the_help_says_what_the_command_says(name):
    """The sentences of `adahop --help` are written down beside the commands' names: they must be the commands' own."""
    app = cli.build([name])
    groups = {g.name: g.typer_instance.info.help for g in app.registered_groups}
    found = {c.name: c.callback.__doc__ for c in app.registered_commands} | groups
    assert found[name].strip().splitlines()[0] == cli.LAB[name]


def test_submodules_are_attributes():
    """As they were when `import adahop` loaded everything."""
    assert loaded("import adahop; adahop.ops.set_threads(1); adahop.distributed.session", ("adahop.ops",)) == [
        "adahop.ops"
    ]
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_the_kind'"):
        adahop.nothing_of_the_kind  # noqa: B018
