"""What an operator may set about the HTTP side."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Times are seconds, sizes bytes.

    host, port          where to listen; port 0 takes a free one
    api_keys            accepted keys; empty = no key is asked for
    key_requests        most requests of one key at a time; 0 = any number
    yield_only          a `priority` below 0, which goes before others, is refused
    tls                 what to encrypt with; None = plain HTTP
    allowed_hosts       further names in the Host header, "*" = any; see hetero.server.security
    allowed_origins     further browser origins ("https://chat.example"), "*" = any
    max_body_bytes      largest request body, after decompression
    body_timeout        longest pause between two pieces of a request body, and what any body may take
    body_rate           bytes a second of a body that takes longer, on average beyond `body_timeout`
    write_timeout       how long a client may stop reading a stream before it counts as gone
    keep_alive          pause after which a silent stream gets a comment line
    drain               how long running requests may go on after a stop signal
    max_choices         most answers that one request may ask for (prompts x n)
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    key_requests: int = 0
    yield_only: bool = False
    tls: ssl.SSLContext | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    body_timeout: float = 30.0
    body_rate: int = 4096
    write_timeout: float = 60.0
    keep_alive: float = 5.0
    drain: float = 30.0
    max_choices: int = 128
