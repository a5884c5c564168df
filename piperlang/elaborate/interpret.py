"""Statements to directives: runs a script top to bottom and applies each directive to the graph before the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piperlang.core.mesh import Axis, Mesh, Submesh
from piperlang.core.selector import Selector
from piperlang.diagnostics import LIMIT, Diagnostic, Frame, PiperError, did_you_mean, error, listed
from piperlang.elaborate.builtins import BUILTINS
from piperlang.elaborate.calling import bind_arguments
from piperlang.elaborate.directive import BY_NODE, Directive, ScheduleTarget, Step
from piperlang.elaborate.evaluate import Evaluator
from piperlang.elaborate.modules import Importer, Module
from piperlang.elaborate.names import bound_by
from piperlang.elaborate.options import given_options
from piperlang.elaborate.parameter import parameter
from piperlang.elaborate.values import Builtin, Function, StepsValue, Value, kind, show
from piperlang.source import Span
from piperlang.syntax import tree

MAX_CALLS = 40
PRINTING, DIRECTIVE, CALLING = 50, 30, 8
"""The cost, in steps of the budget, of a line of output, a directive, and a call or a step of an order."""


class _Returned(Exception):
    """Unwinds a function's blocks to its call."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Interpreter(Evaluator):
    def __init__(
        self,
        graph: ScheduleTarget,
        module: Module,
        overrides: Mapping[str, str] | None = None,
        say: Callable[[str], None] = print,
        importer: Importer | None = None,
    ) -> None:
        super().__init__(graph, module)
        self.overrides = dict(overrides or {})
        self.params: dict[str, Value] = {}
        self.say = say
        self.importer = importer or Importer()
        self.trail: tuple[Frame, ...] = ()
        self.active: list[tree.Define] = []
        self.collecting: list[Step] | None = None
        """The steps of the current order; None outside of an order."""

    # --------------------------------------------------------------------------------------------- whole scripts

    def run(self) -> list[Diagnostic]:
        """Run every top-level statement. One that fails is reported once; later uses of the names it binds are not."""
        problems: list[Diagnostic] = []
        for statement in self.module.script.statements:
            try:
                self.execute(statement)
            except PiperError as problem:
                problems.extend(problem.diagnostics)
                self.module.failed |= bound_by(statement)
            except (
                RecursionError
            ):  # expressions, calls and values within their limits can add up to more than the stack holds
                problems.append(
                    Diagnostic(
                        "P0107",
                        "this statement nests too deeply",
                        statement.span,
                        "nested calls, expressions or lists",
                        helps=("name the inner parts with `let`",),
                    )
                )
                break
            if len(problems) >= LIMIT or self.spent > self.budget:
                break
        unknown = sorted(self.overrides.keys() - self.params.keys() - self.module.failed)
        problems.extend(_unknown_parameter(name, self.params) for name in unknown)
        return problems

    def execute(self, node: tree.Statement) -> None:
        self.spent += 1
        if self.spent > self.budget:
            self.charge(0, node.span)
        if isinstance(node, tree.Directive):
            self.emit(BY_NODE[type(node)].read(self, node))
        else:
            _EXECUTE[type(node)](self, node)

    def block(self, block: tree.Block) -> None:
        for statement in block.statements:
            self.execute(statement)

    def emit(self, directive: Directive) -> None:
        self.charge(DIRECTIVE, directive.span)
        self.graph.apply(directive)

    def written(self, node: tree.Node) -> dict[str, Any]:
        """Where a directive or a step is written, and its options."""
        at: dict[str, Any] = {"span": node.span, "trail": self.trail}
        if isinstance(node, tree.Directive):
            at["options"] = given_options(self, BY_NODE[type(node)], getattr(node, "options", ()))
        return at

    # ---------------------------------------------------------------------------------------------------- imports

    def import_from(self, node: tree.FromImport) -> None:
        module = self.imported(node.module, node.span)
        for item in node.names:
            name = item.name.text
            if name not in module.names or name.startswith("_"):
                public = [n for n in module.names if not n.startswith("_")]
                raise error(
                    "P0209",
                    f"`{module.name}` has no `{name}`",
                    item.name.span,
                    f"it has {listed(sorted(public), 'and')}",
                    help=did_you_mean(name, public),
                )
            self.bind((item.bound,), module.names[name], item.span)

    def import_module(self, node: tree.ImportModule) -> None:
        self.bind((node.name,), self.imported(node.module, node.span), node.span)

    def imported(self, wanted: tree.Library | tree.File, span: Span) -> Module:
        path, shown, library = self.importer.find(wanted, self.module)
        self.importer.check_cycle(path, wanted.span)
        if path in self.importer.loaded:
            return self.importer.loaded[path]
        if path in self.importer.failed:
            raise PiperError  # reported where it was first imported
        self.importer.failed.add(path)
        module = self.importer.load(path, shown, library)
        self.importer.open.append((path, wanted.span))
        inner = Interpreter(self.graph, module, say=self.say, importer=self.importer)
        inner.spent = self.spent
        problems = inner.run()
        self.spent = inner.spent
        self.importer.open.pop()
        if problems:
            raise PiperError(*problems)
        self.importer.failed.discard(path)
        self.importer.loaded[path] = module
        return module

    # ----------------------------------------------------------------------------------------------- declarations

    def param(self, node: tree.Param) -> None:
        value = parameter(node, self.evaluate(node.value), self.overrides)
        self.params[node.name.text] = value
        self.bind((node.name,), value, node.span)

    def let(self, node: tree.Let) -> None:
        if len(node.values) == 1:
            self.bind(node.names, self.present(node.values[0]), node.values[0].span)
            return
        values = tuple(self.present(value) for value in node.values)
        self.bind(node.names, values, node.values[0].span.to(node.values[-1].span))

    def present(self, node: tree.Expr) -> Value:
        value = self.evaluate(node)
        if value is None:
            raise error("P0204", "this call has no value", node.span, "the function does not return a value")
        return value

    def define(self, node: tree.Define) -> None:
        self.bind((node.name,), Function(node, self.module), node.span)

    # ------------------------------------------------------------------------------------- operands of directives

    def settled(self, node: tree.Expr) -> Selector:
        """A selector outside an order, where `next` is not allowed."""
        selector = self.selector(node)
        keys = selector.next_keys()
        if keys:
            raise error(
                "P0304",
                "`next` is only allowed inside an order",
                node.span,
                help=f"write the index: `{keys[0]}=0`, or omit `{keys[0]}` to select all",
            )
        return selector

    def where(self, node: tree.Expr) -> Submesh:
        value = self.evaluate(node)
        if isinstance(value, Mesh):
            value = Submesh(value)
        if isinstance(value, Submesh):
            self.charge(value.size(), node.span)  # every device is visited
            return value
        raise error(
            "P0204",
            f"expected a mesh or a submesh, not {kind(value)}",
            node.span,
            kind(value),
            help="for example, `gpu` or `gpu[pp=0]`",
        )

    def axis(self, node: tree.Expr) -> Axis:
        value = self.evaluate(node)
        if isinstance(value, Axis):
            return value
        hint = (
            f"name the axis: `{value.name}.{value.axes[-1][0]}`"
            if isinstance(value, Mesh)
            else "for example, `over gpu.dp`"
        )
        raise error("P0204", f"expected a mesh axis, not {kind(value)}", node.span, kind(value), help=hint)

    # ------------------------------------------------------------------------------------------------------ orders

    def collect(self, node: tree.OrderBlock) -> tuple[Step, ...]:
        """The steps that the body of an order adds."""
        if self.collecting is not None:
            raise error("P0111", "nested orders are not allowed", node.span, help="call the function outside the order")
        self.collecting = []
        try:
            self.block(node.body)
            return tuple(self.collecting)
        finally:
            self.collecting = None

    def steps(self, node: tree.Steps) -> None:
        if self.collecting is None:
            only = node.steps[0]
            if len(node.steps) > 1 or not isinstance(only, tree.CallOf):
                raise error(
                    "P0111",
                    "a step is only allowed inside an order",
                    node.span,
                    help="call this function inside `order on ...:`",
                )
            value = self.invoke(only, steps=False)
            if value is not None:
                raise error(
                    "P0111",
                    f"the result of this call, {kind(value)}, is not used",
                    node.span,
                    help="bind it with `let`, or use it in an order or a directive",
                )
            return
        for part in node.steps:
            self.collecting.extend(self.step(part))

    def step(self, node: tree.Step) -> list[Step]:
        self.charge(CALLING, node.span)
        if isinstance(node, tree.Overlap):
            group = tuple(item for part in node.items for item in self.overlapping(part))
            return [Step(group, **self.written(node))]
        value = self.invoke(node, steps=True) if isinstance(node, tree.CallOf) else self.evaluate(node)
        return [Step(group, **self.written(node)) for group in self.groups(value, node)]

    def overlapping(self, node: tree.Expr) -> tuple[Selector, ...]:
        groups = self.groups(self.evaluate(node), node)
        if len(groups) != 1:
            raise error(
                "P0204",
                "expected one step on each side of `&`",
                node.span,
                f"{len(groups)} steps",
                help="pair them one by one",
            )
        return groups[0]

    def groups(self, value: Value, node: tree.Step) -> list[tuple[Selector, ...]]:
        self.weigh(value, node.span)
        if isinstance(value, Selector):
            return [(value,)]
        if isinstance(value, StepsValue):
            return list(value.groups)
        if isinstance(value, tuple):
            return [group for item in value for group in self.groups(item, node)]
        if value is None and isinstance(node, tree.CallOf):
            return []
        raise error(
            "P0204",
            f"a step must be a selector, not {kind(value)}",
            node.span,
            kind(value),
            help="for example, `[stage=0, pass=F, mb=next]`",
        )

    # ------------------------------------------------------------------------------------------------------- calls

    def call(self, node: tree.CallOf) -> Value:
        return self.invoke(node, steps=False)

    def overlap(self, node: tree.Overlap) -> Value:
        return StepsValue((tuple(item for part in node.items for item in self.overlapping(part)),))

    def invoke(self, node: tree.CallOf, *, steps: bool) -> Value:
        """Call a function. Only a call that is itself a step of an order may add steps to it."""
        function = self.evaluate(node.function)
        self.charge(CALLING, node.span)
        if isinstance(function, Builtin):
            named = next((a.name for a in node.arguments if a.name is not None), None)
            if named is not None:
                raise error("P0205", f"`{function.name}` takes no named arguments", named.span)
            return BUILTINS[function.name](self, [self.evaluate(a.value) for a in node.arguments], node)
        if not isinstance(function, Function):
            raise error("P0204", f"{kind(function)} cannot be called", node.function.span, kind(function))
        return self.enter(function, bind_arguments(self, function, node), node, steps)

    def enter(self, function: Function, arguments: dict[str, Value], node: tree.CallOf, steps: bool) -> Value:
        define = function.define
        if any(define is active for active in self.active):
            first = next(i for i, active in enumerate(self.active) if active is define)
            names = " -> ".join(f"`{active.name.text}`" for active in [*self.active[first:], define])
            raise error(
                "P0206",
                f"`{function.name}` calls itself",
                node.span,
                names,
                help="recursion is not allowed; use `for` or `repeat`",
            )
        if len(self.active) >= MAX_CALLS:
            raise error(
                "P0107",
                "calls are nested too deeply",
                node.span,
                f"{MAX_CALLS} calls are active here",
                help="reduce the depth of nested calls",
            )
        saved = self.module, self.locals, self.trail, self.collecting
        self.module, self.locals = function.module, arguments
        self.trail = (*self.trail, Frame(function.name, node.span))
        self.collecting = self.collecting if steps else None
        self.active.append(define)
        try:
            return self.body(define)
        except PiperError as problem:
            raise PiperError(*(x.within(self.trail) for x in problem.diagnostics)) from None
        finally:
            self.active.pop()
            self.module, self.locals, self.trail, self.collecting = saved

    def body(self, define: tree.Define) -> Value:
        if define.result is not None:
            return self.result(define.result)
        try:
            self.block(define.body)
        except _Returned as returned:
            return returned.value
        return None

    def result(self, node: tree.Steps) -> Value:
        """The value of a one-line function: a single expression's value, or several steps as steps."""
        only = node.steps[0]
        if len(node.steps) == 1:
            if isinstance(only, tree.CallOf):
                return self.invoke(only, steps=self.collecting is not None)
            return self.evaluate(only)
        groups = [group for part in node.steps for group in self.groups(self.evaluate(part), part)]
        return StepsValue(tuple(groups))

    def give(self, node: tree.Return) -> None:
        raise _Returned(self.evaluate(node.value) if node.value is not None else None)

    # ----------------------------------------------------------------------------------------------------- control

    def loop(self, node: tree.For) -> None:
        for value in self.iterable(node.iterable):
            self.bind(node.names, value, node.iterable.span)
            self.block(node.body)

    def repeat(self, node: tree.Repeat) -> None:
        times = self.integer(node.times)
        if times < 0:
            raise error(
                "P0204",
                f"cannot repeat {times} times",
                node.times.span,
                "the count must be at least 0",
                help="use max(0, ...)",
            )
        for _ in range(times):
            self.block(node.body)

    def branch(self, node: tree.If) -> None:
        for test, body in node.branches:
            if self.truth(test):
                self.block(body)
                return
        if node.otherwise is not None:
            self.block(node.otherwise)

    def require(self, node: tree.Require) -> None:
        if not self.truth(node.test):
            message = self.text(node.message, "the message of `require`")
            raise error("P0207", message.strip() or "requirement not met", node.test.span, "this condition is false")

    def print(self, node: tree.Print) -> None:
        values = [self.present(value) for value in node.values]
        self.charge(PRINTING, node.span)
        for value in values:
            self.weigh(value, node.span)
        self.say(" ".join(show(value) for value in values))


def _unknown_parameter(name: str, params: Mapping[str, Value]) -> Diagnostic:
    known = f"the script has {listed(sorted(params), 'and')}" if params else "the script has no parameters"
    near = did_you_mean(name, params)
    return Diagnostic("P0903", f"unknown parameter `{name}`", notes=(known,), helps=(near,) if near else ())


_EXECUTE: dict[type, Callable[[Any, Any], None]] = {
    tree.FromImport: Interpreter.import_from,
    tree.ImportModule: Interpreter.import_module,
    tree.Param: Interpreter.param,
    tree.Let: Interpreter.let,
    tree.Define: Interpreter.define,
    tree.Steps: Interpreter.steps,
    tree.For: Interpreter.loop,
    tree.Repeat: Interpreter.repeat,
    tree.If: Interpreter.branch,
    tree.Return: Interpreter.give,
    tree.Require: Interpreter.require,
    tree.Print: Interpreter.print,
}
