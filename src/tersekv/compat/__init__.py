"""Other libraries' signatures over tersekv's operations: rename and convert units, compute nothing."""
