"""Everything that touches the outside world to look: one room a source, one observation a call."""
