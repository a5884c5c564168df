"""The reference: a graph executed by its meaning on simulated devices, and compared with plain training."""
