"""hetero: one fast LLM server out of a box with mismatched accelerators."""

__version__ = "0.1.0"
