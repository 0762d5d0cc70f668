"""Backends: sets of files named like the operations. Each file offers

why_not(f) -> str | None      why a call with these facts cannot run here; its whole capability story
configure(f) -> config        the frozen tile configuration for these facts (None where there is none)
run(call, config) -> None     launch; decide nothing
bind(config, at)              optional: a function that launches for the addresses in a list, given where the address of
                              each tensor of the call stands in it, and says whether it did; None: not now

A backend's package may offer, for all its operations:

why_not(f) -> str | None      what all its files need; asked first, and before any of them is imported
broken(f) -> str | None       why kernels that are made for this device are off all the same, and the way out
"""
