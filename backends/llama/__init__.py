"""Models without a graph of ours: libllama computes them, as one stage with all layers."""
