"""``trainer.strategy=deepspeed``: moments, gradients and weights spread over the ranks by DeepSpeed's ZeRO.

DeepSpeed wraps the network (and the value head), not the loss. With stages 1 and 2 each rank holds all weights, and the
network that generates and scores is the one that is trained. With stage 3 the trained network is a copy of which each
rank holds a part; generation, score passes, export and checkpoints use the whole network beside it, which
:meth:`DeepSpeedStrategy.sync` brings up to date. So no rank ever waits for another while it rolls out.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from turntree.errors import MissingExtraError
from turntree.trainers.deepspeed_config import DeepSpeedConfig
from turntree.trainers.distributed.ranks import Ranks
from turntree.trainers.forward import PackedOutput, packed_logprobs
from turntree.trainers.packing import Pack

__all__ = ["DeepSpeedStrategy", "deepspeed_config", "load_deepspeed"]

_GATHERED = 1 << 26
"""Elements of weights that are gathered at a time where the whole network is brought up to date."""

_ALIGNED = 1024
"""Buffers hold a multiple of this many elements."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master"
"""Name, among the moments, of the float32 weights of a bfloat16 network."""


def load_deepspeed(*, device: str = "cpu") -> Any:
    """The library, told to run on ``device`` and to compile into turntree's own folder.

    Raises ``MissingExtraError`` where it is not installed.
    """
    if not device.startswith("cuda"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_extensions_folder()))
    os.environ.setdefault("LOCAL_RANK", "0")
    said = logging.root.manager.disable
    logging.disable(logging.INFO)  # it greets everyone on import
    try:
        import deepspeed
    except ImportError as error:
        raise MissingExtraError(
            f"trainer.strategy=deepspeed needs DeepSpeed ({error}); run: pip install 'turntree[deepspeed]'"
        ) from error
    finally:
        logging.disable(said)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Shared memory in place of gloo: it is compiled for a minute on first use, and hangs on processors without AVX.
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


