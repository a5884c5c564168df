"""Compares what will be trained with eager PyTorch, before anything is trained."""
