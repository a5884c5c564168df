"""What several layers share: placements of tensors on a mesh, and the ids of values."""
