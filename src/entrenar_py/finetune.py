"""The module for torchrun: `torchrun --nproc_per_node=N -m entrenar_py.finetune run.yaml`."""

import os
import sys

from entrenar_py.shared import process
from entrenar_py.train.finetune.cli import rank

if __name__ == "__main__":
    process.collect_seldom()
    sys.exit(rank(sys.argv[1:], os.environ))
