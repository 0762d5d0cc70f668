"""Host code that every GPU backend shares: launches, their arguments, versions of Triton. No kernel."""
