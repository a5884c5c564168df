"""Runs graphs and plans."""
