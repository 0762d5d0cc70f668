"""From a public verb to a launch: checks, plans, call signatures, the launch cache."""
