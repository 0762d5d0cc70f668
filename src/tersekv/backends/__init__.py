"""Backends: sets of files named like the operations. Each file offers

why_not(f) -> str | None      why a call with these facts cannot run here; its whole capability story
configure(f) -> config        the frozen tile configuration for these facts (None where there is none)
run(call, config) -> None     launch; decide nothing
"""
