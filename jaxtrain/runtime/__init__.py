"""The processes of a run: start, supervisor, connection, signals, watchdog, streams."""
