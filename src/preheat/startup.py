"""The two boots: of the engine, and of the frontend (tokenizer, chat template).

The frontend's process never imports torch, so :func:`boot_engine` defers all imports that need it.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.backends.registry import facts_of, pick_backend, rest, wake
from preheat.backends.support import supports
from preheat.boot.early import waiting_ranks
from preheat.core import POOLS, Died, ToEngine
from preheat.errors import PreheatError, SettingsError, WireError
from preheat.figures import AnswerCacheFigures
from preheat.frontend.adapters import Adapters
from preheat.frontend.answer_cache import AnswerCache
from preheat.frontend.answer_folder import AnswerFolder
from preheat.frontend.answer_format import AnswerFormats
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.frontend.options import FrontendOptions
from preheat.frontend.params_checker import override_params, recommended_params
from preheat.frontend.receipt_log import ReceiptLog
from preheat.frontend.receipts import Receipts
from preheat.frontend.tokenizer import ModelFiles, NoTokenizer, Tokenizer
from preheat.frontend.tracing import RequestTraces
from preheat.metrics import Metrics, explain
from preheat.model.config import resolve_dtype
from preheat.model.families import check_architecture, read_spec
from preheat.model.files import find_model, find_tokenizer, read_config
from preheat.model.first_rank import spec_of_first_rank
from preheat.model.kv_scales import with_kv_dtype
from preheat.model.quantization import bytes_by_scheme
from preheat.model.stated import pooled_spec
from preheat.model.traits import check_traits
from preheat.model.unread import GENERATION, refuse_unread
from preheat.model.values import check_supported
from preheat.model.vision_specs import VisionSpec
from preheat.named_files import check_named_files
from preheat.plan import commands
from preheat.plan.modes import check_options, instead, resolve, with_defaults
from preheat.plan.of_model import for_model
from preheat.pooling.pooling import pooling_of
from preheat.settings import Settings
from preheat.settings.combinations import check as check_features
from preheat.settings.combinations import traits_of
from preheat.settings.paths import check_paths
from preheat.transport import EngineTransport, InlineTransport
from preheat.utils import pycache
from preheat.utils.caches import cache_root
from preheat.utils.gc import collect_and_freeze, kept_imports
from preheat.utils.log import set_up_logging
from preheat.utils.structs import describe_structs
from preheat.utils.trace import open_trace
from preheat.verify.names import check_required

if TYPE_CHECKING:
    from preheat.backends.base.backend import Backend
    from preheat.engine.loop import EngineSide, Loop
    from preheat.frontend.images import Images

logger = logging.getLogger(__name__)


def boot_front(
    settings: Settings,
    send: Callable[[ToEngine], None],
    metrics: Metrics | None = None,
    *,
    max_queued: int | None = None,
) -> Frontend:
    """Boot the frontend with its tokenizer and chat template. Raises SettingsError or ModelError, with advice.

    ``send`` sends a message to the engine; at most ``max_queued`` sequences may wait there.
    """
    describe_structs()
    with boot_errors("The tokenizer cannot be loaded"):
        folder = find_model(settings, with_weights=False)
        config = read_config(folder, settings.hf_overrides)
        check_architecture(config)  # before its tokenizer, as that may be of an unsupported kind
        files = ModelFiles(folder, settings.hf_overrides, _generation_folder(settings))
        tokens = find_tokenizer(settings) if settings.tokenizer else folder
        tokenizer = NoTokenizer(folder, files) if settings.skip_tokenizer_init else Tokenizer(tokens, files)
        images = _images(settings, folder)
        image_token = tokenizer.token_text(images.token_id) if images else None
        template = ChatTemplate(
            tokenizer,
            settings.chat_template,
            image_token,
            settings.default_chat_template_kwargs,
            settings.chat_template_content_format,
        )
        template.check()
        pooling = pooling_of(settings, folder, config)
        options = FrontendOptions(
            template=template,
            recommended=_recommended(settings, files),
            max_logprobs=max(settings.max_logprobs, len(POOLS)) if pooling else settings.max_logprobs,
            max_queued=max_queued,
            metrics=metrics,
            seed=settings.seed,
            log_requests=settings.enable_log_requests,
            images=images,
            priorities=settings.scheduling_policy == "priority",
            pooling=pooling,
            embed_size=_embed_size(settings, folder),
            adapters=Adapters(send, settings),
            traces=_traces(settings),
            receipts=_receipts(settings),
            answers=_answers(settings),
            formats=AnswerFormats(
                tokenizer,
                settings.tool_call_parser if settings.enable_auto_tool_choice else None,
                settings.reasoning_parser,
            ),
        )
        frontend = Frontend(tokenizer, send, options)
        _ = frontend.parts  # reads the tokenizer's file; else the first request would wait for it
        return frontend


def _check_kept(settings: Settings) -> str:
    """Return the reason why answers have no receipts, if any.

    Raises SettingsError for a folder of answers or a log of receipts that would stay empty.
    """
    if settings.answer_cache_size is None and settings.answer_cache_dir is not None:
        raise SettingsError(
            "answer_cache_dir keeps the answers of the answer cache, and there is none: give answer_cache_size",
            param="answer_cache_dir",
        )
    try:
        check_features(traits_of(settings) | {"receipts"}, {settings.device: facts_of(settings.device).lacks})
    except SettingsError as error:
        if settings.receipts_log is not None:
            raise SettingsError(f"receipts_log would stay empty: {error.message}", param="receipts_log") from error
        return error.message
    return ""


def _answers(settings: Settings) -> AnswerCache | None:
    if settings.answer_cache_size is None:
        return None
    size = int(settings.answer_cache_size * 2**30)
    folder = None
    if settings.answer_cache_dir is not None:
        folder = AnswerFolder(settings.answer_cache_dir, int(settings.answer_cache_dir_size * 2**30))
    return AnswerCache(size, settings.answer_cache_check_every, AnswerCacheFigures(), folder)


def _receipts(settings: Settings) -> Receipts:
    """Return how answers get receipts. Raises SettingsError if the log cannot be written, or would stay empty."""
    lacking = _check_kept(settings)
    log = None if settings.receipts_log is None else ReceiptLog(settings.receipts_log)
    return Receipts(always=settings.receipts, lacking=lacking, log=log)


def _traces(settings: Settings) -> RequestTraces | None:
    if settings.otlp_traces_endpoint is None:
        return None
    model = settings.served_model_name[0] if settings.served_model_name else settings.model
    return RequestTraces(settings.otlp_traces_endpoint, settings.otlp_traces_protocol, model)


def _images(settings: Settings, folder: Path) -> Images | None:
    """Return the reader of images, if the model sees images.

    No other model needs Pillow.
    """
    if settings.language_model_only:
        return None
    config = read_config(folder, settings.hf_overrides)
    spec = read_spec(config) if "vision_config" in config or "text_config" in config else None
    if spec is None or spec.vision is None:
        return None
    from preheat.frontend.grid_config import GridConfig
    from preheat.frontend.image_config import PixelConfig
    from preheat.frontend.images import Images, check_positions
    from preheat.frontend.media import MediaReader
    from preheat.frontend.video import FRAMES, VideoConfig

    vision = spec.vision
    pixels = PixelConfig.read(folder, any_size=vision.any_size)
    if pixels is None:
        logger.warning("%s holds no preprocessor_config.json: requests with images are refused", folder)
        return None
    config_of: PixelConfig | GridConfig = pixels
    video: VideoConfig | None = None
    if isinstance(vision, VisionSpec):
        check_positions(folder, vision.num_patches, vision.tokens)
        size, least = vision.image_size, vision.tokens
    else:
        patch, merge, bounds = vision.patches.size, vision.merge, (vision.min_pixels, vision.max_pixels)
        config_of = GridConfig(pixels=pixels, patch=patch, merge=merge, least=bounds[0], most=bounds[1])
        size, least = 0, 1
        if vision.patches.frames == FRAMES:
            video = VideoConfig.read(folder, unit=patch * merge, frame=bounds[1])
    reader = MediaReader(
        domains=settings.allowed_media_domains,
        folder=settings.allowed_local_media_path,
        max_bytes=settings.max_image_bytes,
        timeout=settings.image_fetch_timeout,
    )
    return Images(
        config_of,
        reader,
        size=size,
        tokens=least,
        token_id=vision.image_token,
        limit=(settings.limit_mm_per_prompt or {}).get("image"),
        max_pixels=settings.max_image_pixels,
        video=video,
    )


def _embed_size(settings: Settings, folder: Path) -> int | None:
    """Return the size of an embedding, if prompts may be embeddings."""
    if not settings.enable_prompt_embeds:
        return None
    return read_spec(read_config(folder, settings.hf_overrides), settings.quantization).hidden_size


def _generation_folder(settings: Settings) -> Path | None:
    """Return the folder of ``--generation-config``; None for the model's. Raises SettingsError."""
    if settings.generation_config in ("auto", "vllm"):
        return None
    folder = Path(settings.generation_config).expanduser()
    if not (folder / "generation_config.json").is_file():
        raise SettingsError(
            f"generation_config: {folder} holds no generation_config.json; write auto, vllm or a folder that has one",
            param="generation_config",
        )
    return folder


