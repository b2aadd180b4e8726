"""Options: their declaration, and the ways to give them: flags, variables, files, and names of other engines."""
