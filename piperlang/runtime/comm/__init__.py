"""Communication between devices: a file per backend, listed in registry.py, behind the interface of backend.py."""
