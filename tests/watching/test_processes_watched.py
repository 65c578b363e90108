"""A model under DDP, FSDP2 or tensor parallelism gives one recording: that of one process with the whole batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.train.group import together
from torch import nn

import regard
from regard.models import Decoder, DecoderConfig, Transformer, TransformerConfig

SIZES: dict[str, Any] = {"vocab_size": 23, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "ff_dim": 24}
SOURCE = torch.randint(4, 23, (5, 7), generator=torch.Generator().manual_seed(2))
LENGTHS = torch.tensor([7, 3, 5, 7, 6])


def translator() -> Transformer:
    torch.manual_seed(1)
    return Transformer(TransformerConfig(**SIZES, dropout=0.0), dtype=torch.float64).eval()


def writer() -> Decoder:
    torch.manual_seed(1)
    return Decoder(DecoderConfig(**SIZES, num_kv_heads=2, max_tokens=32, dropout=0.0), dtype=torch.float64).eval()


def parts_of(recording: regard.Recording) -> dict[str, Any]:
    calls = [
        (
            (str(call.site).removeprefix("module."), str(call.projection).removeprefix("module.")),
            call.layer,
            call.number,
            call.heads,
            call.counts().clone(),
            {name: part.clone() for name, part in call.parts.items()},
        )
        for call in recording.calls
    ]
    rows = len(recording.summary().rows) if recording.calls else 0
    return {"title": recording.title, "calls": calls, "missed": recording.missed, "rows": rows}


WANT = regard.Want(map=(3, 3), top_k=2, value_mass=True, scores=True, pairs=[(0, 0), (3, 2)])


def watched(model: nn.Module, rows: Any, **how: Any) -> dict[str, Any]:
    with regard.watch(model, want=WANT, **how) as recording, torch.no_grad():
        model(SOURCE[rows], SOURCE[rows][:, :5], source_lengths=LENGTHS[rows])
    return parts_of(recording)


def shared(how: str, rank_rows: list[list[int]]) -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from regard.train import tensor_parallel

    if how == "copies":
        model: nn.Module = DistributedDataParallel(translator())
    elif how == "shards":
        model = translator()
        for part in (*model.encoder_layers, *model.decoder_layers, model):
            fully_shard(part)
    else:
        model = tensor_parallel(translator(), init_device_mesh("cpu", (2,)))
    rows = rank_rows[dist.get_rank()]
    return [watched(model, rows), watched(model, rows, gather=False), watched(model, rows, heads=[3, 0])]


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["title"] == wanted["title"] and found["missed"] == [] and found["rows"] == wanted["rows"]
    assert len(found["calls"]) == len(wanted["calls"])
    for mine, theirs in zip(found["calls"], wanted["calls"], strict=True):
        assert mine[:4] == theirs[:4]
        assert torch.equal(mine[4], theirs[4])
        assert mine[5].keys() == theirs[5].keys()
        for name, part in mine[5].items():
            if part.dtype == torch.int32:
                assert torch.equal(part, theirs[5][name])
            else:
                torch.testing.assert_close(part, theirs[5][name], rtol=1e-8, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("how", ["copies", "shards", "heads"])
def test_processes_that_share_a_model_give_one_recording(how: str) -> None:
    """Of the first process three items and of the second two; by heads, both read all."""
    rows = [[0, 1, 2, 3, 4]] * 2 if how == "heads" else [[0, 1, 2], [3, 4]]
    everyone = together(2, shared, how, rows)
    whole, some = watched(translator(), slice(None)), watched(translator(), slice(None), heads=[3, 0])
    for rank, (all_of_it, alone, chosen) in enumerate(everyone):
        assert_same(all_of_it, whole)
        assert_same(chosen, some)
        items, heads = alone["calls"][0][5]["lse"].shape[:2]
        assert (items, heads) == ((5, 2) if how == "heads" else (len(rows[rank]), 4))


def items_and_heads() -> dict[str, Any]:
    """FSDP2 over pairs of processes that share heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from regard.train import tensor_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("items", "heads"))
    model = tensor_parallel(translator(), mesh["heads"])
    for layer in (*model.encoder_layers, *model.decoder_layers):
        fully_shard(layer, mesh=mesh["items"])
    fully_shard(model, mesh=mesh["items"])
    return watched(model, [[0, 1, 2], [3, 4]][mesh.get_local_rank("items")])


def test_heads_and_items_are_gathered_at_once() -> None:
    whole = watched(translator(), slice(None))
    for found in together(4, items_and_heads):
        assert_same(found, whole)


def uneven() -> dict[str, Any]:
    """Batches of different widths cannot stand in one tensor: passes follow one another."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(writer())
    rank = dist.get_rank()
    with regard.watch(model) as recording, torch.no_grad():
        model(SOURCE[:2, : 4 + rank])
    return parts_of(recording)


def test_batches_of_different_widths_are_passes_one_after_another() -> None:
    for found in together(2, uneven):
        assert [(call[1], call[2], call[5]["lse"].shape[2]) for call in found["calls"]] == [
            (0, 0, 4),
            (1, 0, 4),
            (0, 1, 5),
            (1, 1, 5),
        ]


def missed() -> list[Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(writer())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        limit = 0 if dist.get_rank() else None
        with regard.watch(model, memory_limit=limit) as recording, torch.no_grad():
            model(SOURCE[:2])
    return [len(recording.calls), recording.missed, [str(each.message) for each in said]]


def test_what_one_process_missed_all_of_them_say() -> None:
    for calls, gaps, said in together(2, missed):
        assert calls == 2 and len(gaps) == 2 and "memory limit" in gaps[0][1]
        assert any("missed some attention calls" in each for each in said)
