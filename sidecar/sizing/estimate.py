"""Estimate of a profile's claim, from its files, its settings and earlier measurements.

A model whose files are unknown, or that is simulated, gets a share of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from gateway.shared.files.units import GIB
from gateway.shared.threads import in_thread
from sidecar.core.arguments import environment, largest_rank, lora_slots
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import DiskHangs, EngineFacts, Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.profile import EngineSettings, KvMemory, Profile, pooling
from sidecar.sizing import claim as claims
from sidecar.sizing import extras, memory
from sidecar.sizing.claim import Claim
from sidecar.sizing.extras import amount, draft_model, host_pool_bytes
from sidecar.sizing.memory import Batch, Need, Residue, gib
from sidecar.sizing.model_config import ModelShape
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.model_files import ModelLocation, NotHere, NotKnown, read_model
from sidecar.sizing.weights import StoredWeights, on_each_gpu
from sidecar.sizing.without_files import simulated, unknown

READ_WITHIN = 30.0  # seconds for a model's files; a network file system that hangs must not hold up the others
UNTOLD_CONTEXT = 2048  # tokens: vLLM's, for a model whose config does not say
# `gpu_memory: auto` leaves room for so many whole contexts, and tokens in all, if the GPU has it: one long context also
# holds many short ones, so it is enough by itself.
AT_ONCE, TOKENS = 8, 65_536


class KnownModel(msgspec.Struct, frozen=True):
    """Model whose files are known: its shape and its weights, the rank of its adapters, its draft model."""

    shape: ModelShape
    stored: StoredWeights
    lora_rank: int = 0
    draft: KnownModel | None = None


class Sizing:
    """For one file's profiles. `folder`: what its names are relative to. `inherited`: the sidecar's environment."""

    def __init__(
        self, config: SidecarConfig, folder: Path, inherited: Mapping[str, str], *, sizes_only: bool = False
    ) -> None:
        """`sizes_only`: files of weights need not be readable, their sizes count."""
        self._config = config
        self._folder = folder
        self._inherited = inherited
        self._shapes: dict[str, ModelShape] = {}
        self._sizes_only = sizes_only

    def apply(self, config: SidecarConfig) -> None:
        """Size the profiles of this file from now on."""
        self._config = config

    async def planned(self, name: str, total: int, cuda: int, *, unified: bool = False) -> Estimate:
        """The estimate of a profile on GPUs that need not be here. Raises Unusable, NotKnown, ModelError, KeyError."""
        profile = self._config.models[name]
        model = await self._known(profile, await self._rank(profile))
        return estimate(profile, model, total, profile.tensor_parallel, cuda=cuda, unified=unified)

    async def size(
        self, name: str, total: int, present: int, measured: Measured | None, lesson: Lesson | None, *, unified: bool
    ) -> Size:
        """Memory of an engine of the profile on each GPU; `unified`: it is the host's too. Raises Unusable, and
        KeyError."""
        profile, engine = self._config.models[name], self._config.engine_of(name)
        lesson = lesson or claims.NOTHING_LEARNT
        rank = await self._rank(profile)
        if engine.device == "cpu":
            if engine.simulated is None and profile.flags.get("load-format") != "dummy":
                with suppress(NotKnown, ModelError):  # whatever is not here is vLLM's to fetch
                    await self._read(profile)
            return Size(arithmetic="on CPU: no GPU memory")
        gpus = profile.tensor_parallel
        if gpus > present:
            which = f"{gpus} GPUs (tensor_parallel)" if gpus > 1 else "a GPU"
            raise Unusable(f"needs {which}, the sidecar has {present or 'none (it uses those of NVIDIA alone)'}")
        if not total:
            raise Unusable("no GPU of this machine can be read")
        if engine.simulated is not None:
            return simulated(profile, total, lesson)
        try:
            model = await self._known(profile, rank)
            found = estimate(profile, model, total, present, measured, lesson=lesson, unified=unified)
            size = size_of(profile, found)
        except (NotKnown, ModelError) as error:
            self._shapes.pop(name, None)
            comes = isinstance(error, NotHere)
            if isinstance(profile.gpu_memory, KvMemory) and not comes:
                raise Unusable(
                    f"gpu_memory {{kv: ...}} comes on top of what the model needs, which is not known, since {error}: "
                    "give it a share, such as gpu_memory: 45%"
                ) from error
            alone = not rank and draft_model(profile.flags) is None
            stored = error.stored if alone and isinstance(error, NotKnown) else None
            size = unknown(profile, total, str(error), lesson, comes=comes, stored=stored)
            return msgspec.structs.replace(size, pools=host_pool_bytes(profile))
        self._shapes[name] = model.shape
        pools = host_pool_bytes(profile, found.claim.kv)
        return msgspec.structs.replace(size, lora_rank=rank, pools=pools)

    def kv_bytes(self, name: str, told: EngineFacts) -> int | None:
        """Bytes of an engine's KV cache on each GPU, rather too small than too large, since the rest is taken for
        what it needs; None: that cannot be told."""
        profile, shape = self._config.models.get(name), self._shapes.get(name)
        if profile is None or shape is None:  # or a simulated one
            return None
        if told.kv_bytes is not None and "num-gpu-blocks-override" not in profile.flags:
            return told.kv_bytes
        if told.kv_tokens is None or shape.states or any(cache.window is not None for cache in shape.caches):
            return None  # some layers keep less of a sequence than its tokens
        dtype = _kv_dtype(profile)  # auto: newer vLLM takes 8 bits by itself where the model brings scales for it
        element = 1 if dtype == "auto" else memory.kv_element_bytes("auto", dtype)
        return told.kv_tokens * memory.kv_per_token(shape, gpus=profile.tensor_parallel, element=element)

    async def _rank(self, profile: Profile) -> int:
        """Rank of its adapters; 0: it has none. Raises Unusable."""
        if not profile.adapters:
            return 0
        rank, folder = extras.adapter_rank, self._folder
        try:
            return await in_thread(rank, folder, profile.adapters, within=READ_WITHIN, raises=(Unusable,))
        except TimeoutError:
            raise DiskHangs(f"its adapters were not read within {READ_WITHIN:g} s: does their disk hang?") from None

    async def _known(self, profile: Profile, rank: int) -> KnownModel:
        """The model with its draft model; `rank`: of its adapters. Raises Unusable, NotKnown, ModelError."""
        known, draft = msgspec.structs.replace(await self._read(profile), lora_rank=rank), draft_model(profile.flags)
        if draft is None:
            return known
        model, revision = draft
        flags = {"revision": revision, "download-dir": profile.flags.get("download-dir")}
        try:
            drafts = await self._read(msgspec.structs.replace(profile, model_path=model, flags=flags))
        except Unusable as error:
            raise Unusable(f"its draft model (speculative-config): {error}") from error
        return msgspec.structs.replace(known, draft=drafts)

    async def _read(self, profile: Profile) -> KnownModel:
        given = profile.flags.get
        where = ModelLocation(
            model=profile.model_path,
            folder=self._folder,
            environment=environment(profile, EngineSettings(), (), self._inherited),
            revision=str(given("revision") or "main"),
            downloads=_text(given("download-dir")),
            shape=_text(given("hf-config-path")),
            sizes_only=self._sizes_only,
        )
        try:
            return KnownModel(*await in_thread(read_model, where, within=READ_WITHIN, raises=(Unusable, NotKnown)))
        except TimeoutError:
            raise DiskHangs(
                f"{profile.model_path} was not read within {READ_WITHIN:g} s: does its disk hang?"
            ) from None


# -- sizes ------------------------------------------------------------------------------------------------------------


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Need of an engine at `least`, for one whole context, and its claim; its weights as `stored`; `beyond` its share,
    its CUDA context or what a failed start taught. `own_context`: tokens that the model can; `context_length`: fewer,
    since those do not fit and the profile gives none. `tokens`: those its KV cache holds; `sequences`: at once, None:
    as many as vLLM takes by itself, which `batch` says. `why`: why it cannot run so, None: it can."""

    least: Need
    claim: Claim
    stored: StoredWeights
    beyond: int
    residue: Residue
    own_context: int
    context_length: int | None
    tokens: int
    sequences: int | None
    batch: Batch
    why: str | None

    @property
    def words(self) -> str:
        """The arithmetic, for people."""
        gpus, told = self.least.gpus, msgspec.structs.replace(self.least, kv=self.claim.kv, tokens=self.tokens)
        where = "its GPU" if gpus == 1 else f"each of {gpus} GPUs"
        by = "what a failed start told" if self.least.learnt else "what was measured"
        measured = f" (by {by})" if self.least.measured or self.least.learnt else ""
        short = self.least.total - self.claim.bytes
        doubt = f"; it may not start: {gib(short)} GiB more are needed by estimate" if short > 0 else ""
        taken, total = gib(self.claim.bytes), gib(self.claim.total)
        fits = "" if self.context_length is None else f"; {claims.context_words(self.context_length, self.own_context)}"
        return f"{taken} GiB on {where} of {total} GiB: {memory.arithmetic(told)}{measured}{fits}{doubt}"


