"""`python -m entrenar_py.train.cli`: the command `entrenar`, where it is not installed."""

import sys

from entrenar_py.train.cli import main

sys.exit(main())
