"""What both programs do as processes: the one package in ``schemas`` with sockets and threads."""
