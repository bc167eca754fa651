"""The module for torchrun: `torchrun --nproc_per_node=N -m entrenar_py.supervise train.py`."""

import sys

from entrenar_py.train.elastic.supervise import main

if __name__ == "__main__":
    sys.exit(main())
