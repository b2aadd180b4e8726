"""Traits of a model, and features it lacks.

See :mod:`preheat.settings.combinations`. No torch here.
"""

from __future__ import annotations

from preheat.backends.base.facts import Facts, Mode
from preheat.model.families import read_spec
from preheat.model.files import find_model, read_config
from preheat.model.specs import ModelSpec
from preheat.pooling.pooling import pooling_of
from preheat.settings import Settings
from preheat.settings.combinations import Lacks, check, traits_of


def check_traits(settings: Settings, facts: Facts, mode: Mode | None = None) -> None:
    """Raise SettingsError for a combination that is not supported.

    Checked are the ``settings`` with a backend's defaults, the model they name (by its config.json alone), the backend
    with these ``facts``, and a ``mode``.
    """
    folder = find_model(settings, with_weights=False)
    config = read_config(folder, settings.hf_overrides)
    spec = read_spec(config, settings.quantization)
    pools = pooling_of(settings, folder, config) is not None
    on = traits_of(settings) | model_traits(spec, pools=pools) | ({mode} if mode else set())
    check(on, {f"on {facts.name}": facts.lacks, "with this model": _lacks(spec)})


def model_traits(spec: ModelSpec, *, pools: bool) -> frozenset[str]:
    """Return the traits of a model; ``pools``: it pools."""
    kinds = {scheme.kind for scheme in spec.weight_bytes(1) if scheme is not None}
    more = {"images": spec.vision is not None, "any_size": spec.any_size, "pooling": pools, "encoder": spec.encodes,
            "states": spec.has_states, "latents": spec.attentions[0].latent is not None,
            "entries": len(set(spec.entries) - {()}) > 1}  # fmt: skip
    return frozenset(kinds.union(name for name, on in more.items() if on))


def _lacks(spec: ModelSpec) -> Lacks:
    """Return the features that the model lacks, with the reason.

    A prompt's embeddings must be rows of the table of embeddings, without scale and positions. Ranks have some heads
    each, so they cannot norm all of them together.
    """
    why = None
    if spec.embedding.scale is not None:
        why = "it scales the embeddings of its tokens"
    elif spec.positions is not None:
        why = "it adds learned positions to the embeddings of its tokens"
    found: dict[tuple[str, ...], str] = {("prompt_embeds",): why} if why else {}
    if any(layer.attention.whole_qk_norm for layer in spec.layers):
        found["tensor_parallel",] = "it norms all query heads together, and a rank has some of them"
    return found
