"""Schedules in an editor: the language server that `piperc lsp` runs."""
