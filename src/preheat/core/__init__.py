"""Messages between the parts of the engine, in the order of a request's life.

- ``requests``: frontend to loop, a ``Request`` with its ``SamplingParams`` (``sampling``, ``constraints``).
- ``commands``: frontend to loop, besides requests.
- ``steps``: ``Schedule``, scheduler to packer, and ``StepResult``, executor to scheduler.
- ``Batch``: packer to executor; it has tensors, so it is in :mod:`preheat.execution`.
- ``reports``: loop to frontend, a ``Delta`` and others, with counters (``stats``).

Messages between processes are :class:`msgspec.Struct`, sent as msgpack. Nothing here imports torch.
"""

from preheat.core.commands import (
    Ask,
    Cancel,
    Command,
    Drain,
    LoadAdapter,
    ResetPrefixCache,
    ToEngine,
    UnloadAdapter,
    Wake,
)
from preheat.core.constraints import RepetitionDetectionParams, StructuredOutputsParams
from preheat.core.reports import (
    AdapterReport,
    Declined,
    Delta,
    Died,
    EngineState,
    Finish,
    FinishReason,
    FromEngine,
    Leaving,
    Outcome,
    Progress,
    Ready,
    Report,
    TokenLogprobs,
)
from preheat.core.requests import (
    BACKGROUND_PRIORITY,
    MAX_STOP_IDS,
    OWN_ID,
    PIECE,
    POOLS,
    BlockSource,
    Image,
    Request,
    Resume,
    Segment,
    Thinking,
    in_background,
)
from preheat.core.sampling import (
    CALLERS_FIELDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_IDS,
    SAMPLING_FIELDS,
    Level,
    RequestOutputKind,
    SamplingParams,
)
from preheat.core.stats import AuditStats, GrammarStats, KvTransferStats, Stats
from preheat.core.steps import (
    NO_PERSISTENT_BATCH,
    ImageSpan,
    Plain,
    Schedule,
    StepImages,
    StepResult,
    StepStates,
    Swaps,
    Transfer,
    marked,
    own_states,
    unmarked,
)

__all__ = [
    "AdapterReport", "Ask", "AuditStats", "BACKGROUND_PRIORITY", "BlockSource", "CALLERS_FIELDS", "Cancel",
    "Command", "Declined", "Delta", "Died", "Drain", "EngineState", "Finish", "FinishReason", "FromEngine",
    "GrammarStats", "Image", "ImageSpan", "KvTransferStats", "Leaving", "Level", "LoadAdapter", "MAX_LOGIT_BIAS",
    "MAX_LOGPROB_IDS", "MAX_STOP_IDS", "NO_PERSISTENT_BATCH", "OWN_ID", "Outcome", "PIECE", "POOLS",
    "Plain", "Progress", "Ready", "RepetitionDetectionParams", "Report", "Request", "RequestOutputKind",
    "ResetPrefixCache", "Resume", "SAMPLING_FIELDS", "SamplingParams", "Schedule", "Segment", "Stats",
    "StepImages", "StepResult", "StepStates", "StructuredOutputsParams", "Swaps", "Thinking", "ToEngine",
    "TokenLogprobs", "Transfer", "UnloadAdapter", "Wake", "in_background", "marked", "own_states", "unmarked",
]  # fmt: skip