def _recommended(settings: Settings, files: ModelFiles) -> dict[str, object]:
    """Return the sampling defaults, by parameter."""
    given = settings.override_generation_config or {}
    overridden = {key: value for key, value in files.generation.items() if key not in given}
    if settings.generation_config == "vllm":
        return override_params(given)
    left_out = "; correct it, or start with --generation-config vllm"
    refuse_unread(str(files.generation_path), files.generation, GENERATION, hint=left_out)
    return recommended_params(overridden, files.generation_path) | override_params(given)


def planned(settings: Settings, *, as_json: bool = False) -> str:
    """Return the plan of these settings, as text or JSON.

    It needs only the model's config: no weights, no torch. The device is not examined: the plan assumes bfloat16
    arithmetic and room for every sequence. Raises SettingsError for options that a boot on the device refuses.
    """
    facts = facts_of(settings.device)
    _generation_folder(settings)
    _check_kept(settings)
    check_options(settings, facts)
    mode = resolve(facts, settings)
    may_change = instead(facts, settings) is not None
    check_traits(with_defaults(settings, facts), facts, None if may_change else mode)
    folder = find_model(settings, with_weights=False)
    with boot_errors("The tokenizer cannot be loaded"):
        check_named_files(settings, ModelFiles(folder, settings.hf_overrides, None))
    spec = spec_of_first_rank(settings, facts)
    spec = pooled_spec(settings, folder, read_config(folder, settings.hf_overrides), spec)
    settings = for_model(settings, facts, spec)
    here = facts.in_mode(mode)
    dtype, _ = resolve_dtype(settings.dtype, spec.dtype, native_bfloat16=True, float16=here.float16)
    spec = with_kv_dtype(spec, settings.kv_cache_dtype, dtype)
    check_supported(spec, dtype, partial(supports, facts))
    weights = bytes_by_scheme(spec, here, 4 if dtype == "float32" else 2)
    return commands.plan(
        settings, spec, spec.max_position_embeddings, dtype=dtype, facts=facts, weights=weights, as_json=as_json
    )


