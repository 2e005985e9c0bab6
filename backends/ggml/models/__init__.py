"""Model families that hetero computes itself: facts from metadata, and the graph of one block."""

from backends.ggml.models.config import ModelConfig, ModelError, NotNative, Rope, read_config
from backends.ggml.models.families import FAMILIES, Family

__all__ = ["FAMILIES", "Family", "ModelConfig", "ModelError", "NotNative", "Rope", "read_config"]
