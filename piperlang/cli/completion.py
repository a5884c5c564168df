"""Print a shell script that completes commands, options and files.

bash: add `eval "$(piperc completion bash)"` to ~/.bashrc.

zsh: add `eval "$(piperc completion zsh)"` to ~/.zshrc after compinit, or save it as `_piperc` in a folder of $fpath.

fish: `piperc completion fish > ~/.config/fish/completions/piperc.fish`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.render import FORMATS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(WRITERS), help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    print(WRITERS[options.shell](commands()), end="")
    return 0


# ----------------------------------------------------------------------------------------------------- completions


@dataclass(frozen=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Files:
    """A file with one of these suffixes, or any file; or a folder."""

    suffixes: tuple[str, ...] = ()
    folder: bool = False


@dataclass(frozen=True)
class Anything:
    """A value without candidates: a number, NAME=VALUE."""


Value = OneOf | Files | Anything


@dataclass(frozen=True)
class CompletedOption:
    flags: tuple[str, ...]
    help: str
    value: Value | None
    """The value that follows it, if any."""


@dataclass(frozen=True)
class CompletedCommand:
    name: str
    summary: str
    options: tuple[CompletedOption, ...]
    operand: Value | None


def commands() -> list[CompletedCommand]:
    """All commands, from their parsers."""
    from piperlang.cli.main import COMMANDS, command_parser

    found = []
    for name, summary in COMMANDS.items():
        actions = command_parser(name).described()
        options = tuple(
            CompletedOption(tuple(a.option_strings), _plain(a.help or ""), _value(a))
            for a in actions
            if a.option_strings
        )
        operands = [_value(action) for action in actions if not action.option_strings]
        found.append(
            CompletedCommand(
                name, _plain(summary), options, _together([value for value in operands if value is not None])
            )
        )
    return found


def _value(action: argparse.Action) -> Value | None:
    name = str(action.metavar or action.dest)
    suffixes = tuple(re.findall(r"\.(?:py|piper|plan)\b", name))
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return None
    if action.choices is not None:
        return OneOf(tuple(map(str, action.choices)))
    if name == "CODE":
        return OneOf(tuple(CODES))
    if suffixes or name in ("FILE", "DIR"):
        return Files(suffixes, name == "DIR")
    return Anything()


def _together(values: list[Value]) -> Value | None:
    """A model or a schedule: shells complete all operands alike, since options may be between them."""
    files = [value for value in values if isinstance(value, Files)]
    if len(files) > 1:
        return Files(tuple(dict.fromkeys(suffix for value in files for suffix in value.suffixes)))
    return values[0] if values else None


def _plain(text: str) -> str:
    """Help text without characters that shells interpret."""
    return re.sub(r"[`'\"\[\]\\$:]", "", text).partition(" (default")[0]


def _fill(text: str, **parts: str) -> str:
    """The text with every @name@ replaced."""
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


# --------------------------------------------------------------------------------------------------------------- bash

BASH = """\
# piperc completion for bash
_piperc() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command= word
    [[ $previous == = ]] && previous=${COMP_WORDS[COMP_CWORD-2]}
    [[ $current == = ]] && current=
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in
            @names@) command=$word; break ;;
            *.py) command=train; break ;;
        esac
    done
    COMPREPLY=()
    case "$command $previous" in
        " --format") _piperc_words "@formats@"; return ;;
@values@
    esac
    case "$command $current" in
@flags@
    esac
    case $command in
        "") _piperc_words "@every@ --help --version --format"; _piperc_files '*.py' ;;
@operands@
    esac
}
_piperc_words() {
    local found
    while IFS= read -r found; do COMPREPLY+=("$found"); done < <(compgen -W "$1" -- "$current")
}
_piperc_files() {
    local found pattern
    compopt -o filenames 2>/dev/null
    for pattern in "$@"; do
        while IFS= read -r found; do
            [[ -d $found ]] || COMPREPLY+=("$found")
        done < <(compgen -f -X "!$pattern" -- "$current")
    done
    while IFS= read -r found; do COMPREPLY+=("$found"); done < <(compgen -d -- "$current")
}
complete -F _piperc piperc
"""


def bash(every: list[CompletedCommand]) -> str:
    values, flags, operands = [], [], []
    for command in every:
        own = [(option, flag) for option in command.options for flag in option.flags]
        values += [
            f'        "{command.name} {flag}") {_bash(option.value)}; return ;;' for option, flag in own if option.value
        ]
        flags.append(f'        "{command.name} -"*) _piperc_words "{" ".join(flag for _, flag in own)}"; return ;;')
        operands += [f"        {command.name}) {_bash(command.operand)} ;;"] if command.operand else []
    names = [command.name for command in every]
    parts = {
        "values": "\n".join(values),
        "flags": "\n".join(flags),
        "operands": "\n".join(operands),
        "formats": " ".join(FORMATS),
    }
    return _fill(BASH, names="|".join(names), every=" ".join(names), **parts)


def _bash(value: Value) -> str:
    if isinstance(value, OneOf):
        return f'_piperc_words "{" ".join(value.words)}"'
    if isinstance(value, Files):
        patterns = [] if value.folder else [f"'*{suffix}'" for suffix in value.suffixes] or ["'*'"]
        return " ".join(["_piperc_files", *patterns])
    return ":"


# ---------------------------------------------------------------------------------------------------------------- zsh

ZSH = """\
#compdef piperc
# piperc completion for zsh
_piperc() {
    local command= word
    local -i i
    for ((i = 2; i < CURRENT; i++)); do
        case ${words[i]} in
            @names@) command=${words[i]}; words[i]=(); (( CURRENT-- )); break ;;
            *.py) command=train; break ;;
        esac
    done
    case $command in
