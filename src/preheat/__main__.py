"""``python -m preheat`` is the command line."""

import sys

from preheat.cli import main

sys.exit(main())
