"""Random valid schedules for a model, compared with plain PyTorch. Meant for compiler developers."""
