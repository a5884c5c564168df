"""piperlang: a language for distributed training schedules."""

__version__ = "0.1.0"
