"""Attention of both streams: grouped batched products in tiles that stay in the cache, with its own backward.

Shapes: R query rows, S keys of the real stream, G key/value heads, J query heads per key/value head,
E head size, C keys of a tile, D = (G*J + 2*G) * E the width of the joint query/key/value projection.

Every row sees the real slots `first..last` of its document and, in the placeholder stream, the shallower
placeholders of its own chain. Query heads are folded onto their key/value head, so that a block of rows is
one batched product and no key is repeated. A block's keys are its *prefix*, which all its rows see, and its
*edge*, the few around the rows' own slots, which are masked.

No probability outlives its tile. Of the softmax only each row's log-sum-exp is kept, and what has to be
subtracted from a whole row of a product rides inside the product: with L = log-sum-exp, two more columns
[-L_high, -L_low] on the queries and two rows of ones below the keys give

    [Q, -L_high, -L_low] @ [K, 1, 1]^T = scores - L,    P = 2^(scores - L)
    [dO, -d_high, -d_low] @ [V, 1, 1]^T = dP - d,       d = sum(dO * O),    dS = P * (dP - d)

(two columns, because bfloat16 needs two numbers to hold one of float32; scores are in base 2, the factor is in
the queries, because a CPU raises 2 to a power faster than e). So a tile costs its matrix products
and two passes over its scores, one of them an exponential. The forward does the same with the log-sum-exp
of the keys seen so far, beginning with the edge, and needs no maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Mixed blocks: rows of several documents share a block only while it reaches back less than this.
_SHORT_DOCUMENTS = 512


@dataclass(frozen=True)
class Heads:
    """Head counts and size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Block:
    """Rows and the keys that they look at.

    Attributes:
        prefix: real keys that every row sees.
        edge: the real keys after them; (placeholder stream) the rows' own keys come behind.
        bias: [rows, edge columns] 0 where a row may look, -inf where not. Every row may look somewhere.
    """

    rows: slice
    prefix: slice
    edge: slice
    bias: Tensor

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    def widened(self) -> Block:
        """The same with all keys in the edge."""
        keys = slice(self.prefix.start, self.edge.stop)
        visible = self.bias.new_zeros(self.num_rows, self.prefix.stop - self.prefix.start)
        return Block(self.rows, slice(keys.start, keys.start), keys, torch.cat([visible, self.bias], dim=1))


@dataclass(frozen=True)
class AttentionPlan:
    """Which rows look where; one for all layers of a stream.

    Attributes:
        num_scores: scores per query head that are computed.
        own_keys: whether rows also look at their own chain.
        columns: most keys of a tile.
        row_index: [R] rows of the stream that ask; None: all of them.
    """

    blocks: tuple[Block, ...]
    num_scores: int
    own_keys: bool
    columns: int
    row_index: Tensor | None = None


@dataclass(frozen=True)
class Tiles:
    """Sizes of the pieces that attention is computed in: rows per head, and keys."""

    rows: int = 128
    columns: int = 512


def plan_attention(
    first: Tensor,
    last: Tensor,
    chain: Tensor | None,
    tiles: Tiles,
    device: torch.device,
    dtype: torch.dtype,
    row_index: Tensor | None = None,
) -> AttentionPlan:
    """Cut rows into blocks and build their masks.

    Args:
        first: [R] first real slot that a row sees, ascending (CPU).
        last: [R] last real slot that a row sees, ascending (CPU).
        chain: [R] chain of each placeholder, ascending, shallow before deep; None for real rows.
        tiles: `tiles.rows` bounds the rows of a block, but a chain is never cut.
        device: where the masks live, in `dtype`.
        row_index: rows of the stream that `first` and `last` are of; None: all.
    """
    blocks = []
    num_scores = 0
    starts = _block_starts(first, last, chain, tiles.rows)
    first_list, last_list = first.tolist(), last.tolist()
    for start, stop in zip(starts, [*starts[1:], len(last)], strict=True):
        low, high = first_list[start], last_list[stop - 1] + 1
        same_document = low == first_list[stop - 1]
        # A real row sees itself: the edge begins with the first row's own slot, so that it has one key.
        seen_by_all = last_list[start] + (0 if chain is None else 1)
        edge = slice(seen_by_all if same_document else low, high)
        columns = torch.arange(edge.start, edge.stop)
        hidden = (columns > last[start:stop, None]) | (columns < first[start:stop, None])
        if chain is not None:
            own = chain[start:stop]
            deeper = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
            hidden = torch.cat([hidden, (own[:, None] != own[None, :]) | deeper], dim=1)
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        num_scores += (stop - start) * (edge.start - low + hidden.shape[1])
        blocks.append(Block(slice(start, stop), slice(low, edge.start), edge, bias.to(device)))
    return AttentionPlan(tuple(blocks), num_scores, chain is not None, tiles.columns, row_index)


