"""The OpenAI-compatible server: HTTP and text in one process, the engine in another."""
