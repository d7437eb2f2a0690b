"""A real MCP server for tests: ``python mcp_server.py stdio`` or ``python mcp_server.py http PORT``."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests", log_level="ERROR")
count = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    In detail.
    """
    return a + b


@server.tool(name="Say-It")
def say(text: str) -> str:
    """Says it again."""
    return text


@server.tool()
def huge(size: int) -> str:
    """A lot of text."""
    return "长" * size


@server.tool()
def slow(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "done"


@server.tool()
def fail(text: str) -> str:
    """Raises."""
    raise ValueError(f"no {text}")


@server.tool()
def die() -> str:
    """Ends the server in the middle of a call."""
    os._exit(3)


@server.tool()
def counted() -> int:
    """How often it was called since the server started."""
    global count
    count += 1
    return count


@server.tool()
def picture() -> Image:
    """Shows a picture."""
    return Image(data=b"x", format="png")


@server.tool()
def secret() -> str:
    """What the server knows of its environment."""
    return f"{os.environ.get('GIVEN', 'none')} {os.environ.get('NOT_GIVEN', 'none')}"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
