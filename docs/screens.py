"""Makes docs/screens.md again: what a person sees of a training run, from real terminals, a log file and a notebook.

    python docs/screens.py

Times and rates are those of the machine it runs on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.terminal import PIPERC, terminal  # noqa: E402

JOB = ["examples/01_mlp/model.py", "examples/01_mlp/both.piper", "--steps", "200"]
NOTEBOOK = [
    """import piperlang
from model import data, loss, model, optimizer

batches = data()
trainer = piperlang.compile(model, "both.piper", loss=loss, example=next(batches), optimizer=optimizer)""",
    """for _ in range(200):
    trainer.step(next(batches))""",
    "trainer.close()",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        page = PAGE.format(
            **start_up(Path(folder)),
            narrow=run(Path(folder), 50),
            wide=run(Path(folder), 120),
            log=log(Path(folder)),
            notebook=notebook(),
        )
    (ROOT / "docs" / "screens.md").write_text(page, encoding="utf-8")


def start_up(folder: Path) -> dict[str, str]:
    """The screen at every change of what is being done, until the bar is there."""
    screens: dict[str, str] = {}

    with terminal([*PIPERC, *JOB], 80, cwd=folder) as seen:

        def note() -> bool:
            last = seen.lines[-1] if seen.lines else ""
            what = last.partition(" ...")[0] if " ... " in last else ""
            if what:
                screens[what] = "\n".join(seen.lines)
            return "ETA" in last

        seen.read(until=note)
        screens["bar"] = "\n".join(seen.lines)
        seen.child.sendintr()
        seen.end()
    tracing = next(text for what, text in screens.items() if what.startswith("tracing"))
    workers = [text for what, text in screens.items() if what.startswith("workers")] or [screens["starting 4 workers"]]
    return {"tracing": tracing, "workers": workers[len(workers) // 2], "bar": screens["bar"]}


def run(folder: Path, columns: int) -> str:
    """The screen in the middle of a run, and all that is left of it at its end."""
    with terminal([*PIPERC, *JOB], columns, rows=30, cwd=folder) as seen:
        seen.read(until=lambda: bool(re.search(r"1[0-4]\d/200 .* ETA", seen.lines[-1] if seen.lines else "")))
        middle = "\n".join(seen.lines)
        seen.end()
        end = "\n".join(seen.lines)
    return f"```\n{middle}\n```\n\nAt the end:\n\n```\n{end}\n```"


def log(folder: Path) -> str:
    with (folder / "job.log").open("w") as file:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*PIPERC, *JOB], cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=True, env=environment)
    return (folder / "job.log").read_text(encoding="utf-8").rstrip()


def notebook() -> str:
    """Cells and their outputs. What Ray and tqdm say on standard error of packages that are not there is left out."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK])
    resources = {"metadata": {"path": str(ROOT / "examples" / "01_mlp")}}
    nbclient.NotebookClient(made, timeout=300, resources=resources).execute()
    parts = []
    for cell in made.cells:
        parts.append(f"```python\n{cell.source}\n```")
        parts += [
            f"```\n{out['data']['text/plain']}\n```" for out in cell.outputs if out["output_type"] == "display_data"
        ]
    return "\n\n".join(parts)


PAGE = """# Screens

What a person sees of one job, four workers and 200 steps of [examples/01_mlp](../examples/01_mlp/README.md):

```
piperc examples/01_mlp/model.py examples/01_mlp/both.piper --steps 200
```

All of this page is made by `python docs/screens.py`, on pseudo-terminals, into a file, and by running a notebook. What each part means is in
[Training](running.md#what-is-shown).

## Start-up

The last line is the status line. It is drawn again while a phase goes on, and erased when it ends.

```
{tracing}
```

```
{workers}
```

```
{bar}
```

## On a terminal of 50 columns

{narrow}

## On a terminal of 120 columns

{wide}

## In a log file

`... > job.log`. Nothing is erased. While a phase goes on, it says so every two seconds.

```
{log}
```

## In a notebook

{notebook}
"""  # noqa: E501

if __name__ == "__main__":
    main()
