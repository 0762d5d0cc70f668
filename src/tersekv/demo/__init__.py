"""Two small byte-level language models, trained on Python's documentation, to see what a cache format costs."""
