"""The command line, a module for each group of commands.

``preheat.cli.main`` is the function, as programs call it; ``sys.modules`` has its module under the same name.
"""

from preheat.cli.main import main

__all__ = ["main"]
