"""Says which features of the training server work together (parallel axes, quantisation, full fine-tunes, compile,
offload, engines, families of models): rows with a reason, and the function that reads them.

A row is about two features, or about a feature and families of models (`model_type`). A combination that no row is
about is supported. What has to divide what is in `parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import OptimizerName
from strata.train.families import support_of
from strata.train.parallel import ParallelSettings
from strata.train.plan.fused_kernels import AttentionKernel, FusedLayers
from strata.train.plan.quantisation import Quantise

if TYPE_CHECKING:
    from strata.train.settings import ServerSettings

CombinationLevel = Literal["supported", "experimental", "refused"]

EXPERT_FAMILIES: Final = frozenset({"qwen3_moe", "gpt_oss", "deepseek_v3"})
TENSOR_FAMILIES: Final = frozenset({"llama", "qwen3", "gemma3_text"}) | EXPERT_FAMILIES
PIPELINE_FAMILIES: Final = frozenset({"llama", "qwen3", "gemma3_text", "qwen3_moe"})
FUSED_FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
CONTEXT_FAMILIES: Final = TENSOR_FAMILIES | {"gemma2"}
IMAGE_FAMILIES: Final = frozenset({"mistral3"})

ONE_DOCUMENT: Final = "one document per row"


class PairRow(NamedTuple):
    """Two features that do not work together."""

    first: str
    second: str
    why: str
    hint: str = ""


class FamilyRow(NamedTuple):
    """A feature that was compared with one process for these families alone."""

    feature: str
    families: frozenset[str]
    level: CombinationLevel
    """The level for all other families."""
    why: str


class NeedRow(NamedTuple):
    """A feature that works with these families together with another feature alone."""

    feature: str
    families: frozenset[str]
    needs: str
    why: str


_SPLITS: Final = ("parallel.tensor", "parallel.context", "parallel.expert", "parallel.pipeline")
PAIRS: Final = (
    PairRow("parallel.expert", "parallel.pipeline", "this version has no stages with expert groups"),
    PairRow(
        "model.quantise",
        "model.training",
        "the weights of a quantised base cannot be trained, only LoRA adapters",
        'set model.training = "lora", or leave model.quantise out',
    ),
    *(
        PairRow(
            split, "model.quantise", "a quantised base can be sharded and replicated, and not be split in another way"
        )
        for split in _SPLITS
    ),
    *(
        PairRow(
            setting, other, f"{what} with shards and copies of unquantised models alone", "leave one of the two out"
        )
        for setting, what in (("model.compile", "compiled layers work"), ("model.offload", "offloading works"))
        for other in (*_SPLITS, "model.quantise")
    ),
    PairRow(
        "model.quantise",
        "inference.engine",
        "the engine would sample from the base as it is in its files, and not from the one that is trained",
        "leave inference.engine out: the ranks sample",
    ),
    PairRow(
        "model.quantise",
        "quantised files",
        "the files of the model are quantised already",
        "model.path is a model as it was before that",
    ),
    PairRow(
        "parallel.pipeline",
        "inference.engine",
        "ranks that are stages open no samplers, with an engine or without",
        "leave inference.engine out, and sample from saved weights elsewhere",
    ),
    PairRow("parallel.pipeline", "sampling", "ranks that are stages cannot sample: no rank has all layers"),
    PairRow(
        "parallel.pipeline",
        "a memory plan",
        "a plan does not count what is on a stage",
        "plan without stages; 'strata serve' counts the weights of each stage before it starts",
    ),
    *(
        # transformers chooses the frequencies by the largest position that it is called with.
        PairRow(
            "parallel.context",
            f"rotary embeddings of type {kind}",
            f"rotary embeddings of type {kind} depend on the length of a row, and a rank has a slice",
        )
        for kind in ("dynamic", "longrope")
    ),
    PairRow(
        "parallel.context",
        "attn_temperature_tuning",
        "attn_temperature_tuning scales by the place in a row, and a rank has a slice",
    ),
    PairRow(
        "parallel.context",
        ONE_DOCUMENT,
        "layers of this family follow a document from its first token on, and a rank has a slice",
    ),
    PairRow("model.compile", ONE_DOCUMENT, "layers of families that take one document per row were not compiled"),
    PairRow(
        "model.fused_layers",
        "model.compile",
        "the two were not compared",
        "leave one of the two out",
    ),
    *(
        PairRow(setting, "parallel.pipeline", "not compared on stages")
        for setting in ("model.fused_layers", "model.attention")
    ),
    PairRow(
        "model.attention",
        "soft-capped attention",
        "no fused kernel computes it",
        "leave model.attention out",
    ),
    PairRow("model.training", "the optimizer muon", "all weights of a model are stepped with AdamW"),
    *(
        PairRow(setting, "images", "images were compared with LoRA on shards and copies of plain models alone")
        for setting in (
            *_SPLITS,
            "model.training",
            "model.quantise",
            "model.compile",
            "model.offload",
            "model.fused_layers",
            "model.attention",
        )
    ),
)
FAMILIES: Final = (
    FamilyRow(
        "parallel.tensor", TENSOR_FAMILIES, "refused", "layers of {family} cannot be split, only those of {families}"
    ),
    FamilyRow(
        "parallel.expert", EXPERT_FAMILIES, "refused", "experts of {family} cannot be spread, only those of {families}"
    ),
    FamilyRow(
        "parallel.pipeline", PIPELINE_FAMILIES, "refused", "{family} cannot be on several stages, only {families}"
    ),
    FamilyRow(
        "model.fused_layers",
        FUSED_FAMILIES,
        "refused",
        "layers of {family} were not compared with plain ones, only those of {families}",
    ),
    FamilyRow(
        "parallel.context",
        CONTEXT_FAMILIES,
        "experimental",
        "context groups were not compared with one process for {family}",
    ),
    FamilyRow("images", IMAGE_FAMILIES, "refused", "{family} takes no images here, only {families}"),
)


NEEDS: Final = (
    NeedRow(
        "parallel.tensor",
        EXPERT_FAMILIES,
        "parallel.expert",
        "experts of {family} are not split, but spread over tensor groups: set parallel.expert to a multiple of"
        " {value}",
    ),
)


class Combination(msgspec.Struct, frozen=True, kw_only=True):
    """What a server, a recipe or a plan asks for at once."""

    parallel: ParallelSettings = ParallelSettings()
    training: Literal["lora", "full"] = "lora"
    quantise: Quantise = ""
    compile: bool = False
    fused_layers: FusedLayers = ""
    attention: AttentionKernel = ""
    offload: bool = False
    engine: str = ""
    optimizer: OptimizerName = "adamw"
    samples: bool = False
    images: bool = False
    is_planned: bool = False
    config: Mapping[str, Any] | None = None
    """The model's `config.json`, if it is known."""

    @property
    def family(self) -> str:
        return "" if self.config is None else str(self.config.get("model_type"))

    @property
    def features(self) -> dict[str, Any]:
        """Returns what is in use, by the names in the rows, with its value. What every server has is no feature."""
        config = self.config or {}
        text = config.get("text_config") or config
        # transformers sets it for this family unless the configuration says otherwise.
        is_tuned = text.get("attn_temperature_tuning", text.get("model_type") == "llama4_text")
        optional: dict[str, Any] = {
            "model.quantise": self.quantise,
            "model.training": self.training if self.training == "full" else "",
            "model.compile": self.compile,
            "model.fused_layers": self.fused_layers,
            "model.attention": self.attention,
            "soft-capped attention": bool(text.get("attn_logit_softcapping")),
            "model.offload": self.offload,
            "inference.engine": self.engine,
            "sampling": self.samples,
            "images": self.images,
            "a memory plan": self.is_planned,
            "quantised files": bool(config.get("quantization_config")),
            "attn_temperature_tuning": is_tuned,
            "the optimizer muon": self.optimizer == "muon",
            ONE_DOCUMENT: support_of(self.family).rows != "packed",
            **dict.fromkeys((f"rotary embeddings of type {kind}" for kind in _rope_types(text)), True),
        }
        return {**self.parallel.features, **{name: value for name, value in optional.items() if value}}


