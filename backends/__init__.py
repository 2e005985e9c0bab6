"""Devices that compute: ggml and what runs inside its graphs, libllama for the rest."""
