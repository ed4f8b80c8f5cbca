"""What decides how a relay runs: options, variables, files, and what is kept of an earlier run."""