def boot_engine(
    settings: Settings,
    transport: EngineSide,
    before_ready: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> Loop:
    """Boot an engine in the steps of :mod:`preheat.boot.engine`, and return it warm.

    ``before_ready`` is called first, then ``transport`` is told that requests may come. ``backend`` None picks a
    backend by ``settings.device``. Raises SettingsError or ModelError, with advice.
    """
    started = time.monotonic()
    with boot_errors("The engine cannot start"):
        if settings.data_parallel_size > 1 and isinstance(transport, InlineTransport):
            raise SettingsError(
                "data_parallel_size needs `preheat serve`, because each replica is a process, and this engine runs "
                "within one process: leave it out",
                param="data_parallel_size",
            )
        if isinstance(transport, InlineTransport):  # else the server has checked them: a shell's pipe is not here
            check_paths(settings)
        if settings.models and isinstance(transport, InlineTransport):
            raise SettingsError(
                "models needs `preheat serve`, because each model is a process, and this engine runs within one "
                "process: give model",
                param="models",
            )
        check_required(settings)
        explain(settings.debug)
        spec_of_first_rank(settings)  # report an invalid config before torch is imported
        trace = open_trace(settings.profiler_enabled)
        with ExitStack() as awake:
            wake(settings.device)
            awake.callback(rest, settings.device)
            children = waiting_ranks(settings)
            if children is not None:
                awake.callback(children.leave)
            with trace.span("Importing torch"), pycache.kept(cache_root(settings)), kept_imports():
                from preheat.boot.engine import boot

                backend = backend or pick_backend(settings.device)  # imports Triton for a GPU

            def rested() -> None:
                awake.close()  # the first request waits for no process of the boot
                before_ready()

            return boot(
                settings, transport, rested, started=started, trace=trace, backend=backend, children=children
            )  # fmt: skip


@contextmanager
def boot_errors(what: str) -> Iterator[None]:
    """Convert unforeseen errors to a PreheatError of one line.

    The error is kept as its cause.
    """
    try:
        yield
    except PreheatError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        if _is_no_memory(error):
            raise PreheatError(
                f"{what}: there is not enough memory ({reason or type(error).__name__}): use a smaller model, or lower "
                "--max-num-seqs, --max-num-batched-tokens, --max-model-len or the size of the KV cache"
            ) from error
        raise PreheatError(
            f"{what}: {type(error).__name__}: {reason}; --log-level debug shows the traceback"
        ) from error


def _is_no_memory(error: Exception) -> bool:
    """Return whether Python, torch or a device is out of memory.

    torch is not imported here, and its error on a CPU has no class of its own.
    """
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def run_engine(settings: Settings, address: str) -> None:
    """Run the engine's process: boot, report ready, run until drained. A fatal error is sent to the frontend.

    The server prints an error of the boot. A later, unforeseen error is raised here too.

    Nearly all objects of a boot stay. So garbage collection is off during the boot, runs once at its end, and then
    ignores the remaining objects.
    """

    def before_ready() -> None:
        collect_and_freeze()
        gc.enable()

    gc.disable()
    set_up_logging(settings)
    transport = EngineTransport(address)
    loop: Loop | None = None
    try:
        loop = boot_engine(settings, transport, before_ready)
        loop.executor.on_death(transport.report_death)
        transport.start_heartbeat(lambda: loop.launch_timer.running() < settings.engine_heartbeat_timeout_s)
        loop.run()
    except BaseException as error:
        transport.put(Died(WireError.of(error)))
        if loop is not None:
            raise
        logger.debug("The boot failed", exc_info=True)
        sys.exit(1)
    finally:
        if loop is not None:
            loop.close()
        transport.close()
