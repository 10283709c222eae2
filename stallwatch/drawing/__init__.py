"""How things look: charts on one time axis, colours, numbers with units. For the live page and for reports."""
