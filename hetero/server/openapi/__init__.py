"""The description of all routes, OpenAPI 3.1: served at /openapi.json, and kept as docs/openapi.yaml."""
