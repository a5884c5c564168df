"""The interactive session: directives applied one at a time to a model that is traced once, in a terminal, a pipe or a
notebook."""
