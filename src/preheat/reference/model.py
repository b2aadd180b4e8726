"""A checkpoint as a module; its parameters are the checkpoint's tensors."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from preheat.backends.base.backend import Backend
from preheat.backends.names import HOST
from preheat.backends.registry import pick_backend
from preheat.errors import ModelError, SettingsError
from preheat.limits import Limits
from preheat.model.config import resolve_dtype
from preheat.model.decoder import Attended, Decoder
from preheat.model.families import read_spec
from preheat.model.files import find_model, read_config
from preheat.model.formats import expected_tensors
from preheat.model.reading import Piece
from preheat.model.sources import SafetensorsFiles, check_tensors
from preheat.model.specs import ModelSpec
from preheat.model.ties import with_stored_head
from preheat.model.weight_loader import WeightLoader
from preheat.model.weights import Weights
from preheat.ops.embedding import embed
from preheat.reference.attention import WholeSequences, padded
from preheat.reference.operations import DifferentiableOperations
from preheat.settings import BUNDLED, Settings

INDEX = "model.safetensors.index.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def load(
    path: str | Path = BUNDLED,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = HOST,
    *,
    max_model_len: int | None = None,
) -> ReferenceModel:
    """Load the checkpoint at ``path`` (a folder, a Hub id or "bundled") with gradients.

    It computes in ``dtype`` (bfloat16, float32 or auto). For the bits of an engine, ``dtype`` and ``max_model_len``
    must be the engine's; both have the same defaults.

    Raises SettingsError for a device other than a CPU, or a ``max_model_len`` beyond the model's positions. Raises
    ModelError for a path without a checkpoint, and for a model that is quantized or sees images.
    """
    if torch.device(device).type != HOST:
        raise SettingsError(f"the reference runs on a CPU, not on {device}: leave device out", param="device")
    backend = pick_backend(HOST)
    settings = Settings.load({"model": str(path), "dtype": _DTYPES.get(dtype, str(dtype))})  # type: ignore[arg-type]
    folder = find_model(settings)
    spec = read_spec(read_config(folder))
    _check(spec)
    name, _ = resolve_dtype(settings.dtype, spec.dtype, backend.supports_bfloat16())
    length = spec.max_position_embeddings if max_model_len is None else max_model_len
    if not 1 <= length <= spec.max_position_embeddings:
        raise SettingsError(
            f"max_model_len {length} is not within the {spec.max_position_embeddings} positions of the model",
            param="max_model_len",
        )
    computes: torch.dtype = getattr(torch, name)
    spec = with_stored_head(spec, _files(folder, spec), computes)
    return ReferenceModel(folder, spec, computes, backend, length)


def _files(folder: Path, spec: ModelSpec) -> SafetensorsFiles:
    return SafetensorsFiles(folder, lambda source, out: out.copy_(source), spec.renames)


def _check(spec: ModelSpec) -> None:
    if set(spec.weight_bytes(1)) != {None} or spec.kv_dtype != "auto":
        raise ModelError("the reference has gradients for plain weights only: give the checkpoint before quantization")
    if any(layer.attention.latent for layer in spec.layers):
        raise ModelError("the reference has no gradients for attention over latent vectors yet")
    if any(layer.end for layer in spec.layers):
        raise ModelError("the reference has no gradients for layers with a scalar or an input of their own yet")
    if spec.has_states:
        raise ModelError("the reference has gradients for attention only, and this model has layers with states")
    if spec.vision is not None:
        raise ModelError("the reference reads tokens only: it has no gradients for models that see images")


class ReferenceModel(nn.Module):
    """The model. Call it for logits; :meth:`logprobs` trains policies.

    Parameters have the checkpoint's names and shapes: ``state_dict()`` is a checkpoint. They may be of any floating
    dtype (``model.float()`` makes master weights). Each forward pass rounds them to the dtype that it computes in, as
    loading them into the engine does.
    """

    def __init__(self, folder: Path, spec: ModelSpec, dtype: torch.dtype, backend: Backend, max_model_len: int) -> None:
        super().__init__()
        self.dtype, self._folder, self._spec, self._backend = dtype, folder, spec, backend
        self._limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=max_model_len,
            max_num_prefill_seqs=None,
            block_size=backend.facts.split,
            num_blocks=2,
        )
        files = _files(folder, spec)
        check_tensors(spec, files.shapes)
        self._places = {name: files.place(name) for name in expected_tensors(spec)}
        for stored, name in {stored: name for name, (stored, _) in self._places.items()}.items():
            _register(self, stored, nn.Parameter(files.read_stored(name).to(dtype).contiguous()))
        with torch.no_grad():
            self._decoder = Decoder(spec, self._weights(), max_model_len)
        del self._decoder.weights  # each forward pass makes its own

    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits [n, vocab], in :attr:`dtype`, after each of the n ``token_ids``."""
        return self._logits([token_ids], [range(len(token_ids))])

    def logprobs(self, token_ids: Sequence[int], start: int = 1, *, temperature: float = 1.0) -> Tensor:
        """Return fp32 [n - start]: the log-probability of each token from index ``start`` on.

        Each token's probability is conditioned on the tokens before it. The first token has none before, so ``start``
        is at least 1. With a prompt's length as ``start`` the result belongs to the answer.

        At ``temperature`` 1 these are the bits of the engine's ``logprobs`` and ``prompt_logprobs``, always computed at
        1. Other temperatures divide the logits in fp32.
        """
        (found,) = self.batch_logprobs([token_ids], [start], temperature=temperature)
        return found

    def batch_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int] | None = None, *, temperature: float = 1.0
    ) -> list[Tensor]:
        """Return :meth:`logprobs` of several ``sequences`` in one pass.

        Each sequence has the bits of a pass of its own.
        """
        starts = [1] * len(sequences) if starts is None else starts
        for ids, start in zip(sequences, starts, strict=True):
            if not 1 <= start <= len(ids):
                raise ValueError(f"start {start} is not within a sequence of {len(ids)} tokens, or its first")
        if not temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {temperature}")
        spans = [range(start - 1, len(ids) - 1) for ids, start in zip(sequences, starts, strict=True)]
        logits = self._logits(sequences, spans).float()
        if temperature != 1:
            logits = logits / temperature
        targets = [token for ids, start in zip(sequences, starts, strict=True) for token in ids[start:]]
        found = logits.log_softmax(-1).gather(1, torch.tensor(targets, dtype=torch.int64)[:, None])[:, 0]
        return list(torch.split(found, [len(span) for span in spans]))

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of the parameters, rounded to :attr:`dtype`.

        The other files come from the source. Give the engine that serves it the same dtype. Raises ValueError for a
        folder that holds a sharded checkpoint.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if (target / INDEX).exists():
            raise ValueError(
                f"{target} already holds a checkpoint of several files, and loaders would read it instead: name "
                "another folder"
            )
        for path in self._folder.iterdir():
            if path.is_file() and path.suffix not in _WEIGHTS and path.name != INDEX:
                shutil.copyfile(path, target / path.name)
        tensors = {name: each.detach().to(self.dtype).contiguous() for name, each in self.named_parameters()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    def fill(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        """Copy the parameter, or the part ``name``, to ``out``.

        Its gradient follows. This makes the module a source of tensors.
        """
        assert piece is None, "a whole model is never read in pieces"
        stored, part = self._places[name]
        out.copy_(self.get_parameter(stored)[part].view(out.shape))

    def _weights(self) -> Weights:
        return WeightLoader(self, self.dtype, cast(Backend, DifferentiableOperations(self._backend))).model(self._spec)

    def _logits(self, sequences: Sequence[Sequence[int]], spans: Sequence[range]) -> Tensor:
        """Return [places, vocab]: the logits after the places ``spans`` of each sequence."""
        lengths = [len(ids) for ids in sequences]
        if not lengths or min(lengths) < 1 or max(lengths) > self._limits.max_model_len:
            raise ValueError(f"sequences must have 1 to {self._limits.max_model_len} tokens (max_model_len)")
        step = WholeSequences(lengths, self._limits, self._backend.device)
        decoder = copy(self._decoder)
        decoder.weights = weights = self._weights()
        tokens = torch.zeros(step.tokens, dtype=torch.int64)
        tokens[: step.count] = torch.tensor([token for ids in sequences for token in ids])
        residual = embed(
            tokens,
            weights.embedding,
            scale=self._spec.embedding.scale,
            positions=weights.positions,
            at=step.positions,
        )
        out = decoder.layers(residual, step.attend(self._backend, decoder))
        places = [first + place for first, span in zip(step.ends - lengths, spans, strict=True) for place in span]
        rows = torch.zeros(padded(len(places)), dtype=torch.int64)
        rows[: len(places)] = torch.tensor(places)
        hidden = decoder.finish(Attended(out.index_select(0, rows), residual.index_select(0, rows)))
        logits: Tensor = weights.head(hidden)
        return logits[: len(places)]


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give ``root`` a ``parameter`` with a dotted name.

    Each part before a dot is a module.
    """
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = cast(nn.Module, root._modules[part])
    root.register_parameter(leaf, parameter)
