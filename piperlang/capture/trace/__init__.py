"""One graph of model and loss: what tracing records, keeps or rejects."""
