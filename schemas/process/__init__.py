"""What both programs do as processes: the one wing of ``schemas`` with sockets and threads."""
