"""Speculation: tokens guessed from text seen before, for the engine to verify in an ordinary step."""
