"""Cross entropy in place: equal to torch's, nothing for the padding, no float32 copy, used once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.kernels import cross_entropy as module
from meshwright.kernels import references
from meshwright.kernels.cross_entropy import cross_entropy
from meshwright.model.loss import loss_sum, token_losses

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernel needs a GPU")
UNIT = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def case(n, vocab, padded, dtype, device="cpu", seed=0):
    """Make logits whose padding would win every softmax, labels at both ends, and loss factors."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, padded, generator=random, dtype=torch.float64) * 3
    logits[:, vocab:] = 100.0
    labels = torch.randint(0, vocab, (n,), generator=random)
    labels[0], labels[-1] = 0, vocab - 1
    factors = torch.randn(n, generator=random, dtype=torch.float64)
    return logits.to(device, dtype), labels.to(device), factors.to(device)


def wanted(logits, labels, factors, vocab):
    """Return losses and gradient by torch's function in at least float32; 0 for the padding."""
    x = (logits if logits.dtype is torch.float64 else logits.float()).clone().requires_grad_()
    losses = F.cross_entropy(x[:, :vocab], labels, reduction="none")
    (losses * factors.to(losses.dtype)).sum().backward()
    return losses.detach(), x.grad


def ours(logits, labels, factors, vocab):
    x = logits.clone().requires_grad_()
    losses = cross_entropy(x, labels, vocab)
    (losses * factors.to(losses.dtype)).sum().backward()
    return losses.detach(), x.grad


def compare(logits, labels, factors, vocab):
    (losses, grad), (want_losses, want_grad) = (
        ours(logits, labels, factors, vocab),
        wanted(logits, labels, factors, vocab),
    )
    full = torch.float64 if logits.dtype is torch.float64 else torch.float32
    assert losses.dtype is full and grad.dtype is logits.dtype
    torch.testing.assert_close(losses, want_losses, rtol=UNIT[full], atol=UNIT[full])
    # float16's is 6e-8
    least = 2e-7 if logits.dtype is torch.float16 else 1e-7 if full is torch.float32 else 1e-13
    torch.testing.assert_close(
        grad, want_grad.to(grad.dtype), rtol=4 * UNIT[logits.dtype], atol=least
    )
    assert (grad[:, vocab:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 1 << 14])
def test_loss_and_gradient_are_torchs(dtype, rows, monkeypatch):
    """Test portions of one row, of several rows with a remainder, and of all rows."""
    monkeypatch.setattr(module, "PORTION", rows * 40)
    compare(*case(10, 37, 40, dtype), 37)


@pytest.mark.parametrize("junk", [0.0, 1e30, float("inf"), float("-inf"), float("nan")])
def test_padding_weighs_nothing_whatever_it_holds(junk):
    logits, labels, factors = case(6, 37, 40, torch.float32)
    want_losses, want = wanted(logits, labels, factors, 37)
    logits[:, 37:] = junk
    losses, grad = ours(logits, labels, factors, 37)
    torch.testing.assert_close(losses, want_losses)
    torch.testing.assert_close(grad, want)
    assert (grad[:, 37:] == 0).all()


