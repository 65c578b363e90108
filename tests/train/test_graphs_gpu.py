"""Steps as CUDA graphs give the losses of plain steps, and the fused loss that of torch's operations."""

from __future__ import annotations

import pytest
import torch
from tests.train.small import DATA, SMALL

from regard.train import Settings, Words, _loss, soft_targets
from regard.train._batches import Soft, plan_epoch
from regard.train._build import encode_pairs, model_of
from regard.train._loss import loss_of
from regard.train._step import Stepper

pytestmark = pytest.mark.gpu


def losses(graphs: bool, distill: float = 0.0) -> list[float]:
    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=SMALL.vocab_size)
    settings = Settings(**{**vars(SMALL), "dropout": 0.0, "attention_dropout": 0.0, "r_drop": 0.5, "round_lengths": 4,
                           "distill": distill})  # fmt: skip
    torch.manual_seed(1)
    device = torch.device("cuda")
    model = model_of(settings, len(words), device).train()
    corpus = encode_pairs(words, DATA.train, settings)
    planned = plan_epoch(corpus, 150, seed=1, epoch=0, multiple=4)
    corpus = corpus.to(device)
    if distill:
        corpus = corpus._replace(soft=soft_targets([model], corpus, k=5))
    stepper = Stepper(model, settings, device, graphs=graphs)
    found = []
    for _ in range(4):
        for each in planned:
            batch = corpus.take(torch.tensor(each.rows, device=device), each.widths)
            found.append(float(stepper(batch, 1e-3).total))
    return found


@pytest.mark.parametrize("distill", [0.0, 0.6])
def test_replayed_steps_learn_as_plain_ones(distill: float) -> None:
    assert losses(True, distill) == pytest.approx(losses(False, distill), rel=0.02)


@pytest.mark.parametrize("distill", [0.0, 0.6])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_fused_loss_is_torchs(passes: int, distill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits = torch.randn(passes * 7, 9, 10_007, device="cuda", requires_grad=True)
    outputs = torch.randint(4, 10_007, (7, 9), device="cuda")
    outputs[3, 4:] = 0
    top = torch.randn(7, 9, 10_007, device="cuda").softmax(-1).topk(6)
    how = {"smoothing": 0.1, "r_drop": 0.7, "soft": Soft(top.indices, top.values), "distill": distill}
    found = loss_of(logits, outputs, **how)
    (grad,) = torch.autograd.grad(found.total, logits)
    monkeypatch.setattr(_loss, "FUSED", False)
    wanted = loss_of(logits, outputs, **how)
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.total, logits)[0], rtol=1e-3, atol=1e-6)
