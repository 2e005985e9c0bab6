"""The bodies of the commands. Each returns the process's exit code."""