def _extensions_folder() -> Path:
    """Under the user's cache, one a version of Python and torch: compiled code does not fit another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tag = f"torch{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}"
    return cache / "turntree" / "torch_extensions" / tag


def deepspeed_config(
    options: DeepSpeedConfig, *, ranks: int, clip: float, dtype: torch.dtype, device: str, parameters: int
) -> dict[str, Any]:
    """DeepSpeed's own configuration. A pack is its micro-batch; where a step ends is said by hand, not counted."""
    cuda = device.startswith("cuda")
    place = {"device": "cpu", "pin_memory": cuda}
    bucket = min(-(-parameters // _ALIGNED) * _ALIGNED, 2**29)
    zero: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": cuda,
        "contiguous_gradients": True,
        # Buffers of this many elements are allocated, however small the model is.
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = place
    if options.offload_params:
        zero["offload_param"] = place
    config = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    return _merged(config, options.args)


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in more.items():
        inside = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if inside else value
    return out


class _Packed(nn.Module):
    """What DeepSpeed wraps: the packed forward pass of network and value head as one module."""

    def __init__(self, network: nn.Module, value_head: nn.Module | None) -> None:
        super().__init__()
        self.network = network
        self.value_head = value_head
        # Set before each call, not given as arguments: DeepSpeed's hooks look into arguments.
        self.job: dict[str, Any] = {}

    def forward(self) -> Tensor:
        """Log-probs, then entropies and values where there are any, [columns, N].

        As one tensor: with several, DeepSpeed would count those that a loss used, and ranks must not differ in that.
        """
        found = packed_logprobs(self.network, value_head=self.value_head, **self.job)
        columns = [found.logp, found.entropy, found.value]
        return torch.stack([column.to(found.logp.dtype) for column in columns if column is not None])


class DeepSpeedStrategy:
    """See :class:`turntree.trainers.distributed.strategy.Strategy`; AdamW, as a plain run has it.

    ``network`` and ``value_head`` are whole on every rank and stay what the rest of the program sees. Weights are
    trained in their dtype; of bfloat16 ones the optimiser keeps a float32 copy, spread over the ranks.
    """

    def __init__(
        self,
        network: nn.Module,
        value_head: nn.Module | None,
        *,
        ranks: Ranks,
        options: DeepSpeedConfig,
        learning_rate: float,
        beta2: float,
        weight_decay: float,
        clip: float,
    ) -> None:
        first = next(network.parameters())
        device, self._half = str(first.device), first.dtype == torch.bfloat16
        library = load_deepspeed(device=device)
        self._ranks, self._stage = ranks, options.stage
        self._whole = _Packed(network, value_head)
        self._trained = copy.deepcopy(self._whole) if options.stage == 3 else self._whole
        wanted = [p for p in self._trained.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            wanted,
            lr=learning_rate,
            betas=(0.9, beta2),
            weight_decay=weight_decay,
            # The step on the CPU is several times faster so, and needs no compiler, unlike DeepSpeed's own.
            fused=True if options.offload_optimizer else None,
        )
        size = sum(p.numel() for p in wanted)
        config = deepspeed_config(
            options, ranks=ranks.size, clip=clip, dtype=first.dtype, device=device, parameters=size
        )
        self._engine = _engine(library, self._trained, optimizer, config)
        self._library = library
        self._pieces = 1
        self._anchor: Tensor | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self._engine.optimizer.param_groups)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, *, pieces: int, last: bool) -> None:
        self._pieces = pieces
        self._engine.set_gradient_accumulation_boundary(last)

    def forward(
        self, pack: Pack, *, temperature: float = 1.0, entropy: bool = False, value_head: nn.Module | None = None
    ) -> PackedOutput:
        del value_head  # it has its own
        self._trained.job = {"pack": pack, "temperature": temperature, "entropy": entropy, "pieces": self._pieces}
        columns = self._engine()
        # On every rank every parameter gets a gradient, whatever a loss leaves out: ranks add them up together.
        self._anchor = 0.0 * columns.sum()
        has_values = self._whole.value_head is not None
        return PackedOutput(columns[0], columns[1] if entropy else None, columns[-1] if has_values else None)

    def backward(self, loss: Tensor | None) -> None:
        anchor, self._anchor = self._anchor, None
        if anchor is None:
            raise RuntimeError("backward needs a forward pass before it")
        # DeepSpeed takes the mean over ranks; the loss is this rank's share of a sum.
        total = anchor if loss is None else loss * self._ranks.size + anchor
        self._engine.backward(total, scale_wrt_gas=False)

    def step(self) -> float:
        self._engine.step()
        if self._engine.optimizer.overflow:
            return math.inf
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else math.nan

    # -- weights ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        if self._stage < 3:
            return
        with torch.no_grad():
            for pairs in self._chunks():
                with self._library.zero.GatheredParameters([trained for _, trained in pairs]):
                    for whole, trained in pairs:
                        whole.copy_(trained)

    def adopt(self) -> None:
        loaded, self._loaded = self._loaded, None
        states: dict[int, dict[str, Any]] = (loaded or {}).get("state", {})
        with torch.no_grad():
            if self._stage == 3:
                for pairs in self._chunks():
                    with self._library.zero.GatheredParameters([trained for _, trained in pairs], modifier_rank=0):
                        for whole, trained in pairs if self._ranks.is_main else ():
                            trained.copy_(whole)
            for number, (whole, trained) in enumerate(self._parameters()):
                master = states.get(number, {}).get(_MASTER) if self._half else None
                self._write(trained, whole if master is None else master, None)
        if states:
            self._write_moments(states)

    def train(self, mode: bool) -> None:
        for module in (self._whole, self._trained):
            module.train(mode)

    def _parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(whole, trained) of each trained parameter, once, in the order of the optimiser."""
        pairs = zip(self._whole.parameters(), self._trained.parameters(), strict=True)
        return ((whole, trained) for whole, trained in pairs if trained.requires_grad)

    def _chunks(self) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        chunk: list[tuple[nn.Parameter, nn.Parameter]] = []
        for pair in self._parameters():
            if chunk and sum(whole.numel() for whole, _ in [*chunk, pair]) > _GATHERED:
                yield chunk
                chunk = []
            chunk.append(pair)
        if chunk:
            yield chunk

    # -- moments ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        pairs = list(self._parameters())
        groups[0]["params"] = list(range(len(pairs)))
        found: dict[str, Any] = {"state": {}, "param_groups": groups[:1]}
        steps = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
        for number, (whole, trained) in enumerate(pairs if steps else ()):
            state = {name: self._read(trained, name, whole.shape) for name in _MOMENTS}
            if self._half:
                state[_MASTER] = self._read(trained, None, whole.shape)
            if self._ranks.is_main:
                found["state"][number] = {"step": torch.tensor(float(steps[0])), **state}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        count = len(list(self._parameters()))
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        if sum(saved) != count:
            raise ValueError(f"the optimizer was saved with {sum(saved)} parameters, this one has {count}")
        self._loaded = state_dict

    def _read(self, trained: nn.Parameter, key: str | None, shape: torch.Size) -> Tensor | None:
        """A moment (None: the float32 weights) of a parameter, whole, on the main rank's CPU; collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        full = safe_get_full_fp32_param(trained) if key is None else safe_get_full_optimizer_state(trained, key)
        return cast("Tensor", full).detach().reshape(shape).cpu() if self._ranks.is_main else None

    def _write(self, trained: nn.Parameter, value: Tensor, key: str | None) -> None:
        """This rank's part of a whole moment, or of the float32 weights (key None)."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = value.detach().float().to(next(self._whole.parameters()).device)
        if self._stage == 3:
            self._write_part(trained, value.flatten(), key)
        elif key is None:
            safe_set_full_fp32_param(trained, value)
        else:
            safe_set_full_optimizer_state(trained, value, key)

    def _write_part(self, trained: nn.Parameter, flat: Tensor, key: str | None) -> None:
        from deepspeed.utils import (
            safe_get_local_fp32_param,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        own = safe_get_local_fp32_param(trained)
        start = own.numel() * self._ranks.rank
        part = torch.zeros_like(own)  # the last rank's part is filled up
        given = flat[start : start + own.numel()]
        part[: len(given)] = given
        if key is None:
            safe_set_local_fp32_param(trained, part)
        else:
            safe_set_local_optimizer_state(trained, part, key)

    def _write_moments(self, states: dict[int, dict[str, Any]]) -> None:
        optimizer = self._engine.optimizer
        step = float(next(iter(states.values()))["step"])
        stage3 = self._stage == 3
        flats: Sequence[Tensor] = (
            optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
        )
        for flat in flats:  # otherwise they are made in the first step
            zeros = {name: torch.zeros_like(flat) for name in _MOMENTS}
            optimizer.optimizer.state[flat] = {"step": torch.tensor(step), **zeros}
        if not stage3:
            optimizer._lazy_init_hp_params_optimizer_state()
        for number, (_, trained) in enumerate(self._parameters()):
            for name in _MOMENTS:
                if number in states:
                    self._write(trained, states[number][name], name)


def _engine(library: Any, module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """The engine around ``module``; hooks into the process group that is there."""
    library.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    engine, *_ = library.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine
