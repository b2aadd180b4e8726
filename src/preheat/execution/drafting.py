"""Making the proposer of drafts for an engine, from its :class:`~preheat.configs.speculation.Speculation`."""

from __future__ import annotations

from preheat.backends.base.backend import Backend
from preheat.configs.speculation import Speculation
from preheat.errors import SettingsError
from preheat.execution.draft_model import DraftModel
from preheat.model.drafts import draft_settings
from preheat.model.eagle import is_head, load_head
from preheat.model.loader import LoadedModel, load_model
from preheat.model.mtp import load_mtp
from preheat.plan.plan import Plan
from preheat.plan.step_times import StepTimes
from preheat.schedule.draft_length import FixedLength, MeasuredLength
from preheat.schedule.drafting import Drafting
from preheat.schedule.forced import GrammarProposer
from preheat.schedule.ngram import NgramProposer
from preheat.schedule.proposer import Proposer
from preheat.schedule.suffix import SuffixProposer
from preheat.settings import Settings


def load_draft(settings: Settings, backend: Backend, target: LoadedModel) -> LoadedModel | None:
    """Load the draft model or head; None if there is none.

    Raises SettingsError for one that does not fit the ``target``.
    """
    speculates, own = settings.speculation, draft_settings(settings)
    if speculates is not None and speculates.method == "mtp":
        return load_mtp(settings, backend, target)
    if speculates is None or own is None:
        return None
    if speculates.method == "eagle3":
        return load_head(own, backend, target)
    if is_head(own):
        raise SettingsError(
            f'speculative_config: {speculates.model} is a head of EAGLE-3: write "method": "eagle3"',
            param="speculative_config",
        )
    draft = load_model(own, backend)
    if draft.spec.has_states:
        raise SettingsError(
            f"the draft {speculates.model} has layers with states, which cannot go back before a rejected draft: "
            "choose a draft that has attention in all layers",
            param="speculative_config",
        )
    if draft.spec.vocab_size != target.spec.vocab_size:
        raise SettingsError(
            f"the draft {speculates.model} has a vocabulary of {draft.spec.vocab_size} tokens, the model one of "
            f"{target.spec.vocab_size}: choose a draft of the same family",
            param="speculative_config",
        )
    length = settings.max_model_len or target.spec.max_position_embeddings
    if draft.spec.max_position_embeddings < length:
        raise SettingsError(
            f"the draft {speculates.model} was made for {draft.spec.max_position_embeddings} positions, and "
            f"max_model_len is {length}: lower max_model_len, or choose another draft",
            param="speculative_config",
        )
    return draft


def make_proposer(speculates: Speculation, draft: DraftModel | None) -> Proposer:
    """Return the proposer of drafts: ``draft`` if there is a model."""
    if draft is not None:
        return draft
    if speculates.method == "grammar":
        return GrammarProposer(speculates.tokens)
    if speculates.method == "suffix":
        return SuffixProposer(
            speculates.tokens, speculates.depth, speculates.requests, speculates.factor, speculates.likely
        )
    return NgramProposer(speculates.tokens, *speculates.lookup)


def make_drafting(
    speculates: Speculation, plan: Plan, proposer: Proposer, times: StepTimes, *, waits: bool
) -> Drafting:
    """Make the drafting of an engine.

    ``waits``: the proposer must see the results of the step in flight, so the engine waits for it.
    """
    widths, drafting = plan.options.verify_widths, times.drafting
    length = MeasuredLength(widths, times, drafting, waits=waits) if speculates.auto else FixedLength()
    only = speculates.method == "grammar"
    return Drafting(proposer, length, plan.most_drafts, grammars_only=only)
