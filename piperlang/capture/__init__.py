"""Captures a PyTorch model as chunks with explicit forward and backward graphs, without allocating its weights."""
