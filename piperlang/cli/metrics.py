"""Metrics loggers besides metrics.jsonl: `--log tensorboard`, `wandb`, `mlflow`, each in the run folder."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from piperlang.diagnostics import error

Values = Mapping[str, float]


class Logger(ABC):
    """One run in a tool for metrics."""

    @abstractmethod
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Values) -> None: ...

    @abstractmethod
    def close(self, failed: bool) -> None: ...


class TensorBoard(Logger):
    """An event file in the folder `tensorboard`. torch's own writer would import TensorFlow if it is installed."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self, failed: bool) -> None:
        self.writer.close()


class WandB(Logger):
    """A run of Weights & Biases. WANDB_MODE, WANDB_PROJECT and its other variables apply."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(dir=str(folder), name=folder.name, config=dict(settings))

    def log(self, step: int, values: Values) -> None:
        self.run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=1 if failed else 0)


class MLflow(Logger):
    """A run of MLflow: in mlflow.db, or at MLFLOW_TRACKING_URI. MLflow 3 does not accept plain folders."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import os

        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self.client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "piperlang")
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(name)
        self.id = self.client.create_run(experiment, run_name=folder.name).info.run_id
        for key, value in settings.items():
            self.client.log_param(self.id, key, value)

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""By the names of their packages."""


def check_installed(names: Sequence[str]) -> None:
    """Checked early: P0902 if a package is not installed."""
    missing = [name for name in dict.fromkeys(names) if find_spec(name) is None]
    if missing:
        what = f"`--log {missing[0]}` needs the package `{missing[0]}`, which is not installed"
        raise error("P0902", what, help=f"install it: pip install {' '.join(missing)}")


@contextmanager
def logging_to(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[list[Logger]]:
    """The requested loggers, closed at the end of the block."""
    with ExitStack() as stack:
        loggers = []
        for name in dict.fromkeys(names):
            try:
                logger = LOGGERS[name](folder, settings)
            except Exception as problem:  # any exception of a third-party package
                raise _not_started(name, problem) from problem
            stack.push(lambda kind, *_, logger=logger: logger.close(failed=kind is not None))
            loggers.append(logger)
        yield loggers


def _not_started(name: str, problem: Exception) -> Exception:
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
    help = "run `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else f"try `import {name}` in Python"
    return error("P0902", f"cannot start `--log {name}`", notes=[reason], help=help)


def log(loggers: Sequence[Logger], record: Mapping[str, Any]) -> None:
    """Every number of a row but `step`."""
    values = {name: float(value) for name, value in record.items() if name != "step"}
    for logger in loggers:
        logger.log(record["step"], values)
