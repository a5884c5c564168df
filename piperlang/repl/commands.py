"""The commands of a session: a colon and a word. Each is a function; `:help` prints the first line of its docstring."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from piperlang.core.selector import TagValue
from piperlang.diagnostics import PiperError, did_you_mean, error
from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.explain import page
from piperlang.diagnostics.printable import printable
from piperlang.directives import BY_WORD
from piperlang.elaborate.library import exporting, modules
from piperlang.elaborate.modules import load
from piperlang.elaborate.values import Function
from piperlang.interrupts import uninterrupted
from piperlang.ir.graph import Graph, Node
from piperlang.ir.text import as_json, brief, text
from piperlang.plan.estimate.memory import ACTIVATIONS, COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from piperlang.plan.estimate.summary import bytes_text, summary
from piperlang.progress.lines import counted
from piperlang.repl.answer import difference, orders, signature, status
from piperlang.repl.core import SessionCore, needs_model, write
from piperlang.repl.show import Row, Shown
from piperlang.repl.state import Estimate, State
from piperlang.repl.why import explain as explain_order
from piperlang.simulate.unit import UnitCosts, parse_costs
from piperlang.source import Source
from piperlang.view.grid import chain_text

LINES = 60
"""Maximum number of lines of a listing; files are written in full."""
EXECUTORS = ("inline", "ray")


class Quit(Exception):
    """Ends the session."""


@dataclass(frozen=True)
class Command:
    usage: str
    run: Callable[[SessionCore, str], Shown]

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().partition("\n")[0]

    @property
    def details(self) -> str:
        lines = (self.run.__doc__ or "").strip().splitlines()
        return "\n".join(line.strip() for line in lines)


def run(session: SessionCore, typed: str) -> Shown:
    """One command as typed."""
    name, _, argument = typed.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        span = Source("command", typed).span(0, len(name))
        raise error(
            "P0902",
            f"unknown command `{name}`",
            span,
            help=did_you_mean(name, COMMANDS) or "`:help` lists the commands",
        )
    if argument.strip() and command.usage == name:
        raise usage(name, f"`{name}` takes no argument", argument.strip())
    return command.run(session, argument.strip())


def usage(name: str, wrong: str, argument: str = "", help: str | None = None) -> PiperError:
    """The diagnostic for an invalid argument."""
    typed = Source("command", f"{name} {argument}".rstrip())
    span = typed.span(len(name) + 1 if argument else 0, len(typed.text))
    return error("P0902", wrong, span, help=help or f"usage: {COMMANDS[name].usage}")


# ---------------------------------------------------------------------------------------------------------- statements


def undo(session: SessionCore, argument: str) -> Shown:
    """undo the last statement, or the last N"""
    count = _count(":undo", argument)
    if count > len(session.statements):
        raise usage(
            ":undo",
            (
                "nothing to undo"
                if not session.statements
                else f"only {counted(len(session.statements), 'statement')} can be undone"
            ),
            argument,
        )
    before = session.state
    gone = session.undo(count)
    rows = tuple(Row("undone", first_line(one)) for one in gone)
    return Shown(rows + difference(before, session.state).rows)


def redo(session: SessionCore, argument: str) -> Shown:
    """redo the last undone statement, or the last N"""
    count = _count(":redo", argument)
    if count > len(session.undone):
        raise usage(
            ":redo",
            (
                "nothing to redo"
                if not session.undone
                else f"only {counted(len(session.undone), 'statement')} can be redone"
            ),
            argument,
        )
    before = session.state
    back = session.redo(count)
    rows = tuple(Row("redone", first_line(one)) for one in back)
    return Shown(rows + difference(before, session.state).rows)


def listing(session: SessionCore, argument: str) -> Shown:
    """list the statements; `-` marks undone ones"""
    lines = []
    for number, one in enumerate((*session.statements, *session.undone), 1):
        sign = "-" if number > len(session.statements) else " "
        first, *rest = one.strip("\n").split("\n")
        lines += [f"{number:>4}{sign} {first}", *(f"      {line}" for line in rest)]
    return Shown(block=printable("\n".join(lines), keep="\n\t") or "no statements yet")


def at(session: SessionCore, argument: str) -> Shown:
    """show the session after its first N statements

    With a command, run that command there: `:at 3 :orders`. The session itself does not change."""
    if not argument:
        raise usage(":at", "expected a number of statements")
    number, _, command = argument.partition(" ")
    count = _number(session, ":at", number, argument)
    if not command:
        return status(session.at(count))
    if command.partition(" ")[0] not in LOOKING:
        raise usage(":at", f"`{command.partition(' ')[0]}` cannot be used with `:at`", argument)
    everything = session.statements
    session.statements = everything[:count]
    try:
        return run(session, command.strip())
    finally:
        session.statements = everything


def diff(session: SessionCore, argument: str) -> Shown:
    """show what changed between statement N and statement M

    Communication, estimates, and lines of the graph. `:diff 0 5` shows the effect of the first five statements."""
    words = argument.split()
    if len(words) != 2:
        raise usage(":diff", "expected two numbers", argument)
    first, second = (session.at(_number(session, ":diff", word, argument)) for word in words)
    found = difference(first, second)
    if session.model is None:
        raise needs_model("`:diff`")
    old, new = (text(_graph(state, ":diff")).splitlines() for state in (first, second))
    lines = _changes(old, new)
    counts = Counter(line[0] for line in lines)
    rows = (*found.rows, Row("nodes", f"{counts['+']:,} added, {counts['-']:,} removed, {counts['~']:,} changed"))
    return Shown(rows, _some(lines, 20, "nodes"))


def _changes(old: list[str], new: list[str]) -> list[str]:
    """Nodes that were added (`+`), removed (`-`) or changed (`~`), one per line. Several may have the same name: of
    those, as many count as changed as are on both sides."""
    gone: Counter[str] = Counter()
    added: Counter[str] = Counter()
    names: dict[str, None] = {}
    for line in unified_diff(old, new, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            names[_head(line[1:])] = None
            (gone if line[0] == "-" else added)[_head(line[1:])] += 1
    found = []
    for name in names:
        both = min(gone[name], added[name])
        found += [f"~ {name}"] * both + [f"- {name}"] * (gone[name] - both) + [f"+ {name}"] * (added[name] - both)
    return found


# ---------------------------------------------------------------------------------------------------------- the graph


def show(session: SessionCore, argument: str) -> Shown:
    """show the nodes that a selector matches

    With the devices, the stream and the source line of each: `:show [comm=p2p, stage=0]`"""
    nodes = _selected(session, ":show", argument)
    names = [str(node) for node in nodes[:LINES]]
    width = max(map(len, names), default=0)
    lines = [
        f"{name:<{width}}  {_about(session.state, node)}".rstrip() for name, node in zip(names, nodes, strict=False)
    ]
    return Shown(block="\n".join([*lines, *_more(len(nodes) - LINES, "nodes")]))


def count(session: SessionCore, argument: str) -> Shown:
    """count the nodes that a selector matches"""
    if session.model is None:
        selector = session.selector(argument, ":count")
        named = session.state.outline.count(selector)
        return Shown(block=f"{named:,} pass{'es' if named != 1 else ''} that the script names")
    nodes = _selected(session, ":count", argument)
    by = Counter(node.op for node in nodes)
    return Shown(block=f"{counted(len(nodes), 'node')}: " + ", ".join(f"{n} {op}" for op, n in by.most_common()))


def why(session: SessionCore, argument: str) -> Shown:
    """explain why some nodes run before others

    `:why [stage=0, pass=F, mb=1] before [stage=1, pass=F, mb=0]` shows the shortest chain of data, orders and
    fences between them, each
    with its line of the script; or that the order is reversed; or that they are not ordered."""
    first, sign, second = argument.partition(" before ")
    if not sign:
        raise usage(":why", "expected two selectors with `before` between them", argument)
    _graph(session.state, ":why")
    return Shown(
        block="\n".join(
            explain_order(session.state, *(_selected(session, ":why", one.strip()) for one in (first, second)))
        )
    )


def graph(session: SessionCore, argument: str) -> Shown:
    """print the training graph, one node per line

    `:graph FILE` writes it: a drawing to .svg, all data to .json, text to any other file."""
    found = _graph(session.state, ":graph")
    drawn = drawing(found)
    if not argument:
        return Shown(
            block=_some(brief(found).splitlines(), LINES, "nodes; `:graph FILE` writes them all"), drawing=drawn
        )
    path = Path(argument)
    if path.suffix == ".svg":
        from piperlang.view.graph_svg import draw

        written = draw(found)
    else:
        written = json.dumps(as_json(found)) + "\n" if path.suffix == ".json" else text(found)
    write(path, written)
    return Shown(block=f"{path}: {len(found.nodes):,} nodes")


def show_orders(session: SessionCore, argument: str) -> Shown:
    """show the order of passes on every device as a grid

    With the unit costs of `:cost`; `.` is idle time, `&` joins passes that may overlap."""
    found = orders(session.state, session.screen.width(), session.screen.paint)
    also = [f"also: {chain_text(chain)}" for chain in session.state.chains]
    return Shown(
        block="\n".join([*([found] if found else []), *also]) or "no order yet: the compiler schedules all passes"
    )


def plan(session: SessionCore, argument: str) -> Shown:
    """estimate a step: time, memory, bytes sent, nodes by line"""
    found = _estimated(session, ":plan")
    return Shown(block=summary(found.plan, session.state.graph))


def memory(session: SessionCore, argument: str) -> Shown:
    """show the estimated peak memory of every device"""
    found = _estimated(session, ":memory")
    kinds = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION)
    heads = ["device", "peak", *kinds]
    table = [heads] + [
        [str(device.device), bytes_text(peak.bytes), *(bytes_text(peak.by.get(kind, 0)) for kind in kinds)]
        for device, peak in zip(found.plan.devices, found.peaks, strict=True)
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
    return Shown(block=_some(lines, LINES, "devices"))


# ------------------------------------------------------------------------------------------------------------ training


def numerics(session: SessionCore, argument: str) -> Shown:
    """compare two training steps with plain PyTorch, in float64"""
    if session.model is None:
        raise needs_model("`:numerics`")
    _estimated(session, ":numerics")
    with uninterrupted():
        from piperlang.repl.training import compared

    return compared(session)


def train(session: SessionCore, argument: str) -> Shown:
    """train N steps on workers

    `:run 3 inline` uses threads of this process instead of Ray workers. Training continues where the last `:run`
    ended, unless the script has changed.
    Ctrl-C stops after the current step, a second one at once. The workers are kept until the script changes or the
    session ends."""
    if session.model is None:
        raise needs_model("`:run`")
    words = argument.split()
    steps = next((word for word in words if word.isdecimal()), "1")
    unknown = [word for word in words if word not in (steps, *EXECUTORS)]
    if unknown or len(words) > 2 or int(steps) < 1:
        near = did_you_mean(unknown[0], EXECUTORS) if unknown else None
        what = "is neither a number of steps nor `inline`" if unknown else "is not a number of steps"
        raise usage(":run", f"`{unknown[0] if unknown else argument}` {what}", argument, near)
    _estimated(session, ":run")
    with uninterrupted():
        from piperlang.repl.training import trained

    return trained(session, int(steps), "inline" if "inline" in words else "ray")


def cost(session: SessionCore, argument: str) -> Shown:
    """set the unit costs of passes in grids

    `:cost F=1 I=1 W=1 stage=3:2` makes stage 3 twice as slow; B is the sum of I and W unless it is given. Without
    arguments, print the current costs."""
    if argument:
        costs = _costs(argument, session.setting.costs)
        _check_tags(session, costs, argument)
        session.set_costs(costs)
    if session.state.timeline is None:
        return Shown(block=str(session.setting.costs))
    return show_orders(session, "") if argument else Shown(block=str(session.setting.costs))


# --------------------------------------------------------------------------------------------------------------- files


def load_script(session: SessionCore, argument: str) -> Shown:
    """apply the statements of a script, all or none"""
    if not argument:
        raise usage(":load", "expected a file")
    before = len(session.statements)
    found = session.load(Path(argument).expanduser())
    return Shown(
        (Row("loaded", f"{counted(len(session.statements) - before, 'statement')} of {argument}"), *found.rows),
        found.block,
    )


def save(session: SessionCore, argument: str) -> Shown:
    """save the statements as a script

    In the canonical layout. The script gives the same graph as the session. `:save!` overwrites a file."""
    return _saved(session, ":save", argument, overwrite=False)


def save_over(session: SessionCore, argument: str) -> Shown:
    """like `:save`, but overwrite an existing file"""
    return _saved(session, ":save!", argument, overwrite=True)


# ---------------------------------------------------------------------------------------------------------------- help


def explain(session: SessionCore, argument: str) -> Shown:
    """explain a diagnostic code; without a code, the last diagnostic"""
    code = (argument or session.last_code or "").upper()
    if not code:
        raise usage(":explain", "there was no diagnostic yet; pass a code")
    if code not in CODES:
        raise error("P0904", f"unknown code `{argument}`", help=did_you_mean(code, CODES) or "a code looks like P0302")
    return Shown(block=page(code).text.rstrip())


def help_about(session: SessionCore, argument: str) -> Shown:
    """list the commands, or explain a command, a directive or a function"""
    if not argument:
        width = max(len(one.usage) for one in COMMANDS.values())
        lines = [f"  {one.usage:<{width}}  {one.summary}" for one in COMMANDS.values()]
        head = "Type a statement to apply it, or an expression to show its value. Commands:"
        return Shown(
            block="\n".join(
                [
                    head,
                    "",
                    *lines,
                    "",
                    "`:help :run` explains a command, `:help loop` a function, `:help place` a directive.",
                ]
            )
        )
    command = COMMANDS.get(argument) or COMMANDS.get(f":{argument}")
    if command is not None:
        return Shown(block=f"{command.usage}\n{command.details}")
    if argument in BY_WORD:
        return Shown(block=BY_WORD[argument].help())
    function = session.state.names.get(argument) or library_function(argument)
    if isinstance(function, Function):
        where = f"from {function.module.name} import {argument}\n" if argument not in session.state.names else ""
        return Shown(block=f"{where}{signature(function)}\n{(function.define.doc or '').strip()}")
    raise usage(":help", f"no help for `{argument}`", argument)


def leave(session: SessionCore, argument: str) -> Shown:
    """end the session"""
    raise Quit


COMMANDS: dict[str, Command] = {
    ":undo": Command(":undo [N]", undo),
    ":redo": Command(":redo [N]", redo),
    ":list": Command(":list", listing),
    ":at": Command(":at N [COMMAND]", at),
    ":diff": Command(":diff N M", diff),
    ":show": Command(":show SELECTOR", show),
    ":count": Command(":count SELECTOR", count),
    ":why": Command(":why SELECTOR before SELECTOR", why),
    ":graph": Command(":graph [FILE]", graph),
    ":orders": Command(":orders", show_orders),
    ":plan": Command(":plan", plan),
    ":memory": Command(":memory", memory),
    ":numerics": Command(":numerics", numerics),
    ":run": Command(":run N [inline]", train),
    ":cost": Command(":cost [F=1 stage=3:2 ...]", cost),
    ":load": Command(":load FILE", load_script),
    ":save": Command(":save FILE", save),
    ":save!": Command(":save! FILE", save_over),
    ":explain": Command(":explain [CODE]", explain),
    ":help": Command(":help [WORD]", help_about),
    ":quit": Command(":quit", leave),
}
LOOKING = (":list", ":show", ":count", ":why", ":graph", ":orders", ":plan", ":memory")
"""Commands that only show a state."""


# ----------------------------------------------------------------------------------------------------------- arguments


def first_line(statement: str) -> str:
    lines = [line for line in statement.strip().splitlines() if not line.startswith("#")] or [statement.strip()]
    return lines[0] + (" ..." if len(lines) > 1 else "")


def library_function(name: str) -> Function | None:
    module = exporting(name)
    if module is None:
        return None
    path = modules()[module]
    found = load(path, f"std/{path.name}", library=True)
    define = next((x for x in found.script.statements if getattr(getattr(x, "name", None), "text", None) == name), None)
    return Function(define, found) if define is not None else None  # type: ignore[arg-type]


def _count(name: str, argument: str) -> int:
    if argument and (not argument.isdecimal() or int(argument) < 1):
        raise usage(name, f"`{argument}` is not a number of statements", argument)
    return int(argument or 1)


def _number(session: SessionCore, name: str, word: str, argument: str) -> int:
    if not word.isdecimal() or int(word) > len(session.statements):
        raise usage(name, f"`{word}` is not one of 0 to {len(session.statements)}", argument)
    return int(word)


def _graph(state: State, name: str) -> Graph:
    if state.scheduler is None:
        raise needs_model(f"`{name}`")
    state.settle()
    return state.graph


def _selected(session: SessionCore, name: str, argument: str) -> list[Node]:
    found = _graph(session.state, name)
    selector = session.selector(argument, name)
    nodes = list(found.select(selector))
    if not nodes:
        raise error("P0302", "selector matches no nodes", selector.span, help=_there(found))
    return nodes


def _there(graph: Graph) -> str:
    """The existing tags."""
    values: dict[str, set[TagValue]] = {}
    for chunk in graph.model.chunks:
        for key, value in chunk.tags.items():
            values.setdefault(key, set()).add(value)
    tags = "; ".join(f"{key} is one of {', '.join(map(str, sorted(found, key=str)))}" for key, found in values.items())
    return tags or "the model has no tags; add some with `tag stage=0 at PATH`"


def _about(state: State, node: Node) -> str:
    by = f"  {state.line_of(node.template.by)}" if node.template.by is not None else ""
    return f"stream {node.stream}{by}"


def _estimated(session: SessionCore, name: str) -> Estimate:
    """The estimate, or an error with everything that prevents it."""
    if session.model is None:
        raise needs_model(f"`{name}`")
    state = session.state
    state.settle()
    problems = (*state.missing, *state.trouble)
    if problems:
        raise PiperError(*problems)
    assert state.estimate is not None
    return state.estimate


def _costs(argument: str, now: UnitCosts) -> UnitCosts:
    try:
        return parse_costs(argument.split(), now)
    except ValueError as problem:
        raise usage(":cost", str(problem), argument) from None


def _check_tags(session: SessionCore, costs: UnitCosts, argument: str) -> None:
    """A factor must be for an existing tag. Without a model, only the tags of the script are known, once there are
    any."""
    for key, value in costs.factors.keys() - session.setting.costs.factors.keys():
        there = session.state.tag_values(key)
        if value not in there and (there or session.model is not None):
            known = f"{key} is one of {', '.join(map(str, there))}" if there else f"no chunk has a tag `{key}`"
            raise usage(":cost", f"no chunk has {key}={value}", argument, known)


def _saved(session: SessionCore, name: str, argument: str, overwrite: bool) -> Shown:
    if not argument:
        raise usage(name, "expected a file")
    path = Path(argument).expanduser()
    if path.suffix != ".piper":
        raise usage(name, "the name of a script must end in .piper", argument)
    lines = session.save(path, overwrite).count("\n")
    given = "".join(f" -p {key}={value}" for key, value in session.setting.overrides.items())
    return Shown(
        block=f"saved {argument}: {counted(lines, 'line')}" + (f"; it needs the options{given}" if given else "")
    )


def _head(line: str) -> str:
    """One line of the graph's text: the node, its devices and its stream, without its inputs and outputs."""
    return line.partition(": ")[0]


def _some(lines: list[str], most: int, what: str) -> str:
    return "\n".join([*lines[:most], *_more(len(lines) - most, what)])


def _more(count: int, what: str) -> list[str]:
    return [f"... and {count:,} more {what}"] if count > 0 else []


def drawing(graph: Graph) -> str:
    """For a notebook: an SVG on a white background in any theme."""
    from piperlang.view.graph_svg import MAX_NODES, draw

    return (
        f'<div style="overflow:auto;max-height:32em;background:#fff">{draw(graph)}</div>'
        if len(graph.nodes) <= MAX_NODES
        else ""
    )