def _block_starts(first: Tensor, last: Tensor, chain: Tensor | None, rows_per_block: int) -> list[int]:
    """First rows of the blocks.

    With chains a block begins where a chain does. Rows of a new document begin a block of their own when the
    one before looks far back: mixed rows see the whole range, masked.
    """
    num_rows = len(last)
    if chain is None:
        begins = list(range(num_rows))
    else:
        begins = [0, *(torch.where(chain.diff() != 0)[0] + 1).tolist()]
    first_list, last_list = first.tolist(), last.tolist()
    starts = [0]
    for previous, begin in zip(begins, [*begins[1:], num_rows], strict=True):
        block = starts[-1]
        is_full = begin - block > rows_per_block
        is_far = (
            first_list[previous] != first_list[block]
            and last_list[previous] - first_list[block] >= _SHORT_DOCUMENTS
        )
        if (is_full or is_far) and previous > block:
            starts.append(previous)
    return starts


class KeyValueStore:
    """Keys and values of one layer's stream, in tiles, and the gradient that is collected for them.

    Args:
        key, value: [G, S, E] after rotation.
        columns: C, keys of a tile.
    """

    def __init__(self, key: Tensor, value: Tensor, columns: int) -> None:
        self.columns = columns
        self._tiles = [
            _Tile.of(*(x[:, start : start + columns] for x in (key, value)))
            for start in range(0, key.shape[1], columns)
        ]
        self._gradient_shape = key.mT.shape
        self._gradients: tuple[Tensor, Tensor] | None = None

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of keys and values, [G, E, S], made on first use.

        float32 whatever the compute type, because many segments add to them.
        """
        if self._gradients is None:
            device = self._tiles[0].key.device
            key, value = (torch.zeros(self._gradient_shape, device=device) for _ in range(2))
            self._gradients = key, value
        return self._gradients

    def tiles(self, keys: slice) -> Iterator[tuple[_Tile, slice]]:
        """The tiles that hold some keys, cut where they hold others too, and the keys in each."""
        start = keys.start
        while start < keys.stop:
            index, offset = divmod(start, self.columns)
            stop = min((index + 1) * self.columns, keys.stop)
            tile = self._tiles[index]
            whole = offset == 0 and stop - start == tile.key.shape[1]
            yield tile if whole else tile.cut(offset, offset + stop - start), slice(start, stop)
            start = stop


@dataclass(frozen=True)
class _Tile:
    """Some keys.

    Attributes:
        key, value: [G, C, E].
        key_columns, value_columns: [G, E + extra, C], the same transposed, above rows of ones.
    """

    key: Tensor
    value: Tensor
    key_columns: Tensor
    value_columns: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Tile:
        return cls(key.contiguous(), value.contiguous(), _with_ones(key), _with_ones(value))

    @classmethod
    def joined(cls, tiles: Sequence[_Tile]) -> _Tile:
        if len(tiles) == 1:
            return tiles[0]
        return cls(
            torch.cat([tile.key for tile in tiles], 1),
            torch.cat([tile.value for tile in tiles], 1),
            torch.cat([tile.key_columns for tile in tiles], 2),
            torch.cat([tile.value_columns for tile in tiles], 2),
        )

    def cut(self, start: int, stop: int) -> _Tile:
        return _Tile(
            self.key[:, start:stop],
            self.value[:, start:stop],
            self.key_columns[:, :, start:stop],
            self.value_columns[:, :, start:stop],
        )


def _extra_columns(device: torch.device) -> int:
    """Columns that carry what is subtracted: two, and on a GPU as many as its matrix units are aligned to."""
    return 8 if device.type == "cuda" else 2


def _with_ones(x: Tensor) -> Tensor:
    """[G, S, E] -> [G, E + extra, S] with ones in the two rows that meet the extra columns."""
    groups, size, width = x.shape
    columns = x.new_zeros(groups, width + _extra_columns(x.device), size)
    columns[:, :width] = x.mT
    columns[:, width : width + 2] = 1
    return columns


def _with_columns(x: Tensor) -> Tensor:
    """[..., E] -> [..., E + extra] with zeros, for `_subtract_in_product`."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + _extra_columns(x.device))
    wide[..., : x.shape[-1]] = x
    return wide


