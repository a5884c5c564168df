"""Syntax tree to directives: names, values, functions, imports; and the outline of a script without a model."""
