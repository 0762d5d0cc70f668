"""Two small byte-level language models, trained on Python's documentation, to show what a format costs."""