def _subtract_in_product(wide: Tensor, width: int, subtracted: Tensor) -> None:
    """Make products of `wide` [..., E + extra] with columns above ones smaller by `subtracted` [..., 1]."""
    high = subtracted.to(wide.dtype)
    torch.neg(high, out=wide[..., width : width + 1])
    wide[..., width + 1 : width + 2] = high - subtracted


@dataclass(frozen=True)
class Rotation:
    """Rotary position tables of a stream's rows, each [R, E/2] float32."""

    cosine: Tensor
    sine: Tensor

    def select(self, rows: Tensor | None) -> Rotation:
        """The tables of some rows."""
        return self if rows is None else Rotation(self.cosine[rows], self.sine[rows])

    def scaled(self, factor: float) -> Rotation:
        """Tables that also multiply by `factor`."""
        return Rotation(self.cosine * factor, self.sine * factor)


def rotate(x: Tensor, rotation: Rotation, backward: bool = False) -> Tensor:
    """Rotate halves of heads by their position. `x` is [R, heads..., E]; `backward` rotates the other way."""
    shape = (len(x), *([1] * (x.dim() - 2)), x.shape[-1] // 2)
    cosine, sine = rotation.cosine.view(shape), rotation.sine.view(shape)
    low, high = x.float().chunk(2, dim=-1)
    sign = -1 if backward else 1
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = low.shape[-1]
    rotated[..., :half] = (low * cosine).addcmul_(high, sine, value=-sign)
    rotated[..., half:] = (high * cosine).addcmul_(low, sine, value=sign)
    return rotated


@dataclass
class AttentionCall:
    """What one layer's attention needs beside its projection.

    Attributes:
        store: the real stream's keys and values; filled by the real stream's own call, read by others.
    """

    heads: Heads
    plan: AttentionPlan
    rotation: Rotation
    store: KeyValueStore | None


def attend(projection: Tensor, call: AttentionCall) -> Tensor:
    """Rotate, attend, and return [rows, G*J*E] from the joint projection [R, D].

    With `call.store` None this is the real stream: the call fills in the store.
    """
    return _Attention.apply(projection, call)


class _Attention(torch.autograd.Function):
    """Attention whose backward computes probabilities again from the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, projection: Tensor, call: AttentionCall) -> Tensor:
        heads, plan = call.heads, call.plan
        query, key, value = _split(projection, call)
        ctx.own = None
        if call.store is None:
            call.store = KeyValueStore(key, value, plan.columns)
        elif plan.own_keys:
            ctx.own = KeyValueStore(key, value, plan.columns)
        ctx.is_real = ctx.own is None
        output, log_sum = attend_blocks(query, Keys(call.store, ctx.own), plan.blocks)
        ctx.call = call
        ctx.num_rows, ctx.width = projection.shape
        attended = output.view(len(output), heads.query_width)
        ctx.save_for_backward(query, attended, log_sum)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        query, attended, log_sum = ctx.saved_tensors
        output, output_gradient = attended.view(query.shape), gradients[0].reshape(query.shape)
        keys = Keys(call.store, ctx.own)
        query_gradient = differentiate_blocks(query, output, log_sum, output_gradient, keys, call.plan.blocks)
        key_gradient, value_gradient = (call.store if ctx.is_real else ctx.own).gradients()
        return _join(ctx, query_gradient, key_gradient, value_gradient), None


def scale_of_queries(heads: Heads) -> float:
    """Factor that makes scores of rotated queries, in base 2."""
    return heads.head_dim**-0.5 / math.log(2)


def attend_blocks(query: Tensor, keys: Keys, blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """What rotated queries [R, G, J, E] see, and log2 of the sum of 2^scores, [R, G, J, 1] float32.

    Queries are scaled for base 2, by `scale_of_queries`.
    """
    output = torch.empty_like(query)
    log_sum = query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
    for block in blocks:
        _attend_block(query, keys, block, output, log_sum)
    if not bool(log_sum.isfinite().all() & output.isfinite().all()):
        # A later score beat all earlier ones by so much that 2^(their difference), or that times a value, is
        # more than float32's exponent can hold.
        for block in blocks:
            _attend_block(query, keys, block.widened(), output, log_sum)
    return output, log_sum


def differentiate_blocks(
    query: Tensor, output: Tensor, log_sum: Tensor, upstream: Tensor, keys: Keys, blocks: Sequence[Block]
) -> Tensor:
    """Gradient by queries [R, G, J, E] scaled for base e; that of keys and values is added to their stores.

    `output` and `log_sum` may be of a softmax over further keys, whose gradients are the caller's.

    Args:
        upstream: [R, G, J, E] gradient by the output.
    """
    query_gradient = torch.empty_like(query)
    for block in blocks:
        queries, by_output = _fold(query[block.rows]), _fold(upstream[block.rows])
        inner = (by_output.float() * _fold(output[block.rows])).sum(-1, keepdim=True)
        work = _BlockGradient(queries, by_output, _fold(log_sum[block.rows]), inner)
        edge, pieces = keys.edge(block)
        work.add(edge, pieces, block.bias)
        for tile, columns in keys.store.tiles(block.prefix):
            work.add(tile, ((keys.store, columns),))
        _unfold_into(query_gradient[block.rows], work.query_gradient)
    return query_gradient


@dataclass(frozen=True)
class Keys:
    """Keys and values as blocks see them: the real stream's, and the rows' own."""

    store: KeyValueStore
    own: KeyValueStore | None

    def edge(self, block: Block) -> tuple[_Tile, tuple[tuple[KeyValueStore, slice], ...]]:
        """The edge as one tile, and where its gradients go, in order."""
        pieces = ((self.store, block.edge), *(((self.own, block.rows),) if self.own is not None else ()))
        tiles = [tile for store, keys in pieces for tile, _ in store.tiles(keys)]
        return _Tile.joined(tiles), pieces


def _fold(x: Tensor) -> Tensor:
    """[rows, G, J, E] -> [G, J * rows, E]."""
    return x.permute(1, 2, 0, 3).reshape(x.shape[1], -1, x.shape[-1])


def _unfold_into(rows: Tensor, x: Tensor) -> None:
    """Write [G, J * rows, E] where [rows, G, J, E] are."""
    target = rows.permute(1, 2, 0, 3)
    target.copy_(x.view(target.shape))


def _add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    """Add [rows, C] to scores [G, J * rows, C] in place."""
    scores.view(scores.shape[0], -1, *bias.shape).add_(bias)
    return scores


def _attend_block(query: Tensor, keys: Keys, block: Block, output: Tensor, log_sum: Tensor) -> None:
    """Write a block's rows of `output` [R, G, J, E] and `log_sum` [R, G, J, 1].

    Scores of the prefix are taken relative to the log-sum-exp of the keys before. It is renewed whenever
    the number of tiles has doubled: the first tile often holds a document's heaviest keys.
    """
    width = query.shape[-1]
    queries = _with_columns(_fold(query[block.rows]))
    edge, _ = keys.edge(block)
    scores = _add_bias(torch.bmm(queries, edge.key_columns).float(), block.bias)
    largest = scores.amax(-1, keepdim=True)
    probability = torch.softmax(scores.mul_(math.log(2)), dim=-1)
    # The largest probability is 2^(largest score - log-sum-exp): no further exponential is needed.
    reference = largest - probability.amax(-1, keepdim=True).log2_()
    attended = torch.bmm(probability.to(query.dtype), edge.value).float()
    total = torch.ones_like(reference)
    for index, (tile, _) in enumerate(keys.store.tiles(block.prefix)):
        if index & (index - 1) == 0:  # 0, 1, 2, 4, 8, ...
            attended.div_(total)
            reference.add_(total.log2())
            total.fill_(1)
            _subtract_in_product(queries, width, reference)
        relative = torch.bmm(queries, tile.key_columns).exp2_()
        total.add_(relative.sum(-1, keepdim=True))
        attended.add_(torch.bmm(relative, tile.value))
    _unfold_into(output[block.rows], attended.div_(total))
    _unfold_into(log_sum[block.rows], reference.add_(total.log2_()))


class _BlockGradient:
    """Gradients of one block of rows, tile by tile.

    Args:
        queries, upstream: [G, J * rows, E], scaled queries and the gradient of the output.
        log_sum: [G, J * rows, 1] log2 of the sum of 2^scores.
        inner: [G, J * rows, 1] sum of output times its gradient.
    """

    def __init__(self, queries: Tensor, upstream: Tensor, log_sum: Tensor, inner: Tensor) -> None:
        width = queries.shape[-1]
        self.queries, self.upstream = _with_columns(queries), _with_columns(upstream)
        _subtract_in_product(self.queries, width, log_sum)
        _subtract_in_product(self.upstream, width, inner)
        self.query_columns, self.upstream_columns = queries.mT.contiguous(), upstream.mT.contiguous()
        self.query_gradient = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)

    def add(
        self, tile: _Tile, pieces: tuple[tuple[KeyValueStore, slice], ...], bias: Tensor | None = None
    ) -> None:
        """Add what the keys of a tile contribute, theirs to the stores that they are pieces of."""
        scores = torch.bmm(self.queries, tile.key_columns)
        if bias is not None:
            _add_bias(scores, bias)
        probability = scores.exp2_()
        score_gradient = torch.bmm(self.upstream, tile.value_columns).mul_(probability)
        self.query_gradient.add_(torch.bmm(score_gradient, tile.key))
        gradients = (
            torch.bmm(self.query_columns, score_gradient),
            torch.bmm(self.upstream_columns, probability),
        )
        start = 0
        for store, columns in pieces:
            stop = start + columns.stop - columns.start
            for buffer, gradient in zip(store.gradients(), gradients, strict=True):
                buffer[:, :, columns].add_(gradient[:, :, start:stop])
            start = stop


def _split(projection: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, G, J, E] scaled for base 2, keys and values [G, S, E] of the projection, rotated."""
    heads, plan = call.heads, call.plan
    query, key, value = projection.split([heads.query_width, heads.kv_width, heads.kv_width], dim=-1)
    if plan.row_index is not None:
        query = query[plan.row_index]
    query = query.reshape(len(query), heads.num_kv_heads, heads.group, heads.head_dim)
    rotation = call.rotation.select(plan.row_index).scaled(scale_of_queries(heads))
    query = rotate(query, rotation)
    key = rotate(key.reshape(len(key), heads.num_kv_heads, heads.head_dim), call.rotation)
    value = value.reshape(len(value), heads.num_kv_heads, heads.head_dim)
    return query, key.transpose(0, 1), value.transpose(0, 1)


def _join(ctx: Any, query_gradient: Tensor, key_gradient: Tensor, value_gradient: Tensor) -> Tensor:
    """Gradient of the joint projection [R, D], the inverse of `_split`."""
    call, heads = ctx.call, ctx.call.heads
    index = call.plan.row_index
    projection = query_gradient.new_empty(ctx.num_rows, ctx.width)
    query, key, value = projection.split([heads.query_width, heads.kv_width, heads.kv_width], dim=-1)
    rotation = call.rotation.select(index).scaled(heads.head_dim**-0.5)
    rotated = rotate(query_gradient, rotation, backward=True)
    if index is None:
        query.copy_(rotated.reshape(ctx.num_rows, -1))
    else:
        query.zero_()
        query[index] = rotated.reshape(len(index), -1)
    # It was collected with queries in base 2.
    rotated = rotate(key_gradient.permute(2, 0, 1), call.rotation.scaled(math.log(2)), backward=True)
    key.copy_(rotated.reshape(ctx.num_rows, -1))
    value.copy_(value_gradient.permute(2, 0, 1).reshape(ctx.num_rows, -1))
    return projection
