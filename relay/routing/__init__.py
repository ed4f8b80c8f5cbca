"""How a call reaches the node that it is for, whichever process holds that node's session."""
