"""ggml driven from Python: library binding, devices, weights, graphs and model families."""
