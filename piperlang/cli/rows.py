"""metrics.jsonl: a row for every step."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from piperlang.cli.run_folder import METRICS, drop, keep_rows, writing
from piperlang.progress import StepMetrics


class MetricRows:
    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def __enter__(self) -> MetricRows:
        with writing(self.path, "all rows of metrics"):
            self.file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        drop(self.file)
        self.file.close()

    def add(self, row: StepMetrics) -> None:
        """`flush` writes it."""
        self.file.write(row.json() + "\n")

    def flush(self, step: int) -> None:
        with writing(self.path, f"the rows of metrics from step {step} on"):
            self.file.flush()
        with writing(self.path, "the rows of metrics so far: the file was removed"):
            self.path.stat()  # it would take rows that nobody can read

    def cut(self, step: int) -> None:
        """Removes the rows from this step on: they come again."""
        if not self.file.closed:
            self.__exit__()
        with writing(self.path, "the rows of metrics so far"):
            keep_rows(self.path, self.path, step)
        self.__enter__()
