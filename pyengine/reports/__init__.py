"""Stage 6, reports: what the engine can say about a model beyond its text."""
