"""The table of features that work together, and the rules between options.

A feature is a :class:`Trait`. The settings turn most traits on; the model, the execution mode or a request turns on the
rest. Every pair of traits has a row in :data:`ROWS`. The row names the test that proves that the two work together, or
the reason why they do not. A backend or a model may lack more, see :data:`Lacks`. docs/combinations.md is generated
from this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from preheat.configs.kv_events import kv_events_config
from preheat.configs.kv_transfer import kv_transfer
from preheat.errors import SettingsError

Lacks = Mapping[tuple[str, ...], str]
"""Traits that a backend or a model lacks, alone or together, and the reasons."""


class Trait(NamedTuple):
    """A feature that can be on.

    ``option`` turns it off, as ``off`` describes. ``on`` returns from the settings whether it is on; None if the
    settings do not tell.
    """

    name: str
    option: str
    on: Callable[[Any], object] | None
    off: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.option})" if self.option else self.name

    @property
    def remedy(self) -> str:
        """Advice on how to turn it off."""
        return self.off or f"leave {self.option} out"


def _drafts(*methods: str) -> Callable[[Any], object]:
    return lambda s: s.speculation is not None and s.speculation.method in methods


def _publishes(settings: Any) -> bool:
    return kv_events_config(settings.kv_events_config).publishes


def _in_messages(settings: Any) -> set[bool]:
    """Return, for each parser in use, whether it reads answers as messages in channels."""
    tools = settings.tool_call_parser if settings.enable_auto_tool_choice else None
    return {name in ("openai", "openai_gptoss") for name in (tools, settings.reasoning_parser) if name}


def _mode(name: str) -> Trait:
    return Trait(f"mode {name}", "execution_mode", lambda s: s.execution_mode == name, "choose another execution_mode")


_MODEL, _ASKED = "choose another model", "send such requests to another engine"
_TEXT = f"set language_model_only or {_MODEL}"

TRAITS: Mapping[str, Trait] = MappingProxyType({
    "tensor_parallel": Trait(
        "layers that ranks share", "tensor_parallel_size", lambda s: s.tensor_parallel_size > 1 or s.tp_invariant,
        "leave tensor_parallel_size and tp_invariant out"),
    "expert_parallel": Trait(
        "experts dealt whole to ranks", "enable_expert_parallel", lambda s: s.enable_expert_parallel),
    "pipeline": Trait("stages of layers", "pipeline_parallel_size", lambda s: s.pipeline_parallel_size > 1),
    "replicas": Trait("replicas", "data_parallel_size", lambda s: s.data_parallel_size > 1),
    "pods": Trait("a front before other servers", "pods", lambda s: s.pods),
    "several_models": Trait("several models", "models", lambda s: len(s.models) > 1, "serve one model"),
    "ray": Trait(
        "ranks that are actors of Ray", "distributed_executor_backend",
        lambda s: s.distributed_executor_backend == "ray"),
    "adapters": Trait("adapters", "enable_lora", lambda s: s.enable_lora),
    "w8a8": Trait("layers of 8 bits with inputs of 8 bits", "", None, f"leave quantization out or {_MODEL}"),
    "w8a16": Trait("layers of 8 bits", "", None, _MODEL),
    "w4a16": Trait("layers of 4 bits", "", None, _MODEL),
    "inc": Trait("measured ranges of INC", "quantization", lambda s: s.quantization == "inc"),
    "fp8_cache": Trait("a KV cache of 8 bits", "kv_cache_dtype", lambda s: s.kv_cache_dtype.startswith("fp8")),
    "text_drafts": Trait(
        "drafts from text or grammars", "speculative_config", _drafts("ngram", "suffix", "grammar")),
    "draft_model": Trait("a draft model", "speculative_config", _drafts("draft_model")),
    "eagle3": Trait("drafts of an EAGLE-3 head", "speculative_config", _drafts("eagle3")),
    "mtp": Trait("drafts of the checkpoint's own layer", "speculative_config", _drafts("mtp")),
    "structured": Trait("structured outputs", "", None, _ASKED),
    "budget": Trait("budgets of reasoning", "", None, _ASKED),
    "beam_search": Trait("beam search", "", None, _ASKED),
    "images": Trait("a model that sees images", "", None, _TEXT),
    "any_size": Trait("a model that sees images of any size", "", None, _TEXT),
    "latents": Trait("a cache of latent vectors", "", None, _MODEL),
    "entries": Trait("cache entries of several sizes", "", None, _MODEL),
    "prompt_embeds": Trait("embeddings as prompts", "enable_prompt_embeds", lambda s: s.enable_prompt_embeds),
    "pooling": Trait("pooling", "runner", None, "write --runner generate"),
    "encoder": Trait("an encoder", "", None, _MODEL),
    "states": Trait("a model with states", "", None, _MODEL),
    "sleep": Trait("sleep", "enable_sleep_mode", lambda s: s.enable_sleep_mode),
    "operator": Trait("an operator's commands over HTTP", "server_dev_mode", lambda s: s.server_dev_mode),
    "updates": Trait(
        "updates of weights", "weight_transfer_config", lambda s: s.weight_transfer_config is not None),
    "offload": Trait("a KV cache on the host", "kv_offloading_size", lambda s: s.kv_offloading_size),
    "roles": Trait("prefill apart from decode", "role", kv_transfer),
    "events": Trait(
        "events of the KV cache", "kv_events_config", _publishes),
    "receipts": Trait("receipts", "receipts", lambda s: s.receipts),
    "audit": Trait("the audit", "audit_every", lambda s: s.audit_every is not None),
    "answer_cache": Trait("the answer cache", "answer_cache_size", lambda s: s.answer_cache_size),
    "split": Trait(
        "buckets of prompts and decoding apart", "bucketing_policy", lambda s: s.bucketing_policy == "split",
        "use --bucketing-policy unified, without a file or ranges of prompts or blocks"),
    "groups": Trait("cache groups", "", None, "set disable_hybrid_kv_cache_manager"),
    **{mode: _mode(mode) for mode in ("eager", "lazy", "compile", "graphs", "llvm")},
})  # fmt: skip
"""Every trait by its key. Keys of quantized layers are kinds of :class:`preheat.ops.kinds.Scheme`."""

ONE_OF = ("eager lazy compile graphs llvm", "text_drafts draft_model eagle3 mtp")
"""Groups of exclusive traits: an engine has at most one of each group."""


class Works(NamedTuple):
    """Each of ``left`` works with each of ``right``, as ``test`` proves."""

    test: str
    left: str
    right: str


class Refused(NamedTuple):
    """Each of ``left`` is refused with each of ``right``. ``yet``: only missing work is in the way."""

    left: str
    right: str
    reason: str
    yet: bool = True


Row = Works | Refused


@cache
def _traits_in(side: str) -> frozenset[str]:
    """Return the traits of a side of a row."""
    return frozenset(side.split())


def pairs(row: Row) -> Iterator[tuple[str, str]]:
    """Return the pairs of traits that ``row`` decides."""
    return ((left, right) for left in row.left.split() for right in row.right.split() if left != right)


_DRAFTS, _FORMATS = "text_drafts draft_model eagle3 mtp", "w8a8 w8a16 w4a16"
_GAUDI = "adapters w8a8 eagle3 mtp pooling sleep updates offload pipeline replicas several_models"

_REFUSED: tuple[Refused, ...] = (
    Refused("inc", "tensor_parallel expert_parallel", "its ranges are measured for whole layers, and ranks hold parts"),
    Refused("inc", "adapters", "linear layers of INC's files have no slots for adapters"),
    Refused("inc", _FORMATS, "it rounds a checkpoint that is not quantized", yet=False),
    Refused("eagle3 mtp", "pipeline", "the first stage drafts, and the states that a head reads are on the last one"),
    Refused(_DRAFTS, "split", "speculation needs steps that mix prompts and decoding", yet=False),
    Refused("compile", "tensor_parallel pipeline", "the exchange between ranks cannot be compiled"),
    Refused("compile", "adapters", "compiled regions do not apply adapters"),
    Refused("eagle3", "images any_size", "no EAGLE-3 head was trained for a model that sees images"),
    Refused("eagle3", "compile", "the head reads states between layers, and compiled regions do not give them"),
    Refused("mtp", "entries", "no model of such kind has a layer that predicts ahead"),
    Refused("mtp", "images any_size", "the layer that predicts ahead would not read the embeddings of images"),
    Refused("mtp", "compile llvm", "no model with a layer that predicts ahead runs in this mode"),
    Refused("mtp", "inc", "its files have no ranges of a layer that predicts ahead"),
    Refused("images any_size", "pipeline", "every stage would load the encoder of images"),
    Refused("updates", "pipeline", "nobody has tried to update the parts of a model on each stage"),
    Refused("offload", "pipeline", "nobody has tried a tier of blocks beside stages"),
    Refused("updates", "adapters", "an update replaces the layers that hold the adapters"),
    Refused("operator sleep updates", "replicas", "an operator's commands go to one engine"),
    Refused("events", "replicas", "all replicas would publish at one endpoint"),
    Refused("pipeline", "replicas", "nobody has tried replicas of several stages"),
    Refused("operator sleep updates", "several_models", "an operator's commands go to one engine"),
    Refused("events", "several_models", "all engines would publish at one endpoint"),
    Refused("replicas tensor_parallel expert_parallel pipeline ray", "several_models",
            "nobody has tried engines of several devices beside each other"),
    Refused("ray", "replicas", "let Ray Serve run the replicas, as docs/ray.md says", yet=False),
    Refused("ray", "draft_model eagle3 mtp images any_size sleep offload updates compile",
            "with Ray an engine has ranks, and ranks do not support this feature"),
    Refused("adapters", "pipeline", "a stage cannot read an adapter's matrices for the layers of other stages"),
    Refused("expert_parallel", "compile lazy llvm", "only eager CPUs and GPUs exchange rows of experts"),
    Refused("expert_parallel", "pipeline ray", "nobody has tried it"),
    Refused("expert_parallel", "groups encoder audit", "ranks do not support the feature"),
    Refused("prompt_embeds", "images any_size", "both fill positions between a prompt's tokens"),
    Refused("prompt_embeds", "draft_model eagle3 mtp", "the draft would have no tokens to read"),
    Refused("encoder", "tensor_parallel pipeline ray", "an encoder fits one device, and nobody has tried ranks"),
    Refused("encoder", "adapters images any_size prompt_embeds", "an encoder reads only text", yet=False),
    Refused("encoder", f"{_DRAFTS} structured budget beam_search", "an encoder generates nothing", yet=False),
    Refused("encoder", "offload events", "an encoder keeps nothing in the prefix cache", yet=False),
    Refused("encoder", "w8a8 inc", "a norm that replaces the residual stream writes no inputs in float8"),
    Refused("encoder", "lazy", "Gaudi, the only device with this mode, does not support the feature"),
    Refused("latents", "inc", "its files have the ranges of keys and values of each head"),
    Refused("latents", "eagle3", "nobody has tried an EAGLE-3 head beside latent vectors"),
    Refused("latents", "images any_size encoder groups", "no model of such kind has latent vectors"),
    Refused("latents", "llvm", "attention over latent vectors has no function"),
    Refused("latents", "lazy", "Gaudi, the only device with this mode, does not support the feature"),
    Refused("latents", "compile pipeline", "nobody has tried it"),
    Refused("entries", "images any_size encoder states latents", "no model of such kind has entries of several sizes"),
    Refused("entries", "pipeline", "a layer may read the keys and values of a layer on another stage"),
    Refused("entries", "ray inc eagle3 compile", "nobody has tried it"),
    Refused("entries", "prompt_embeds", "a model with such entries scales the embeddings of its tokens"),
    Refused("entries", "llvm", "layers with a scalar or an input of their own have no function"),
    Refused("entries", "lazy", "Gaudi, the only device with this mode, does not support the feature"),
    Refused("states", "pipeline", "a stage may have no layer with keys"),
    Refused("states", "ray", "nobody has tried states on ranks that are actors of Ray"),
    Refused("states", "eagle3", "nobody has tried a head that reads states between layers there"),
    Refused("states", "offload", "nobody has shown that a state returns from the host with its blocks"),
    Refused("states", "encoder", "an encoder keeps nothing of a text", yet=False),
    Refused("states", "updates", "an update of weights does not replace the numbers of a recurrence"),
    Refused("states", "latents groups inc", "nobody has tried layers with states there"),
    Refused("states", "adapters", "a checkpoint has the rows of queries and of gates among each other"),
    Refused("states", "compile", "nobody tests compiled regions beside states yet"),
    Refused("states", "llvm", "the compiled layers have no function for a state"),
    Refused("states", "lazy", "Gaudi, the only device with this mode, has no kernel for layers with states"),
    Refused("pooling", "adapters", "requests for embeddings cannot name an adapter"),
    Refused("pooling", "images any_size prompt_embeds", "an engine that pools reads only text"),
    Refused("pooling", f"{_DRAFTS} structured budget beam_search", "an engine that pools generates nothing", yet=False),
    Refused("groups", "tensor_parallel pipeline ray", "ranks are sent one block table for each sequence"),
    Refused("groups", "draft_model eagle3 mtp", "a draft's cache has the blocks of one group"),
    Refused("groups", "offload", "nobody has shown that a block returns from the host in all groups or in none"),
    Refused("groups", "split", "the two phases count one kind of block"),
    Refused("groups", "images any_size", "nobody has tried images with windows of their own tables"),
    Refused("groups", "encoder", "an encoder keeps nothing between steps", yet=False),
    Refused("groups", "lazy", "attention in this mode reads one block table"),
    Refused("llvm", "tensor_parallel pipeline ray", "compiled layers exchange nothing with other ranks"),
    Refused("llvm", "w8a8 inc", "no compiled function reads inputs in float8"),
    Refused("roles", "pooling encoder", "it decodes nothing, so no other engine needs its blocks", yet=False),
    Refused("roles", "draft_model eagle3 mtp", "a block would need its part of the draft's cache"),
    Refused("roles", "entries", "nobody has tried to send blocks with entries of several sizes"),
    Refused("roles", "groups", "nobody has shown that a block arrives in all groups or in none"),
    Refused("roles", "states", "no state is sent with the blocks"),
    Refused("roles", "pods", "a front sends tokens to its pods, and no place of blocks"),
    Refused("roles", "beam_search", "each round is requests of its own, which pull nothing"),
    Refused("roles", "graphs", "nobody has tried to send blocks of a GPU"),
    Refused("roles", "images any_size prompt_embeds", "nobody has tried prompts with more than tokens there"),
    Refused("roles", "pipeline ray replicas several_models", "nobody has tried to send blocks from there"),
    Refused("roles", "lazy", "Gaudi, the only device with this mode, does not support the feature"),
    Refused("receipts", "pooling encoder", "a receipt is about tokens that are drawn, and none are", yet=False),
    Refused("answer_cache", "pooling encoder", "it keeps answers, and vectors are none", yet=False),
    Refused("answer_cache", "ray lazy graphs several_models", "nobody has tried kept answers there"),
    Refused("audit", "tensor_parallel pipeline ray", "only the first rank's memory would be read"),
    Refused("audit", "lazy graphs", "its digests are computed on the host, of memory on the host"),
    Refused("audit", "several_models", "nobody has tried the audit there"),
    Refused("receipts", "images any_size prompt_embeds", "a receipt holds tokens, but neither pixels nor embeddings"),
    Refused("receipts", "pipeline ray lazy several_models", "nobody has tried receipts there"),
    Refused("pods", "images any_size prompt_embeds", "a front sends tokens to its pods, neither pixels nor embeddings"),
    Refused("pods", "several_models receipts answer_cache states", "nobody has tried a front there"),
    Refused("pods", "sleep operator updates events audit",
            "a front has no engine of its own: give the option to its pods", yet=False),
    Refused("lazy", _GAUDI, "Gaudi, the only device with this mode, does not support the feature"),
)  # fmt: skip

_HERE = "tests/cpu/test_combinations.py::"
_API = "tests/api/test_data_parallel.py::"
_RANKS = "tests/cpu/test_quantized_ranks.py::test_bits_do_not_depend_on_the_number_of_ranks"


def _together(names: str, test: str = "test_together") -> Works:
    """Return a row for ``names`` on at once, in an engine on a CPU.

    The test takes its cases from here.
    """
    return Works(_HERE + test, names, names)


def _on_gaudi(names: str) -> Works:
    """Return a row for all of ``names`` on at once, on a fake Gaudi."""
    return _together(names, "test_together_on_a_fake_gaudi")


_WORKS: tuple[Works, ...] = (
    _together("eager adapters w8a8 text_drafts structured budget beam_search prompt_embeds fp8_cache offload events "
              "operator"),
    _together("eager adapters w8a16 draft_model structured budget beam_search fp8_cache offload events operator sleep "
              "receipts audit"),
    _together("eager adapters w4a16 eagle3 structured budget beam_search fp8_cache offload events operator receipts "
              "answer_cache audit"),
    _together("eager inc text_drafts structured budget beam_search prompt_embeds fp8_cache offload events sleep "
              "operator updates audit"),
    _together("eager inc draft_model sleep updates operator fp8_cache receipts answer_cache"),
    _together("eager inc eagle3 sleep updates operator"),
    _together("eager w8a8 w8a16 w4a16"),
    _together("eager groups w8a16 text_drafts prompt_embeds sleep updates"),
    _together("eager w4a16 text_drafts prompt_embeds sleep updates"),
    _together("eager w8a8 draft_model sleep updates receipts answer_cache audit"),
    _together("eager w8a8 eagle3 structured budget beam_search sleep updates offload events"),
    _together("eager w4a16 draft_model"),
    _together("eager w8a16 eagle3"),
    _together("eager images w8a8 adapters text_drafts structured budget beam_search fp8_cache offload events operator"),
    _together("eager images any_size w4a16 adapters draft_model structured budget"),
    _together("eager images any_size w8a16 updates sleep split answer_cache audit"),
    _together("eager images any_size inc split"),
    _together("eager pooling w8a8 fp8_cache sleep operator offload events split updates audit"),
    _together("eager pooling w8a16"),
    _together("eager pooling w4a16"),
    _together("eager groups pooling inc"),
    _together("eager split w8a8 adapters fp8_cache structured budget beam_search offload events operator "
              "prompt_embeds answer_cache"),
    _together("eager split w8a16 sleep updates receipts answer_cache"),
    _together("eager split w4a16 structured budget"),
    _together("eager split inc"),
    _together("eager latents adapters w8a16 text_drafts structured budget beam_search fp8_cache offload events "
              "operator receipts answer_cache audit"),
    _together("eager latents split w4a16 prompt_embeds"),
    _together("eager latents pooling w8a8 sleep updates"),
    _together("eager latents draft_model"),
    _together("eager latents mtp adapters w8a16 structured budget beam_search fp8_cache offload events operator "
              "receipts answer_cache audit"),
    _together("eager latents mtp w8a8 w4a16 sleep updates"),
    _together("graphs latents"),
    _together("tensor_parallel expert_parallel eager latents"),
    _together("eager entries groups adapters w8a16 text_drafts structured budget beam_search fp8_cache events "
              "operator receipts answer_cache"),
    _together("eager entries split w4a16 offload audit"),
    _together("eager entries groups pooling w8a8 sleep updates"),
    _together("eager entries draft_model"),
    _together("graphs entries"),
    _together("eager states pooling operator sleep"),
    _together("tensor_parallel expert_parallel eager entries"),
    _together("tensor_parallel expert_parallel eager images any_size states"),
    _together("compile w8a8 draft_model structured budget beam_search fp8_cache offload events sleep operator updates "
              "receipts audit"),
    _together("compile groups w8a16 text_drafts prompt_embeds"),
    _together("compile w4a16 images any_size split"),
    _together("compile inc answer_cache"),
    _together("compile pooling"),
    _together("eager groups adapters w8a8 w4a16 budget beam_search fp8_cache events operator"),
    _together("llvm adapters text_drafts structured budget beam_search prompt_embeds offload events operator"),
    _together("llvm split structured adapters"),
    _together("llvm images any_size fp8_cache text_drafts structured budget beam_search offload events operator"),
    _together("llvm images split"),
    _together("eager images any_size w8a8"),
    _together("llvm groups w8a16 text_drafts structured receipts answer_cache audit"),
    _together("llvm w4a16 adapters text_drafts structured"),
    _together("llvm pooling fp8_cache"),
    _together("llvm draft_model sleep operator updates"),
    _together("llvm pooling sleep updates"),
    _together("llvm encoder pooling fp8_cache sleep operator updates audit"),
    _together("llvm encoder pooling w8a16"),
    _together("eager encoder pooling w4a16 split"),
    _together("compile encoder pooling"),
    _together("graphs encoder pooling"),
    _together("eager states structured budget beam_search fp8_cache operator split receipts answer_cache events"),
    _together("eager states text_drafts structured budget beam_search fp8_cache events operator sleep"),
    _together("eager states draft_model structured sleep"),
    _together("eager states mtp structured"),
    _together("eager states images any_size"),
    _together("eager states w8a8 audit"),
    _together("eager states w8a16 prompt_embeds"),
    _together("eager states w4a16"),
    _together("llvm eagle3 sleep updates w4a16 structured"),
    _together("tensor_parallel expert_parallel eager w8a8 adapters structured budget beam_search events operator split "
              "fp8_cache offload"),
    _together("tensor_parallel expert_parallel eager text_drafts receipts answer_cache sleep updates"),
    _together("tensor_parallel expert_parallel eager pooling"),
    _together("tensor_parallel expert_parallel eager prompt_embeds"),
    _together("tensor_parallel eager images structured"),
    _together("tensor_parallel eager images any_size structured"),
    _together("tensor_parallel expert_parallel eager states text_drafts structured budget beam_search"),
    _together("pipeline eager w8a8 text_drafts structured budget beam_search events fp8_cache operator sleep"),
    _together("pipeline eager w8a16 prompt_embeds split answer_cache"),
    _together("tensor_parallel expert_parallel eager draft_model structured"),
    _together("tensor_parallel expert_parallel eager eagle3 structured"),
    _together("tensor_parallel expert_parallel eager states mtp structured"),
    _together("pipeline eager draft_model"),
    _together("pipeline eager pooling inc"),
    _together("pipeline graphs tensor_parallel w4a16 text_drafts structured budget"),
    _on_gaudi("lazy w8a16 text_drafts structured budget beam_search fp8_cache events operator prompt_embeds"),
    _on_gaudi("lazy w4a16 draft_model"),
    _on_gaudi("lazy images any_size split"),
    _on_gaudi("lazy inc"),
    _on_gaudi("lazy tensor_parallel"),
    _on_gaudi("graphs w8a16 text_drafts structured budget beam_search fp8_cache events operator prompt_embeds"),
    _on_gaudi("graphs w4a16 draft_model"),
    _on_gaudi("graphs images any_size split"),
    _on_gaudi("graphs inc"),
    Works(_RANKS, "tensor_parallel", "w8a16 w4a16"),
    Works("tests/cpu/test_expert_parallel.py::test_a_layer_of_many_ranks_has_the_bits_of_one", "expert_parallel",
          "w8a16 w4a16"),
    Works("tests/cpu/test_hpu_features.py::test_two_cards_have_the_bits_of_one", "tensor_parallel", "graphs"),
    Works("tests/cuda/test_lora.py::test_mixed_is_each_alone_by_graphs_and_nothing_is_cold", "graphs", "adapters"),
    Works("tests/cuda/test_lora.py::test_beside_float8_weights_mixed_is_each_alone", "graphs", "w8a8"),
    Works("tests/cuda/test_speculation.py::test_answers_equal_answers_without_drafts", "graphs", "eagle3"),
    Works("tests/cuda/test_cache_groups.py::test_windows_give_blocks_back_and_change_no_bits", "graphs", "groups"),
    Works("tests/cuda/test_pooling.py::test_the_same_bits_in_every_way", "graphs", "pooling"),
    Works("tests/cuda/test_hybrids.py::test_graphs_have_the_bits_of_operations", "graphs", "states"),
    Works("tests/cuda/test_hybrids.py::test_a_layer_that_predicts_changes_no_answer", "graphs", "mtp"),
    Works("tests/cuda/test_tensor_parallel.py::test_one_and_two_gpus_have_one_digest", "graphs", "expert_parallel"),
    Works("tests/cuda/test_sleep.py::test_level_1_keeps_addresses_and_bits", "graphs", "sleep"),
    Works("tests/cuda/test_elastic.py::test_an_update_makes_a_fresh_engine", "graphs", "updates"),
    Works("tests/cuda/test_elastic.py::test_blocks_come_back_with_their_bits", "graphs", "offload"),
    Works("tests/cuda/test_receipts.py::test_another_boot_gives_every_answer_again", "graphs", "receipts"),
    # A replica is an engine of its own, and a rank is the same process whoever starts it.
    Works(_API + "test_adapters_are_read_by_all", "replicas", "adapters"),
    Works(_API + "test_replicas_with_ranks_of_their_own", "replicas", "tensor_parallel expert_parallel"),
    Works(_API + "test_a_killed_replica_changes_no_answer", "replicas", "receipts"),
    Works(_API + "test_the_memory_of_all_replicas_is_read_on_demand", "replicas", "audit"),
    Works("tests/api/test_answer_cache_api.py::test_a_kept_answer_is_marked_in_the_usage_and_streamed_at_once",
          "replicas", "answer_cache"),
    Works(_API + "test_replicas_give_the_bits_of_one_engine", "replicas",
          f"{_FORMATS} inc fp8_cache {_DRAFTS} structured budget beam_search images any_size latents entries "
          "prompt_embeds pooling encoder groups offload split eager compile graphs llvm"),
    Works(_API + "test_replicas_of_a_model_with_states", "replicas", "states"),
    # A front sees tokens alone, whatever its pods are; its places are the replicas of the table.
    Works("tests/api/test_front.py::test_a_killed_pod_loses_no_stream", "pods", "replicas"),
    Works("tests/api/test_front.py::test_answers_through_a_front_are_the_answers_of_its_pod", "pods",
          f"tensor_parallel expert_parallel pipeline ray adapters {_FORMATS} inc fp8_cache {_DRAFTS} structured budget "
          "beam_search latents entries pooling encoder groups offload split eager lazy compile graphs llvm"),
    # A block that arrives is a block of the tier on the host, and so are blocks that are sent.
    Works("tests/cpu/test_roles.py::test_the_answers_have_the_bits_of_one_process", "roles",
          f"tensor_parallel expert_parallel eager adapters fp8_cache text_drafts structured budget {_FORMATS} inc "
          "latents sleep operator updates offload events receipts audit answer_cache split compile llvm"),
    # Each of several models has an engine of its own, too.
    Works("tests/api/test_several_models.py::test_each_has_the_bits_of_a_server_of_its_own", "several_models",
          f"adapters {_FORMATS} inc fp8_cache {_DRAFTS} structured budget beam_search images any_size latents entries "
          "prompt_embeds pooling encoder groups offload split eager compile graphs llvm"),
    Works("tests/api/test_several_models.py::test_a_model_with_states_beside_another", "several_models", "states"),
    Works("tests/cpu/test_ray_ranks.py::test_actors_give_the_bits_of_one_process", "ray",
          f"tensor_parallel pipeline adapters {_FORMATS} inc fp8_cache text_drafts structured budget beam_search "
          "prompt_embeds pooling latents operator events split eager lazy graphs"),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*_REFUSED, *_WORKS)


class Rule(NamedTuple):
    """A rule between options or their values. ``message`` may name any option of ``s``."""

    param: str | None
    broken: Callable[[Any], object]
    message: str


def _of_adapters(name: str) -> Rule:
    return Rule(
        name,
        lambda s: getattr(s, name) and not s.enable_lora,
        f"{name} needs enable_lora: set it, or drop {name}",
    )


def _of_batches(name: str) -> Rule:
    return Rule(
        name,
        lambda s: s.batch_dir is None and getattr(s, name) != type(s).__dataclass_fields__[name].default,
        f"{name} needs batch_dir: name the folder for files and batches, or drop {name}",
    )


RULES: tuple[Rule, ...] = (
    Rule("tp_invariant", lambda s: s.tensor_parallel_size > 1 and s.tp_invariant is False,
         "several devices can only add in the order of tp_invariant: leave it out, or set tensor_parallel_size to 1"),
    Rule("enable_expert_parallel",
         lambda s: s.enable_expert_parallel and s.tensor_parallel_size == 1 and not s.tp_invariant,
         "enable_expert_parallel deals experts to ranks, and there is one: raise tensor_parallel_size, or leave "
         "enable_expert_parallel out"),
    Rule("distributed_executor_backend",
         lambda s: s.distributed_executor_backend == "ray" and s.tensor_parallel_size * s.pipeline_parallel_size == 1,
         "distributed_executor_backend ray runs the ranks beside the first one: leave it out, or set "
         "tensor_parallel_size or pipeline_parallel_size"),
    Rule("distributed_executor_backend",
         lambda s: s.distributed_executor_backend == "uni" and s.tensor_parallel_size * s.pipeline_parallel_size > 1,
         "distributed_executor_backend uni runs one rank: leave it out, or set tensor_parallel_size and "
         "pipeline_parallel_size to 1"),
    Rule(None, lambda s: (s.ssl_keyfile is None) != (s.ssl_certfile is None),
         "ssl_keyfile and ssl_certfile belong together: give both or none"),
    Rule(None, lambda s: s.ssl_ca_certs is not None and s.ssl_certfile is None,
         "ssl_ca_certs needs ssl_certfile and ssl_keyfile"),
    Rule("model_options", lambda s: s.model_options and not s.models,
         "model_options needs models: name them as --model NAME=PATH"),
    Rule("on_cold", lambda s: s.skip_warmup and s.on_cold == "raise",
         "on_cold raise would fail every first request without warm-up: drop skip_warmup"),
    Rule("skip_tokenizer_init",
         lambda s: s.skip_tokenizer_init
         and not (s.tokenizer is s.chat_template is s.default_chat_template_kwargs is None),
         "skip_tokenizer_init leaves no use for tokenizer, chat_template and default_chat_template_kwargs: drop it, "
         "or drop all three"),
    Rule("tool_call_parser", lambda s: s.enable_auto_tool_choice and s.tool_call_parser is None,
         "enable_auto_tool_choice needs a tool_call_parser: name the model's own"),
    Rule("reasoning_parser", lambda s: _in_messages(s) == {True, False},
         "{s.tool_call_parser} and {s.reasoning_parser} cannot be combined: openai reads whole answers, so give it "
         "for both, or leave reasoning_parser out"),
    Rule("quant_config", lambda s: (s.quantization == "inc") != (s.quant_config is not None),
         "quantization inc and quant_config (QUANT_CONFIG) belong together: give both or none"),
    Rule("kv_cache_dtype", lambda s: s.kv_cache_dtype == "fp8_inc" and s.quantization != "inc",
         "kv_cache_dtype fp8_inc takes its scales from QUANT_CONFIG: add --quantization inc, or write fp8"),
    Rule("num_scheduler_steps", lambda s: s.num_scheduler_steps > 1 and s.async_scheduling is False,
         "num_scheduler_steps {s.num_scheduler_steps} asks for steps that are prepared ahead, and async_scheduling is "
         "off: drop one of them"),
    Rule("kv_events_config", lambda s: _publishes(s) and not s.enable_prefix_caching,
         "kv_events_config tells of the prefix cache: drop it, or enable_prefix_caching false"),
    Rule("role", lambda s: kv_transfer(s) is not None and not s.enable_prefix_caching,
         "role exchanges blocks of the prefix cache: drop it, or enable_prefix_caching false"),
    Rule("kv_offloading_size", lambda s: s.kv_offloading_size and not s.enable_prefix_caching,
         "kv_offloading_size keeps blocks that the prefix cache evicts: drop it, or enable_prefix_caching false"),
    Rule("data_parallel_size", lambda s: s.data_parallel_size > 1 and s.allow_runtime_lora_updating,
         "data_parallel_size: replicas read adapters at boot alone: leave allow_runtime_lora_updating out, or run one "
         "engine"),
    *map(_of_batches, ("max_batch_file_bytes", "max_batch_files", "max_batches")),
    *map(_of_adapters, ("lora_modules", "lora_root", "fully_sharded_loras")),
    Rule("max_cpu_loras", lambda s: s.enable_lora and s.max_cpu_loras is not None and s.max_cpu_loras < s.max_loras,
         "max_cpu_loras ({s.max_cpu_loras}) must be at least max_loras ({s.max_loras}): the host keeps a copy of each "
         "adapter on the device"),
    Rule("fully_sharded_loras", lambda s: s.fully_sharded_loras and s.tensor_parallel_size == 1,
         "fully_sharded_loras divides adapters among ranks, and there is one: raise tensor_parallel_size, or leave "
         "fully_sharded_loras out"),
    Rule("max_cpu_loras", lambda s: len(s.lora_modules) > (s.max_cpu_loras or s.max_loras),
         "lora_modules names more adapters than the host keeps: raise max_cpu_loras"),
)  # fmt: skip
"""The rules between options."""


def check_settings(settings: Any) -> None:
    """Raise SettingsError for options or traits that do not work together."""
    for rule in RULES:
        if rule.broken(settings):
            raise SettingsError(rule.message.format(s=settings), param=rule.param)
    check(traits_of(settings))


def traits_of(settings: Any) -> frozenset[str]:
    """Return the traits that ``settings`` turn on."""
    return frozenset(name for name, trait in TRAITS.items() if trait.on is not None and trait.on(settings))


def check(on: Collection[str], lacking: Mapping[str, Lacks] = MappingProxyType({})) -> None:
    """Raise SettingsError if the traits ``on`` do not work together.

    The message names all sides and the remedies.

    ``lacking`` has the missing traits by place, such as a backend.
    """
    for row in ROWS:
        if not isinstance(row, Refused) or _traits_in(row.left).isdisjoint(on):
            continue
        if not _traits_in(row.right).isdisjoint(on):
            for pair in pairs(row):
                _refuse(on, pair, f"do not work together{' yet' * row.yet}: {row.reason}")
    for where, lacks in lacking.items():
        for names, reason in lacks.items():
            _refuse(on, names, f"cannot be used {where}: {reason}")


def reason_against(name: str, on: Collection[str], lacks: Lacks) -> str:
    """Return why the trait ``name`` gives way to the traits ``on``, on a backend that ``lacks`` some; "" if it stays.

    It is for a trait that no option asks for, so that an engine without it runs as well.
    """
    for row in ROWS:
        if isinstance(row, Refused):
            for pair in pairs(row):
                if name in pair and set(pair) <= {name, *on}:
                    (other,) = set(pair) - {name}
                    return f"{TRAITS[other].name}: {row.reason}"
    found = (reason for names, reason in lacks.items() if name in names and set(names) <= {name, *on})
    return next(found, "")


def _refuse(on: Collection[str], names: tuple[str, ...], why: str) -> None:
    """Raise SettingsError if all of ``names`` are ``on``."""
    if not set(names) <= set(on):
        return
    traits = [TRAITS[name] for name in names]
    said, remedies = " and ".join(map(str, traits)), " or ".join(dict.fromkeys(trait.remedy for trait in traits))
    param = next((trait.option for trait in traits if trait.option), None)
    raise SettingsError(f"{said} {why}: {remedies}", param=param)
