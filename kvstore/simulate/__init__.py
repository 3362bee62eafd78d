"""Request logs, simulated with the code that serves them: the same core, on the log's own clock, without payloads."""
