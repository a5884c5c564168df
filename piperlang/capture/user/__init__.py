"""The user's code: the model file, its functions, batches and lines, and the Python state that it keeps."""
