"""The processes of a parallel engine: the driver, which is the user's own, and the workers that it starts."""
