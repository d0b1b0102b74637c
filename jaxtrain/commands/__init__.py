"""The commands, a file each: options, calls, exit code; and the Python API."""
