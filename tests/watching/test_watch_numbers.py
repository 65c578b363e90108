"""Value mass, scores and pairs of whole models, against the model's eager weights and its own matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard.statistics import RELATIONS

IDS = torch.tensor([[3, 7, 3, 9, 7, 3, 11, 9, 3, 7, 2], [1, 1, 2, 5, 1, 2, 5, 8, 1, 2, 4]])


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=64, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=13, n_embd=24, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=13, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=17
    )
    return transformers.BertModel(config).eval()


class Plain(nn.Module):
    """torch's own module, and attention that is written out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 24)
        self.mha = nn.MultiheadAttention(24, 4, batch_first=True)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mha(x, x, x, need_weights=False)[0]
        q, k, v = (t.view(*ids.shape, 4, 6).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * 6**-0.5).softmax(-1)
        self.kept = weights, v
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def lengths_of(value: Tensor, weight: Tensor) -> Tensor:
    """‖v_j W_O‖ of value [batch, head, key, dim] and weight [model dim, heads · dim], by the whole product."""
    heads, dim = value.shape[1], value.shape[3]
    blocks = weight.detach().view(weight.shape[0], heads, dim)
    return torch.einsum("bhsd,mhd->bhsm", value, blocks).norm(dim=-1)


# the model, where its output projections are, the first of them as a matrix, and what makes the first values
MODELS: dict[str, Any] = {
    "llama": (
        llama,
        "model.layers.{}.self_attn.o_proj",
        lambda model: model.model.layers[0].self_attn.o_proj.weight,
        lambda model: model.model.layers[0].self_attn.v_proj,
    ),
    "gpt2": (
        gpt2,
        "transformer.h.{}.attn.c_proj",
        lambda model: model.transformer.h[0].attn.c_proj.weight.T,
        lambda model: model.transformer.h[0].attn.c_attn,
    ),
    "bert": (
        bert,
        "encoder.layer.{}.attention.output.dense",
        lambda model: model.encoder.layer[0].attention.output.dense.weight,
        lambda model: model.encoder.layer[0].attention.self.value,
    ),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(MODELS))
def test_values_are_measured_behind_the_output_projection_that_really_reads_them(
    name: str, implementation: str
) -> None:
    make, path, matrix, values = MODELS[name]
    model = make()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(implementation)
    with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True)) as recording:
        model(IDS, use_cache=False)
    assert not recording.missed
    for n, (call, weights) in enumerate(zip(recording, expected, strict=True)):
        assert call.projection == path.format(n)
        lengths = call.value_length
        torch.testing.assert_close(call.value_mass, (weights * lengths[:, :, None]).sum(2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(call.value_sum, (weights * lengths[:, :, None]).sum(-1), rtol=1e-4, atol=1e-5)
        best = (weights * lengths[:, :, None]).amax(-1)
        torch.testing.assert_close(call.value_top_lengths[..., 0], best, rtol=1e-4, atol=1e-6)
    made: list[Tensor] = []
    handle = values(model).register_forward_hook(lambda module, args, out: made.append(out))
    with torch.no_grad():
        model(IDS, use_cache=False)
    handle.remove()
    value = made[0][..., -24:] if name == "gpt2" else made[0]
    value = value.view(*IDS.shape, -1, 6).transpose(1, 2)
    value = value.repeat_interleave(4 // value.shape[1], 1)
    torch.testing.assert_close(recording.calls[0].value_length, lengths_of(value, matrix(model)))


def test_torch_s_own_module_and_written_out_attention_have_their_projections_too() -> None:
    model = Plain().eval()
    with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True, scores=True)) as recording:
        model(IDS)
    assert [call.projection for call in recording] == ["mha.out_proj", "out"]
    weights, value = model.kept
    lengths = lengths_of(value, model.out.weight)
    torch.testing.assert_close(recording.calls[1].value_length, lengths)
    torch.testing.assert_close(recording.calls[1].value_mass, (weights * lengths[:, :, None]).sum(2))
    assert recording.calls[0].relations.shape == (2, 4, 11, len(RELATIONS))


def test_a_gate_before_the_projection_is_said_to_leave_the_values_alone() -> None:
    model = Plain().eval()
    model.out = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24))
    with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True)) as recording:
        model(IDS)
    assert recording.calls[1].projection is None
    torch.testing.assert_close(recording.calls[1].value_length, model.kept[1].norm(dim=-1))
    assert any("output projection" in note for note in recording.notes())