ODD = {
    "-inf beside the label": lambda x: x[:, 1:9].fill_(float("-inf")),
    "-inf at the label": lambda x: x[0, :1].fill_(float("-inf")),  # whose label is 0
    "all but the label -inf": lambda x: x[0, 1:].fill_(float("-inf")),
    "a row of -inf": lambda x: x[1].fill_(float("-inf")),
    "+inf": lambda x: x[1, 3].fill_(float("inf")),
    "NaN": lambda x: x[1, 3].fill_(float("nan")),
    "huge": lambda x: x[1, 3].fill_(1e4),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("odd", ODD)
def test_odd_logits_as_torch_has_them(odd, device):
    logits, labels, factors = case(4, 37, 40, torch.float32, device)
    ODD[odd](logits[:, :37])
    (losses, grad), (want_losses, want) = (
        ours(logits, labels, factors, 37),
        wanted(logits, labels, factors, 37),
    )
    torch.testing.assert_close(losses, want_losses, equal_nan=True)
    torch.testing.assert_close(grad[:, :37], want[:, :37], equal_nan=True)
    assert (grad[:, 37:] == 0).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_the_gradient_is_the_logits_memory(device):
    """The gradient overwrites the logits; the previous backward function gets this memory."""
    logits, labels, _ = case(6, 37, 40, torch.bfloat16, device)
    leaf = logits.clone().requires_grad_()
    made, got = leaf * 1, []
    made.register_hook(lambda grad: got.append((grad.data_ptr(), grad.shape, grad.stride())))
    at = made.data_ptr(), made.shape, made.stride()
    before = made.detach().clone()
    loss = cross_entropy(made, labels, 37).sum()
    assert torch.equal(made, before), "the forward pass writes over the logits"
    loss.backward()
    assert got == [at]
    assert torch.equal(made.detach(), leaf.grad) and not torch.equal(made.detach(), before)


class LargestFloat32(TorchDispatchMode):
    """Records the largest float32 result while active."""

    def __init__(self):
        super().__init__()
        self.numel, self.calls = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.dtype is torch.float32:
                self.numel, self.calls = max(self.numel, x.numel()), self.calls + 1
        return result


def test_no_float32_copy_of_the_logits(monkeypatch):
    monkeypatch.setattr(module, "PORTION", 4 * 128)
    logits, labels, _ = case(64, 100, 128, torch.bfloat16)
    x = logits.requires_grad_()
    with LargestFloat32() as seen:
        cross_entropy(x, labels, 100).sum().backward()
    assert seen.calls > 2 * 64 / 4, "the mode sees forward and backward"
    assert seen.numel <= 4 * 128


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_second_backward_pass_is_refused(device):
    logits, labels, _ = case(6, 37, 40, torch.float32, device)
    loss = cross_entropy(logits.requires_grad_(), labels, 37).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_token_losses_and_their_sum():
    """Losses are [B, T] in float32 for all logits; a mask removes losses and gradients."""
    logits, labels, _ = case(10, 37, 40, torch.bfloat16)
    logits, labels = logits.view(2, 5, 40), labels.view(2, 5)
    losses = token_losses(logits, labels, 37)
    want = F.cross_entropy(logits[..., :37].float().transpose(1, 2), labels, reduction="none")
    assert losses.shape == (2, 5) and losses.dtype is torch.float32
    torch.testing.assert_close(losses, want)
    torch.testing.assert_close(loss_sum(losses, None), want.sum())
    mask = torch.tensor([[1.0, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    x = logits.clone().requires_grad_()
    masked = loss_sum(token_losses(x * 1, labels, 37), mask)
    torch.testing.assert_close(masked, (want * mask).sum())
    masked.backward()
    assert torch.equal(x.grad.abs().sum(-1) > 0, mask > 0)


@gpu
@pytest.mark.parametrize(
    ("vocab", "padded"), [(50257, 50304), (17, 128), (4096, 4096), (4097, 4224)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_equals_plain(vocab, padded, dtype):
    from meshwright.kernels.triton import cross_entropy as kernel

    logits, labels, factors = case(300, vocab, padded, dtype, "cuda")
    lses, picked = kernel.log_sum_exp(logits, labels, vocab)
    want, there = module.log_sum_exp.plain(logits, labels, vocab)
    torch.testing.assert_close(lses, want, rtol=2e-6, atol=2e-6)
    assert torch.equal(picked, there)
    a, b = logits.clone(), logits.clone()
    kernel.overwrite(a, labels, lses, factors.float(), vocab)
    module.overwrite.plain(b, labels, want, factors.float(), vocab)
    torch.testing.assert_close(
        a, b, rtol=2 * UNIT[dtype], atol=1.2e-7
    )  # a number near 0: float16's smallest are 6e-8 apart
    assert (a[:, vocab:] == 0).all()
    compare(logits, labels, factors, vocab)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_vocabulary_in_parts(device):
    """Combined log-sum-exps of parts, one all padding, give the losses and the gradients."""
    logits, labels, factors = case(9, 37, 60, torch.float32, device)
    want, whole = logits.clone().requires_grad_(), module.cross_entropy
    losses = whole(want * 1.0, labels, 37)
    losses.backward(factors.to(losses.dtype))
    parts = [logits[:, i : i + 20].clone().requires_grad_() for i in (0, 20, 40)]
    held = []
    for first, part in zip((0, 20, 40), parts, strict=True):
        module.cross_entropy(part * 1.0, labels, 37, first, lambda *both: held.append(both) or both)
    lse = torch.stack([x for x, _ in held]).logsumexp(0)
    picked = sum(x for _, x in held)
    for first, part in zip((0, 20, 40), parts, strict=True):
        mine = module.cross_entropy(part * 1.0, labels, 37, first, lambda *both: (lse, picked))
        torch.testing.assert_close(mine, losses)
        mine.backward(factors.to(mine.dtype))
    torch.testing.assert_close(torch.cat([p.grad for p in parts], 1), want.grad)


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("parts", [1, 2])
def test_normalisers_have_a_gradient(kernels, parts, monkeypatch):
    """The z-loss beside the loss, of a whole vocabulary and of one in parts: torch's gradients."""
    monkeypatch.setattr(references, "is_triton", lambda x: kernels == "triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, labels, factors = (x.to(device) for x in case(9, 37, 40, torch.float32))
    want = logits.clone().requires_grad_()
    lse = want[:, :37].logsumexp(-1)
    picked = want.gather(1, labels[:, None]).squeeze(1)
    ((lse - picked + 0.3 * lse.square()) * factors).sum().backward()
    whole = (lambda *_: (lse.detach(), picked.detach())) if parts > 1 else None
    for first in range(0, 40, 40 // parts):
        part = logits[:, first : first + 40 // parts].clone().requires_grad_()
        losses, normalisers = module.losses_and_normalisers(part * 1.0, labels, 37, first, whole)
        torch.testing.assert_close(normalisers, lse)
        ((losses + 0.3 * normalisers.square()) * factors).sum().backward()
        torch.testing.assert_close(
            part.grad, want.grad[:, first : first + 40 // parts], rtol=1e-5, atol=1e-5
        )


@gpu
def test_triton_on_rows_of_a_wider_tensor():
    """Strided rows work, and the columns beside them do not change."""
    from meshwright.kernels.triton import cross_entropy as kernel

    logits, labels, factors = case(8, 37, 64, torch.float32, "cuda")
    part, alone = logits[:, :40], logits[:, :40].contiguous()
    (lse, a), (b, _) = kernel.log_sum_exp(part, labels, 37), kernel.log_sum_exp(alone, labels, 37)
    torch.testing.assert_close(lse, b)
    assert torch.equal(a, logits[torch.arange(8, device=a.device), labels])
    kernel.overwrite(part, labels, lse, factors.float(), 37)
    kernel.overwrite(alone, labels, lse, factors.float(), 37)
    torch.testing.assert_close(part, alone)
    assert (logits[:, 40:] == 100).all()


@gpu
def test_triton_with_one_gradient_for_all():
    """`sum` passes an expanded scalar to the backward pass."""
    logits, labels, _ = case(8, 37, 40, torch.float32, "cuda")
    x = logits.clone().requires_grad_()
    cross_entropy(x, labels, 37).sum().backward()
    torch.testing.assert_close(x.grad, wanted(logits, labels, torch.ones(8, device="cuda"), 37)[1])
