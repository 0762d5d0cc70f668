"""The public verbs, one page each. Each fills a call record and hands it to `submit`."""
