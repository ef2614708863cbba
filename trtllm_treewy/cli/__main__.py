"""`python -m trtllm_treewy.cli`: the command, without its entry point."""

import sys

from . import main

sys.exit(main())
