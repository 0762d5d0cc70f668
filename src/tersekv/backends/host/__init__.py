"""What every GPU backend needs on the host: launches, what they are bound to, versions of Triton. No kernel."""