def estimate(
    profile: Profile,
    model: KnownModel,
    total: int,
    present: int,
    measured: Measured | None = None,
    *,
    cuda: int | None = None,
    lesson: Lesson = claims.NOTHING_LEARNT,
    unified: bool = False,
) -> Estimate:
    """Estimate a model whose files are known, on GPUs of `total` bytes, of which CUDA reports `cuda` (None: not known).

    `lesson`: of starts with these settings. `unified`: the memory is the host's. Raises ModelError."""
    cuda = claims.cuda_of(total, lesson) if cuda is None else min(cuda, total)
    shape, most = _with_caches(profile, model.shape), _batch(profile, total)
    own = shape.context or UNTOLD_CONTEXT
    own = min(own, lesson.longest or own)
    needed = _needs(profile, msgspec.structs.replace(model, shape=shape), most, measured, lesson, own)
    limit = claims.UNIFIED_MOST if unified else claims.MOST
    given, told = profile.context_length, profile.gpu_memory
    context, room = claims.choose_context(own, given, told, cuda, lesson, needed, limit)
    chosen = context if context < own and not given else None
    least = needed(context)
    at_once = 1 if pooling(profile) else max(1, min(AT_ONCE, most.sequences))
    wanted = needed(max(context, min(at_once * context, TOKENS)), at_once)
    if chosen is not None:  # all that there is, since that is not enough
        wanted = msgspec.structs.replace(least, kv=room)
    made = _claim(profile, least, cuda, claims.largest_share(lesson, cuda, least.total, limit), wanted)
    graphs = 0 if most.eager else memory.graphs(shape, most.sequences)
    # vLLM does not start a hybrid model with room for the states of fewer sequences than `--max-num-seqs`.
    states = memory.kv_per_sequence(shape, gpus=profile.tensor_parallel)
    with_states = max(1, min(most.sequences, made.kv // states)) if states else None
    return Estimate(
        least=least,
        claim=made,
        stored=model.stored,
        beyond=claims.beside(made.start_needs, lesson, cuda, total, graphs),
        residue=memory.asleep(least, 1, unified=unified),
        own_context=own,
        context_length=chosen,
        tokens=least.tokens * made.kv // least.kv if least.kv else least.tokens,
        sequences=min((each for each in (with_states, lesson.sequences) if each), default=None),
        batch=most,
        why=claims.refuse_reason(shape, least, made, present)
        or _too_many(profile, lesson)
        or claims.no_room_reason(made, lesson, total),
    )


def _needs(
    profile: Profile, model: KnownModel, most: Batch, measured: Measured | None, lesson: Lesson, own: int
) -> Callable[..., Need]:
    """The need of the profile's engine, by tokens and sequences, as failed starts have taught it. `own`: tokens of the
    model's context."""
    gpus, shape, stored, draft = profile.tensor_parallel, model.shape, model.stored, model.draft
    rank = largest_rank(profile, model.lora_rank) if model.lora_rank else 0
    beside_weights = extras.slot_bytes(shape, rank, lora_slots(profile)) if rank else 0
    if draft is not None:
        beside_weights += on_each_gpu(draft.stored, draft.shape, extras.draft_gpus(profile.flags, gpus))
    on_gpus = max(0, stored.bytes - int(amount(profile.flags.get("cpu-offload-gb")) * GIB) * gpus)
    needed = partial(
        memory.need,
        shape,
        StoredWeights(on_gpus, min(stored.wide, on_gpus)),
        gpus=gpus,
        dtype=_text(profile.flags.get("dtype")) or "auto",
        kv_dtype=_kv_dtype(profile),
        most=most,
        drafted=extras.drafted_share(profile.flags, shape, None if draft is None else draft.shape),
        quantized=_text(profile.flags.get("quantization")),
        beside=beside_weights,
        measured=measured,
    )
    told_kv = needed(tokens=lesson.tokens or profile.context_length or own, sequences=1).kv

    def after_lesson(tokens: int, sequences: int = 1) -> Need:
        return claims.taught(needed(tokens=tokens, sequences=sequences), lesson, told_kv)

    return after_lesson


def _claim(profile: Profile, least: Need, cuda: int, limit: int, wanted: Need) -> Claim:
    """The claim by what the profile says: so much KV cache, a share of the GPU, or what is `wanted`."""
    told = profile.gpu_memory
    if isinstance(told, KvMemory):
        return claims.claim(least, cuda, kv=told.kv, most=limit)
    if told == "auto":
        return claims.claim(wanted, cuda, most=limit)
    return claims.claim(least, cuda, utilization=told)


def _with_caches(profile: Profile, shape: ModelShape) -> ModelShape:
    """The shape with KV caches as the profile's flags have vLLM keep them."""
    if profile.flags.get("disable-hybrid-kv-cache-manager") is not True:
        return shape
    caches = tuple(msgspec.structs.replace(cache, window=None) for cache in shape.caches)
    return msgspec.structs.replace(shape, caches=caches)


def _batch(profile: Profile, total: int) -> Batch:
    return memory.batch(
        total,
        int(amount(profile.flags.get("max-num-batched-tokens"))) or None,
        int(amount(profile.flags.get("max-num-seqs"))) or None,
        eager=profile.flags.get("enforce-eager") is True,
    )


def size_of(profile: Profile, found: Estimate) -> Size:
    """The size that the plan books for an engine. Raises Unusable where it can never run so."""
    if found.why is not None:
        raise Unusable(found.why)
    sleeps = profile.sleeps is not None
    return Size(
        claim=found.claim.bytes + found.beyond,
        start_needs=found.claim.start_needs + found.beyond,
        residue=min(found.residue.device, found.claim.bytes) if sleeps else 0,
        host=found.residue.host if sleeps else 0,
        share=found.claim.utilization,
        sequences=found.sequences,
        context=found.least.kv,
        context_length=found.context_length,
        beyond=found.beyond,
        weights=found.least.weights,
        stored=found.stored.bytes,
        absent=found.stored.absent,
        encoder=not found.least.kv,
        arithmetic=found.words,
    )


# -- a profile's words ------------------------------------------------------------------------------------------------


def _too_many(profile: Profile, lesson: Lesson) -> str | None:
    """Return the reason why a hybrid model cannot start with the operator's number of sequences; None if none is
    known."""
    given = amount(profile.flags.get("max-num-seqs"))
    if lesson.sequences is None or given <= lesson.sequences:
        return None
    return (
        f"its flag max-num-seqs is {given:g}, and a start found room for the states of {lesson.sequences}: give it no "
        "more, or more gpu_memory"
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _kv_dtype(profile: Profile) -> str:
    """Return the flag's dtype, or auto for an unknown one: newer dtypes are smaller, so the estimate is safe."""
    told = str(profile.flags.get("kv-cache-dtype", "auto"))
    try:
        memory.kv_element_bytes("auto", told)
    except ModelError:
        return "auto"
    return told
