"""`python -m entrenar_py.service.cli`: the command `entrenar`, where it is not installed."""

import sys

from entrenar_py.service.cli import main

sys.exit(main())
