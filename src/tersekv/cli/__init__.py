"""The command line: tersekv demo | eval | bench | verify | doctor."""
