"""Models of libraries, with their default settings, each trained under several schedules beside plain PyTorch.

    python -m tests.models [--only NAME] [--executor threads|ray] [--write]

Every model either trains as plain PyTorch does, or is refused with a diagnostic. `text.py`, `vision.py` and `others.py`
list the models, `run.py` has the schedules; the comparison is that of tests/habits.
"""
