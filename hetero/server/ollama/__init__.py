"""/api/*: Ollama's API, for the one model that is served."""
