"""Everything that judges: pure functions and small state over observations; no I/O and no clock."""
