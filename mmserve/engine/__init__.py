"""The engine: requests in, tokens out; schedule, run, update."""
