"""`hetero worker`: this machine's devices for a server on another one."""
