"""`python -m entrenar_py.cli`: the command `entrenar-check`."""

import sys

from entrenar_py.cli import main

sys.exit(main())
