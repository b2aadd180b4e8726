"""Offline inference: ``LLM(model).generate(prompts)``, with frontend and engine in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from preheat.configs.adapters import model_names
from preheat.configs.kv_transfer import kv_transfer
from preheat.configs.weight_transfer import TransferGroup, announced
from preheat.core import EngineState, Outcome, SamplingParams
from preheat.engine.listeners import STEP_EVENTS
from preheat.engine.progress import ProgressLines
from preheat.errors import InvalidRequest, SettingsError
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.hf_tokenizer import transformers_tokenizer
from preheat.frontend.metric_values import Metric, metric_values
from preheat.library.engine_args import EngineArgs
from preheat.library.inputs import EmbedsPrompt, Prompt, TextPrompt, TokensPrompt
from preheat.library.offline import OfflineClient
from preheat.library.stepping import StepEngine
from preheat.library.worker import Worker, collective_rpc
from preheat.metrics import Metrics
from preheat.settings import BUNDLED, Settings
from preheat.startup import boot_engine, boot_front
from preheat.transport import InlineTransport
from preheat.utils.refused import Refused
from preheat.utils.trace import Call, Trace, open_trace
from preheat.warmup.dummy_requests import DummyRequest, EchoLoop, spare_frontend, warm_up_frontend

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.model.decoder import Decoder

R = TypeVar("R")

__all__ = ["LLM", "EmbedsPrompt", "OfflineClient", "Prompt", "TextPrompt", "TokensPrompt"]


class LLM(OfflineClient):
    """One model in this process. ``options`` are the command line's, by name: see docs/settings.md.

    Raises SettingsError for a bad option, ModelError for a bad checkpoint, NotInvariant if the check at boot fails.
    """

    def __init__(self, model: str = BUNDLED, **options: Any) -> None:
        self._boot(Settings.load({"model": model, **options}))

    @classmethod
    def of(cls, settings: Settings) -> LLM:
        """Boot the engine of ``settings``."""
        llm = cls.__new__(cls)
        llm._boot(settings)
        return llm

    def _boot(self, settings: Settings) -> None:
        if kv_transfer(settings) is not None:
            raise SettingsError(
                "role needs `preheat serve`, because an engine that runs within one process sends no blocks between "
                "two calls: leave it out",
                param="role",
            )
        self.settings = settings
        with ProgressLines(settings.use_tqdm_on_load) as progress:
            self._start(progress)

    def _start(self, progress: ProgressLines) -> None:
        transport = InlineTransport(progress.show)
        settings = self.settings
        metrics = Metrics(model_names(settings)[0], settings.metrics_prefix)
        # First, so that an error of the frontend shows without torch.
        frontend = boot_front(settings, transport.send, metrics)
        self.loop = boot_engine(settings, transport)
        super().__init__(frontend, self.loop, transport)
        transport.on_put = None
        self._receive()
        self.frontend.check_blocked()
        if not settings.skip_warmup:
            _warm_up(self.frontend)
        self._profile: tuple[Trace, Call] | None = None  # the open trace, and the loop's usual way of calls

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Boot the engine of ``engine_args``."""
        return cls.of(engine_args.create_engine_config())

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The same engine, driven step by step."""
        return LLMEngine(self)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as transformers' class, with the chat template in use.

        Raises InvalidRequest without a tokenizer, and without transformers.
        """
        return self._transformers_tokenizer

    @cached_property
    def _transformers_tokenizer(self) -> Any:
        return transformers_tokenizer(self.frontend.tokenizer, self.frontend.template.source)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of prompts without any: the checkpoint's recommendations."""
        return self.frontend.input.params()

    def get_metrics(self) -> list[Metric]:
        """Return the metrics of the server's ``/metrics``, without the metrics of the process."""
        return metric_values(self.frontend.metrics)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks.

        There is one replica in a process, with or without ``include_dp``.
        """
        return self.settings.tensor_parallel_size * self.settings.pipeline_parallel_size

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks of the engine: "generate", or how it pools texts."""
        pooling = self.frontend.pooling
        if pooling is None:
            return ("generate",)
        if pooling.classes:
            return ("classify", *["score"] * pooling.scores_pairs)
        return ("token_embed", "score") if pooling.of_tokens else ("embed", "token_embed", "score")

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a trace of every step, for https://ui.perfetto.dev.

        The trace goes to ``PREFIX_trace_PID.json`` in the working directory; ``profile_prefix`` is "preheat" unless
        given. Raises InvalidRequest if there is a trace already.
        """
        if self._profile is not None or self.settings.profiler_enabled:
            raise InvalidRequest("a trace is written already: call stop_profile first, or unset VLLM_PROFILER_ENABLED")
        self.loop.drain_steps()
        trace = open_trace(True, prefix=profile_prefix or "preheat")
        self._profile, self.loop.call = (trace, self.loop.call), trace.calls(STEP_EVENTS)

    def stop_profile(self) -> None:
        """End the trace. Raises InvalidRequest if :meth:`start_profile` was not called."""
        if self._profile is None:
            raise InvalidRequest("no trace is written: call start_profile first")
        self.loop.drain_steps()
        (trace, self.loop.call), self._profile = self._profile, None
        trace.close()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the :class:`preheat.library.worker.Worker`, or a function with it.

        The call comes between two steps.

        Return a list with one result, as the one worker is in this process. Raises InvalidRequest.
        """
        if timeout is not None:
            raise InvalidRequest("the call runs in this process and cannot be cut off: leave timeout out")
        return collective_rpc(Worker(self.settings, self.loop), method, args, kwargs)

    def apply_model(self, func: Callable[[Decoder], R]) -> list[R]:
        """Call ``func`` with the model, for inspection; otherwise as :meth:`collective_rpc`."""
        return self.collective_rpc("apply_model", args=(func,))

    reset_mm_cache = Refused("reset_mm_cache", "images are read anew for each request, and none are kept")
    reward = Refused("reward", "no reward models are run here; LLM.score compares embeddings")

    def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Run no step until :meth:`resume`.

        ``mode`` is about running requests, which exist under :meth:`OfflineClient.advance`: they end with reason
        "abort", run to their end, or go on later.
        """
        self._command("pause", mode=mode)

    def resume(self) -> None:
        """Run steps again."""
        self._command("resume")

    @property
    def state(self) -> EngineState:
        """The state: pause, sleep, weights' version, digest of the check's logits."""
        return self.frontend.state

    def update_weights(
        self,
        weights: str | Path | Iterable[tuple[str, Tensor]] | Mapping[str, Any],
        weight_version: str | None = None,
    ) -> None:
        """Replace weights in place, all or some of them, and clear the prefix cache.

        ``weights`` is a folder of safetensors files, or tensors by their names in the checkpoint. Or it is, as in vLLM,
        ``{"update_info": {...}}``, which describes tensors that a trainer will send.

        Raises ModelError, naming tensors, if some do not fit or are not finite; the old weights then stay.
        """
        version = weight_version or ""
        if isinstance(weights, str | Path):
            self._command("update_weights", path=str(weights), version=version)
        elif isinstance(weights, Mapping):
            info = weights["update_info"]
            tensors = announced(info["names"], info["dtype_names"], info["shapes"])
            self._command("update_weights", announced=tensors, version=version)
        else:
            self._command("update_weights", tensors=dict(weights), version=version)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the group of a trainer; needs ``weight_transfer_config``.

        The trainer waits in :class:`preheat.WeightGroup`. ``init_info`` has vLLM's ``master_address``, ``master_port``,
        ``rank_offset`` and ``world_size``, and ``timeout`` in seconds. Raises InvalidRequest.
        """
        self._command("init_weight_transfer_engine", group=TransferGroup(**init_info.get("init_info", init_info)))

    def start_weight_update(self) -> None:
        """Collect a trainer's tensors until :meth:`finish_weight_update`."""
        self._command("start_weight_update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Replace weights in place by the tensors sent since :meth:`start_weight_update`."""
        self._command("finish_weight_update", version=weight_version or "")

    def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Release memory; needs ``enable_sleep_mode``.

        Level 1 releases the memory of the cache. Level 2 releases the weights' too, and :meth:`update_weights` must
        then bring them back. Level 0 only pauses. ``mode`` is as in :meth:`pause`.
        """
        self._command("sleep", level=level, mode=mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, of all or of ``tags`` ("weights", "kv_cache").

        Steps run again once all memory is there.

        Raises NotInvariant if the check's logits differ from the logits before.
        """
        self._command("wake_up", tags=list(tags or ()))

    def _command(self, name: str, **fields: Any) -> None:
        outcomes: list[Outcome] = []
        self.frontend.command(name, outcomes.append, **fields)
        self._loop.take(0)
        self._receive()
        while not outcomes:  # running requests must end first
            self.advance()
        if outcomes[0].error is not None:
            raise outcomes[0].error.restore()


class LLMEngine(StepEngine):
    """The engine of an :class:`LLM`, driven step by step.

    Requests are added one by one, and each :meth:`step` returns new outputs.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.llm = llm
        self.get_tokenizer, self.get_metrics = llm.get_tokenizer, llm.get_metrics
        self.reset_prefix_cache, self.sleep, self.wake_up = llm.reset_prefix_cache, llm.sleep, llm.wake_up
        self.start_profile, self.stop_profile = llm.start_profile, llm.stop_profile
        self.collective_rpc, self.apply_model = llm.collective_rpc, llm.apply_model

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> LLMEngine:
        """Boot the engine of ``engine_args``.

        ``usage_context`` is as in :meth:`EngineArgs.create_engine_config`.
        """
        return cls(LLM.from_engine_args(engine_args))

    @classmethod
    def from_vllm_config(cls, vllm_config: Settings, usage_context: object = None) -> LLMEngine:
        """Boot the engine of a configuration from :meth:`EngineArgs.create_engine_config`."""
        return cls(LLM.of(vllm_config))

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    @property
    def vllm_config(self) -> Settings:
        """The settings: one object, unlike vLLM's tree."""
        return self.llm.settings

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self.llm.state.sleeping is not None

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request names it. Raises InvalidRequest."""
        self.llm.serve(lora_request)
        return True

    remove_lora = Refused("remove_lora", "an adapter that no request uses gives its slot on the device to others")
    list_loras = Refused("list_loras", "adapters are known by name: see LLM.frontend.adapters.served")
    pin_lora = Refused("pin_lora", "an adapter keeps its slot as long as one of its requests runs")
    reset_mm_cache = LLM.reset_mm_cache
    model_config = Refused("model_config", "settings are one object: see vllm_config")
    renderer = Refused("renderer", "prompts are made by LLM.chat, or by get_tokenizer().apply_chat_template")
    input_processor = Refused("input_processor", "add_request takes prompts as they are")
    output_processor = Refused("output_processor", "step returns outputs as they are")
    engine_core = Refused("engine_core", "the engine runs in this process: see LLM.loop")
    do_log_stats = Refused("do_log_stats", "statistics are not logged: see get_metrics")


def _warm_up(frontend: Frontend) -> None:
    """Warm up the frontend by dummy requests through a separate client."""
    transport = InlineTransport()
    spare = spare_frontend(frontend, transport.send)
    client = OfflineClient(spare, EchoLoop(transport, frontend.tokenizer), transport)

    def send(request: DummyRequest) -> None:
        if request.embeds:
            classifies = frontend.pooling is not None and frontend.pooling.classes
            client.encode(request.prompt, use_tqdm=False, pooling_task="classify" if classifies else "embed")
        elif request.chat:
            client.chat([*request.messages], request.params, use_tqdm=False)
        else:
            client.generate([request.prompt], request.params, use_tqdm=False)

    warm_up_frontend(send, frontend)
