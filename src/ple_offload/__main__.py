"""python -m ple_offload: the same as the command ple-offload."""

import sys

from ple_offload.cli import main

sys.exit(main())
