"""``relay demo``: a whole system on this machine."""
