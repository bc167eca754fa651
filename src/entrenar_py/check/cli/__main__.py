"""`python -m entrenar_py.check.cli`: the command `entrenar-check`."""

import sys

from entrenar_py.check.cli import main

sys.exit(main())