def test_some_heads_keep_their_own_lengths() -> None:
    model = llama()
    with torch.no_grad():
        with regard.watch(model, want=regard.Want(value_mass=True)) as whole:
            model(IDS, use_cache=False)
        with regard.watch(model, want=regard.Want(value_mass=True), heads=[3, 1]) as some:
            model(IDS, use_cache=False)
    for name in ("value_length", "value_mass", "value_map"):
        torch.testing.assert_close(getattr(some.calls[1], name), getattr(whole.calls[1], name)[:, [3, 1]])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_scores_are_means_over_the_eager_weights(implementation: str) -> None:
    model = llama()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True, use_cache=False).attentions
        model.set_attn_implementation(implementation)
        with regard.watch(model, want=regard.Want(scores=True)) as recording:
            model(IDS, use_cache=False)
    scores = recording.scores()
    assert [(row["layer"], row["head"]) for row in scores] == [(n, h) for n in range(2) for h in range(4)]
    for row in scores:
        weights, by_hand = expected[row["layer"]][:, row["head"]], {name: [] for name in (*RELATIONS, "sink")}
        for item, ids in enumerate(IDS.tolist()):
            for i in range(11):
                p = weights[item, i].tolist()
                keys = {
                    "previous": [i - 1] * (i > 0),
                    "duplicate": [j for j in range(i) if ids[j] == ids[i]],
                    "induction": [j for j in range(1, i + 1) if ids[j - 1] == ids[i]],
                    "copying": [j for j in range(i + 1) if i < 10 and ids[j] == ids[i + 1]],
                }
                for name, some in keys.items():
                    by_hand[name] += [sum(p[j] for j in some)] * bool(some)
                by_hand["retrieval"] += [float(p.index(max(p)) in keys["copying"])] * bool(keys["copying"])
                by_hand["sink"].append(p[0])
        for name, numbers in by_hand.items():
            if numbers:
                assert row[name] == pytest.approx(sum(numbers) / len(numbers), abs=1e-5), name
        assert row["next"] is None  # no query of a causal model sees what comes next


def test_scores_of_some_queries_and_of_a_generated_text() -> None:
    model = llama()
    with torch.no_grad():
        with regard.watch(model, want=regard.Want(scores=True)) as whole:
            model(IDS[:1], use_cache=False)
        with regard.watch(model, want=regard.Want(scores=True)) as stepwise:
            cache = model(IDS[:1, :6]).past_key_values
            for at in range(6, 11):
                cache = model(IDS[:1, at : at + 1], past_key_values=cache).past_key_values
    for name in ("previous", "duplicate", "induction"):
        for row, other in zip(whole.scores(), stepwise.scores(), strict=True):
            assert row[name] == pytest.approx(other[name], abs=1e-5), name
    some = whole.scores(queries=slice(4, 9))
    part = whole.calls[1].relations[0, 2, 4:9, 0].mean()
    assert some.of("previous")[1][2] == pytest.approx(float(part))