def combination_of(settings: ServerSettings, config: Mapping[str, Any] | None = None) -> Combination:
    model = settings.model
    return Combination(
        parallel=settings.parallel,
        training=model.training,
        quantise=model.quantise,
        compile=model.compile,
        fused_layers=model.fused_layers,
        attention=model.attention,
        offload=model.offload,
        engine=settings.inference.engine,
        config=config,
    )


class Verdict(NamedTuple):
    level: CombinationLevel
    features: tuple[str, ...] = ()
    """What the reason is about; the first is a setting."""
    message: str = ""
    """The settings and the reason."""
    why: str = ""
    hint: str = ""


def assess(combination: Combination) -> Verdict:
    """Says whether the combination is supported, experimental or refused, with the reason of the row that decides."""
    verdicts = list(_verdicts(combination))
    refused = (verdict for verdict in verdicts if verdict.level == "refused")
    return next(refused, verdicts[0] if verdicts else Verdict("supported"))


def check_combination(combination: Combination) -> None:
    """INVALID if it is refused."""
    verdict = assess(combination)
    if verdict.level == "refused":
        raise StrataError(Code.INVALID, verdict.message, hint=verdict.hint)


def assess_groups(config: Mapping[str, Any]) -> dict[str, Verdict]:
    """Says for each kind of group of ranks whether a model of this configuration can be on it."""
    needs = {need.feature: need for need in NEEDS if str(config.get("model_type")) in need.families}
    verdicts = {}
    for split in _SPLITS:
        names = [split, needs[split].needs] if split in needs else [split]
        sizes: dict[str, Any] = {name.removeprefix("parallel."): 2 for name in names}
        verdicts[split] = assess(Combination(parallel=ParallelSettings(**sizes), config=config))
    return verdicts


def _verdicts(combination: Combination) -> Iterator[Verdict]:
    features, family = combination.features, combination.family
    for pair in PAIRS:
        if pair.first in features and pair.second in features:
            named = [_name(name, features[name]) for name in (pair.first, pair.second) if "." in name]
            message = f"{', and '.join(named)}: {pair.why}"
            yield Verdict("refused", (pair.first, pair.second), message, pair.why, pair.hint)
    for row in FAMILIES:
        if family and row.feature in features and family not in row.families:
            why = row.why.format(family=family, families=", ".join(sorted(row.families)))
            yield Verdict(row.level, (row.feature,), f"{_name(row.feature, features[row.feature])}: {why}", why)
    for need in NEEDS:
        if need.feature in features and family in need.families and need.needs not in features:
            why = need.why.format(family=family, value=features[need.feature])
            yield Verdict("refused", (need.feature,), f"{_name(need.feature, features[need.feature])}: {why}", why)


def _name(feature: str, value: object) -> str:
    return f"{feature} is {'true' if value is True else value}"


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Those of a model's rotary embeddings, which may differ from layer to layer."""
    kinds: set[str] = set()
    for parameters in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(parameters, Mapping):
            layers = [parameters, *(layer for layer in parameters.values() if isinstance(layer, Mapping))]
            kinds.update(str(layer.get("rope_type", layer.get("type"))) for layer in layers)
    return kinds
