"""`python -m piperlang` is `piperc`."""

import sys

from piperlang.cli.main import main

sys.exit(main())
