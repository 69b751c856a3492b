"""A training script of the shape of Megatron-LM's: it imports its loop from a module and runs it.

`loop.py`, written by the test beside a copy of this file, has setup_model_and_optimizer, train and the rest.
"""

import sys

from loop import pretrain

if __name__ == "__main__":
    pretrain(sys.argv[1:])
