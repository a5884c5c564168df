"""`python -m piperlang` is `piperc`. Nothing is imported here that takes long: Ctrl-C is handled from the start."""

import sys

from piperlang.interrupts import checkpoint, leave, watched


def main() -> int:
    code = watched(_run)
    leave(code)
    return code


def _run() -> int:
    from piperlang.cli.main import main as run

    checkpoint()
    return run()


if __name__ == "__main__":
    sys.exit(main())
