"""Directives as transformations of the graph: one file each, one list of them all."""
