"""A vLLM server of one's own on this machine, for tests, examples and short runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from turntree.agents.engines.vllm import require_vllm
from turntree.errors import EngineError

__all__ = ["LocalServer", "local_server", "server_command"]


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server: its address up to ``/v1``, its process (leader of its own group) and its log."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """Let the server end by itself, which frees its shared memory; kill it where it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=30)
        self.kill()

    def kill(self) -> None:
        """End the server and its workers at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


def server_command(model: str | Path, *, port: int, arguments: Sequence[str] = ()) -> list[str]:
    """The command line of a server whose answers can be trained on."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill", *arguments),
    ]


@contextlib.contextmanager
def local_server(
    model: str | Path,
    *,
    arguments: Sequence[str] = ("--block-size", "32", "--enforce-eager"),
    environment: Mapping[str, str] | None = None,
    dev_mode: bool = True,
    port: int | None = None,
    timeout_s: float = 300.0,
) -> Iterator[LocalServer]:
    """Serve a model folder on the loopback address for as long as the block runs; a free port by default.

    ``dev_mode`` lets whoever reaches the port change the weights. Raises ``EngineError`` with the end of the log when
    the server does not answer within ``timeout_s``.
    """
    require_vllm()
    port = _free_port() if port is None else port
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ, **(environment or {})}
    variables["VLLM_SERVER_DEV_MODE"] = "1" if dev_mode else "0"
    with tempfile.TemporaryDirectory(prefix="turntree-vllm-") as scratch:
        log = Path(scratch) / "server.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                server_command(model, port=port, arguments=arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        server = LocalServer(f"http://127.0.0.1:{port}/v1", process, log)
        try:
            _wait(server, timeout_s)
            yield server
        finally:
            server.stop()


def _wait(server: LocalServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{server.base_url}/models", timeout=2.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    end = server.log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise EngineError(f"the server did not answer within {timeout_s:g} s; the end of its log:\n{end}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
