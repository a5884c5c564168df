"""Command-line parsers that report errors as diagnostics, and help that fits the terminal."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from piperlang.diagnostics import did_you_mean, error, listed

NARROWEST, WIDEST = 40, 200
"""Minimum and maximum width of help in columns."""

TYPES = {"int": "an integer", "float": "a number"}
MOST = 2**63 - 1
QUOTED = 40
"""Characters of a value that a message quotes."""


class Number:
    """The type of a numeric option, with its range. Any other value is rejected at the flag, before the command
    begins."""

    def __init__(self, kind: type[int] | type[float], least: float, most: float) -> None:
        self.kind, self.least, self.most = kind, least, most
        self.__name__ = kind.__name__  # in the message about a value that is not a number

    def __call__(self, text: str) -> float:
        long = re.fullmatch(r"\s*([+-]?)[\d_]{500,}\s*", text)  # more digits than int() or a message should have
        value = (-self.most * 2 if long[1] == "-" else self.most * 2) if long else self.kind(text)
        if self.least <= value <= self.most:
            return value
        bound = f"at least {self.least}" if value < self.least else f"at most {self.most}"  # nan: neither
        what = f"must be {bound}" if value == value else f"must be a number from {self.least} to {self.most}"
        raise argparse.ArgumentTypeError(f"{what}, not {_quoted(text.strip())}")


def _quoted(text: str) -> str:
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


COUNT = Number(int, 1, MOST)
POSITION = Number(int, 0, MOST)
SEED = Number(int, -MOST - 1, MOST)
"""torch.manual_seed takes 64 bits."""
SECONDS = Number(float, 0.001, 10**8)
"""Locks and sockets take no more than some years, and no infinity."""


MINUTES = Number(float, 0.0001, 10**6)


class Help(argparse.HelpFormatter):
    """Help as wide as the terminal. Paragraphs of a description stay paragraphs; usage breaks between words."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(
            prog, width=min(max(columns, NARROWEST), WIDEST), max_help_position=28 if columns >= 60 else 14
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text).strip())
        return "\n\n".join(
            textwrap.fill(" ".join(p.split()), width, initial_indent=indent, subsequent_indent=indent)
            for p in paragraphs
        )

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        lines = (usage or self._prog).splitlines()
        width = max(self._width - self._current_indent, 11)
        wrapped = [
            textwrap.fill(
                line.strip(), width, initial_indent="       ", subsequent_indent="         ", break_on_hyphens=False
            )
            for line in lines
        ]
        return "usage: " + "\n".join(wrapped).lstrip() + "\n\n"


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations: `--step` may be another option in the next version."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help, **options})

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def described(self) -> list[argparse.Action]:
        """The flags, in the order of the help."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS]

    def operands(self) -> str:
        """`MODEL.py SCHEDULE.piper`: the operands of a command."""
        words = []
        for action in self.described():
            if not action.option_strings:
                word = str(action.metavar or action.dest)
                word += " ..." if action.nargs in ("+", "*") else ""
                words.append(f"[{word}]" if action.nargs in ("?", "*") else word)
        return " ".join(words)

    def read(self, words: Sequence[str], elsewhere: Callable[[str], list[str]]) -> argparse.Namespace:
        """The options of a command line; `elsewhere` names the commands that have a flag."""
        self._refuse_unknown(words, elsewhere)
        # Options may be between operands; argparse's support for that loses `--` and excludes subcommands.
        plain = "--" in words or self._subparsers is not None
        return self.parse_args(words) if plain else self.parse_intermixed_args(words)

    def _refuse_unknown(self, words: Sequence[str], elsewhere: Callable[[str], list[str]]) -> None:
        flags = self.flags
        for word in words:
            if word == "--":
                return
            flag = word.partition("=")[0]
            short = not word.startswith("--") and word[:2] in flags  # -pNAME=VALUE
            if word[:1] != "-" or word == "-" or re.match(r"-\d", word) or flag in flags or short:
                continue
            begins = [known for known in flags if len(flag) > 2 and known.startswith(flag)]
            others = elsewhere(flag)
            if begins:
                raise error("P0902", f"abbreviated option `{flag}`", help=f"did you mean {listed(begins)}?")
            if others:
                raise error(
                    "P0902",
                    f"`{self.prog}` has no option `{flag}`",
                    help=f"it is an option of {listed([f'piperc {name}' for name in others], 'and')}",
                )
            raise error(
                "P0902",
                f"unknown option `{flag}`",
                help=(did_you_mean(flag, flags) if flag.startswith("--") else None)
                or f"`{self.prog} --help` lists the options",
            )

    def error(self, message: str) -> NoReturn:
        """Turns argparse's errors into diagnostics."""
        usage = " ".join((self.usage or self.prog).split())
        hints = f"`{self.prog} --help` lists the options"
        argument, _, complaint = message.removeprefix("argument ").partition(": ")
        argument = argument.rpartition("/")[2]
        choice = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        value = re.search(r"invalid (\w+) value: '(.*)'$", message)
        if choice:
            legal = re.sub("['\"]", "", choice[2]).split(", ")
            raise error(
                "P0902", f"`{choice[1]}` is not one of {', '.join(legal)}", help=did_you_mean(choice[1], legal) or hints
            )
        if complaint.startswith("must be "):
            raise error("P0902", f"{argument} {complaint}", help=f"give a number of that range; {hints}")
        if value:
            raise error(
                "P0902", f"`{argument}` must be {TYPES.get(value[1], value[1])}, not `{_quoted(value[2])}`", help=hints
            )
        if "not allowed with argument" in complaint:
            raise error(
                "P0902",
                f"`{argument}` and `{complaint.rpartition(' ')[2].rpartition('/')[2]}` cannot be combined",
                help="use only one of them",
            )
        if complaint.startswith("expected "):
            raise error("P0902", f"`{argument}` needs a value", help=hints)
        if message.startswith("the following arguments are required: "):
            missing = [word.rpartition("] ")[2] for word in message.partition(": ")[2].split(", ")]
            raise error("P0902", f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", help=usage)
        if message.startswith("unrecognized arguments: "):
            raise error("P0902", f"unexpected argument `{message.partition(': ')[2].split()[0]}`", help=usage)
        raise error("P0902", message, help=hints)