class Heads(nn.Module):
    """Heads that are made to do one thing each: previous token, duplicate token, induction, sink."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        i, j = torch.arange(n)[:, None], torch.arange(n)
        same = ids[0][:, None] == ids[0]
        after = torch.zeros_like(same)
        after[:, 1:] = same[:, :-1]
        wished = torch.stack([j == i - 1, same & (j < i), after & (j <= i), (j == 0).expand(n, n)])
        logits = torch.where(wished, 20.0, 0.0)[None]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        mixed = torch.nn.functional.scaled_dot_product_attention(
            torch.zeros(1, 4, n, 1), torch.zeros(1, 4, n, 1), torch.ones(1, 4, n, 1),
            attn_mask=logits.masked_fill(~causal, -torch.inf),
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_heads_that_do_one_thing_are_named_by_their_score() -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (1, 24)).repeat(1, 2)
    with torch.no_grad(), regard.watch(model := Heads(), want=regard.Want(scores=True)) as recording:
        model(ids)
    scores = recording.scores()
    for head, name in enumerate(("previous", "duplicate", "induction", "sink")):
        (best,) = scores.best(name, 1)
        assert best["head"] == head and best[name] > 0.99, name
        assert all(row[name] < 0.5 for row in scores if row["head"] != head), name
    # where a text is repeated, an induction head looks at what comes next
    assert scores.best("copying", 1)[0]["head"] == 2 and scores.best("retrieval", 1)[0]["head"] == 2
    assert "induction" in str(scores)


def test_scores_say_what_they_need() -> None:
    model = llama()
    with torch.no_grad():
        with regard.watch(model) as recording:
            model(IDS, use_cache=False)
        with pytest.raises(ValueError, match=r"want=regard.Want\(scores=True\)"):
            recording.scores()
        with regard.watch(model, want=regard.Want(scores=True)) as recording:
            model(inputs_embeds=model.get_input_embeddings()(IDS), use_cache=False)
    scores = recording.scores()
    assert "previous" in scores.names and "induction" not in scores.names
    with pytest.raises(ValueError, match="induction needs the tokens"):
        scores.best("induction")
    with pytest.raises(ValueError, match="there is no score 'attention'; there are previous"):
        scores.best("attention")
    with pytest.raises(TypeError, match=r"scores\(queries=...\) must be a slice of rows, .* got 3"):
        recording.scores(queries=3)  # type: ignore[arg-type]


def test_recordings_with_all_numbers_are_saved_loaded_and_shown(tmp_path: Path) -> None:
    model = llama()
    want = regard.Want(value_mass=True, scores=True, pairs=[(3, 1), (5, 5)])
    with torch.no_grad(), regard.watch(model, want=want) as recording:
        model(IDS, use_cache=False)
    recording.save(tmp_path / "run.regard")
    again = regard.Recording.load(tmp_path / "run.regard")
    assert again.scores().rows == recording.scores().rows
    for call, other in zip(recording, again, strict=True):
        assert call.projection == other.projection is not None
        assert set(call.parts) == set(other.parts) >= {"pairs", "relations", "value_length", "value_top_keys"}
        assert all(
            torch.equal(part.nan_to_num(-1), other.parts[name].nan_to_num(-1)) for name, part in call.parts.items()
        )
    recording.to_html(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size > 10_000
    assert "its value: the first key's share" in str(recording.summary())
    assert "权重 × 值的长度" in str(recording.summary("zh"))


def test_torch_s_fused_encoder_layer_has_the_projection_of_its_own_attention() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 17, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 9, 24)
    with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True)) as recording:
        model(x)
    assert [call.projection for call in recording] == [f"layers.{n}.self_attn.out_proj" for n in range(2)]
    first = model.layers[0].self_attn
    value = nn.functional.linear(x, first.in_proj_weight[48:], first.in_proj_bias[48:]).detach()
    expected = lengths_of(value.view(2, 9, 4, 6).transpose(1, 2), first.out_proj.weight)
    torch.testing.assert_close(recording.calls[0].value_length, expected)


def test_what_is_written_into_before_the_projection_is_not_taken_for_the_call_s_own_output() -> None:
    class Gated(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            q, k, v = (t.view(*ids.shape, 4, 6).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            mixed.mul_(0.5)
            return self.out(mixed.transpose(1, 2).flatten(2))

    model = Gated().eval()
    with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True)) as recording:
        model(IDS)
    assert recording.calls[0].projection is None
