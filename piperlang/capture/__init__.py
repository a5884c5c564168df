"""From a PyTorch model to chunks with explicit forward and backward graphs, without holding a weight."""
