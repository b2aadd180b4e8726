"""The traits that a model has, and what it lacks: see :mod:`preheat.combinations`. No torch here."""

from __future__ import annotations

from preheat.backends.base import Facts, Mode
from preheat.combinations import Lacks, check, traits_of
from preheat.model.families import read_spec
from preheat.model.files import find_model, read_config
from preheat.model.specs import ModelSpec
from preheat.settings import Settings
from preheat.utils.pooling import pooling_of


def check_traits(settings: Settings, facts: Facts, mode: Mode | None = None) -> None:
    """Raise SettingsError for what does not go together: in ``settings``, which have a backend's defaults, in the model
    that they name, by its config.json alone, on the backend, and in a ``mode``.
    """
    folder = find_model(settings, with_weights=False)
    config = read_config(folder, settings.hf_overrides)
    spec = read_spec(config, settings.quantization)
    pools = pooling_of(settings, folder, config) is not None
    on = traits_of(settings) | model_traits(spec, pools=pools) | ({mode} if mode else set())
    check(on, {f"on {facts.name}": facts.lacks, "with this model": _lacks(spec)})


def model_traits(spec: ModelSpec, *, pools: bool) -> frozenset[str]:
    """The traits of a model, which may pool."""
    kinds = {scheme.kind for scheme in spec.weight_bytes(1) if scheme is not None}
    more = {"images": spec.vision is not None, "pooling": pools}
    return frozenset(kinds.union(name for name, on in more.items() if on))


def _lacks(spec: ModelSpec) -> Lacks:
    """A prompt's embeddings must be the rows of a table as they are, and nothing else."""
    why = None
    if spec.embedding.scale is not None:
        why = "it scales the embeddings of its tokens"
    elif spec.positions is not None:
        why = "it adds learned positions to the embeddings of its tokens"
    return {("prompt_embeds",): why} if why else {}
