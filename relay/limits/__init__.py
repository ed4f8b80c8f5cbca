"""Rates, shares and the groups of addresses that they are counted by. Nothing here knows what is limited."""
