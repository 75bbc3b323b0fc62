"""From a checkpoint to a decoder: check every tensor, then bind each to its place.

Nothing is bound before all tensors have been checked: a missing, leftover or misshapen tensor is
fatal, and all of them are listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.kernels.base import Ops
from freetoken.layers.attention import PagedAttention, QkNorm
from freetoken.layers.linear import Linear
from freetoken.layers.mlp import GatedMlp
from freetoken.layers.moe import OffloadMoELayer
from freetoken.models.decoder import Decoder, DecoderLayer
from freetoken.models.families import family_of
from freetoken.models.fields import Fields
from freetoken.models.names import ExpertSizes, Shape, TensorNames, bias_of
from freetoken.models.spec import DecoderSpec, DenseMlpSpec, MoeSpec
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.store import LayerExperts
from freetoken.moe.strategies import make_strategy

MakeMoe = Callable[[Sequence[LayerExperts], MoeSpec], OffloadMoeRuntime]

_LISTED = 20  # problems of one kind that an error lists
_COUNTED = 1000  # problems after which checking stops: the file is another model's


def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """What the checkpoint's config describes. Raises CheckpointError for an architecture, or a
    detail of one, that this decoder does not have."""
    family = family_of(checkpoint)
    fields = Fields.of(checkpoint)
    if checkpoint.kind == "gguf":
        return family.gguf_spec(checkpoint, fields)
    return family.hf_spec(fields)


def load_decoder(checkpoint: Checkpoint, spec: DecoderSpec, ops: Ops, make_moe: MakeMoe) -> Decoder:
    """Build the decoder that `spec` describes over the checkpoint's bytes (norms and biases are
    copied as float32).

    `make_moe` gets the experts of all MoE layers and makes their runtime, which stays the caller's
    to close; it is not called for a dense model. Raises CheckpointError.
    """
    names = family_of(checkpoint).names(checkpoint)
    check_tensors(checkpoint, spec, names)
    return _Builder(checkpoint, spec, names, ops).decoder(make_moe)


def check_tensors(checkpoint: Checkpoint, spec: DecoderSpec, names: TensorNames) -> None:
    """Raises CheckpointError listing the missing, misshapen and leftover tensors."""
    seen: set[str] = set()
    missing: list[str] = []
    misshapen: list[str] = []
    for name, shape in _expected(checkpoint, spec, names):
        seen.add(name)
        if name not in checkpoint:
            missing.append(f"{name} {list(shape)}")
        elif checkpoint.tensor(name).shape != shape:
            found = list(checkpoint.tensor(name).shape)
            misshapen.append(f"{name}: found {found}, expected {list(shape)}")
        if len(missing) + len(misshapen) >= _COUNTED:
            break
    else:
        leftover = [name for name in checkpoint.names() if name not in seen]
        _raise_on(checkpoint, spec, missing, misshapen, _not_ignored(leftover, spec, names))
        return
    _raise_on(checkpoint, spec, missing, misshapen, [])


def _expected(
    checkpoint: Checkpoint, spec: DecoderSpec, names: TensorNames
) -> Iterator[tuple[str, Shape]]:
    """Every tensor that the decoder reads, with its shape."""
    yield names.embedding, (spec.vocab, spec.hidden)
    for layer, mlp in enumerate(spec.mlps):
        yield from _expected_attention(spec, names, layer)
        yield names.mlp_norm.format(layer=layer), (spec.hidden,)
        if isinstance(mlp, MoeSpec):
            sizes = ExpertSizes(mlp.experts, spec.hidden, mlp.intermediate)
            router = names.router.format(layer=layer)
            yield from _expected_linear(router, (mlp.experts, spec.hidden), mlp.router_bias)
            yield from names.expert_layout(checkpoint, layer, sizes).shapes(layer, sizes)
            if mlp.expert_bias:
                yield from names.expert_biases.shapes(layer, sizes)
            continue
        for template, shape in (
            (names.gate, (mlp.intermediate, spec.hidden)),
            (names.up, (mlp.intermediate, spec.hidden)),
            (names.down, (spec.hidden, mlp.intermediate)),
        ):
            yield from _expected_linear(template.format(layer=layer), shape, mlp.bias)
    yield names.final_norm, (spec.hidden,)
    if not spec.tied_embeddings:
        yield names.lm_head, (spec.vocab, spec.hidden)


def _expected_attention(
    spec: DecoderSpec, names: TensorNames, layer: int
) -> Iterator[tuple[str, Shape]]:
    attention, hidden = spec.attention, spec.hidden
    q_rows = attention.heads * attention.head_dim
    kv_rows = attention.kv_heads * attention.head_dim
    yield names.attention_norm.format(layer=layer), (hidden,)
    for template, shape, bias in (
        (names.query, (q_rows, hidden), attention.qkv_bias),
        (names.key, (kv_rows, hidden), attention.qkv_bias),
        (names.value, (kv_rows, hidden), attention.qkv_bias),
        (names.output, (hidden, q_rows), attention.output_bias),
    ):
        yield from _expected_linear(template.format(layer=layer), shape, bias)
    if attention.sinks:
        yield names.sinks.format(layer=layer), (attention.heads,)
    if attention.qk_norm:
        yield names.query_norm.format(layer=layer), (attention.head_dim,)
        yield names.key_norm.format(layer=layer), (attention.head_dim,)


def _expected_linear(name: str, shape: tuple[int, int], bias: bool) -> Iterator[tuple[str, Shape]]:
    yield name, shape
    if bias:
        yield bias_of(name), shape[:1]


def _not_ignored(leftover: list[str], spec: DecoderSpec, names: TensorNames) -> list[str]:
    patterns = list(names.ignored)
    if spec.tied_embeddings:  # a copy of the embedding that some files keep
        patterns.append(re.escape(names.lm_head))
    ignored = re.compile("|".join(patterns))
    return sorted(name for name in leftover if not ignored.fullmatch(name))


def _raise_on(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    missing: list[str],
    misshapen: list[str],
    leftover: list[str],
) -> None:
    problems = {"missing": missing, "misshapen": misshapen, "not expected": leftover}
    found = [_listing(kind, items) for kind, items in problems.items() if items]
    if not found:
        return
    raise CheckpointError(
        f"the tensors do not fit the {spec.family} model that the config describes",
        file=checkpoint.path,
        found="; ".join(found),
        expected=f"all tensors of {spec.layers} layers with hidden size {spec.hidden}, and no more",
        hint="fetch the checkpoint again, or convert it with a current converter",
    )


def _listing(kind: str, items: list[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    shown = "\n    ".join(islice(items, _LISTED))
    return f"{len(items)} {kind}:\n    {shown}{more}"


class _Builder:
    """Binds checked tensors."""

    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, names: TensorNames, ops: Ops
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._names = names
        self._ops = ops

    def decoder(self, make_moe: MakeMoe) -> Decoder:
        spec, names = self._spec, self._names
        embedding = self._ops.matrix(self._checkpoint.tensor(names.embedding))
        head = Linear(self._ops, embedding) if spec.tied_embeddings else self._linear(names.lm_head)
        mlps = self._mlps(make_moe)
        return Decoder(
            spec,
            self._ops,
            embedding=embedding,
            layers=[
                DecoderLayer(
                    attention_norm=self._vector(names.attention_norm.format(layer=layer)),
                    attention=self._attention(layer),
                    mlp_norm=self._vector(names.mlp_norm.format(layer=layer)),
                    mlp=mlp,
                )
                for layer, mlp in enumerate(mlps)
            ],
            final_norm=self._vector(names.final_norm),
            lm_head=head,
        )

    def _mlps(self, make_moe: MakeMoe) -> list[GatedMlp | OffloadMoELayer]:
        moe_layers = [i for i, mlp in enumerate(self._spec.mlps) if isinstance(mlp, MoeSpec)]
        mlps: dict[int, GatedMlp | OffloadMoELayer] = {
            i: self._dense(i, mlp)
            for i, mlp in enumerate(self._spec.mlps)
            if isinstance(mlp, DenseMlpSpec)
        }
        if moe_layers:
            mlps.update(self._moe(moe_layers, make_moe))
        return [mlps[layer] for layer in range(self._spec.layers)]

    def _moe(self, layers: list[int], make_moe: MakeMoe) -> dict[int, OffloadMoELayer]:
        """MoE layers by their index in the decoder; their runtime numbers them from 0."""
        specs = [mlp for mlp in self._spec.mlps if isinstance(mlp, MoeSpec)]
        experts = [
            self._experts(layer_id, layer, moe)
            for layer_id, (layer, moe) in enumerate(zip(layers, specs, strict=True))
        ]
        routers = [
            self._linear(self._names.router.format(layer=layer), moe.router_bias)
            for layer, moe in zip(layers, specs, strict=True)
        ]
        runtime = make_moe(experts, specs[0])
        strategy = make_strategy(runtime)
        built = {}
        for layer_id, (layer, moe) in enumerate(zip(layers, specs, strict=True)):
            kernel = runtime.slot_kernel(layer_id)
            built[layer] = OffloadMoELayer(
                layer_id, routers[layer_id], moe, self._ops, strategy, kernel
            )
        return built

    def _experts(self, layer_id: int, layer: int, moe: MoeSpec) -> LayerExperts:
        sizes = ExpertSizes(moe.experts, self._spec.hidden, moe.intermediate)
        layout = self._names.expert_layout(self._checkpoint, layer, sizes)
        gate, up, down = layout.parts(self._checkpoint, layer, sizes)
        if moe.expert_bias:
            biases = self._names.expert_biases.read(self._checkpoint, layer)
            gate = replace(gate, biases=biases.gate)
            up = replace(up, biases=biases.up)
            down = replace(down, biases=biases.down)
        return LayerExperts(layer_id, gate, up, down, moe.activation)

    def _dense(self, layer: int, mlp: DenseMlpSpec) -> GatedMlp:
        names = self._names
        return GatedMlp(
            self._ops,
            gate=self._linear(names.gate.format(layer=layer), mlp.bias),
            up=self._linear(names.up.format(layer=layer), mlp.bias),
            down=self._linear(names.down.format(layer=layer), mlp.bias),
            activation=mlp.activation,
        )

    def _attention(self, layer: int) -> PagedAttention:
        names, spec = self._names, self._spec.attention
        norm = None
        if spec.qk_norm:
            norm = QkNorm(
                query=self._vector(names.query_norm.format(layer=layer)),
                key=self._vector(names.key_norm.format(layer=layer)),
                eps=self._spec.norm_eps,
            )
        return PagedAttention(
            self._ops,
            spec,
            query=self._linear(names.query.format(layer=layer), spec.qkv_bias),
            key=self._linear(names.key.format(layer=layer), spec.qkv_bias),
            value=self._linear(names.value.format(layer=layer), spec.qkv_bias),
            output=self._linear(names.output.format(layer=layer), spec.output_bias),
            norm=norm,
            interleaved=self._spec.rotary.interleaved,
            window=self._spec.windows[layer],
            sinks=self._vector(names.sinks.format(layer=layer)) if spec.sinks else None,
        )

    def _linear(self, name: str, bias: bool = False) -> Linear:
        matrix = self._ops.matrix(self._checkpoint.tensor(name))
        return Linear(self._ops, matrix, self._vector(bias_of(name)) if bias else None)

    def _vector(self, name: str) -> Tensor:
        numbers = self._checkpoint.tensor(name).dequantize()
        return torch.tensor(numbers, dtype=torch.float32, device=self._ops.device)
