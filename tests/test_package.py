"""The wheel carries grammar and library, and works where no checkout is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_runs_elsewhere(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    ignored = shutil.ignore_patterns("node_modules", "__pycache__", ".*", "tests", "editor-support", "benchmarks", "docs")
    shutil.copytree(ROOT, copy, ignore=ignored)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(copy)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("grammar/piper.lark", "stdlib/pipeline.piper", "stdlib/data.piper"):
        assert f"piperlang/_data/{name}" in names
    assert "piperlang/py.typed" in names
    assert any(name.startswith("piperlang/diagnostics/pages/P0302") for name in names)
    assert not any(name.startswith(("tests/", "examples/")) for name in names)

    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=300)
    shutil.rmtree(copy)
    script = tmp_path / "s.piper"
    script.write_text("from std.pipeline import gpipe, loop\nmesh gpu = pp: 2\nloop(gpu, 2)\nsplit batch into 2 as mb\ngpipe(gpu, 2, 2)\n")
    # Only the installed wheel and the packages it depends on are on the path: no checkout, no editable install.
    code = f"import sys; sys.path[:0] = [{str(target)!r}]; import piperlang; assert piperlang.__file__.startswith({str(target)!r}); from piperlang.cli.main import main; sys.exit(main(['orders', {str(script)!r}]))"
    env = {"PYTHONPATH": sysconfig.get_paths()["purelib"], "HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "device 0 | F0 F1" in done.stdout
    assert (target / "bin" / "piperc").exists()
