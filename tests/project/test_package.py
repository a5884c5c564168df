"""The wheel, alone in a new virtual environment with nothing but what it depends on: no checkout, no torch, no Ray."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import ROOT

SCRIPT = (
    "from std.pipeline import gpipe, loop\nmesh gpu = pp: 2\nloop(gpu, 2)\nsplit batch into 2 as mb\ngpipe(gpu, 2, 2)\n"
)
MODEL = "import torch\nfrom piperlang import annotate\n"


@dataclass(frozen=True)
class Installed:
    wheel: Path
    environment: Path
    folder: Path
    """An empty folder but for s.piper and model.py."""

    def run(self, program: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.folder.parent), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        command = [str(self.environment / "bin" / program), *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def piperc(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        done = self.run("piperc", *arguments, stdin=stdin)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    top = tmp_path_factory.mktemp("package")
    copy = top / "source"
    ignored = shutil.ignore_patterns(
        "node_modules", "__pycache__", ".*", "tests", "editor-support", "benchmarks", "docs", "runs"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    shutil.copy(ROOT / ".gitignore", copy)  # the builder leaves out what git ignores
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(top / "dist"), str(copy)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    shutil.rmtree(copy)
    (wheel,) = (top / "dist").glob("*.whl")
    environment = top / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=600)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in dependencies(required(wheel)):
        _copy(name, site)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=300)
    folder = top / "elsewhere"
    folder.mkdir()
    (folder / "s.piper").write_text(SCRIPT)
    (folder / "model.py").write_text(MODEL)
    return Installed(wheel, environment, folder)


def required(wheel: Path) -> list[str]:
    """What the wheel wants installed without any extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        return _names(email.message_from_bytes(archive.read(name)).get_all("Requires-Dist"))


def _names(requirements: list[str] | None) -> list[str]:
    """Of what is required here, without any extra."""
    found = map(Requirement, requirements or ())
    return [wanted.name for wanted in found if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]


def dependencies(names: list[str]) -> set[str]:
    """Those, and all that they depend on."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += _names(distribution(name).requires)
    return found


def _copy(name: str, site: Path) -> None:
    """A package from this environment into another: as a download would, but for the network."""
    for file in distribution(name).files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target)


def test_what_the_wheel_holds(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    for name in (
        "grammar/piper.lark",
        "stdlib/pipeline.piper",
        "stdlib/data.piper",
        "examples/starter/model.py",
        "examples/starter/schedule.piper",
    ):
        assert f"piperlang/_data/{name}" in names
    assert "piperlang/py.typed" in names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "piperlang").rglob("*.py")}
    assert modules <= set(names)
    assert any(name.startswith("piperlang/diagnostics/pages/P0302") for name in names)
    assert not any(name.startswith(("tests/", "examples/")) for name in names)


def test_it_is_small(installed: Installed) -> None:
    names = {name.replace("_", "-") for name in required(installed.wheel)}
    assert names == {"lark", "prompt-toolkit", "pygls", "pygments", "rich"}
    assert not dependencies(required(installed.wheel)) & {"torch", "ray", "numpy", "safetensors"}
    assert installed.wheel.stat().st_size < 2**20
    site = next(installed.environment.glob("lib/python*/site-packages"))
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc") < 20 * 2**20


def test_neither_torch_nor_ray_is_there(installed: Installed) -> None:
    code = (
        "import importlib.util as u, piperlang; names = ('torch', 'ray', 'numpy', 'safetensors');"
        " print([n for n in names if u.find_spec(n)], piperlang.__file__)"
    )
    done = installed.run("python", "-c", code)
    assert done.stdout.startswith("[] "), done.stderr
    assert str(installed.environment) in done.stdout


def test_the_front_end_works(installed: Installed) -> None:
    assert installed.piperc("check", ".") == "s.piper: ok (2 devices, 2 chunks, 8 ordered steps)\n"
    assert installed.piperc("fmt", "--check", ".") == ""
    assert "device 0 | F0 F1" in installed.piperc("orders", "s.piper")
    assert installed.piperc("explain", "P0302").startswith("# P0302")
    assert "complete -F _piperc piperc" in installed.piperc("completion", "bash")
    assert "unknown name" in installed.piperc("check", "-", stdin="print x\n", code=1)
    assert "schedule.piper" in installed.piperc("init", "job")
    assert "pip install 'piperlang[run]'" in installed.piperc("doctor", code=1)
    messages = [
        {"id": 1, "method": "initialize", "params": {"capabilities": {}, "processId": None, "rootUri": None}},
        {"id": 2, "method": "shutdown"},
        {"method": "exit"},
    ]
    bodies = [json.dumps({"jsonrpc": "2.0", **message}) for message in messages]
    spoken = "".join(f"Content-Length: {len(body)}\r\n\r\n{body}" for body in bodies)
    assert '"completionProvider"' in installed.piperc("lsp", stdin=spoken)


def test_models_say_what_to_install(installed: Installed) -> None:
    for words in (
        ["model.py", "s.piper"],
        ["check", "model.py", "s.piper"],
        ["graph", "model.py", "s.piper"],
        ["plan", "model.py", "s.piper"],
        ["fuzz", "model.py"],
    ):
        assert "error[P0905]" in installed.piperc(*words, code=2)
    done = installed.run("python", "-c", "import piperlang; piperlang.annotate")
    assert done.stderr.splitlines()[-1] == "ImportError: piperlang.annotate needs torch: pip install 'piperlang[run]'"


def test_highlighting(installed: Installed) -> None:
    done = installed.run("python", "-m", "pygments", "-l", "piper", "-f", "html", "s.piper")
    assert done.returncode == 0, done.stderr
    assert '<span class="kn">from</span>' in done.stdout
