"""What users install: wheel and sdist of both distributions, built here, in an environment with nothing else in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; out = sys.argv[1]; from setuptools import build_meta as b; b.build_sdist(out); b.build_wheel(out)"
HEAVY = {"matplotlib", "scikit-learn", "pandas", "scipy", "dgl", "ogb", "lightning", "adahop-lab"}

pytestmark = pytest.mark.slow


def sh(*words: str | Path, cwd: Path | None = None) -> str:
    """The output of a program that must succeed, with no trace of this checkout in its paths."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(cwd or "/nonexistent"), "NUMBA_CACHE_DIR": str(cwd or "/tmp")}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """(wheel, sdist) of each distribution, built offline in a copy of its source."""
    found = {}
    for name, source in (("adahop", ROOT), ("adahop-lab", ROOT / "lab")):
        home, out = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("dist")
        kept = ("pyproject.toml", "README.md", "LICENSE")
        for file in kept:
            if (source / file).exists():
                shutil.copy(source / file, home)
        shutil.copytree(source / "src", home / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        sh(sys.executable, "-c", BUILD, out, cwd=home)
        found[name] = (next(out.glob("*.whl")), next(out.glob("*.tar.gz")))
    return found


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as z:
        return {name for name in z.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as z:
        return Parser().parsestr(z.read(next(n for n in z.namelist() if n.endswith("/METADATA"))).decode())


def needs(lines: list[str]) -> set[str]:
    """The names of requirements that hold without an extra."""
    plain = [line for line in lines if "extra ==" not in line]
    return {re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0].lower().replace("_", "-") for line in plain}


def test_a_wheel_holds_the_library_and_nothing_of_the_laboratory(built):
    wheel, _ = built["adahop"]
    held = names(wheel)
    assert {"adahop/__init__.py", "adahop/py.typed", "adahop/datasets/digits.npz"} <= held
    assert {name.split("/")[0] for name in held} == {"adahop"}
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert source <= held
    lab = names(built["adahop-lab"][0])
    assert {"adahop_lab/experiments/paper.json", "adahop_lab/experiments/page/page.js"} <= lab


def test_the_metadata_is_what_users_expect(built):
    from adahop import __version__

    said = metadata(built["adahop"][0])
    assert said["Version"] == __version__ and said["License-Expression"] == "MIT" and said["License-File"] == "LICENSE"
    assert said["Author"] == "The adahop authors" and said["Keywords"] and said.get_all("Classifier")
    assert said.get_payload().startswith("# adahop")
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE), "it is in __init__.py"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_nothing_heavy_is_pulled_in(built):
    """The closure of the requirements, by the metadata of what is installed here."""
    waiting, seen = needs(metadata(built["adahop"][0]).get_all("Requires-Dist")), set()
    assert waiting == {"torch", "torch-geometric", "numba", "numpy", "typer", "rich"}
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            try:
                waiting |= needs(requires(name) or [])
            except PackageNotFoundError:  # for another system or Python
                continue
    assert len(seen) > 15 and not seen & HEAVY


def test_the_sdist_is_whole(built, tmp_path):
    """A wheel built from it holds the same files."""
    for wheel, sdist in built.values():
        home, out = tmp_path / f"from-{wheel.stem}", tmp_path / f"wheel-{wheel.stem}"
        with tarfile.open(sdist) as archive:
            archive.extractall(home, filter="data")
        out.mkdir()
        sh(sys.executable, "-c", BUILD, out, cwd=next(home.iterdir()))
        assert names(next(out.glob("*.whl"))) == names(wheel)


def test_it_runs_where_nothing_else_of_it_is(built, tmp_path):
    """An environment of its own, with the packages it needs lent by this one."""
    home = tmp_path / "venv"
    sh(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    site = Path(sh(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-cache-dir",
    )
    sh(*pip, "--force-reinstall", built["adahop"][0])
    where = sh(python, "-c", "import adahop; print(adahop.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    adahop = home / "bin" / "adahop"
    assert sh(adahop, "--version", cwd=tmp_path).startswith("adahop ")
    flags = ("--epochs", "1", "--hidden", "8", "--sizes", "2,2", "--method", "graphsage")
    assert "test accuracy" in sh(adahop, "train", *flags, cwd=tmp_path)
    sh(*pip, "--force-reinstall", built["adahop-lab"][0])
    assert "sampling" in sh(adahop, "bench", "--help", cwd=tmp_path)
    lab = sh(python, "-c", "import adahop_lab; print(adahop_lab.__file__)", cwd=tmp_path)
    assert Path(lab.strip()).is_relative_to(site)