@commands@
        *)
            local -a commands=(
@described@
            )
            [[ ${words[CURRENT-1]} == --format ]] || _describe -t commands command commands
            _arguments '--help[print help]' '--version[print the version]' \\
                '--format[output format of diagnostics]:FORMAT:(@formats@)' '*:model:_files -g "*.py(-.)"'
            ;;
    esac
}
if [[ $funcstack[1] == _piperc ]]; then _piperc "$@"; else compdef _piperc piperc; fi
"""


def zsh(every: list[CompletedCommand]) -> str:
    described = "\n".join(f"                '{command.name}:{command.summary}'" for command in every)
    blocks = []
    for command in every:
        specs = [f"            {spec} \\" for option in command.options for spec in _specs(option)]
        operand = f"            '*:{_zsh(command.operand)}'" if command.operand else "            '*: :'"
        blocks.append("\n".join([f"        {command.name}) _arguments \\", *specs, operand, "            ;;"]))
    names = "|".join(command.name for command in every)
    return _fill(ZSH, names=names, commands="\n".join(blocks), described=described, formats=" ".join(FORMATS))


def _specs(option: CompletedOption) -> Iterator[str]:
    for flag in option.flags:
        sign = "" if option.value is None else "=" if flag.startswith("--") else "+"
        several = "*" if flag == "-p" else ""
        yield f"'{several}{flag}{sign}[{option.help}]{':' + _zsh(option.value) if option.value else ''}'"


def _zsh(value: Value) -> str:
    if isinstance(value, OneOf):
        return f"word:({' '.join(value.words)})"
    if isinstance(value, Files):
        suffixes = "|".join(suffix.removeprefix(".") for suffix in value.suffixes)
        return (
            "folder:_files -/"
            if value.folder
            else f'file:_files -g "*.({suffixes})(-.)"'
            if suffixes
            else "file:_files"
        )
    return "value:"


# --------------------------------------------------------------------------------------------------------------- fish

FISH = """\
# piperc completion for fish
function __piperc_command
    for word in (commandline -opc)[2..]
        switch $word
            case @names@
                echo $word
                return
            case '*.py'
                echo train
                return
        end
    end
end
function __piperc_is
    set -l command (__piperc_command)
    test "$command" = "$argv[1]"
end
function __piperc_files
    set -l token (commandline -ct | string replace -r '^--[a-z-]+=' '')
    for file in $token*
        if test -d $file
            echo $file/
        else if test (count $argv) -eq 0
            echo $file
        else
            for suffix in $argv
                string match -q -- "*$suffix" $file; and echo $file
            end
        end
    end
end
complete -c piperc -f
complete -c piperc -n '__piperc_is ""' -l help -d 'print help'
complete -c piperc -n '__piperc_is ""' -l version -d 'print the version'
complete -c piperc -n '__piperc_is ""' -l format -d 'output format of diagnostics' -x -a '@formats@'
complete -c piperc -n '__piperc_is ""' -a '(__piperc_files .py)'
@lines@
"""


def fish(every: list[CompletedCommand]) -> str:
    lines = [f"complete -c piperc -n '__piperc_is \"\"' -a {command.name} -d '{command.summary}'" for command in every]
    for command in every:
        only = f"complete -c piperc -n '__piperc_is {command.name}'"
        for option in command.options:
            names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            lines.append(f"{only} {names} -d '{option.help}'" + (f" -x{_fish(option.value)}" if option.value else ""))
        if command.operand:
            lines.append(f"{only}{_fish(command.operand)}")
    return _fill(
        FISH, names=" ".join(command.name for command in every), lines="\n".join(lines), formats=" ".join(FORMATS)
    )


def _fish(value: Value) -> str:
    if isinstance(value, OneOf):
        return f" -a '{' '.join(value.words)}'"
    if isinstance(value, Files):
        return (
            " -a '(__fish_complete_directories)'"
            if value.folder
            else f" -a '({' '.join(['__piperc_files', *value.suffixes])})'"
        )
    return ""


WRITERS = {"bash": bash, "zsh": zsh, "fish": fish}
